"""A survey in words: what to look at first, then tables in Markdown, which are read in a terminal as well."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from exp.data.columns import EPOCH
from exp.data.fingerprints import Repeats
from exp.extras.survey.survey import PartSurvey, Speed, Survey, Value
from exp.shared_types import Stage
from exp.spelling import among

# Rows of a table: of columns, and of classes. data.json has all of them.
MOST_ROWS, MOST_CLASSES = 40, 20
# A cell that is set to the right: nothing, or a number, maybe with a share behind it.
FIGURE = re.compile(r"(-?[\d,.]+(e[+-]\d+)?( \([\d.e-]+%\))?)?|unknown")
# From here on the rarest class is told.
UNEQUAL = 10


def markdown(survey: Survey, *, command: str, findings: Sequence[str]) -> str:
    """The whole survey. command: the line that made it."""
    sections = [
        ("Findings", [*(f"- {line}" for line in findings)] or ["Nothing that a person should look at first."]),
        ("Parts", table(("part", "samples", "looked at", "batches"), _part_rows(survey))),
        ("Batches", _batches(survey)),
        ("Classes", list(_classes(survey))),
        ("Numbers", _numbers(survey)),
        ("Sequences and whole numbers", [*_lengths(survey), *_whole(survey)]),
        ("Loader", [] if survey.speed is None else [speed_line(survey.speed)]),
    ]
    told = {title: "\n".join(lines).strip("\n") for title, lines in sections if lines}
    text = "\n\n".join(f"## {title}\n\n{lines}" for title, lines in told.items())
    return f"# Data\n\n    {command}\n\n{text}\n"


def findings(
    survey: Survey,
    *,
    origins: Mapping[tuple[Stage, int], str],
    classes: Mapping[str, int],
    notes: Sequence[str] = (),
) -> list[str]:
    """What a person should look at, the worst first.

    origins: where samples that are told come from, in words. classes: how many there are, by target. notes: of the
    data itself.
    """
    found = [f"leak: {_repeats(one, origins)}" for one in survey.leaks]
    found += [f"repeated: {_repeats(one, origins)}" for one in survey.duplicates]
    found += _differences(survey)
    found += [*(line for part in survey.parts.values() for line in part.telling), *(f"note: {line}" for line in notes)]
    for stage, part in survey.parts.items():
        found += [*_missing(stage, part), *_imbalances(stage, part, classes)]
    for stage, part in survey.parts.items():
        if stage == "train":
            found += _constant(part)
        if part.samples is None or part.seen < part.samples:
            rest = (
                "the rest of it"
                if part.samples is None
                else f"{part.samples - part.seen:,} of {part.samples:,} samples"
            )
            found.append(f"not looked at: {rest} in {stage}; --samples all looks at every one")
    for stage, count in survey.incomparable.items():
        found.append(f"not compared: {count:,} samples of {stage}, which hold objects without bytes to compare")
    if survey.rounded:
        found.append(f"rounded: {', '.join(survey.rounded)}, from float64 to float32; precision=fp64 keeps it")
    return found


def plain(survey: Survey, *, command: str, findings: Sequence[str]) -> dict[str, Any]:
    """The same for programs: numbers, texts, lists and mappings."""
    parts = {}
    for stage, part in survey.parts.items():
        parts[stage] = {
            "samples": part.samples,
            "looked_at": part.seen,
            "batches": part.batches,
            "batch": {name: asdict(value) for name, value in part.batch.items()},
            "after_batch_transforms": {name: asdict(value) for name, value in part.changed.items()},
            "numbers": {name: [asdict(one) for one in several] for name, several in part.numbers.items()},
            "classes": {
                name: {
                    "counts": {str(label): count for label, count in one.counts.items()},
                    "names": list(one.names),
                    "ignored": one.ignored,
                    "imbalance": one.imbalance,
                }
                for name, one in part.classes.items()
            },
            "whole_numbers": {name: asdict(one) for name, one in part.whole.items()},
            "lengths": {name: {**asdict(one), "mean": one.mean} for name, one in part.lengths.items()},
        }
    speed = survey.speed
    return {
        "command": command,
        "findings": list(findings),
        "parts": parts,
        "leaks": [asdict(one) for one in survey.leaks],
        "repeated": [asdict(one) for one in survey.duplicates],
        "loader": None
        if speed is None
        else {**asdict(speed), "samples_per_second": speed.samples_per_second, "batch_ms": speed.batch_ms},
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, padded, with columns of figures to the right; none where there is no row."""
    # A sign of its own in a name would end its cell.
    body = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    if not body:
        return []
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    right = [all(FIGURE.fullmatch(row[place]) for row in body) for place in range(len(head))]
    signs = [
        "-" * (width + 1) + ":" if is_right else "-" * (width + 2)
        for width, is_right in zip(widths, right, strict=True)
    ]
    return [_line(head, widths, right), f"|{'|'.join(signs)}|", *(_line(row, widths, right) for row in body)]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = zip(row, widths, right, strict=True)
    return (
        "| "
        + " | ".join(text.rjust(width) if is_right else text.ljust(width) for text, width, is_right in cells)
        + " |"
    )


