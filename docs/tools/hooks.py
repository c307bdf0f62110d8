"""What MkDocs does not do by itself, for `mkdocs.yml`: maths, files of the repository, generated tables, completeness.

- Formulas become MathML while the site is built. Browsers typeset that without a script, and nothing is fetched. What
  they need is a font with a table for maths: STIX Two Math, of which the site gets the glyphs that it uses.
- Links to files outside of docs/ lead to pages that show these files.
- `<!-- generated: NAME -->` in a page is replaced by a table that is made from the code (`generated.py`).
- A public name without a docstring or without a place in the reference is a warning, and warnings are errors.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fontTools import subset
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import generated
import public

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown"}
FONT = Path(str(find_spec("ziamath").origin)).parent / "fonts" / "STIXTwoMath-Regular.ttf"  # type: ignore[union-attr]
log = logging.getLogger("mkdocs.fipa")
SIGNS = "0123456789()[]{}|+-=<>/,.\u221a\u0302\u0304\u02c6\u00af\u2032"  # also those that no text of a formula has
_used: set[str] = set()  # characters of formulas


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that show files of the repository that other pages link to, and the list of changes."""
    shown: set[Path] = set()
    for file in files.documentation_pages():
        for _, target, _, _ in LINK.findall(file.content_string):
            path = _outside(file.src_uri, target)
            if path is not None and path.exists():
                shown.add(path)
    for path in sorted(shown | {ROOT / "CHANGELOG.md"}):
        uri = _page_of(path)
        page = File.generated(config, uri, content=_showing(path))
        if uri != "changelog.md":
            page.inclusion = page.inclusion.__class__.NOT_IN_NAV
        files.append(page)
    for problem in public.problems(ROOT / "docs" / "reference"):
        log.warning(problem)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables from the code, and links to files outside of docs/."""

    def link(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        path = _outside(page.file.src_uri, target)
        if path is None:
            return match.group()
        here = posixpath.dirname(page.file.src_uri)
        return f"{before}{posixpath.relpath(_page_of(path), here or '.')}{anchor or ''}{after}"

    text = re.sub(r"<!-- generated: ([\w-]+) -->", lambda match: generated.table(match.group(1)), markdown)
    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML."""
    pattern = r'<(span|div) class="arithmatex">(.*?)</\1>'
    return re.sub(pattern, lambda match: _typeset(match, page.file.src_uri), content, flags=re.DOTALL)


def _typeset(match: re.Match[str], where: str) -> str:
    tag, source = match.groups()
    formula = html.unescape(source).strip()
    formula = re.sub(r"^\\[(\[]|\\[)\]]$", "", formula).strip()
    try:
        typeset = convert(formula, display="block" if tag == "div" else "inline")
    except Exception as error:  # whatever the converter meets: the page must not be published without it
        log.warning("%s: cannot typeset %r: %s", where, formula, error)
        return match.group()
    shown = html.unescape(re.sub(r"<[^>]*>", "", typeset))
    if "\\" in shown or "&" in shown:
        log.warning("%s: the converter does not know a command of %r: %s", where, formula, shown)
    _used.update(shown)
    return f'<{tag} class="arithmatex">{typeset}</{tag}>'


def _outside(page: str, target: str) -> Path | None:
    """The file that a link leads to if that is in the repository, but not in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") or path.startswith("..") or path == "docs" else ROOT / path


def _page_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return "changelog.md" if name == "CHANGELOG.md" else f"source/{name}.md"


def _showing(path: Path) -> str:
    if path.name == "CHANGELOG.md":
        return re.sub(r"\]\(docs/", "](", path.read_text("utf-8"))
    name = path.relative_to(ROOT).as_posix()
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if _text(file)]
    parts = [f"# {name}\n"]
    for file in files:
        code = file.read_text("utf-8").rstrip()
        title = f"## {file.relative_to(path).as_posix()}\n\n" if path.is_dir() else ""
        parts.append(f"{title}````{LANGUAGES.get(file.suffix, 'text')}\n{code}\n````\n")
    return "\n".join(parts)


def _text(file: Path) -> bool:
    return file.is_file() and file.suffix in LANGUAGES and "__pycache__" not in file.parts


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """The version stands in the footer."""
    sys.path.insert(0, str(ROOT / "src"))
    config.copyright = f"FIPA {generated.version()}, Apache-2.0"
    return config


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """The part of the font that formulas use."""
    options = subset.Options(layout_features=["*"], notdef_outline=True)
    options.drop_tables = [table for table in options.drop_tables if table != "MATH"]
    font = subset.load_font(str(FONT), options)
    cutter = subset.Subsetter(options)
    letters = [chr(code) for code in (*range(0x1D434, 0x1D468), *range(0x1D6E2, 0x1D71C), 0x210E)]  # italic in <mi>
    cutter.populate(text="".join([*sorted(_used), *letters, SIGNS]))
    cutter.subset(font)
    file = Path(config.site_dir) / "assets" / "math.ttf"
    file.parent.mkdir(parents=True, exist_ok=True)
    subset.save_font(font, str(file), options)
