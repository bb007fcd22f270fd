"""The launcher of `hydra/launcher=slurm`, which submits each job of a sweep to SLURM by submitit.

A job has one task per rank. If hydra.launcher.cluster is `local`, submitit starts processes on this machine instead.
The folder submitit/ in the run directory contains the batch script and the output of submitit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from exp.errors import RunError, config_error
from exp.extras.clusters.cluster import ClusterExecutor, Frozen, Submitted, output_of
from exp.extras.clusters.task import run_task
from exp.launch.launcher import allow_flags
from exp.launch.spawn import import_path
from exp.sweeps.executor import Prepare
from exp.sweeps.job import JobProcesses

log = logging.getLogger(__name__)

FOLDER = "submitit"
# States of SLURM in which a job is unfinished.
ALIVE = (
    *("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "STAGE_OUT", "STOPPED", "SIGNALING", "REQUEUED"),
    *("REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
)
UNKNOWN = "UNKNOWN"
WORDS = {
    "TIMEOUT": "reached the time limit of SLURM (hydra.launcher.timeout_min)",
    "OUT_OF_MEMORY": "ran out of the memory that SLURM gave it (hydra.launcher.mem_gb)",
}
# States after which SLURM may queue a job again. Such a job counts as ended if two reads show such a state.
DOUBTED = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", UNKNOWN)
SQUEUE_SECONDS = 5.0
SIGNAL_SECONDS = 2.0
LOCAL_POLL, SLURM_POLL = 0.1, 1.0
# Settings that submitit passes to sbatch under the same name.
OPTIONS = (
    *("cpus_per_task", "gpus_per_task", "cpus_per_gpu", "mem_per_cpu", "mem_per_gpu", "partition", "account"),
    *("qos", "constraint", "exclude", "nodelist", "gres", "exclusive", "comment", "job_name", "signal_delay_s"),
)


class SlurmExecutor(ClusterExecutor):
    """Executor that submits jobs by submitit, and reads the states of all jobs with one call of squeue.

    Args:
        settings: Values of the node hydra.launcher, which are already checked.
        processes: See ClusterExecutor.
        prepare: See ClusterExecutor.
        jobs: Largest number of jobs at the same time. None: sweep.jobs is not a number.
    """

    def __init__(
        self, *, settings: Mapping[str, Any], processes: JobProcesses, prepare: Prepare, jobs: int | None = None
    ) -> None:
        # The signal that submitit requests before the time limit of a job. submitit's default is SIGUSR2.
        os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"
        self._settings = settings
        self._is_local = settings["cluster"] == "local"
        most = min(settings["array_parallelism"], os.cpu_count() or 1) if self._is_local else None
        super().__init__(
            slots=jobs or most or settings["array_parallelism"],
            processes=processes,
            prepare=prepare,
            gpus=settings["gpus_per_node"],
            poll_seconds=LOCAL_POLL if self._is_local else SLURM_POLL,
        )
        self._asked = self._signalled = -math.inf
        self._doubted: set[str] = set()
        self._submissions: dict[str, Any] = {}

    def _check(self, frozen: Frozen) -> None:
        nodes, wanted = 1 if self._is_local else self._settings["nodes"], frozen.placement.nodes
        if nodes is not None and wanted not in (1, nodes):
            raise config_error(
                "hydra.launcher.nodes",
                got=f"{nodes}, with launch.nodes={wanted}",
                expected="equal numbers, or only one of the two keys",
            )

    def _submit(self, frozen: Frozen) -> str:
        folder = frozen.directory / FOLDER
        for script in sorted(folder.glob("*_submitted.pkl")):
            job = script.name.removesuffix("_submitted.pkl")
            if self._is_alive(job, folder):
                return job
        # Files of an earlier attempt are removed, because they would be taken for files of this job.
        (frozen.directory / "report.json").unlink(missing_ok=True)
        shutil.rmtree(frozen.exchange, ignore_errors=True)
        frozen.exchange.mkdir()
        requeues, allow = self._settings["max_num_timeout"], frozen.settings.security.allow
        arguments = ["--requeues", str(requeues), *allow_flags(allow)]
        threads = frozen.settings.runtime.threads
        cpus = threads if threads is not None else self._settings["cpus_per_task"]
        executor = self._submitit(frozen, folder)
        try:
            job = executor.submit(
                run_task,
                directory=str(frozen.directory),
                exchange=str(frozen.exchange),
                outputs=[str(output_of(frozen.directory, rank)) for rank in range(frozen.placement.world_size)],
                folders=import_path(),
                arguments=arguments,
                cpus=cpus,
            )
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            raise RunError(f"the job was not submitted: {str(error).strip() or type(error).__name__}") from error
        self._submissions[job.job_id] = job
        return str(job.job_id)

    def _submitit(self, frozen: Frozen, folder: Path) -> Any:
        """Return an executor of submitit, set up with the parameters of one job.

        Args:
            frozen: The job.
            folder: Folder for the batch script and the output of submitit.
        """
        import submitit

        placed, settings = frozen.placement, self._settings
        gpus = settings["gpus_per_node"]
        has_gpus = any(settings[name] is not None for name in ("gpus_per_task", "gres"))
        if gpus is None and placed.accelerator == "cuda" and not has_gpus:
            gpus = placed.ranks_per_node * placed.layers
        common: dict[str, object] = {} if gpus is None else {"gpus_per_node": gpus}
        if self._is_local:
            local = submitit.LocalExecutor(folder=folder)
            common |= {name: settings[name] for name in ("timeout_min", "signal_delay_s")}
            local.update_parameters(tasks_per_node=placed.ranks_per_node, **common)
            return local
        executor = submitit.SlurmExecutor(folder=folder)
        given = {name: settings[name] for name in OPTIONS if settings[name] is not None}
        if settings["mem_gb"] is not None:
            given["mem"] = f"{math.ceil(1024 * settings['mem_gb'])}MB"
        # Some clusters queue a job again only if the option `requeue` is set.
        own = {"signal": f"USR1@{settings['signal_delay_s']}", "requeue": True}
        executor.update_parameters(
            **common,
            **given,
            nodes=settings["nodes"] or placed.nodes,
            ntasks_per_node=placed.ranks_per_node,
            time=max(1, math.ceil(settings["timeout_min"])),
            # If a rank dies, SLURM ends the other ranks of the job.
            srun_args=["--kill-on-bad-exit=1", *settings["srun_args"]],
            additional_parameters={**settings["additional_parameters"], **own},
            **({"setup": list(settings["setup"])} if settings["setup"] else {}),
        )
        return executor

    def _states(self) -> Mapping[Any, str]:
        if self._signum is not None and not self._is_killed and time.monotonic() > self._signalled + SIGNAL_SECONDS:
            # The signal is repeated, because a task that had just begun missed the first signal.
            self._signal(self._running, self._signum)
        if not self._running:
            return {}
        ids = [submitted.handle for submitted in self._running]
        if self._is_local:
            return {
                submitted.handle: "ended without a message"
                for submitted in self._running
                if not self._is_alive(submitted.handle, submitted.frozen.directory / FOLDER)
            }
        if time.monotonic() < self._asked + SQUEUE_SECONDS:
            return {}
        said, self._asked = _squeue(ids), time.monotonic()
        if said is None:
            return {}
        states = {job: said.get(job, UNKNOWN) for job in ids}
        over = {job: state for job, state in states.items() if state not in ALIVE}
        # A preempted job may return to the queue, so it counts as ended only after a second read.
        doubted = {job for job, state in over.items() if state in DOUBTED}
        sure = {job: state for job, state in over.items() if job not in doubted or job in self._doubted}
        self._doubted = doubted
        return {job: WORDS.get(state, f"ended in SLURM as {state}") for job, state in sure.items()}

    def _is_alive(self, job: str, folder: Path) -> bool:
        if not self._is_local:
            said = _squeue([job])
            return said is not None and job in said and said[job] in ALIVE
        if job in self._submissions:
            return not self._submissions[job].done()
        with contextlib.suppress(psutil.Error, ValueError):
            return str(folder) in psutil.Process(int(job)).cmdline()
        return False

    def _signal(self, jobs: list[Submitted], signum: int) -> None:
        self._signalled = time.monotonic()
        ids = [submitted.handle for submitted in jobs]
        # After SIGUSR1 a job would queue itself again.
        number = signal.SIGTERM if signum == signal.SIGUSR1 else signal.Signals(signum)
        if self._is_local:
            for job in ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(job), signal.SIGTERM)  # the signal that submitit's controller forwards
            return
        _scancel("--state=PENDING", *ids)
        _scancel(f"--signal={number.name.removeprefix('SIG')}", *ids)

    def _kill(self, jobs: list[Submitted]) -> None:
        ids = [submitted.handle for submitted in jobs]
        if not self._is_local:
            _scancel(*ids)
            return
        for job in ids:
            with contextlib.suppress(psutil.Error):
                controller = psutil.Process(int(job))
                processes = [controller, *controller.children(recursive=True)]
                for process in processes:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                psutil.wait_procs(processes, timeout=5.0)


def _squeue(jobs: Sequence[str]) -> Mapping[str, str] | None:
    """Return the SLURM states by job ID, including those of recently ended jobs; None if squeue fails."""
    command = ["squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={','.join(jobs)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("squeue: %s", error)
        return None
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        log.warning("squeue: %s", done.stderr.strip())
        return None
    return dict(line.split("|") for line in done.stdout.split())


def _scancel(*arguments: str) -> None:
    # Errors are ignored, because scancel fails for a job that has ended.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["scancel", *arguments], capture_output=True, timeout=60, check=False)
