"""The site is complete, needs nothing from elsewhere, and is fit to be read in a browser."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[2]
PAGES = (
    "index.html",
    "maths.html",
    "which-rule.html",
    "architecture.html",
    "tutorials/hospitals.html",
    "reference/rules.html",
    "reference/settings.html",
    "vision.html",
)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of docs/tools by name."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/tools"))
    return importlib.import_module


@pytest.mark.long
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        fetched = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?([^\s\">]+)", text)
        fetched += re.findall(r"<link[^>]*\shref=\"?([^\s\">]+)", text)
        assert not [url for url in fetched if re.match(r"(https?:)?//", url)], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", style.read_text("utf-8")), style


@pytest.mark.long
def test_formulas_are_typeset_and_tables_are_made(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert "<!-- generated" not in text, page
        assert not re.findall(r'class="arithmatex">\\[(\[]', text), page
    assert (site / "maths.html").read_text("utf-8").count("<math") > 100
    assert 20_000 < (site / "assets" / "math.ttf").stat().st_size < 400_000


def visit(browser: Any, url: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.messages(), browser.requests()
    browser.driver.get(url)
    WebDriverWait(browser.driver, 30).until(
        lambda driver: driver.execute_script("return document.readyState") == "complete"
    )


@pytest.mark.parametrize("page", PAGES)
def test_pages_render(browser: Any, address: str, page: str) -> None:
    visit(browser, f"{address}/{page}")
    assert browser.run("return document.querySelector('h1').getBoundingClientRect().height") > 10
    assert [url for url in browser.requests() if url.startswith("http") and not url.startswith(address)] == []
    assert [text for text in browser.messages() if "favicon" not in text] == []
    loaded = "return [...document.images].filter(i => i.loading != 'lazy' && i.naturalWidth == 0).map(i => i.src)"
    assert browser.run(loaded) == []
    with browser.width(390):
        wide = browser.run("return document.documentElement.scrollWidth")
    assert wide <= 390


def test_maths_are_set_as_maths(browser: Any, address: str) -> None:
    """Numerators above denominators, indices below and small, in a font for maths."""
    visit(browser, f"{address}/maths.html")
    from selenium.webdriver.support.ui import WebDriverWait

    loaded = """return [...document.fonts].some(f => f.family.includes("STIX Two Math") && f.status == "loaded")"""
    WebDriverWait(browser.driver, 30).until(lambda driver: driver.execute_script(loaded))
    above = browser.run(
        "const [top, below] = document.querySelector('mfrac').children;"
        "return [top.getBoundingClientRect().bottom, below.getBoundingClientRect().top]"
    )
    assert above[0] <= above[1] + 1
    base, index = browser.run(
        "const [base, index] = document.querySelector('msub').children;"
        "return [base, index].map(e => { const r = e.getBoundingClientRect(); return [r.bottom, r.height] })"
    )
    assert index[0] > base[0]
    assert index[1] < base[1]


def test_search_finds_a_rule(browser: Any, address: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    visit(browser, f"{address}/index.html?q=FedVARP")
    found = (
        "return [...document.querySelectorAll('.md-search-result__item, [class*=search] a')].map(e => e.textContent)"
    )
    WebDriverWait(browser.driver, 30).until(
        lambda driver: any("FedVARP" in text for text in driver.execute_script(found))
    )


@pytest.mark.parametrize(
    "text",
    [
        "[a page](nowhere.md)",
        "[a section](#nowhere)",
        "[a file](../src/fipa/nowhere.py)",
        "![figure](none.png)",
        "[there](other.md#nowhere)",
    ],
)
def test_what_is_broken_fails(tmp_path: Path, text: str) -> None:
    """By the settings of mkdocs.yml, on a site of two pages."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    changes = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site"), "hooks": [], "plugins": []}
    config = load_config(str(ROOT / "mkdocs.yml"), nav=["index.md", "other.md"], extra_css=[], strict=True, **changes)
    with pytest.raises(Abort):
        build(config)


def test_every_public_name_has_its_place(tools: Any, tmp_path: Path) -> None:
    public = tools("public")
    assert list(public.problems(ROOT / "docs" / "reference")) == []
    (tmp_path / "rules.md").write_text("::: fipa.FIPA\n::: fipa.nothing.at_all\n")
    problems = list(public.problems(tmp_path))
    assert "fipa.FedAvg is public, but no page of the reference shows it" in problems
    assert "the reference shows fipa.nothing.at_all, which does not exist" in problems
    assert not [problem for problem in problems if "fipa.FIPA " in problem]


def test_a_name_without_a_docstring_is_found(tools: Any) -> None:
    class Silent:
        def method(self) -> None:
            pass

        @property
        def said(self) -> int:
            """A docstring."""
            return 1

    assert list(tools("public")._members("fipa.Silent", Silent)) == [
        "fipa.Silent.method is public, but has no docstring"
    ]


def test_entries_of_two_parameters_are_split(tools: Any) -> None:
    text = "Rule.\n\nParameters\n----------\nlow, high\n    Ends.\nother\n    Else.\n"
    assert tools("split").split(text).count("    Ends.") == 2


def test_readme_is_short_and_has_the_figure_first() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 120
    assert any("docs/main.png" in line for line in lines[:12])


def test_words_beside_the_main_figure_are_those_of_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/results"))
    figure, tables = importlib.import_module("main_figure"), importlib.import_module("tables")

    def last(arm: str, file: str) -> float:
        rows = [row["last"] for row in tables.read(tables.HERE / file) if row["arm"] == arm]
        return sum(rows) / len(rows)

    silos, few = (file for file, _, _ in figure.PANELS)
    first_order = max(last(arm, silos) for arm in ("FedAdam", "FedAvgM", "FedVARP"))
    best = max(value for arm, (value, *_) in figure.points(few).items() if arm != figure.OURS)
    numbers = [
        last(figure.OURS, silos) - last("L-BFGS (server)", silos),
        last(figure.OURS, silos) - first_order,
        figure.points(few)[figure.OURS][0] - best,
    ]
    told = [f"{number:.1f} points" if k != 1 else f"{number:.1f} above" for k, number in enumerate(numbers)]
    text = " ".join((ROOT / "docs/index.md").read_text("utf-8").split())
    assert [words for words in told if words not in text] == []
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"{numbers[1]:.1f} points above the best first-order rule" in readme
    assert f"{numbers[2]:.1f} points above the best control" in readme
