"""python -m exp.worker RUN_DIR: run one rank of a frozen run. exp, torchrun or SLURM starts it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from exp.launch.lifecycle import live
from exp.lighter_imports import pause_garbage_collection
from exp.strategies.rank import Rank


def main() -> NoReturn:
    """Run one rank, and end the process."""
    parser = argparse.ArgumentParser(prog="python -m exp.worker", description=__doc__)
    parser.add_argument("directory", type=Path, help="a run directory with a frozen config.yaml")
    parser.add_argument("--resume", type=Path, default=None, help="the checkpoint to resume; default: as in the config")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose classes the config may name",
    )
    parser.add_argument(
        "--requeues", type=int, default=None, metavar="N",
        help="for a job of a scheduler: resume from the newest checkpoint; at its time limit SLURM requeues it "
        "at most N times",
    )  # fmt: skip
    arguments = parser.parse_args()
    live(lambda rank: work(rank, **vars(arguments)))


def work(
    rank: Rank, *, directory: Path, resume: Path | None, allow: Sequence[str] = (), requeues: int | None = None
) -> None:
    """Join the process group of a run, and train as one rank of the run.

    Args:
        rank: Rank of this process.
        directory: Run directory.
        resume: Checkpoint from which to resume. None: the checkpoint in the config.
        allow: Packages that the command allows. `security.allow` in the run directory does not allow a package.
            Default: none.
        requeues: See exp.run.run. Default: None.

    Raises:
        ConfigError: The config names a package that the command does not allow.
    """
    with pause_garbage_collection():
        from exp.check.plan import Plan
        from exp.config.frozen import refuse_more_than
        from exp.run import run
        from exp.strategies.process_group import join

    refuse_more_than(allow, directory)

    def meet(decided: Plan) -> None:
        join(rank, decided.placement, timeout_seconds=decided.settings.launch.timeout_seconds)

    run(directory, rank=rank, resume=resume, join=meet, requeues=requeues)
