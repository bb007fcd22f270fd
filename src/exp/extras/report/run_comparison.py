"""Runs held against each other: their rows, what differs between them, which are repeats, by what they are judged."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from exp.errors import RunError
from exp.extras.report.analysis import numbers, spans_decades
from exp.shared_types import Mode, compared_tag, parted
from exp.spelling import among, did_you_mean
from exp.sweeps.ledger import SETTINGS
from exp.sweeps.results import DEFAULT, FINISHED, FOLD, NONE, Repeats, Row, best_of, differing, repeats_of
from exp.sweeps.run_records import RunRecord, best_point

SEED = "seed"
SECONDS = "wall seconds"
# A tag of which less is better, where neither the config nor the command says so.
LESS = re.compile(
    r"(^|[/_])(loss|error|mae|mse|rmse|mape|nll|perplexity|bits_per_character|seconds|ms|mib|steps)($|[/_])"
)


class ReportError(RunError):
    """There is nothing to compare, or not as it was asked for."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One thing that runs are judged by. name: as an axis says it. values: one a run, nan where it has none."""

    name: str
    mode: Mode
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, and how they are compared.

    base: the folder that holds them all. names: what the runs are called, their directories below it.
    rows: one a record, `job` its place.
    tag, mode: what they are compared by; None where they watch different tags.
    values: of `tag`, one a run, whatever its status; nan where there is none.
    keys: the hyperparameters that differ. log_keys: those that a sweep draws in their logarithm.
    notes: what was decided, and what could not be read, a line each.
    """

    base: Path
    records: Sequence[RunRecord]
    rows: Sequence[Row]
    names: Sequence[str]
    tag: str | None
    mode: Mode
    values: Sequence[float]
    keys: Sequence[str]
    log_keys: frozenset[str]
    repeat_over: str | None
    objectives: Sequence[Objective]
    notes: Sequence[str]

    @cached_property
    def groups(self) -> list[Repeats]:
        """The repeats; without any, every run by itself."""
        if self.repeat_over is None:
            return [Repeats(swept=row.swept, rows=[row]) for row in self.rows]
        return repeats_of(self.rows, over=self.repeat_over)

    @cached_property
    def best(self) -> Row | None:
        """The best run; of repeats, the best one of those with the best mean."""
        return best_of(self.rows, repeat_over=self.repeat_over)

    @cached_property
    def best_group(self) -> Sequence[Row]:
        """The best run with its repeats; empty where there is none."""
        best = self.best
        return () if best is None else next(one.rows for one in self.groups if any(row is best for row in one.rows))

    def is_log(self, key: str) -> bool:
        """Whether the axis of a numeric key is logarithmic."""
        found = numbers([row.swept[key] for row in self.rows if key in row.swept])
        if found is None or found.min() <= 0:
            return False
        return key in self.log_keys or spans_decades(found)

    def label(self, swept: Mapping[str, str]) -> str:
        """What was swept, in few words: lr=0.01 weight_decay=0."""
        keys = [key for key in self.keys if key != self.repeat_over and key in swept]
        return " ".join(f"{self.short(key)}={swept[key]}" for key in keys)

    def short(self, key: str) -> str:
        """The last part of a key, where no other has the same one."""
        last = key.rpartition(".")[2]
        return last if [one.rpartition(".")[2] for one in self.keys].count(last) == 1 else key


def compare(
    records: Sequence[RunRecord],
    *,
    repeat_over: str | None = None,
    metrics: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> Comparison:
    """Hold runs against each other.

    records: one at least, their directories absolute.
    repeat_over: the key whose runs are repeats, or none; None: the one that the runs' own config says, else seed where
        runs differ in it alone.
    metrics: TAG, TAG:min or TAG:max, in the place of the monitored tag; of several, each is an objective.
    problems: of finding them.
    Raises: ReportError where a key or a tag is not theirs.
    """
    notes = list(problems)
    wanted = _wanted(records, metrics, notes)
    tag, mode = _compared(records, wanted, notes)
    keys = _keys(records)
    base = Path(os.path.commonpath([record.directory.parent for record in records]))
    names = [os.path.relpath(record.directory, base) for record in records]
    points = [_point(record, tag, mode, is_wanted=bool(wanted)) for record in records]
    rows = [
        _row(place, record, keys, names=(tag, mode), point=point, base=base)
        for place, (record, point) in enumerate(zip(records, points, strict=True))
    ]
    over = _repeated(records, rows, keys, repeat_over, notes)
    notes += [f"{name}: {problem}" for name, one in zip(names, records, strict=True) for problem in one.problems]
    return Comparison(
        base=base,
        records=records,
        rows=rows,
        names=names,
        tag=tag,
        mode=mode,
        values=[value for value, _ in points],
        keys=differing(rows),
        log_keys=_log_keys(records),
        repeat_over=over,
        objectives=_objectives(records, wanted, tag, mode, rows),
        notes=notes,
    )


def _wanted(records: Sequence[RunRecord], metrics: Sequence[str], notes: list[str]) -> dict[str, Mode]:
    """The tags of --metric, and what is better of each."""
    known = list(dict.fromkeys(tag for record in records for tag in (*record.curves, *record.metrics)))
    found: dict[str, Mode] = {}
    for text, tag in zip(metrics, tags_of(metrics), strict=True):
        if tag not in known:
            cure = did_you_mean(tag, known) or f"There is {among(known, word=tag)}"
            raise ReportError(f"--metric {tag}: no run has this tag. {cure}")
        said = {record.objectives[tag] for record in records if tag in record.objectives}
        said |= {record.mode for record in records if record.monitor == tag and record.mode is not None}
        if tag != text:
            found[tag] = "min" if text.endswith(":min") else "max"
        elif len(said) == 1:
            (found[tag],) = said
        else:
            found[tag] = "min" if LESS.search(tag) else "max"
            other = "max" if found[tag] == "min" else "min"
            which = "smallest" if found[tag] == "min" else "largest"
            notes.append(f"--metric {tag}: the {which} is taken for the best. Write {tag}:{other} if it is not")
    return found


def tags_of(metrics: Sequence[str]) -> list[str]:
    """The tags of TAG, TAG:min and TAG:max."""
    return [re.sub(r":(min|max)$", "", text) for text in metrics]


def _compared(records: Sequence[RunRecord], wanted: Mapping[str, Mode], notes: list[str]) -> tuple[str | None, Mode]:
    if wanted:
        return next(iter(wanted.items()))
    pairs = {(record.monitor, record.mode) for record in records if record.monitor is not None and record.mode}
    if len(pairs) == 1:
        ((tag, mode),) = pairs
        assert mode is not None
        return tag, mode
    if pairs:
        listed = among(sorted({f"{tag} ({mode})" for tag, mode in pairs}))
        notes.append(f"the runs watch different tags, so none is the best: {listed}. Compare them by --metric TAG")
    return None, "min"


def _keys(records: Sequence[RunRecord]) -> list[str]:
    """The typed keys of which two runs have different values; all of a single run."""
    typed = list(dict.fromkeys(key for record in records for key in record.typed))
    if len(records) == 1:
        return typed
    return [key for key in typed if len({_swept(record, key) for record in records if _is_known(record)}) > 1]


def _is_known(record: RunRecord) -> bool:
    return bool(record.config or record.typed)


def _swept(record: RunRecord, key: str) -> str:
    found = record.value_of(key)
    return DEFAULT if found is None else found


def _point(record: RunRecord, tag: str | None, mode: Mode, *, is_wanted: bool) -> tuple[float, int | None]:
    """The value that a run is compared by, and its step."""
    if tag is None or not is_wanted or tag == record.monitor:
        return record.value, record.step
    value, step = best_point(record.curves.get(compared_tag(tag)), mode=mode)
    if step is None and tag in record.metrics:
        value = record.metrics[tag]
    return value, step


def _row(
    place: int,
    record: RunRecord,
    keys: Sequence[str],
    *,
    names: tuple[str | None, Mode],
    point: tuple[float, int | None],
    base: Path,
) -> Row:
    tag, mode = names
    if tag is None and record.monitor is not None and record.mode is not None:
        tag, mode = record.monitor, record.mode
    value, step = point
    return Row(
        job=place,
        swept={key: _swept(record, key) for key in keys} if _is_known(record) else {},
        status=record.status,
        monitor=tag,
        mode=mode,
        # Of a run without a config nobody knows what was good about it, nor of which others it is a repeat.
        value=value if record.status in FINISHED and record.config else math.nan,
        step=step,
        metrics=record.metrics,
        seconds=record.seconds,
        peak_memory_mib=record.peak_memory_mib,
        directory=os.path.relpath(record.directory, base),
        error=record.error,
        is_job=False,
    )


def _repeated(
    records: Sequence[RunRecord], rows: Sequence[Row], keys: Sequence[str], asked: str | None, notes: list[str]
) -> str | None:
    """The key whose runs are repeats, if any."""
    if asked == NONE:
        return None
    if asked is not None:
        if asked not in keys:
            cure = did_you_mean(asked, keys) or f"They differ in {among(keys, word=asked)}"
            raise ReportError(f"--repeat-over {asked}: the runs do not differ in it. {cure}; none is for no repeats")
        return asked
    said = {record.repeat_over for record in records if record.repeat_over is not None}
    if len(said) == 1 and said <= set(keys):
        return said.pop()
    for key, what in ((FOLD, "fold"), (SEED, "seed")):
        if key in keys and any(len(group.rows) > 1 for group in repeats_of(rows, over=key)):
            notes.append(
                f"runs that differ in the {what} alone are taken for repeats; --repeat-over none takes each by itself"
            )
            return key
    return None


def _objectives(
    records: Sequence[RunRecord], wanted: Mapping[str, Mode], tag: str | None, mode: Mode, rows: Sequence[Row]
) -> list[Objective]:
    """Those of --metric or of sweep.monitor; where they are not several, the compared value and the time it took."""
    several = wanted if len(wanted) > 1 else next((one.objectives for one in records if len(one.objectives) > 1), {})
    if len(several) > 1:
        return [_objective(records, name, one) for name, one in several.items()]
    if tag is None:
        return []
    # Who was ended early took less time for a worse value: no trade that anybody would make.
    seconds = [record.seconds if record.status == "completed" else math.nan for record in records]
    return [
        Objective(name=SECONDS, mode="min", values=seconds),
        Objective(name=f"{tag} (best)", mode=mode, values=[row.value for row in rows]),
    ]


def _objective(records: Sequence[RunRecord], tag: str, mode: Mode) -> Objective:
    """Return a tag as a search sees it: of the best weights, or its last value if it is no stage's metric."""
    is_best = all(record.monitor in (tag, None) for record in records)
    values = [
        (record.value if is_best else record.metrics.get(tag, math.nan)) if record.status == "completed" else math.nan
        for record in records
    ]
    of = "best" if is_best else "at the best step" if parted(tag)[1] else "last"
    return Objective(name=f"{tag} ({of})", mode=mode, values=values)


def _log_keys(records: Sequence[RunRecord]) -> frozenset[str]:
    """The keys that the sweeps of some runs draw in their logarithm, by tag(log, ...)."""
    found: set[str] = set()
    for folder in dict.fromkeys(record.directory.parent for record in records):
        try:
            overrides = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["overrides"]
            pairs = [str(text).lstrip("+").partition("=") for text in overrides]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # no sweep, or one whose settings are damaged: the axis is chosen by the values alone
        found.update(key for key, _, value in pairs if re.match(r"tag\(\s*log\b", value))
    return frozenset(found)


def finite_pairs(comparison: Comparison, key: str) -> tuple[list[str], np.ndarray]:
    """The values of a key, and the compared values `[N]`, of the completed runs that have both."""
    done = [row for row in comparison.rows if row.has_value and key in row.swept]
    return [row.swept[key] for row in done], np.array([row.value for row in done], np.float64)
