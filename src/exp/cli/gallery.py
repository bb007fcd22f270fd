"""python -m exp.gallery: the experiments that come with exp, each one command.

    python -m exp.gallery                 all of them, with their pictures
    python -m exp.gallery lenet           the YAML of one

Each has a page with a picture in docs/gallery of the repository; an installed package has the experiments alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exp.errors import ConfigError, Fault
from exp.output import exit_status
from exp.spelling import among, did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
# Of a checkout; a wheel has no docs.
PAGES = PACKAGE.parents[1] / "docs" / "gallery"
SELECTED_BY = ": experiment="


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An experiment of conf/experiment.

    name: in `experiment=NAME`. title: what it is, from its first line. path: of the YAML.
    """

    name: str
    title: str
    path: Path

    @property
    def command(self) -> str:
        return f"python -m exp.train experiment={self.name}"

    @property
    def picture(self) -> str:
        """Where the picture is: a path from the current folder where it can be, else its place in the repository."""
        path = PAGES / f"{self.name}.png"
        if not path.is_file():
            return f"docs/gallery/{self.name}.png of the repository"
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def entries() -> list[Entry]:
    """All experiments, by name."""
    return [_entry(path) for path in sorted((PACKAGE / "conf" / "experiment").glob("*.yaml"))]


def _entry(path: Path) -> Entry:
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if line.startswith("# ") and not line.startswith("# @package"))
    return Entry(name=path.stem, title=first.removeprefix("# ").partition(SELECTED_BY)[0], path=path)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the list, or the YAML of one experiment.

    Returns: 0; 2 where there is no experiment of that name.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    description, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m exp.gallery",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="the experiment whose YAML is printed")
    name: str | None = parser.parse_args(argv).name
    found = {entry.name: entry for entry in entries()}
    if name is None:
        for entry in found.values():
            print(f"{entry.name}\n  {entry.title}\n  {entry.command}\n  {entry.picture}\n")
        return 0
    if name not in found:
        raise ConfigError(
            [
                Fault(
                    key="experiment",
                    got=f"{name}, which is none of exp's own",
                    expected=f"one of {among(found, word=name)}",
                    cure=did_you_mean(name, found),
                )
            ]
        )
    print(found[name].path.read_text(encoding="utf-8"), end="")
    return 0
