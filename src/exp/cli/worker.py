"""One rank of a frozen run: `python -m exp.worker RUN_DIR`, started by exp itself, by torchrun or by SLURM."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from exp.launch.lifecycle import live
from exp.lighter_imports import pause_garbage_collection
from exp.strategies.rank import Rank


def main() -> NoReturn:
    """Run one rank as the command line says, and end the process."""
    parser = argparse.ArgumentParser(prog="python -m exp.worker", description=__doc__)
    parser.add_argument("directory", type=Path, help="a run directory with a frozen config.yaml")
    parser.add_argument("--resume", type=Path, default=None, help="a checkpoint to go on from, instead of the config's")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="PACKAGE", help="as security.allow of the run: trust it first"
    )
    parser.add_argument(
        "--requeues", type=int, default=None, metavar="N",
        help="of a scheduler's job: go on from the newest checkpoint here; at the end of its time SLURM queues it "
        "again, N times at most",
    )  # fmt: skip
    arguments = parser.parse_args()
    live(lambda rank: work(rank, **vars(arguments)))


def work(
    rank: Rank, *, directory: Path, resume: Path | None, allow: Sequence[str] = (), requeues: int | None = None
) -> None:
    """Join the run's process group and run it.

    requeues: as of exp.run.run.
    allow: the packages that whoever started this rank trusts; what the run directory says of that is not believed.
    Raises: ConfigError where it asks for others.
    """
    with pause_garbage_collection():
        from exp.check.plan import Plan
        from exp.config.frozen import refuse_more_than
        from exp.run import run
        from exp.strategies.process_group import join

    refuse_more_than(allow, directory)

    def meet(decided: Plan) -> None:
        launch = decided.settings.launch
        join(
            rank,
            decided.placement,
            timeout_seconds=launch.timeout_seconds,
            network_interface=launch.network_interface,
            high_priority_stream=launch.high_priority_stream,
        )

    run(directory, rank=rank, resume=resume, join=meet, requeues=requeues)
