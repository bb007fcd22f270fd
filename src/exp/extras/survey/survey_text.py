"""Text of a survey: a list of findings, and Markdown tables that are readable in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from exp.extras.survey.survey import Part, Survey
from exp.output import markdown_table
from exp.shared_types import Stage
from exp.spelling import among

# Maximum number of rows in a table of data.md. The file data.json contains all rows.
MOST_ROWS = 40
# Minimum imbalance of classes that is reported as a finding; see Classes.
UNEQUAL = 10


def markdown(survey: Survey, *, command: str, findings: Sequence[str]) -> str:
    """Return a survey as Markdown.

    Args:
        survey: The survey.
        command: Command line that was used to make the survey.
        findings: Findings, each of one line.
    """
    sections = {
        "Findings": "\n".join(f"- {line}" for line in findings) or "No issues found.",
        "Parts": table([
            {"part": stage, "samples": part.samples, "looked at": part.looked_at, "batches": part.batches}
            for stage, part in survey.parts.items()
        ]),
        "Batches": table(_rows(survey, "batch")),
        "Classes": table([
            {"part": stage, "value": name, "class": one.name_of(label), "samples": count}
            for stage, part in survey.parts.items()
            for name, one in part.classes.items()
            for label, count in one.counts.items()
        ]),
        "Numbers": table(_rows(survey, "numbers")),
        "Sequences": table(_rows(survey, "lengths")),
    }  # fmt: skip
    text = "\n\n".join(f"## {title}\n\n{lines}" for title, lines in sections.items() if lines)
    return f"# Data\n\n    {command}\n\n{text}\n"


def findings(survey: Survey, *, origin: Callable[[Stage, int], str | None], notes: Sequence[str]) -> list[str]:
    """Return the findings, each of one line. The most severe findings are first.

    Args:
        survey: The survey.
        origin: Function that returns the origin of a sample as text, such as its file, or None. Its arguments are the
            name of a split and the index of a sample.
        notes: Notes on the data, which are also findings.
    """
    found = []
    for (stage, within), pairs in sorted(survey.repeats.items(), key=lambda one: one[0][0] == one[0][1]):
        files = filter(None, (origin(stage, pairs[0][0]), origin(within, pairs[0][1])))
        found.append(_repeats(stage, within, pairs, list(files)))
    found += [*_differences(survey), *(f"note: {line}" for line in notes)]
    for stage, part in survey.parts.items():
        found += _of_part(stage, part)
    return found


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a Markdown table. Return an empty text if there are no rows.

    Args:
        rows: Mappings from columns to values. All rows have the same columns.
    """
    if not rows:
        return ""
    texts = [place for place, name in enumerate(rows[0]) if any(isinstance(row[name], str | tuple) for row in rows)]
    cells = [list(map(_cell, row.values())) for row in rows[:MOST_ROWS]]
    lines = markdown_table(list(rows[0]), cells, left=texts[-1] + 1)
    if len(rows) > MOST_ROWS:
        lines += ["", f"and {len(rows) - MOST_ROWS:,} more rows in data.json."]
    return "\n".join(lines)


def _rows(survey: Survey, kind: str) -> list[dict[str, object]]:
    """Return the rows of a table that shows a field of Part for all splits.

    Args:
        survey: The survey.
        kind: Name of the field, such as `numbers`.
    """
    return [
        {"part": stage, "value": name, **asdict(one)}
        for stage, part in survey.parts.items()
        for name, held in vars(part)[kind].items()
        for one in (held if isinstance(held, list) else [held])
    ]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return str(list(value))
    return "" if value is None else str(value)


def _repeats(part: Stage, within: Stage, pairs: Sequence[tuple[int, int]], files: Sequence[str]) -> str:
    word, place = ("repeated", "in this split more than once") if part == within else ("leak", f"in {within}")
    first = f"{part} {pairs[0][0]} = {within} {pairs[0][1]}"
    text = f"{word}: samples of {part} that are {place}: {len(pairs):,}, first {first}"
    return f"{text} ({' and '.join(files)})" if files else text


def _differences(survey: Survey) -> Iterator[str]:
    """Yield a finding for each value that is different in the first split and in another split.

    The value is missing in one of the two splits, or it has a different dtype or shape.
    """
    (first, own), *others = survey.parts.items()
    for name in dict.fromkeys(name for part in survey.parts.values() for name in part.batch):
        for stage, part in others:
            if _form(part, name) != _form(own, name):
                yield f"differs: {name} is {_form(own, name)} in {first}, and {_form(part, name)} in {stage}"


def _form(part: Part, name: str) -> str:
    """Return the dtype and shape of a value in one sample as text. A size that varies is written as null.

    Args:
        part: Survey of the split.
        name: Name of the value.
    """
    if name not in part.batch:
        return "missing"
    value = part.batch[name]
    varies = name in part.lengths and part.lengths[name].low != part.lengths[name].high
    return f"{value.dtype} [{', '.join('null' if varies else str(size) for size in (value.shape or ())[1:])}]"


def _of_part(stage: Stage, part: Part) -> Iterator[str]:
    """Yield the findings about a single split: invalid numbers, constant columns, classes and samples not read."""
    for name, columns in part.numbers.items():
        wrong = {one.name: one.missing + one.infinite for one in columns if one.missing or one.infinite}
        if wrong:
            missing, infinite = sum(one.missing for one in columns), sum(one.infinite for one in columns)
            where = f", by column {among(f'{column} {count:,}' for column, count in wrong.items())}"
            yield f"missing: {name} of {stage} has {missing:,} nan and {infinite:,} infinite numbers{where}"
        same = [one.name or name for one in columns if one.count > 1 and one.low == one.high]
        if same and stage == "train":
            yield f"constant: in train {among(same)} of {name} never changes"
    for name, classes in part.classes.items():
        # Targets with several labels per sample, such as next characters, are skipped.
        is_single = sum(classes.counts.values()) + classes.ignored == part.looked_at
        if classes.counts and is_single and classes.imbalance >= UNEQUAL:
            rare, *_, often = sorted(classes.counts, key=classes.counts.__getitem__)
            times = f"{classes.imbalance:.3g} times as often as {classes.name_of(rare)}"
            yield f"imbalance: in {stage} the {name} {classes.name_of(often)} occurs {times}"
        absent = [classes.name_of(one) for one in range(len(classes.names)) if one not in classes.counts]
        if absent and is_single:
            yield f"absent: {name} {among(absent)} in none of the samples of {stage} that were read"
    if part.samples is None or part.looked_at < part.samples:
        yield f"not read: samples of {stage} after the first {part.looked_at:,}; --samples all reads all"
