"""Compares two runs: the keys of their configs, their code, their versions, and their results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exp.config.plain_tree import are_same
from exp.redaction import covered
from exp.sweeps.run_records import RunRecord, read_part, read_run, text_of

ABSENT = "(not there)"
# Characters of a value in a table.
MOST_CHARACTERS = 48
# Fields of report.json that are compared.
FACTS = ("steps", "epochs", "wall_seconds", "step_ms", "peak_memory_mib", "world_size", "precision", "strategy")
PATCH = re.compile(r"^diff --git a/(.+?) b/|^--- (?:a/)?(.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table. change: from A to B, for numbers."""

    name: str
    first: str
    second: str
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the comparison: a table, and further lines."""

    title: str
    rows: Sequence[Row] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Side:
    """A run. provenance, report: the content of their files; empty if it cannot be read."""

    record: RunRecord
    provenance: Mapping[str, Any]
    report: Mapping[str, Any]
    problems: Sequence[str]

    @classmethod
    def of(cls, directory: Path) -> Side:
        """Read a run directory, in which any file may be missing or damaged."""
        problems: list[str] = []
        record = read_run(directory)
        provenance = read_part(directory, "provenance.json", _json, problems) or {}
        # The record reports the problems of report.json.
        report = read_part(directory, "report.json", _json, []) or {}
        return cls(record=record, provenance=provenance, report=report, problems=[*record.problems, *problems])


def _json(path: Path) -> Mapping[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    return found


def differences(first: Path, second: Path) -> Iterator[Section]:
    """Yield the differences of two run directories, part by part."""
    one, other = Side.of(first), Side.of(second)
    missing = [f"{name}: {text}" for name, side in (("A", one), ("B", other)) for text in side.problems]
    if missing:
        yield Section(title="missing", lines=missing)
    yield _compared("config", one.record.config, other.record.config)
    yield _code(_mapping(one.provenance, "git"), _mapping(other.provenance, "git"))
    yield _compared("versions", *(_machine(side.provenance) for side in (one, other)))
    yield _results(one, other)


def _mapping(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping within a file; an empty one if it is something else."""
    found = holder.get(name)
    return found if isinstance(found, dict) else {}


def _machine(provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_mapping(provenance, "versions"), **_mapping(provenance, "machine")}


def _compared(title: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Section:
    """Return the keys in which two mappings differ."""
    if not first or not second:
        return _unread(title, first, second)
    rows = [Row(name=key, first=shown(one), second=shown(other)) for key, one, other in changed(first, second)]
    return Section(title=title, rows=rows, lines=[] if rows else ["the same"])


def _unread(title: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Section:
    names = " and ".join(name for name, found in (("A", first), ("B", second)) if not found)
    return Section(title=title, lines=[f"not compared: nothing of {names} can be read"])


def changed(first: Any, second: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each dotted key with different values in two plain trees; ABSENT stands for a missing key.

    A node that only one tree has is one key.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for name in dict.fromkeys([*first, *second]):
            inner = f"{key}.{name}" if key else str(name)
            yield from changed(first.get(name, ABSENT), second.get(name, ABSENT), inner)
    elif not are_same(first, second):
        yield key, first, second


def shown(value: Any, *, most: int | None = MOST_CHARACTERS) -> str:
    """Return a value in one line, as in YAML, without secrets."""
    if isinstance(value, dict):
        text = f"{{{', '.join(f'{name}: {shown(inner, most=None)}' for name, inner in value.items())}}}"
    elif isinstance(value, list):
        text = f"[{', '.join(shown(inner, most=None) for inner in value)}]"
    else:
        text = " ".join(covered(text_of(value)).split()) if most else covered(text_of(value))
    return text if most is None or len(text) <= most else f"{text[: most - 3]}..."


def _code(first: Mapping[str, Any], second: Mapping[str, Any]) -> Section:
    if not first or not second:
        return _unread("code", first, second)
    revisions = [str(git.get("revision", "not known"))[:12] for git in (first, second)]
    rows, lines = [], []
    if revisions[0] != revisions[1]:
        rows.append(Row(name="git revision", first=revisions[0], second=revisions[1]))
        lines.append(f"what was committed between them: git diff {' '.join(revisions)}")
    patches = [_patches(str(git.get("diff", ""))) for git in (first, second)]
    for path in dict.fromkeys([*patches[0], *patches[1]]):
        one, other = (found.get(path) for found in patches)
        if one != other:
            words = ["as committed" if patch is None else "uncommitted changes" for patch in (one, other)]
            rows.append(Row(name=path, first=words[0], second=words[1]))
    same = f"the same: {revisions[0]}" + (", with the same uncommitted changes" if first.get("diff") else "")
    return Section(title="code", rows=rows, lines=lines if rows else [same])


def _patches(diff: str) -> dict[str, str]:
    """Return the uncommitted changes of each file."""
    starts = list(PATCH.finditer(diff))
    ends = [match.start() for match in starts[1:]] + [len(diff)]
    # Without a patch, the text says why the changes are not known.
    found = {"uncommitted changes": diff} if diff and not starts else {}
    for match, end in zip(starts, ends, strict=True):
        name = (match[1] or match[2]).split("\t")[0].strip()
        found[name] = found.get(name, "") + diff[match.start() : end]
    return found


def _results(first: Side, second: Side) -> Section:
    one, other = first.record, second.record
    pairs: dict[str, tuple[Any, Any]] = {"status": (one.status, other.status)}
    if one.error or other.error:
        pairs["error"] = one.error, other.error
    if one.monitor == other.monitor:
        pairs[f"best {one.monitor}"] = one.value, other.value
    else:
        pairs |= {"monitor": (one.monitor, other.monitor), "best of it": (one.value, other.value)}
    pairs["at step"] = one.step, other.step
    facts = {name: (first.report.get(name), second.report.get(name)) for name in FACTS}
    pairs |= {name: pair for name, pair in facts.items() if pair != (None, None)}
    names = sorted({*one.metrics, *other.metrics})
    metrics = {name: (one.metrics.get(name), other.metrics.get(name)) for name in names}
    # As text, because nan is not equal to itself.
    different = {name: pair for name, pair in metrics.items() if str(pair[0]) != str(pair[1])}
    pairs |= {name: pair for name, pair in different.items() if name.count("/") == 1}
    hidden = sum(name.count("/") != 1 for name in different)
    lines = [f"{hidden} more tags differ, of parts of the network"] if hidden else []
    if len(different) < len(names):
        lines.append(f"{len(names) - len(different)} tags are equal")
    rows = [
        Row(name=name, first=_number(before), second=_number(after), change=_change(before, after))
        for name, (before, after) in pairs.items()
    ]
    return Section(title="results", rows=rows, lines=lines)


def _change(first: Any, second: Any) -> str:
    """Return the change of a number; an empty text for anything else."""
    is_number = all(isinstance(one, int | float) and math.isfinite(one) for one in (first, second))
    if not is_number or first == second:
        return ""
    share = f", {100 * (second - first) / abs(first):+.3g} %" if first else ""
    return f"{second - first:+.4g}{share}"


def _number(value: Any) -> str:
    if value in (None, "") or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else shown(value)
