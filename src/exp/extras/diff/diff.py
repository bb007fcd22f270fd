"""python -m exp.diff RUN_A RUN_B: the config, code, versions and results in which two runs differ.

    python -m exp.diff outputs/train/2026-01-31/12-00-00 outputs/train/2026-01-31/12-30-00
    python -m exp.diff outputs/train/sweeps/2026-01-31/12-00-00/0 outputs/train/sweeps/2026-01-31/12-00-00/3

A run that is going on, was killed or is damaged is compared as far as its files can be read.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from exp.errors import RunError
from exp.extras.diff.run_difference import Row, Section, differences
from exp.output import command
from exp.redaction import redacted
from exp.spelling import nearest
from exp.sweeps.run_records import EVENTS, MARKS, is_sweep, natural

EXPECTED = "a run directory, such as outputs/train/2026-01-31/12-00-00, or a job's of a sweep"


class NoRunError(RunError):
    """A path of the command is no directory of one run."""

    exit_status = 2


@command()
def main(argv: Sequence[str]) -> int:
    """Print the keys, versions and results that differ.

    Returns:
        0, whether they differ or not; 2 if a path is no directory of a run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m exp.diff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, metavar="RUN_A", help="a run directory")
    parser.add_argument("second", type=Path, metavar="RUN_B", help="another one")
    arguments = parser.parse_args(argv)
    for place in (arguments.first, arguments.second):
        _refuse_others(place)
    print(f"A  {arguments.first}\nB  {arguments.second}")
    for section in differences(arguments.first, arguments.second):
        print("\n".join(["", section.title, *(redacted(f"  {line}".rstrip()) for line in _lines(section))]))
    return 0


def _refuse_others(place: Path) -> None:
    """Raise NoRunError for a path that is no directory, and for a directory that holds no run or several."""
    if not os.path.isdir(place):
        near = nearest(place.name, (path.name for path in place.parent.glob("*/")))
        cure = f". Did you mean {place.parent / near[0]}?" if near else ""
        raise NoRunError(f"{place} is no directory; expected {EXPECTED}{cure}")
    # A killed run may have left its curves alone.
    has_run = any(os.path.lexists(place / name) for name in (*MARKS, EVENTS))
    if is_sweep(place) or not has_run:
        runs = sorted({path.parent for name in MARKS for path in place.glob(f"*/{name}")}, key=natural)
        cure = f". Did you mean {runs[0]}?" if runs else ""
        raise NoRunError(f"{place} holds {len(runs) or 'no'} runs; expected {EXPECTED}{cure}")


def _lines(section: Section) -> Iterator[str]:
    header = [Row(name="", first="A", second="B")] if section.rows else []
    cells = [(row.name, row.first, row.second, row.change) for row in (*header, *section.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)] if cells else []
    for *columns, change in cells:
        yield "  ".join([*(f"{cell:<{width}}" for cell, width in zip(columns, widths, strict=True)), change])
    yield from section.lines
