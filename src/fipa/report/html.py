"""Templates, styles and scripts that report.html and the page of `fipa serve` share."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup

CHARTS = ("charts.js", "images.js", "theme.js", "figure.js")  # what draws, for both pages


@cache
def environment() -> Environment:
    """The templates of both pages: all that is put into them is escaped, and nothing may be missing."""
    loader = PrefixLoader({name: PackageLoader(f"fipa.{name}") for name in ("report", "serve")})
    found = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip
    found.globals["embedded"] = embedded
    return found


def render(template: str, **content: Any) -> str:
    """A template by its name, as "report/page.html"."""
    return environment().get_template(template).render(**content)


def asset(name: str, package: str = "report") -> str:
    """The text of a style or script of ours."""
    return (files(f"fipa.{package}") / "static" / name).read_text(encoding="utf-8")


def embedded(content: Any) -> Markup:
    """Data for a script element: "</" would end it, "<!--" would hide its end."""
    return Markup(json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
