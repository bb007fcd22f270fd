"""Compares runs: finds the keys in which runs differ, the repeats of a run, and the best run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from exp.errors import RunError
from exp.extras.report.run_records import RunRecord, best_point
from exp.shared_types import Mode, compared_tag
from exp.spelling import among, did_you_mean
from exp.sweeps.results import DEFAULT, FINISHED, FOLD, NONE, Repeats, Row, best_of, differing_keys, repeats_of

# If neither the config nor the command sets a mode, smaller values of matching tags are better.
LESS = re.compile(
    r"(^|[/_])(loss|error|mae|mse|rmse|mape|nll|perplexity|bits_per_character|seconds|ms|mib|steps)($|[/_])"
)


class ReportError(RunError):
    """Error of a report that needs runs, keys or tags that do not exist."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of runs.

    Args:
        base: Common parent folder of all run directories.
        records: The runs.
        rows: Rows of the table, one for each record. `job` of a row is the index of the row's record in `records`.
        tag: Tag by which the runs are compared. None: the runs monitor different tags.
        keys: Config keys of the hyperparameters that differ between runs.
        repeat_over: The only config key in which repeats of a run differ, such as seed. None: no run is repeated.
        notes: Notes about decisions and unreadable files, one line each.
    """

    base: Path
    records: Sequence[RunRecord]
    rows: Sequence[Row]
    tag: str | None
    keys: Sequence[str]
    repeat_over: str | None
    notes: Sequence[str]

    @cached_property
    def groups(self) -> list[Repeats]:
        """The groups of repeats. If no run is repeated, each group has one run."""
        if self.repeat_over is None:
            return [Repeats(swept=row.swept, rows=[row]) for row in self.rows]
        return repeats_of(self.rows, over=self.repeat_over)

    @cached_property
    def best(self) -> Row | None:
        """The best run, or None. If runs are repeated, it is the best run of the group with the best mean."""
        return best_of(self.rows, repeat_over=self.repeat_over)

    @cached_property
    def best_group(self) -> Sequence[Row]:
        """The best run and its repeats; empty if `best` is None."""
        return next((group.rows for group in self.groups if any(row is self.best for row in group.rows)), ())

    def label(self, swept: Mapping[str, str]) -> str:
        """Return the swept values in short form, such as lr=0.01 weight_decay=0.

        Args:
            swept: Swept values by config key.
        """
        keys = [key for key in self.keys if key != self.repeat_over and key in swept]
        return " ".join(f"{self.short(key)}={swept[key]}" for key in keys)

    def short(self, key: str) -> str:
        """Return the last part of a config key, or the whole key if another compared key has the same last part."""
        last = key.rpartition(".")[2]
        return last if [one.rpartition(".")[2] for one in self.keys].count(last) == 1 else key


def compare(
    records: Sequence[RunRecord],
    *,
    repeat_over: str | None = None,
    metrics: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> Comparison:
    """Return the comparison of runs.

    Args:
        records: Records of one or more runs, with absolute directories.
        repeat_over: Config key in which repeats of a run differ. "none": no run is a repeat. None: the key
            sweep.repeat_over in the configs. If the configs do not set it, runs that differ only in the fold or only in
            the seed are repeats.
        metrics: Tags to draw, each as TAG, TAG:min or TAG:max. The runs are compared by the first tag instead of the
            monitored tag.
        problems: Messages about folders that could not be read. They become notes of the comparison.

    Raises:
        ReportError: No run has a tag in `metrics`, or the runs do not differ in `repeat_over`.
    """
    notes = list(problems)
    wanted = [_find_wanted(records, text) for text in metrics]
    tag, mode = wanted[0] if wanted else _find_monitored(records, notes)
    typed = list(dict.fromkeys(key for record in records for key in record.typed))
    known = [record for record in records if _is_known(record)]
    keys = [key for key in typed if len(records) == 1 or len({_swept_value(record, key) for record in known}) > 1]
    base = Path(os.path.commonpath([record.directory.parent for record in records]))
    points = [_point(record, tag, mode) if wanted else (record.value, record.step) for record in records]
    rows = []
    for place, (record, (value, step)) in enumerate(zip(records, points, strict=True)):
        own = (tag, mode) if tag is not None else (record.monitor, record.mode or "min")
        row = Row(
            job=place,
            swept={key: _swept_value(record, key) for key in keys} if _is_known(record) else {},
            status=record.status,
            monitor=own[0],
            mode=own[1],
            # If a run lacks its config, the mode of the value and the repeats of the run are unknown.
            value=value if record.status in FINISHED and record.config else math.nan,
            step=step,
            metrics=record.metrics,
            seconds=record.seconds,
            peak_memory_mib=record.peak_memory_mib,
            directory=os.path.relpath(record.directory, base),
            error=record.error,
            is_job=False,
        )
        rows.append(row)
        notes += [f"{row.name}: {problem}" for problem in record.problems]
    return Comparison(
        base=base,
        records=records,
        rows=rows,
        tag=tag,
        keys=differing_keys(rows),
        repeat_over=_find_repeat_key(records, rows, keys, repeat_over, notes),
        notes=notes,
    )


def tags_of(metrics: Sequence[str]) -> list[str]:
    """Return the tags without the suffixes `:min` and `:max`."""
    return [re.sub(r":(min|max)$", "", text) for text in metrics]


def _find_wanted(records: Sequence[RunRecord], metric: str) -> tuple[str, Mode]:
    """Return the tag in a value of --metric, and the mode: "min" if smaller values are better, else "max".

    Raises:
        ReportError: No run has the tag.
    """
    (tag,) = tags_of([metric])
    known = list(dict.fromkeys(tag for record in records for tag in (*record.curves, *record.metrics)))
    if tag not in known:
        fix = did_you_mean(tag, known) or ""
        raise ReportError(f"--metric: no run has the tag {tag}; expected {among(known, word=tag)}. {fix}".rstrip(". "))
    if tag != metric:
        return tag, "min" if metric.endswith(":min") else "max"
    modes = {record.mode for record in records if record.monitor == tag and record.mode is not None}
    return tag, modes.pop() if len(modes) == 1 else "min" if LESS.search(tag) else "max"


def _find_monitored(records: Sequence[RunRecord], notes: list[str]) -> tuple[str | None, Mode]:
    """Return the tag that all runs monitor, and its mode. If the runs monitor different tags, the tag is None.

    Args:
        records: The runs.
        notes: List to which a note about different tags is added.
    """
    pairs = {(record.monitor, record.mode) for record in records if record.monitor is not None and record.mode}
    if len(pairs) > 1:
        listed = among(sorted(f"{tag} ({mode})" for tag, mode in pairs))
        notes.append(f"no best run, because the runs monitor different tags: {listed}. Compare them by --metric TAG")
    tag, mode = pairs.pop() if len(pairs) == 1 else (None, None)
    return tag, mode or "min"


def _is_known(record: RunRecord) -> bool:
    return bool(record.config or record.typed)


def _swept_value(record: RunRecord, key: str) -> str:
    found = record.value_of(key)
    return DEFAULT if found is None else found


def _point(record: RunRecord, tag: str | None, mode: Mode) -> tuple[float, int | None]:
    """Return the best value of a tag in a run, and the optimizer step of the value. An unknown step is None."""
    if tag is None or tag == record.monitor:
        return record.value, record.step
    value, step = best_point(record.curves.get(compared_tag(tag)), mode=mode)
    return (record.metrics[tag], None) if step is None and tag in record.metrics else (value, step)


def _find_repeat_key(
    records: Sequence[RunRecord], rows: Sequence[Row], keys: Sequence[str], asked: str | None, notes: list[str]
) -> str | None:
    """Return the config key in which repeats of a run differ; None if no run is repeated."""
    if asked == NONE:
        return None
    if asked is not None:
        if asked not in keys:
            expected, fix = among([*keys, NONE], word=asked), did_you_mean(asked, keys) or ""
            raise ReportError(
                f"--repeat-over: the runs do not differ in {asked}; expected {expected}. {fix}".rstrip(". ")
            )
        return asked
    said = {record.repeat_over for record in records if record.repeat_over is not None}
    if len(said) == 1 and said <= set(keys):
        return said.pop()
    for key in (FOLD, "seed"):
        if key in keys and any(len(group.rows) > 1 for group in repeats_of(rows, over=key)):
            notes.append(f"runs that differ only in {key} are repeats; --repeat-over none compares each run")
            return key
    return None
