"""Run the tutorials and write their pages: `python docs/tools/tutorials.py [NAME...]`.

A tutorial is a Python file in docs/tutorials in the "percent" format that editors open as a notebook. Its page shows
text and code as they stand there, and below each cell what running it has printed and drawn. Cells:

    # %% [markdown]    text, as comments
    # %% TITLE         code; the title, if there is one, is the file that the reader puts it into
    # %% [file] NAME   the source of a file of the repository; its title is the path within its example
    # %% [shell]       a command, as comments that begin with "$"; what it prints is in the lines after it

A shell cell is not run here: its output is compared with that of the cell before it by a test that does run it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
NAMES = ("own-loop", "flower", "hospitals", "pinn", "own-rule")


@dataclass(frozen=True)
class Cell:
    """One cell: its kind, what stands behind the kind, and its lines."""

    kind: str
    label: str
    text: str


def cells(name: str) -> list[Cell]:
    """The cells of a tutorial."""
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    found = []
    for part in re.split(r"(?m)^# %%", source)[1:]:
        head, _, text = part.partition("\n")
        kind, label = re.fullmatch(r"(?: \[(\w+)\])? ?(.*)", head).groups()  # type: ignore[union-attr]
        if kind in ("markdown", "shell"):
            text = re.sub(r"(?m)^# ?", "", text)
        found.append(Cell(kind or "code", label, text.strip("\n")))
    return found


def run(name: str, figures: Path | None = None) -> list[tuple[Cell, str, list[str]]]:
    """Every cell with what it has printed, and the figures it has drawn; without a folder nothing is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    done = []
    with _elsewhere(), plt.rc_context({"figure.dpi": 110, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        for number, cell in enumerate(cells(name)):
            printed, drawn = io.StringIO(), []
            if cell.kind == "code":
                with contextlib.redirect_stdout(printed):
                    exec(compile(cell.text, f"{name}.py, cell {number}", "exec"), names)
            for figure in map(plt.figure, plt.get_fignums()):
                if figures is not None:
                    file = f"{name}-{number}.png"
                    figure.savefig(figures / file, bbox_inches="tight", metadata={"Software": None})
                    drawn.append(file)
            plt.close("all")
            done.append((cell, printed.getvalue(), drawn))
    return done


@contextlib.contextmanager
def _elsewhere() -> Any:
    """In an empty folder, with the examples where a tutorial can import them."""
    before, path = Path.cwd(), list(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, str(ROOT / "examples" / "flower-digits"))
        try:
            yield
        finally:
            os.chdir(before)
            sys.path[:] = path


def page(name: str, results: list[tuple[Cell, str, list[str]]]) -> str:
    """The page of a tutorial that has been run."""
    parts = []
    for cell, printed, drawn in results:
        if cell.kind == "markdown":
            parts.append(cell.text)
        elif cell.kind == "file":
            source = (ROOT / cell.label).read_text("utf-8").rstrip()
            within, kind = "/".join(Path(cell.label).parts[2:]), Path(cell.label).suffix[1:]
            parts.append(f'```{kind} title="{within}"\n{source}\n```')
        elif cell.kind == "shell":
            commands = [line[2:] for line in cell.text.splitlines() if line.startswith("$ ")]
            output = [line for line in cell.text.splitlines() if not line.startswith("$ ")]
            parts.append("```sh\n" + "\n".join(commands) + "\n```")
            printed = "\n".join(output)
        else:
            title = f' title="{cell.label}"' if cell.label else ""
            parts.append(f"```python{title}\n{cell.text}\n```")
        if printed.strip():
            parts.append(f'<div class="output" markdown="1">\n\n```text\n{printed.rstrip()}\n```\n\n</div>')
        parts += [f"![figure]({file})" for file in drawn]
    note = f"<!-- Written by `python docs/tools/tutorials.py {name}` from {name}.py: change that file. -->"
    return note + "\n\n" + "\n\n".join(parts) + "\n"


def outputs(text: str) -> list[str]:
    """What the cells of a page have printed."""
    return re.findall(r'<div class="output" markdown="1">\n\n```text\n(.*?)\n```\n\n</div>', text, flags=re.DOTALL)


def main() -> None:
    """Run those that are named, or all of them."""
    import torch

    torch.set_num_threads(1)  # the last digits depend on it
    for name in sys.argv[1:] or NAMES:
        (FOLDER / f"{name}.md").write_text(page(name, run(name, FOLDER)), "utf-8")
        print(f"docs/tutorials/{name}.md")


if __name__ == "__main__":
    main()
