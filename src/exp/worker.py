"""One rank of a frozen run: `python -m exp.worker RUN_DIR`, started by exp itself, by torchrun or by SLURM."""

from __future__ import annotations

import argparse
from pathlib import Path

from exp.launch.lifecycle import live
from exp.strategies.rank import Rank


def main() -> None:
    """Run one rank as the command line says; does not return."""
    parser = argparse.ArgumentParser(prog="python -m exp.worker", description=__doc__)
    parser.add_argument("directory", type=Path, help="a run directory with a frozen config.yaml")
    parser.add_argument("--resume", type=Path, default=None, help="a checkpoint to go on from, instead of the config's")
    arguments = parser.parse_args()
    live(lambda rank: work(rank, directory=arguments.directory, resume=arguments.resume))


def work(rank: Rank, *, directory: Path, resume: Path | None) -> None:
    """Join the run's process group and run it."""
    from exp.check.plan import adopt, frozen
    from exp.run import run
    from exp.strategies.process_group import join

    decided = adopt(frozen(directory), rank=rank)
    chosen = ("timeout_seconds", "network_interface", "high_priority_stream")
    join(rank, decided.placement, **{name: decided.plain["launch"][name] for name in chosen})
    run(directory, rank=rank, resume=resume, decided=decided)


if __name__ == "__main__":
    main()
