"""python -m exp.gallery: the experiments that come with exp, each one command.

python -m exp.gallery                 list all experiments
python -m exp.gallery lenet           print the YAML of an experiment
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from exp.errors import config_error
from exp.output import command
from exp.spelling import among, did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
EXPERIMENTS = PACKAGE / "conf" / "experiment"


def titles() -> dict[str, str]:
    """Return the title of each experiment by name. The first comment in an experiment's file is its title."""
    found = {}
    for path in sorted(EXPERIMENTS.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next(line for line in lines if line.startswith("# ") and not line.startswith("# @package"))
        found[path.stem] = first.removeprefix("# ").partition(": experiment=")[0]
    return found


@command()
def main(argv: Sequence[str]) -> int:
    """Print the list of experiments, or the YAML of one experiment.

    Returns:
        Exit status: 0, or 2 for an unknown name.
    """
    description, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m exp.gallery",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="the experiment whose YAML is printed")
    name: str | None = parser.parse_args(argv).name
    found = titles()
    if name is None:
        for one, title in found.items():
            print(f"{one}\n  {title}\n  python -m exp.train experiment={one}\n")
        return 0
    if name not in found:
        got, expected = f"{name}, which is no experiment of exp", f"one of {among(found, word=name)}"
        raise config_error("experiment", got=got, expected=expected, fix=did_you_mean(name, found))
    print((EXPERIMENTS / f"{name}.yaml").read_text(encoding="utf-8"), end="")
    return 0
