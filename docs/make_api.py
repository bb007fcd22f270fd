"""Page api.md of the site, made from docstrings. `python docs/make_api.py` prints it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import exp

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# API: Python functions, and classes for a `_target_`

*Reference*: classes, functions and their parameters. Made from docstrings by `python docs/make_api.py`.
The config's keys are in [configuration](configuration.md).
"""
# Base classes of users' classes. The page lists their methods.
BASES = [
    "exp.hooks.hook.Hook",
    "exp.hooks.step.Step",
    "exp.strategies.strategy.Strategy",
    "exp.objectives.objective.Term",
    "exp.data.data.Data",
]
# Classes that are not listed, because their modules import a package of an extra that may not be installed.
OF_EXTRAS = {"exp.extras.mlflow.mlflow_store.MlflowLogger", "exp.extras.wandb.wandb_run.WandbLogger"}
TARGET = re.compile(r"_target_: *(exp\.[\w.]+)")
# Header of a section in a Google-style docstring, and an item of a section.
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Shape|Yields):")
ITEM = re.compile(r" {4}(\w+(?:, \w+)*): +(.*)")
# `name: meaning` at the start of a line in a docstring without sections.
NAMED = re.compile(r"^(\w+(?:, \w+)*): +(.*)$")


def page() -> str:
    text = "\n".join([HEAD, *_python(), *_bases(), *_targets()])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _python() -> Iterator[str]:
    yield "## In Python\n"
    for name in sorted(exp.__all__, key=lambda name: (name[0].isupper(), name)):
        yield from _entry(f"exp.{name}", getattr(exp, name))


def _bases() -> Iterator[str]:
    yield "## Base classes and their methods\n"
    for name in BASES:
        found = _resolved(name)
        yield from _entry(name, found)
        for method, function in vars(found).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
                signature = " ".join(_signature(function).split())
                yield f"- `{method}{signature}`{': ' if first else ''}{first}"
        yield ""


def _targets() -> Iterator[str]:
    """Yield an entry for each class in a `_target_` of conf/, under the first config group that uses it."""
    seen = OF_EXTRAS.union(BASES)
    for group in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        options: dict[str, list[str]] = {}
        for path in sorted(group.glob("*.yaml")):
            for name in TARGET.findall(path.read_text(encoding="utf-8")):
                options.setdefault(name, []).append(path.stem)
        names = sorted(options.keys() - seen)
        seen |= options.keys()
        if names:
            yield f"## {group.name}\n"
        for name in names:
            said = ", ".join(f"`{option}`" for option in dict.fromkeys(options[name]))
            yield from _entry(name, _resolved(name), f"In {said} of `conf/{group.name}/`.")


def _entry(name: str, found: object, where: str = "") -> Iterator[str]:
    yield f"### `{name}`\n"
    if not (inspect.isclass(found) and issubclass(found, BaseException)):
        yield f"    {name.rpartition('.')[2]}{_signature(found)}\n"
    yield from _prose(found)
    if where:
        yield f"{where}\n"


def _prose(found: object) -> Iterator[str]:
    """Yield the docstring of an object in Markdown, with lists of parameters and exceptions."""
    own = vars(found).get("__doc__") if inspect.isclass(found) else inspect.getdoc(found)
    rows: list[str] = []
    section = ""
    for line in inspect.cleandoc(own or "").splitlines():
        if header := SECTION.fullmatch(line):
            section = header[1]
            rows += ["", f"{section}:", ""] if section in ("Raises", "Returns", "Yields") else [""]
            continue
        if line and not line.startswith(" "):
            section = ""
        in_list = bool(rows) and rows[-1].startswith(("- ", "  "))
        item = ITEM.match(line) if section else NAMED.match(line)
        if item and item[1] not in ("Raises", "Returns", "Source"):
            rows += [] if in_list or not rows or not rows[-1] else [""]
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            rows.append(f"- {names}: {item[2]}")
        elif in_list and line.strip() and not item:
            rows.append(f"  {line.strip()}")
        else:
            rows += [""] if in_list else []
            rows.append(line.strip() if section else line)
    yield "\n".join(rows) + "\n"


def _signature(found: object) -> str:
    """Return the signature without `self`, with one line per parameter if it is long."""
    if not callable(found):
        return ""
    signature = inspect.signature(found)
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    rows, is_keyword = [], False
    for name, parameter in signature.parameters.items():
        if name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            rows.append("*")
        rows.append(f"{marks.get(parameter.kind, '')}{name}{_said(parameter.annotation)}{_default(parameter.default)}")
        is_keyword = is_keyword or parameter.kind is inspect.Parameter.VAR_POSITIONAL
    end = _said(signature.return_annotation, " -> ") if not inspect.isclass(found) else ""
    line = f"({', '.join(rows)}){end}"
    return line if len(line) < 110 else "(\n" + "".join(f"        {row},\n" for row in rows) + f"    ){end}"


def _said(annotation: object, before: str = ": ") -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return before + (annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if callable(value) or repr(value).startswith("<"):
        return f" = {getattr(value, '__name__', '...').lstrip('_')}"
    return f" = {value!r}"


def _resolved(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


if __name__ == "__main__":
    print(page(), end="")
