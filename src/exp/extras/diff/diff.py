"""python -m exp.diff RUN_A RUN_B: what two runs have of different config, code, versions and results.

    python -m exp.diff outputs/train/2026-01-31/12-00-00 outputs/train/2026-01-31/12-30-00
    python -m exp.diff outputs/train/sweeps/2026-01-31/12-00-00/0 outputs/train/sweeps/2026-01-31/12-00-00/3
    python -m exp.diff RUN_A RUN_B --all                   with every tag, and every line of uncommitted changes

It reads what is there: a run that is going on, was killed or is damaged is compared as far as it goes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from exp.errors import RunError
from exp.extras.diff.run_difference import Row, Section, differences
from exp.output import exit_status
from exp.redaction import redacted
from exp.spelling import nearest
from exp.sweeps.run_records import EVENTS, MARKS, is_sweep, natural

EXPECTED = "a run directory, such as outputs/train/2026-01-31/12-00-00, or a job's of a sweep"


class NoRunError(RunError):
    """What was named is no directory of one run."""

    exit_status = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print the keys, versions and results that differ.

    Returns: 0, whether they differ or not; 2 where one is no directory of a run.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    for place in (arguments.first, arguments.second):
        _refuse_others(place)
    print(f"A  {arguments.first}\nB  {arguments.second}")
    for section in differences(arguments.first, arguments.second, everything=arguments.all):
        print("\n".join(["", section.title, *(redacted(f"  {line}".rstrip()) for line in _lines(section))]))
    return 0


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m exp.diff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("first", type=Path, metavar="RUN_A", help="a run directory")
    found.add_argument("second", type=Path, metavar="RUN_B", help="another one")
    found.add_argument("--all", action="store_true", help="every tag, and every line of uncommitted changes")
    return found


def _refuse_others(place: Path) -> None:
    """Raises: NoRunError of what is no directory, or is a sweep's, one above runs, or one of something else."""
    if not os.path.isdir(place):
        is_file = os.path.exists(place)
        near = [] if is_file else nearest(place.name, (path.name for path in place.parent.glob("*/")))
        # A path of a file in a run is a slip that is seen often.
        meant = place.parent if is_file else place.parent / near[0] if near else None
        cure = "" if meant is None else f". Did you mean {meant}?"
        raise NoRunError(f"{place} is {'a file' if is_file else 'not there'}; expected {EXPECTED}{cure}")
    runs = sorted({path.parent for name in MARKS for path in place.glob(f"*/{name}")}, key=natural)
    if runs and (is_sweep(place) or not any(os.path.lexists(place / name) for name in MARKS)):
        what = "a sweep" if is_sweep(place) else "a folder"
        raise NoRunError(f"{place} is {what} of {len(runs)} runs; expected {EXPECTED}. Did you mean {runs[0]}?")
    # What was killed may have left its curves alone.
    if not any(os.path.lexists(place / name) for name in (*MARKS, EVENTS)):
        raise NoRunError(f"{place} holds none of {', '.join(MARKS)}; expected {EXPECTED}")


def _lines(section: Section) -> Iterator[str]:
    header = [Row(name="", first="A", second="B")] if section.rows else []
    cells = [(row.name, row.first, row.second, row.change) for row in (*header, *section.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)] if cells else []
    for *columns, change in cells:
        yield "  ".join([*(f"{cell:<{width}}" for cell, width in zip(columns, widths, strict=True)), change])
    yield from section.lines