def _part_rows(survey: Survey) -> Iterator[Sequence[str]]:
    for stage, part in survey.parts.items():
        yield stage, _count(part.samples), _count(part.seen), _count(part.batches)


def _batches(survey: Survey) -> list[str]:
    has_changes = any(part.changed for part in survey.parts.values())
    head = ("part", "value", "dtype", "shape of a batch", *(["after batch transforms"] * has_changes))
    rows = []
    for stage, part in survey.parts.items():
        for name in {**part.batch, **part.changed}:
            value, changed = part.batch.get(name), part.changed.get(name)
            own = ("", "") if value is None else (value.dtype, _shape(value))
            more = "" if changed is None else f"{changed.dtype} {_shape(changed)}".strip()
            rows.append((stage, name, *own, *([more] * has_changes)))
    return table(head, rows)


def _shape(value: Value) -> str:
    return "" if value.shape is None else str(list(value.shape))


def _classes(survey: Survey) -> Iterator[str]:
    """A table for each target: a row a class, a column a part."""
    stages = list(survey.parts)
    for name in dict.fromkeys(name for part in survey.parts.values() for name in part.classes):
        own = {stage: part.classes[name] for stage, part in survey.parts.items() if name in part.classes}
        labels = sorted({label for one in own.values() for label in one.counts})
        some = next(iter(own.values()))
        rest = []
        if len(labels) > MOST_CLASSES:
            often = sorted(labels, key=lambda label: -some.counts.get(label, 0))
            labels, rest = often[:MOST_CLASSES], often[MOST_CLASSES:]
        rows = []
        for label in labels:
            shown = [_share(one.counts.get(label, 0), one.total) for one in own.values()]
            rows.append((some.named(label), *shown))
        for title, counts in (("ignored", [one.ignored for one in own.values()]),):
            if any(counts):
                rows.append((title, *map(_count, counts)))
        yield from table((name, *[stage for stage in stages if stage in own]), rows)
        if rest:
            yield f"\nand {len(rest):,} more, which are rarer in {next(iter(own))}."
        told = [f"{one.imbalance:,.3g} to 1 in {stage}" for stage, one in own.items() if len(one.counts) > 1]
        if told:
            yield f"\nThe most frequent class to the rarest that is there: {', '.join(told)}.\n"


def _share(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / total:.1f}%)" if total else "0"


def _numbers(survey: Survey) -> list[str]:
    head = ("value", "column", "part", "mean", "deviation", "min", "max", "nan", "infinite")
    rows, left_out = [], 0
    for name in dict.fromkeys(name for part in survey.parts.values() for name in part.numbers):
        parts = {stage: part.numbers[name] for stage, part in survey.parts.items() if name in part.numbers}
        columns = max(map(len, parts.values()))
        left_out += max(0, columns - MOST_ROWS)
        for place in range(min(columns, MOST_ROWS)):
            for stage, own in parts.items():
                if place < len(own):
                    one = own[place]
                    shown = _date if one.name in survey.parts[stage].dates else _figure
                    figures = (shown(one.mean), _figure(one.deviation), shown(one.low), shown(one.high))
                    rows.append((name, one.name, stage, *figures, _count(one.missing), _count(one.infinite)))
    lines = table(head, rows)
    return [*lines, f"\nand {left_out:,} more columns, which data.json has."] if left_out else lines


def _lengths(survey: Survey) -> list[str]:
    head = ("value", "part", "shortest", "mean length", "longest")
    rows = [
        (name, stage, _count(one.low), _figure(one.mean), _count(one.high))
        for stage, part in survey.parts.items()
        for name, one in part.lengths.items()
    ]
    return table(head, rows)


def _whole(survey: Survey) -> list[str]:
    rows = [
        (
            name,
            stage,
            _count(one.count),
            _count(one.distinct),
            "" if one.vocabulary is None else _count(one.vocabulary),
            _count(one.low),
            _count(one.high),
            "" if one.unknown is None else f"{one.unknown:,} ({100 * one.unknown / max(one.count, 1):.3g}%)",
        )
        for stage, part in survey.parts.items()
        for name, one in part.whole.items()
    ]
    lines = table(("value", "part", "numbers", "different", "vocabulary", "min", "max", "unknown"), rows)
    return ["", *lines] if lines else []


