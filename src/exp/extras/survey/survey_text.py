"""A survey in words: findings, the worst first, and tables in Markdown that are also readable in a terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exp.extras.survey.fingerprints import Repeats
from exp.extras.survey.survey import Part, Survey
from exp.shared_types import Stage
from exp.spelling import among

# Rows of a table: of columns, and of classes. data.json has all of them.
MOST_ROWS, MOST_CLASSES = 40, 20
# The imbalance of classes that is a finding.
UNEQUAL = 10


def markdown(survey: Survey, *, command: str, findings: Sequence[str]) -> str:
    """Return the whole survey. command: the command line that made it."""
    parts = [(stage, one.samples, one.looked_at, one.batches) for stage, one in survey.parts.items()]
    batches = [
        (stage, name, value.dtype, "" if value.shape is None else list(value.shape))
        for stage, part in survey.parts.items()
        for name, value in part.batch.items()
    ]
    lengths = [
        (name, stage, one.low, one.mean, one.high)
        for stage, part in survey.parts.items()
        for name, one in part.lengths.items()
    ]
    whole = [
        (name, stage, one.count, one.distinct, one.vocabulary or "", one.low, one.high, _share(one.unknown, one.count))
        for stage, part in survey.parts.items()
        for name, one in part.whole_numbers.items()
    ]
    sections = {
        "Findings": "\n".join(f"- {line}" for line in findings) or "Nothing to look at first.",
        "Parts": table(("part", "samples", "looked at", "batches"), parts),
        "Batches": table(("part", "value", "dtype", "shape of a batch"), batches),
        "Classes": "\n\n".join(_classes(survey)),
        "Numbers": _numbers(survey),
        "Sequences": table(("value", "part", "shortest", "mean length", "longest"), lengths),
        "Whole numbers": table(("value", "part", "numbers", "different", "vocabulary", "min", "max", "unknown"), whole),
    }
    text = "\n\n".join(f"## {title}\n\n{lines}" for title, lines in sections.items() if lines)
    return f"# Data\n\n    {command}\n\n{text}\n"


def findings(
    survey: Survey,
    *,
    origins: Mapping[tuple[Stage, int], str],
    classes: Mapping[str, int],
    notes: Sequence[str],
    rounded: Sequence[str],
) -> list[str]:
    """Return what a person should look at, the worst first.

    Args:
        survey: The survey.
        origins: The files of repeated samples, or another place, by stage and number.
        classes: The number of classes, by target.
        notes: The notes of the data itself.
        rounded: Values that are rounded from float64 to float32.
    """
    found = [f"leak: {_repeats(one, origins)}" for one in survey.leaks]
    found += [f"repeated: {_repeats(one, origins)}" for one in survey.duplicates]
    found += [*_differences(survey), *survey.columns, *(f"note: {line}" for line in notes)]
    for stage, part in survey.parts.items():
        found += [*_missing(stage, part), *_imbalances(stage, part, classes)]
    for stage, part in survey.parts.items():
        if stage == "train":
            found += _constant(part)
        if part.samples is None:
            found.append(f"not looked at: the rest of {stage}; --samples all reads all samples")
        elif part.looked_at < part.samples:
            rest = f"{part.samples - part.looked_at:,} of {part.samples:,} samples in {stage}"
            found.append(f"not looked at: {rest}; --samples all reads all samples")
    for stage, count in survey.incomparable.items():
        found.append(f"not compared: {count:,} samples of {stage}, which hold objects without bytes to compare")
    if rounded:
        found.append(f"rounded: {', '.join(rounded)}, from float64 to float32; precision=fp64 keeps it")
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown with columns of numbers to the right; an empty text without rows."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        return ""
    drawn = Table(box=MARKDOWN)
    for name, cells in zip(head, columns, strict=True):
        is_number = not any(isinstance(cell, str) and cell and not cell.endswith("%)") for cell in cells)
        drawn.add_column(Text(name), justify="right" if is_number else "left", no_wrap=True)
    for row in zip(*columns, strict=True):
        drawn.add_row(*(Text(_cell(cell)) for cell in row))
    output = io.StringIO()
    Console(file=output, width=10_000).print(drawn)
    return "\n".join(line.strip() for line in output.getvalue().splitlines() if line.strip())


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    # A vertical bar in a name would end the cell.
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")


def _classes(survey: Survey) -> Iterator[str]:
    """Yield a table for each target: one row for each class, one column for each part."""
    for name in dict.fromkeys(name for part in survey.parts.values() for name in part.classes):
        own = {stage: part.classes[name] for stage, part in survey.parts.items() if name in part.classes}
        first = next(iter(own.values()))
        labels = sorted({label for one in own.values() for label in one.counts})
        often = sorted(labels, key=lambda label: -first.counts.get(label, 0))
        shown = labels if len(labels) <= MOST_CLASSES else often[:MOST_CLASSES]
        rows = [
            (first.named(label), *(_share(one.counts.get(label, 0), one.total) for one in own.values()))
            for label in shown
        ]
        if any(one.ignored for one in own.values()):
            rows.append(("ignored", *(f"{one.ignored:,}" for one in own.values())))
        yield table((name, *own), rows)
        if len(labels) > len(shown):
            yield f"and {len(labels) - len(shown):,} more classes, which are rarer in {next(iter(own))}."


def _share(count: int | None, total: int) -> str:
    return "" if count is None else f"{count:,} ({100 * count / max(total, 1):.3g}%)"


def _numbers(survey: Survey) -> str:
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
                    figures = (one.mean, one.deviation, one.low, one.high, one.missing, one.infinite)
                    rows.append((name, one.name, stage, *figures))
    text = table(head, rows)
    return f"{text}\n\nand {left_out:,} more columns, which data.json has." if left_out else text


def _repeats(one: Repeats, origins: Mapping[tuple[Stage, int], str]) -> str:
    index, found = one.pairs[0]
    where = [origins[place] for place in ((one.part, index), (one.within, found)) if place in origins]
    are, samples = ("is", "sample") if one.count == 1 else ("are", "samples")
    place = "in it more than once" if one.part == one.within else f"in {one.within}"
    text = f"{one.count:,} {samples} of {one.part} {are} {place}, first: {one.part} {index} = {one.within} {found}"
    text += f" ({' and '.join(where)})" if where else ""
    return f"{text}; {one.other_target:,} of them with another target" if one.other_target else text


def _differences(survey: Survey) -> Iterator[str]:
    """Yield the values with another dtype or size in another part, or that it does not have."""
    (first, own), *others = survey.parts.items()
    for name in dict.fromkeys(name for part in survey.parts.values() for name in part.batch):
        for stage, part in others:
            if _form(part, name) != _form(own, name):
                yield f"differs: {name} is {_form(own, name)} in {first}, and {_form(part, name)} in {stage}"
                break


def _form(part: Part, name: str) -> str:
    """Return dtype and shape of one sample; null is a length that varies."""
    if name not in part.batch:
        return "not there"
    value = part.batch[name]
    if value.shape is None:
        return value.dtype
    varies = name in part.lengths and part.lengths[name].low != part.lengths[name].high
    return f"{value.dtype} [{', '.join('null' if varies else str(size) for size in value.shape[1:])}]"


def _missing(stage: Stage, part: Part) -> Iterator[str]:
    for name, columns in part.numbers.items():
        missing, infinite = sum(one.missing for one in columns), sum(one.infinite for one in columns)
        if missing or infinite:
            where = [f"{one.name} {one.missing + one.infinite:,}" for one in columns if one.missing or one.infinite]
            of = f", by column {among(where)}" if columns[0].name else ""
            yield f"missing: {name} of {stage} has {missing:,} nan and {infinite:,} infinite numbers{of}"


def _imbalances(stage: Stage, part: Part, classes: Mapping[str, int]) -> Iterator[str]:
    for name, one in part.classes.items():
        # Targets with several labels for each sample, such as the next characters, are not compared.
        if one.total + one.ignored != part.looked_at or not one.counts:
            continue
        often, rare = max(one.counts, key=one.counts.__getitem__), min(one.counts, key=one.counts.__getitem__)
        if one.imbalance >= UNEQUAL:
            times = f"{one.imbalance:.3g} times as often as {one.named(rare)}"
            yield f"imbalance: in {stage} the {name} {one.named(often)} is there {times}"
        absent = [one.named(label) for label in range(classes.get(name, 0)) if label not in one.counts]
        if absent:
            yield f"absent: {name} {among(absent)} in no sample of {stage} that was looked at"


def _constant(part: Part) -> Iterator[str]:
    for name, columns in part.numbers.items():
        same = [one.name or name for one in columns if one.count > 1 and one.low == one.high]
        if same:
            yield f"constant: in train {among(same)} of {name} never {'change' if same[1:] else 'changes'}"
