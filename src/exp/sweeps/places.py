"""Where the jobs of a sweep run, by hydra/launcher: a cluster's executor, or this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exp.config.launchers import RAY, SLURM
from exp.launch.zygote import Zygote
from exp.sweeps.cluster import Prepare
from exp.sweeps.executor import Executor


def cluster_executor(
    settings: Mapping[str, Any], *, zygote: Zygote, prepare: Prepare, jobs: int | None
) -> Executor | None:
    """The executor of the cluster that hydra.launcher names; None for this machine, and for launchers of others.

    settings: hydra.launcher as plain values, checked. zygote: starts the processes in which jobs are frozen.
    prepare: freezes a job, exp.run.prepare. jobs: sweep.jobs, where it is a number; None for auto.
    """
    target = settings["_target_"]
    if target == SLURM:
        from exp.sweeps.slurm import SlurmExecutor

        return SlurmExecutor(settings=settings, zygote=zygote, prepare=prepare, jobs=jobs)
    if target == RAY:
        from exp.sweeps.ray_jobs import RayExecutor

        return RayExecutor(settings=settings, zygote=zygote, prepare=prepare, jobs=jobs)
    return None
