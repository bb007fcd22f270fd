"""Where the jobs of a sweep run, by hydra/launcher: a cluster's executor, or this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from exp.config.launchers import RAY, SLURM
from exp.sweeps.cluster import Prepare
from exp.sweeps.executor import Executor
from exp.sweeps.job import JobProcesses
from exp.sweeps.local import LocalExecutor


def executor_of(config: DictConfig, processes: JobProcesses, *, prepare: Prepare) -> Executor:
    """The executor of the place that hydra/launcher names: a cluster, or this machine.

    config: composed, with its hydra node. processes, prepare: as of `cluster_executor`.
    """
    jobs = config.sweep.jobs
    launcher = cast(dict[str, Any], OmegaConf.to_container(config.hydra.launcher, resolve=True))
    cluster = cluster_executor(launcher, processes=processes, prepare=prepare, jobs=None if jobs == "auto" else jobs)
    return LocalExecutor(processes, jobs=jobs) if cluster is None else cluster


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
