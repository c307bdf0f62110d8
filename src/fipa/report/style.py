"""One colour and dash per arm, the same on the page and in the figures.

Paul Tol's bright and muted palettes, which colour-blind readers can tell apart. The control is grey. Beyond six arms
the lines are dashed as well. On the page every arm has a mark of its own besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BRIGHT = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE")
MUTED = ("#CC6677", "#44AA99", "#999933", "#AA4499", "#117733", "#88CCEE", "#882255")
GREY = "#808080"
DASHES = ("solid", "dash", "dot", "dashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "pentagon", "star", "triangle-down", "cross", "hexagram")


@dataclass(frozen=True)
class Style:
    """A line style; `dash` and `mark` in plotly's words."""

    colour: str
    dash: str
    mark: str = MARKS[0]


def arm_styles(arms: Sequence[str], controls: Sequence[str | None], first: Sequence[str] = ()) -> dict[str, Style]:
    """Assign styles in order, grey to the controls; the arms of `first` choose before the others."""
    styles: dict[str, Style] = {}
    greys = colours = 0
    for place, arm in enumerate(sorted(arms, key=lambda arm: arm not in first)):
        mark = MARKS[place % len(MARKS)]
        if arm in controls:
            styles[arm] = Style(GREY, DASHES[greys % len(DASHES)], mark)
            greys += 1
        else:
            palette = BRIGHT if colours < len(BRIGHT) else MUTED
            step = colours if colours < len(BRIGHT) else colours - len(BRIGHT)
            dash = DASHES[0] if colours < len(BRIGHT) else DASHES[1 + step // len(palette) % 3]
            styles[arm] = Style(palette[step % len(palette)], dash, mark)
            colours += 1
    return {arm: styles[arm] for arm in arms}