def speed_line(speed: Speed) -> str:
    """How fast the loader is, in a line."""
    workers = f"{speed.workers} worker{'' if speed.workers == 1 else 's'}"
    start = f"{speed.stage}, {workers}: the first batch after {1000 * speed.start_seconds:.3g} ms"
    if speed.samples_per_second is None or speed.batch_ms is None:
        return f"{start}; it is the only one."
    return (
        f"{start}; then {speed.samples_per_second:,.0f} samples/s, {speed.batch_ms:.3g} ms a batch, with nothing "
        f"beside it (batches: {speed.batches:,}, in {speed.seconds:.2f} s)."
    )


def _repeats(one: Repeats, origins: Mapping[tuple[Stage, int], str]) -> str:
    index, found = one.pairs[0]
    where = [origins[place] for place in ((one.part, index), (one.within, found)) if place in origins]
    are, samples = ("is", "sample") if one.count == 1 else ("are", "samples")
    place = "in it more than once" if one.part == one.within else f"in {one.within}"
    text = f"{one.count:,} {samples} of {one.part} {are} {place}, first: {one.part} {index} = {one.within} {found}"
    text += f" ({' and '.join(where)})" if where else ""
    return f"{text}; {one.other_target:,} of them with another target" if one.other_target else text


def _differences(survey: Survey) -> Iterator[str]:
    """Of values that are not alike in all parts: another dtype, another size, or not there at all."""
    first, *others = survey.parts.values()
    for name in dict.fromkeys(name for part in survey.parts.values() for name in part.batch):
        own, *rest = (_form(part, name) for part in (first, *others))
        for part, form in zip(others, rest, strict=True):
            if form != own:
                yield f"differs: {name} is {own} in {first.stage}, and {form} in {part.stage}"
                break


def _form(part: PartSurvey, name: str) -> str:
    """A value of one sample in words; a length that varies, as of what is padded, as null."""
    value = part.changed.get(name) or part.batch.get(name)
    if value is None:
        return "not there"
    shape = list(value.shape or ())[1:]
    has_lengths = name in part.lengths and part.lengths[name].low != part.lengths[name].high
    sizes = ["null" for _ in shape] if has_lengths else [str(size) for size in shape]
    return f"{value.dtype} [{', '.join(sizes)}]" if value.shape is not None else value.dtype


def _missing(stage: Stage, part: PartSurvey) -> Iterator[str]:
    for name, columns in part.numbers.items():
        missing, infinite = sum(one.missing for one in columns), sum(one.infinite for one in columns)
        if missing or infinite:
            where = [f"{one.name} {one.missing + one.infinite:,}" for one in columns if one.missing or one.infinite]
            of = f", by column {among(where)}" if columns[0].name else ""
            yield f"missing: {name} of {stage} has {missing:,} nan and {infinite:,} infinite numbers{of}"
    for name, count in part.wordless.items():
        if count:
            yield f"missing: {name} of {stage} has no word in {count:,} of {part.seen:,} rows"


def _imbalances(stage: Stage, part: PartSurvey, classes: Mapping[str, int]) -> Iterator[str]:
    for name, one in part.classes.items():
        if one.total + one.ignored != part.seen or not one.counts:
            continue  # one for each of several places, such as the next characters
        often, rare = max(one.counts, key=one.counts.__getitem__), min(one.counts, key=one.counts.__getitem__)
        if one.imbalance >= UNEQUAL:
            yield (
                f"imbalance: in {stage} the {name} {one.named(often)} is there {one.imbalance:.3g} times as often as "
                f"{one.named(rare)}"
            )
        absent = [one.named(label) for label in range(classes.get(name, 0)) if label not in one.counts]
        if absent:
            yield f"absent: {name} {among(absent)} in no sample of {stage} that was looked at"


def _constant(part: PartSurvey) -> Iterator[str]:
    for name, columns in part.numbers.items():
        same = [one.name for one in columns if one.count > 1 and one.low == one.high]
        if same and columns[0].name:
            yield f"constant: in train {among(same)} of {name} never {'change' if same[1:] else 'changes'}"
        elif same:
            yield f"constant: in train {name} is {_figure(columns[0].low)} everywhere"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _date(days: float | None) -> str:
    return "" if days is None else str(EPOCH.date() + timedelta(days))


def _figure(number: float | None) -> str:
    if number is None:
        return ""
    return "0" if number == 0 else f"{number:.4g}" if math.isfinite(number) else str(number)
