"""One colour and dash per arm, the same on the page and in the figures.

Paul Tol's bright and muted palettes, which colour-blind readers can tell apart. The control is grey. Beyond six arms
the lines are dashed as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BRIGHT = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE")
MUTED = ("#CC6677", "#44AA99", "#999933", "#AA4499", "#117733", "#88CCEE", "#882255")
GREY = "#808080"
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Style:
    """A line style; `dash` in plotly's words."""

    colour: str
    dash: str


def arm_styles(arms: Sequence[str], controls: Sequence[str | None]) -> dict[str, Style]:
    """Assign styles in order, grey to the controls."""
    styles: dict[str, Style] = {}
    greys = colours = 0
    for arm in arms:
        if arm in controls:
            styles[arm] = Style(GREY, DASHES[greys % len(DASHES)])
            greys += 1
        else:
            palette = BRIGHT if colours < len(BRIGHT) else MUTED
            place = colours if colours < len(BRIGHT) else colours - len(BRIGHT)
            dash = DASHES[0] if colours < len(BRIGHT) else DASHES[1 + place // len(palette) % 3]
            styles[arm] = Style(palette[place % len(palette)], dash)
            colours += 1
    return styles
