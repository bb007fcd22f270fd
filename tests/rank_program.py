"""Program of one forked rank of the fixture `ranks`: runs a frozen config as exp.worker does, or calls a function.

SETTINGS is a mapping: rank, world_size, store, result (a file), and either directory or file, name and arguments.
"""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from exp.strategies.rank import Rank

    torch.set_num_threads(1)
    gc.freeze()  # as in exp's ranks: a collection would copy the memory of all imported modules
    rank = Rank(
        global_rank=settings["rank"],
        local_rank=settings["rank"],
        world_size=settings["world_size"],
        local_world_size=settings["world_size"],
        store=settings["store"],
    )
    status = 0
    try:
        result = trained(settings, rank) if "directory" in settings else called(settings, rank)
        Path(settings["result"]).write_bytes(pickle.dumps(result))
        from exp.strategies.process_group import meet

        meet()
    except BaseException:
        status = 1
        Path(settings["result"] + ".error").write_text(traceback.format_exc())
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of collectives may block the exit of an interpreter, or abort it (seen with DTensor).
    os._exit(status)


def called(settings: dict[str, Any], rank: Any) -> Any:
    """Call a function of the test's file in a joined process group."""
    from exp.strategies.placement import Machine, placement
    from exp.strategies.process_group import join

    placed = placement("ddp", devices=rank.world_size, accelerator="cpu", machine=Machine(gpus=0))
    join(rank, placed, timeout_seconds=120)
    function = runpy.run_path(settings["file"])[settings["name"]]
    return function(rank, **settings["arguments"])


def trained(settings: dict[str, Any], rank: Any) -> dict[str, Any]:
    """Run a frozen config, and return its logged values in float64 and its report."""
    import dataclasses

    from omegaconf import OmegaConf

    from exp import run
    from exp.cli import worker
    from exp.run_report import read_report

    values: dict[str, dict[int, float]] = {}
    build = run.build

    def recording(*arguments: Any, **named: Any) -> Any:
        parts = build(*arguments, **named)
        parts.trainer.loggers.append(values_logger(values))
        return parts

    run.build = recording
    if rank.world_size == 1:
        run.run(settings["directory"], rank=rank)
    else:
        frozen = Path(settings["directory"])
        allow = OmegaConf.load(frozen / "config.yaml").security.allow  # the test wrote this file, so it is trusted
        worker.work(rank, directory=frozen, resume=None, allow=allow)
    report = read_report(Path(settings["directory"])) if rank.is_first else None
    return {"values": values, "report": None if report is None else dataclasses.asdict(report)}


def values_logger(values: dict[str, dict[int, float]]) -> Any:
    from lightning.pytorch.loggers import Logger

    class Values(Logger):
        name = version = None

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            for tag, value in metrics.items():
                values.setdefault(tag, {})[step] = value

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    return Values()


if __name__ == "__main__":
    main(globals()["SETTINGS"])
