"""The layers of the package, and their pictures: `python docs/tools/house.py` writes the two SVGs of architecture.md.

`tests/test_architecture.py` holds the code against `FLOORS`: a module may import what stands on its own floor
and everything below.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1]
# from top to bottom; modules that stand on no floor belong to the top one
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ways in", ("cli", "serve", "doctor", "flower")),
    ("runs on disk", ("api", "results", "launch", "progress", "runner", "results_files")),
    ("experiments as data", ("config",)),
    ("problems that come with it", ("problems",)),
    ("equations and reports", ("pde", "report")),
    ("rounds", ("federation",)),
    ("server and client rules", ("aggregation", "clients")),
    ("what a client knows", ("curvature",)),
    ("data and fast loops", ("data", "kernels")),
    (
        "small things",
        (
            *("errors", "layout", "linalg", "randomness", "coding", "threads", "compiler", "models", "privacy"),
            *("folders", "machine", "parallel", "shipped", "spill"),
        ),
    ),
)
APART = (("aggregation", "clients"), ("pde", "report"), ("data", "kernels"))  # side by side: neither imports the other
EXCEPT = (("shipped", "launch"),)  # what `fipa show` tells is worked out once, by what would run it
INK, LINE, WARM, COOL = "#1d2733", "#24476b", "#f6e7dc", "#e6eef7"
FONT = "font-family='system-ui, Segoe UI, Helvetica, Arial, sans-serif'"


def floor_of(name: str) -> int:
    """The place of a module, 0 at the top."""
    return next((i for i, (_, names) in enumerate(FLOORS) if name in names), 0)


def _text(x: float, y: float, text: str, size: int = 14, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f"<text x='{x}' y='{y}' font-size='{size}' text-anchor='{anchor}' font-weight='{weight}'>{escape(text)}</text>"
    )


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='5' fill='{fill}' stroke='{LINE}'/>"


def house() -> str:
    """Floors, each with its rooms."""
    width, height, left, wall = 760, 46, 210, 530
    parts = [f"<polygon points='{left - 14},62 {left + wall / 2},12 {left + wall + 14},62' fill='{LINE}'/>"]
    parts.append(f"<g fill='#ffffff'>{_text(left + wall / 2, 50, 'import fipa', 16, weight='bold')}</g>")
    for i, (label, names) in enumerate(FLOORS):
        y = 66 + i * (height + 6)
        parts.append(_text(left - 16, y + 28, label, 13, "end"))
        rooms = [names] if len(names) > 4 else [(name,) for name in names]
        room = (wall - 6 * (len(rooms) - 1)) / len(rooms)
        for k, inside in enumerate(rooms):
            x = left + k * (room + 6)
            parts.append(_box(x, y, room, height, WARM if i in (5, 6, 7) else COOL))
            words = " · ".join(inside)
            if len(words) > 70:
                half = len(inside) // 2 + 1
                parts.append(_text(x + room / 2, y + 20, " · ".join(inside[:half]), 12))
                parts.append(_text(x + room / 2, y + 36, " · ".join(inside[half:]), 12))
            else:
                single = len(inside) == 1
                weight = "bold" if single else "normal"
                parts.append(_text(x + room / 2, y + 28, words, 14 if single else 12, weight=weight))
    total = 66 + len(FLOORS) * (height + 6) + 6
    return _svg(width, total, parts)


STEPS = (
    ("server", "clients", "model", "Ask(clients, Order)"),
    ("clients", "server", "update, curvature, loss", "checked before it is believed"),
    ("server", "server", "rule: updates and curvatures give a step", "fipa.aggregate"),
    ("server", "clients", "a model to try", "Ask(clients, Loss), under step control"),
    ("clients", "server", "loss: one number each", "raised? a more careful step, same updates"),
    ("server", "server", "new model, record of the round, state on disk", "RoundRecord"),
)


def flow() -> str:
    """A round as messages between server and clients."""
    width, left, right, top, gap = 760, 150, 610, 88, 58
    bottom = top + gap * len(STEPS)
    parts = [
        "<defs><marker id='tip' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0 L10,5 L0,10 z' fill='{LINE}'/></marker></defs>",
        _box(left - 110, 10, 220, 50, WARM), _text(left, 32, "coordinator", 15, weight="bold"),
        _text(left, 50, "no I/O, no clock", 12),
        _box(right - 110, 10, 220, 50, COOL), _text(right, 32, "clients", 15, weight="bold"),
        _text(right, 50, "data stay here", 12),
        _text((left + right) / 2, 32, "transport", 15, weight="bold"),
        _text((left + right) / 2, 50, "processes, Flower, or masked sums", 12),
        *(f"<path d='M{x},62 V{bottom}' stroke='{LINE}' stroke-dasharray='3 4'/>" for x in (left, right)),
    ]  # fmt: skip
    for i, (start, end, what, note) in enumerate(STEPS):
        y = top + i * gap
        if start == end:
            parts.append(_box(left - 110, y - 12, 380, 44, WARM))
            parts += [_text(left + 80, y + 6, what, 13), _text(left + 80, y + 23, note, 11)]
            continue
        x1, x2 = (left, right) if start == "server" else (right, left)
        arrow = f"<line x1='{x1}' y1='{y + 10}' x2='{x2}' y2='{y + 10}' stroke='{LINE}' stroke-width='1.5'"
        parts.append(f"{arrow} marker-end='url(#tip)'/>")
        parts += [_text((left + right) / 2, y + 3, what, 13), _text((left + right) / 2, y + 26, note, 11)]
    return _svg(width, bottom + 6, parts)


def _svg(width: int, height: int, parts: list[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT} fill='{INK}'>"
    ground = f"<rect width='{width}' height='{height}' fill='#ffffff'/>"
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def main() -> None:
    """Write both pictures."""
    (FOLDER / "house.svg").write_text(house(), "utf-8")
    (FOLDER / "round.svg").write_text(flow(), "utf-8")


if __name__ == "__main__":
    main()
