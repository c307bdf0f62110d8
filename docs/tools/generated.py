"""Tables of the reference that are made from the code, so that they say what the code does.

`table(NAME)` is the Markdown for `<!-- generated: NAME -->` in a page. What a key means is said once, in the docstring
of the class or function that it belongs to.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import griffe

log = logging.getLogger("mkdocs.fipa")
logging.getLogger("griffe").setLevel(logging.ERROR)  # types stand in the signatures


def version() -> str:
    """The package's version."""
    import fipa

    return fipa.__version__


def table(name: str) -> str:
    """The table of that name."""
    return TABLES[name]()


def meanings(thing: Any) -> dict[str, str]:
    """What a docstring says of each parameter or attribute, those of base classes included."""
    found: dict[str, str] = {}
    for kind in reversed(inspect.getmro(thing)) if inspect.isclass(thing) else [thing]:
        text = inspect.cleandoc(kind.__doc__ or "")
        for section in griffe.Docstring(text).parse("numpy", warnings=False):
            if section.kind.value in ("parameters", "attributes"):
                for entry in section.value:
                    for key in entry.name.split(", "):
                        found[key] = " ".join(entry.description.split())
    return found


def first_sentence(thing: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def kind_of(hint: Any) -> str:
    """A type in the words of a TOML file."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return kind_of(arguments[0])
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, types.UnionType):
        words = [kind_of(one) for one in arguments if one is not type(None)]
        named = [word for word in words if "table" in word]
        return "table, told apart by `name`" if len(named) > 3 else " or ".join(dict.fromkeys(words))
    if origin in (tuple, list):
        return "list of " + re.sub(r"number|text|table|list", r"\g<0>s", kind_of(arguments[0]), count=1)
    if origin is dict:
        return "table"
    if hint is Any:  # a rule, a local rule or a problem, which `fipa.config.kinds` reads
        return "table, told apart by `name`"
    if hint in PLAIN:
        return PLAIN[hint]
    return f"[table](#{SECTIONS.get(hint.__name__, hint.__name__.lower())})" if inspect.isclass(hint) else "table"


SECTIONS = {  # of the page, by the class of a table
    "EngineSpec": "engine", "ArmSpec": "arms-and-warmup", "WarmupSpec": "arms-and-warmup", "StageSpec": "stages",
    "SketchSpec": "sketch",
}  # fmt: skip
PLAIN: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def shown(default: Any) -> str:
    """A default as TOML has it."""
    from pydantic_core import PydanticUndefined

    if default is PydanticUndefined or default is inspect.Parameter.empty:
        return "**required**"
    if default is None or default == () or dataclasses.is_dataclass(default) or hasattr(type(default), "model_fields"):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def keys(model: Any, source: Any = None, skip: tuple[str, ...] = ()) -> str:
    """Key, type, default and meaning of every setting of a pydantic model or a dataclass."""
    said = meanings(source or model)
    rows = []
    for name, hint, default in _fields(model):
        if name in skip:
            continue
        if name == "name" and get_origin(hint) is Literal:
            said[name] = "Says which of the tables this is."
        if name not in said:
            log.warning("%s.%s has no description in its docstring", getattr(source or model, "__name__", model), name)
        kind = " or ".join(dict.fromkeys(kind_of(hint).split(" or ")))
        rows.append(f"| `{name}` | {kind} | {shown(default)} | {_cell(said.get(name, ''))} |")
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _fields(model: Any) -> Iterator[tuple[str, Any, Any]]:
    if hasattr(model, "model_fields"):
        for name, field in model.model_fields.items():
            yield name, field.annotation, field.default
    else:
        import typing

        hints = typing.get_type_hints(model, include_extras=True)
        for field in dataclasses.fields(model):
            made = field.default_factory is not dataclasses.MISSING
            empty = () if made else inspect.Parameter.empty
            yield field.name, hints[field.name], empty if field.default is dataclasses.MISSING else field.default


def kinds(key: str) -> str:
    """All rules, local rules or problems: a heading for each, what it does, and its settings."""
    from fipa.config.kinds import MAKERS, specs

    parts = []
    for name, model in specs(key).items():
        if name == "given":  # a problem that was made in Python: no file can name it
            continue
        maker = MAKERS[key][name]
        parts.append(f"#### `{name}`\n\n{first_sentence(maker)}\n")
        if len(model.model_fields) > 1:
            parts.append(keys(model, maker, skip=("name",)))
    return "\n".join(parts)


def small_tables() -> str:
    """Tables within tables: step control, participation, points and so on."""
    from fipa.config.kinds import SETTINGS

    parts = []
    for kind in SETTINGS:
        parts.append(f"#### {kind.__name__}\n\n{first_sentence(kind)}\n\n{keys(kind)}")
    return "\n".join(parts)


def exit_codes() -> str:
    """What the shell is told."""
    from fipa.cli import Exit

    lines = inspect.getsource(Exit).splitlines()
    said = {}
    for line in lines:
        found = re.match(r"\s+([A-Z]+) = \d+(?:\s+# (.*))?", line)
        if found:
            said[found[1]] = found[2] or ""
    rows = ["| 0 | success: everything was run |", "| 1 | something broke, with a traceback |"]
    for code in Exit:
        meaning = said[code.name] or MEANINGS.get(code.name, "")
        if not meaning:
            log.warning("exit code %s has no meaning", code.name)
        rows.append(f"| {code.value} | {meaning} |")
    return "\n".join(["| code | meaning |", "|---|---|", *rows]) + "\n"


MEANINGS = {"INTERRUPTED": "interrupted, as by Ctrl-C; `fipa resume DIR` continues where it stopped"}


def commands() -> str:
    """Every command with its arguments and options."""
    import typer.main

    from fipa.cli.app import app

    return "\n".join(_command(typer.main.get_command(app), "fipa"))


def _command(command: Any, path: str) -> Iterator[str]:
    children = getattr(command, "commands", None)
    if children:
        for name, child in children.items():
            yield from _command(child, f"{path} {name}")
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join([path, *(_usage(p) for p in arguments), *(["[OPTIONS]"] if options else [])])
    about = " ".join(inspect.cleandoc(command.help or "").split())
    yield f"### `{path}`\n\n{about}\n\n```text\n{usage}\n```\n"
    if options:
        yield "| option | meaning |\n|---|---|"
        for option in options:
            names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
            taken = f" `{option.metavar}`" if option.metavar else ""
            yield f"| {names}{taken} | {_cell(' '.join((option.help or '').split()))} |"
        yield ""


def _usage(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    name = f"{name}..." if argument.nargs == -1 and "..." not in name else name
    return name if argument.required else f"[{name}]"


def series() -> str:
    """What results.json has of every round, and of which type."""
    from fipa.federation.record import SERIES, RoundRecord

    return _record(RoundRecord, SERIES)


def _record(record: Any, names: tuple[str, ...]) -> str:
    import typing

    said = _shared_meanings(record)
    hints = typing.get_type_hints(record)
    rows = [f"| `{name}` | {_json(hints[name])} | {_cell(said[name])} |" for name in names]
    return "\n".join(["| series | each entry | meaning |", "|---|---|---|", *rows]) + "\n"


def _shared_meanings(record: Any) -> dict[str, str]:
    said = meanings(record)
    for name in (field.name for field in dataclasses.fields(record)):
        if name not in said:
            log.warning("%s.%s has no description in its docstring", record.__name__, name)
            said[name] = ""
    return said


def _json(hint: Any) -> str:
    words = {int: "whole number", float: "number", bool: "true or false"}
    arguments = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is tuple:
        return f"list, one {words[arguments[0]]} per client"
    if arguments:
        return f"{words[arguments[0]]} or null"
    return words[hint]


TABLES: dict[str, Callable[[], str]] = {
    "experiment": lambda: keys(_schema("Experiment")),
    "engine": lambda: keys(_schema("EngineSpec")),
    "arm": lambda: keys(_schema("ArmSpec"), skip=tuple(_schema("StageSpec").model_fields)),
    "stage": lambda: keys(_schema("StageSpec")),
    "sketch": lambda: keys(_sketch()),
    "rules": lambda: kinds("rule"),
    "local": lambda: kinds("local"),
    "problems": lambda: kinds("problem"),
    "tables": small_tables,
    "exit-codes": exit_codes,
    "commands": commands,
    "series": series,
}


def _schema(name: str) -> Any:
    from fipa.config import schema, stages

    return getattr(schema, name, None) or getattr(stages, name)


def _sketch() -> Any:
    from fipa.config.sketch import SketchSpec

    return SketchSpec
