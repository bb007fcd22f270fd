"""The launcher of `hydra/launcher=ray`, which runs each job of a sweep as a task of Ray.

A task starts the ranks of the job on one node. The run directories must be on a disk that all nodes share. Each rank
has a separate process, because a process of Ray runs several tasks one after another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exp.errors import ExpError, Interrupted, RankError, RunError, config_error, one_line
from exp.extras.clusters.cluster import ClusterExecutor, Frozen, Submitted, output_of
from exp.launch.failure import Failure
from exp.launch.job_process import Died
from exp.launch.launcher import launch
from exp.launch.spawn import import_path
from exp.run_report import Report
from exp.sweeps.executor import Prepare
from exp.sweeps.job import JobProcesses, dead_job, interruption_of

POLL_SECONDS = 0.1


def run_ranks(frozen: Frozen, place: str, folders: Sequence[str]) -> ExpError | None:
    """Run the ranks of a job on this node, and wait until all ranks have ended.

    Args:
        frozen: The job.
        place: Working directory of the sweep, in which the ranks run.
        folders: Import path of the sweep. The folders are appended to sys.path.

    Returns:
        The error that ended the run. None: the run was completed.
    """
    launching, runtime = frozen.settings.launch, frozen.settings.runtime
    sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        with contextlib.chdir(place), _output_in(output_of(frozen.directory, 0)):
            launch(
                frozen.directory,
                placement=frozen.placement,
                max_restarts=launching.max_restarts,
                threads=runtime.threads,
                grace_seconds=launching.grace_seconds,
                resume=frozen.resume,
                allow=frozen.settings.security.allow,
            )
    except ExpError as error:
        error.__cause__ = error.__context__ = None
        return error
    return None


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Redirect stdout and stderr of this process and its children to the end of a file within the block."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with path.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


class RayExecutor(ClusterExecutor):
    """Executor that runs the jobs of a sweep as tasks of Ray.

    Args:
        settings: Values of the node hydra.launcher, which are already checked.
        processes: See ClusterExecutor.
        prepare: See ClusterExecutor.
        jobs: Largest number of jobs at the same time. None: sweep.jobs is not a number.

    Raises:
        ConfigError: No cluster runs at hydra.launcher.address.
    """

    def __init__(
        self, *, settings: Mapping[str, Any], processes: JobProcesses, prepare: Prepare, jobs: int | None = None
    ) -> None:
        import ray

        self._settings, self._ray = settings, ray
        self._is_own = not ray.is_initialized()
        if self._is_own:
            self._start()
        super().__init__(
            slots=jobs or settings["max_jobs"] or self._room(),
            processes=processes,
            prepare=prepare,
            gpus=settings["num_gpus"],
            poll_seconds=POLL_SECONDS,
        )
        self._task = ray.remote(run_ranks)

    def close(self) -> None:
        """End all running jobs, and shut Ray down if this executor started it."""
        super().close()
        if self._is_own:
            self._ray.shutdown()

    def _start(self) -> None:
        address = self._settings["address"]
        # Disable the usage statistics of Ray.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        given: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            given |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            self._ray.init(address=address or "local", **given)
        except (OSError, RuntimeError, ValueError) as error:  # a ConnectionError is an OSError
            raise config_error(
                "hydra.launcher.address",
                got=f"{address} ({one_line(error)})",
                expected="a running cluster of Ray, or null for one on this machine",
            ) from error

    def _room(self) -> int:
        """Return the number of jobs with one rank that can run on the cluster at the same time."""
        has, settings = self._ray.cluster_resources(), self._settings
        asked = {"CPU": 1 if settings["num_cpus"] is None else settings["num_cpus"], "GPU": settings["num_gpus"] or 0}
        return max(1, min((int(has.get(name, 0) // count) for name, count in asked.items() if count), default=1))

    def _check(self, frozen: Frozen) -> None:
        placed = frozen.placement
        if placed.nodes > 1:
            raise config_error(
                "launch.nodes",
                got=f"{placed.nodes}, with hydra/launcher=ray",
                expected="1: a job of Ray runs on one node",
                fix="Write hydra/launcher=slurm for several",
            )
        has, asked = self._ray.cluster_resources(), self._resources(frozen)
        short = {name: count for name, count in asked.items() if count > has.get(name, 0)}
        if short:
            # The job is rejected, because it would wait in Ray's queue forever.
            raise config_error(
                "hydra.launcher",
                got=", ".join(f"{count:g} {name}" for name, count in short.items()),
                expected="at most " + ", ".join(f"{has.get(name, 0):g} {name}" for name in short),
            )

    def _resources(self, frozen: Frozen) -> dict[str, float]:
        settings, placed = self._settings, frozen.placement
        gpus = settings["num_gpus"]
        if gpus is None:
            gpus = placed.world_size * placed.layers if placed.accelerator == "cuda" else 0
        cpus = placed.world_size if settings["num_cpus"] is None else settings["num_cpus"]
        return {"CPU": cpus, "GPU": gpus, **settings["resources"]}

    def _submit(self, frozen: Frozen) -> Any:
        # The report of an earlier attempt is removed, because it would be taken for the report of this job.
        (frozen.directory / "report.json").unlink(missing_ok=True)
        asked = self._resources(frozen)
        cpus, gpus, name = asked.pop("CPU"), asked.pop("GPU"), f"job {frozen.job}"
        task = self._task.options(num_cpus=cpus, num_gpus=gpus, resources=asked, max_retries=0, name=name)
        return task.remote(frozen, os.getcwd(), import_path())

    def _states(self) -> Mapping[Any, str]:
        if not self._running:
            return {}
        handles = [submitted.handle for submitted in self._running]
        ready, _ = self._ray.wait(handles, num_returns=len(handles), timeout=0)
        return dict.fromkeys(ready, "ended")

    def _error(self, submitted: Submitted, report: Report | None, failures: list[Failure]) -> ExpError | None:
        try:
            error = self._ray.get(submitted.handle)
        except self._ray.exceptions.RayError as problem:
            if self._signum is not None:
                return interruption_of(submitted.frozen.directory, self._signum)
            return dead_job(submitted.frozen.directory, Died(f"ended in Ray with {one_line(problem)}"))
        if isinstance(error, Interrupted) and self._signum is not None:
            return Interrupted(signum=self._signum, checkpoint=error.checkpoint)
        directory = submitted.frozen.directory
        if error is None:
            is_coming = report is None and not self._is_late(submitted)
            return None if is_coming else dead_job(directory, Died("ended with status 0 without a message"))
        if submitted.frozen.placement.world_size == 1 and isinstance(error, RankError):
            # The message of a job with one process does not name the rank.
            reported = None if report is None else report.error
            return dead_job(directory, Died(error.reason)) if reported is None else RunError(reported["message"])
        assert isinstance(error, ExpError)
        return error

    def _signal(self, jobs: list[Submitted], signum: int) -> None:
        for submitted in jobs:
            # Ray raises KeyboardInterrupt in a running task, and removes a task that waits in the queue.
            self._ray.cancel(submitted.handle, force=False)

    def _kill(self, jobs: list[Submitted]) -> None:
        for submitted in jobs:
            self._ray.cancel(submitted.handle, force=True)
