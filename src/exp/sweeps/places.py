"""Where the jobs of a sweep run, by hydra/launcher: a cluster's executor, or this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exp.config.launchers import RAY, SLURM
from exp.sweeps.cluster import Prepare
from exp.sweeps.executor import Executor
from exp.sweeps.job import JobProcesses


def cluster_executor(
    settings: Mapping[str, Any], *, processes: JobProcesses, prepare: Prepare, jobs: int | None
) -> Executor | None:
    """The executor of the cluster that hydra.launcher names; None for this machine, and for launchers of others.

    settings: hydra.launcher as plain values, checked. processes: starts those in which jobs are frozen.
    prepare: freezes a job, exp.run.prepare. jobs: sweep.jobs, where it is a number; None for auto.
    """
    target = settings["_target_"]
    if target == SLURM:
        from exp.sweeps.slurm import SlurmExecutor

        return SlurmExecutor(settings=settings, processes=processes, prepare=prepare, jobs=jobs)
    if target == RAY:
        from exp.sweeps.ray_jobs import RayExecutor

        return RayExecutor(settings=settings, processes=processes, prepare=prepare, jobs=jobs)
    return None
