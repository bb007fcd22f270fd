"""Two runs held against each other: the keys of their configs, their code, their versions, and what came of them."""

from __future__ import annotations

import difflib
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
# Of a value in a table.
MOST_CHARACTERS = 48
# What a report says of a run as a whole, beside the monitored value.
FACTS = ("steps", "epochs", "wall_seconds", "step_ms", "peak_memory_mib", "world_size", "precision", "strategy")
# Of the lines of the uncommitted changes, and of the tags that differ.
MOST_LINES = 40
PATCH = re.compile(r"^diff --git a/(.+?) b/|^--- (?:a/)?(.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing of two runs, that differs or is to be seen of both. change: from A to B, of numbers, in words."""

    name: str
    first: str
    second: str
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the comparison. lines: what is no table."""

    title: str
    rows: Sequence[Row] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run. provenance, report: as their files have them; empty where they cannot be read."""

    record: RunRecord
    provenance: Mapping[str, Any]
    report: Mapping[str, Any]
    problems: Sequence[str]

    @classmethod
    def of(cls, directory: Path) -> Side:
        """Read what a run directory holds, which may be half of it, or nothing."""
        problems: list[str] = []
        record = read_run(directory)
        provenance = read_part(directory, "provenance.json", _json, problems) or {}
        # Whether there is one, and what is wrong with it, the record says.
        report = read_part(directory, "report.json", _json, []) or {}
        return cls(record=record, provenance=provenance, report=report, problems=[*record.problems, *problems])


def _json(path: Path) -> Mapping[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    return found


def differences(first: Path, second: Path, *, everything: bool = False) -> Iterator[Section]:
    """Compare two run directories, part by part.

    everything: every tag, and the uncommitted changes as a whole.
    """
    one, other = Side.of(first), Side.of(second)
    missing = [f"{name}: {text}" for name, side in (("A", one), ("B", other)) for text in side.problems]
    if missing:
        yield Section(title="missing", lines=missing)
    yield _config(one.record.config, other.record.config)
    yield _code(_mapping(one.provenance, "git"), _mapping(other.provenance, "git"), everything=everything)
    yield _versions(one.provenance, other.provenance)
    yield _results(one, other, everything=everything)


def _mapping(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping within a file; empty where it is something else."""
    found = holder.get(name)
    return found if isinstance(found, dict) else {}


# --- the config ---


def _config(first: Mapping[str, Any], second: Mapping[str, Any]) -> Section:
    unread = [name for name, config in (("A", first), ("B", second)) if not config]
    if unread:
        return Section(title="config", lines=[f"not compared: {' and '.join(unread)} without a config.yaml to read"])
    rows = [Row(name=key, first=shown(one), second=shown(other)) for key, one, other in changed(first, second)]
    return Section(title="config", rows=rows, lines=[] if rows else ["the same"])


def changed(first: Any, second: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every dotted key of which two plain trees have different values; ABSENT for a tree that has no such key.

    What one tree alone has is one key, however much is below it.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for name in dict.fromkeys([*first, *second]):
            inner = f"{key}.{name}" if key else str(name)
            yield from changed(first.get(name, ABSENT), second.get(name, ABSENT), inner)
    elif not are_same(first, second):
        yield key, first, second


def shown(value: Any, *, most: int | None = MOST_CHARACTERS) -> str:
    """A value in one line, as YAML has it, without what is secret."""
    if isinstance(value, dict):
        text = f"{{{', '.join(f'{name}: {shown(inner, most=None)}' for name, inner in value.items())}}}"
    elif isinstance(value, list):
        text = f"[{', '.join(shown(inner, most=None) for inner in value)}]"
    else:
        text = " ".join(covered(text_of(value)).split()) if most else covered(text_of(value))
    return text if most is None or len(text) <= most else f"{text[: most - 3]}..."


# --- the code ---


def _code(first: Mapping[str, Any], second: Mapping[str, Any], *, everything: bool) -> Section:
    if not first and not second:
        return Section(title="code", lines=["not known: neither was started in a git repository that could be read"])
    revisions = [str(git.get("revision", "not known")) for git in (first, second)]
    rows = []
    if revisions[0] != revisions[1]:
        rows.append(Row(name="git revision", first=revisions[0][:12], second=revisions[1][:12]))
    patches = [_patches(str(git.get("diff", ""))) for git in (first, second)]
    for path in dict.fromkeys([*patches[0], *patches[1]]):
        one, other = (found.get(path) for found in patches)
        if one != other:
            words = [_state(git, patch) for git, patch in ((first, one), (second, other))]
            rows.append(Row(name=path, first=words[0], second=words[1]))
    lines = []
    if revisions[0] != revisions[1] and first and second:
        lines.append(f"what was committed between them: git diff {revisions[0][:12]} {revisions[1][:12]}")
    if first and second:
        lines += _between(str(first.get("diff", "")), str(second.get("diff", "")), everything=everything)
    else:
        lines.append(f"of {'B' if first else 'A'} it is not known: no git repository that could be read")
    same = f"the same: {revisions[0][:12]}" + (", with the same uncommitted changes" if first.get("diff") else "")
    return Section(title="code", rows=rows, lines=lines if rows else [same])


def _patches(diff: str) -> dict[str, str]:
    """The uncommitted changes of each file."""
    starts = list(PATCH.finditer(diff))
    ends = [match.start() for match in starts[1:]] + [len(diff)]
    if not starts:
        return {"uncommitted changes": diff} if diff else {}
    found: dict[str, str] = {}
    for match, end in zip(starts, ends, strict=True):
        name = (match[1] or match[2]).split("\t")[0].strip()
        found[name] = found.get(name, "") + diff[match.start() : end]
    return found


def _state(git: Mapping[str, Any], patch: str | None) -> str:
    """What a run had of a file."""
    if patch is None:
        return "as committed" if git else "not known"
    if PATCH.search(patch) is None:
        return shown(patch)  # why the changes are not known
    lines = [line for line in patch.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    return f"{len(lines)} line{'s' if len(lines) != 1 else ''} uncommitted"


def _between(first: str, second: str, *, everything: bool) -> list[str]:
    """How the uncommitted changes of one run differ from those of the other."""
    if first == second:
        return []
    lines = list(difflib.unified_diff(first.splitlines(), second.splitlines(), "A", "B", n=2, lineterm=""))
    if everything or len(lines) <= MOST_LINES:
        return ["their uncommitted changes, held against each other:", *(f"  {line}" for line in lines)]
    return [f"their uncommitted changes differ in {len(lines)} lines, which --all shows"]


# --- where they ran ---


def _versions(first: Mapping[str, Any], second: Mapping[str, Any]) -> Section:
    if not first or not second:
        unread = " and ".join(name for name, found in (("A", first), ("B", second)) if not found)
        return Section(title="versions", lines=[f"not compared: {unread} without a provenance.json to read"])
    pairs = [(_mapping(first, name), _mapping(second, name)) for name in ("versions", "machine")]
    rows = [
        Row(name=key, first=shown(one), second=shown(other))
        for before, after in pairs
        for key, one, other in changed(before, after)
    ]
    return Section(title="versions", rows=rows, lines=[] if rows else ["the same, on the same machine"])


# --- what came of them ---


def _results(first: Side, second: Side, *, everything: bool) -> Section:
    one, other = first.record, second.record
    rows = [Row(name="status", first=one.status, second=other.status)]
    if one.error or other.error:
        rows.append(Row(name="error", first=shown(one.error) or "-", second=shown(other.error) or "-"))
    tags = [record.monitor or "-" for record in (one, other)]
    if tags[0] == tags[1]:
        rows.append(_number_row(f"best {tags[0]}", one.value, other.value))
    else:
        rows += [Row(name="monitor", first=tags[0], second=tags[1])]
        rows.append(Row(name="best of it", first=_number(one.value), second=_number(other.value)))
    rows.append(_number_row("at step", one.step, other.step))
    facts = [(name, first.report.get(name), second.report.get(name)) for name in FACTS]
    rows += [_number_row(name, *pair) for name, *pair in facts if pair != [None, None]]
    names = sorted({*one.metrics, *other.metrics})
    pairs = {name: (one.metrics.get(name, math.nan), other.metrics.get(name, math.nan)) for name in names}
    told = [name for name in names if everything or name.count("/") == 1]
    rows += [_number_row(name, *pairs[name]) for name in told if _differ(*pairs[name])]
    left = sum(_differ(*pairs[name]) for name in names if name not in told)
    lines = [f"{left} more tags differ, of parts of the network, which --all shows"] if left else []
    same = sum(not _differ(*pair) for pair in pairs.values())
    return Section(title="results", rows=rows, lines=[*lines, f"{same} tags are equal"] if same else lines)


def _differ(first: float, second: float) -> bool:
    return first != second and not (math.isnan(first) and math.isnan(second))


def _number_row(name: str, first: Any, second: Any) -> Row:
    change = ""
    if _is_number(first) and _is_number(second) and first != second:
        change = f"{second - first:+.4g}"
        if first:
            change += f", {100 * (second - first) / abs(first):+.3g} %"
    return Row(name=name, first=_number(first), second=_number(second), change=change)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else shown(value)
