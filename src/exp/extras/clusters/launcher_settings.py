"""The settings of hydra/launcher=slurm and hydra/launcher=ray, and the errors in their values.

The dataclasses accept any value, so that Hydra composes them. `launcher_errors` then reports all errors together,
before a job is submitted.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, MinLen

from exp.config.clusters import CLUSTERS, RAY, SLURM
from exp.errors import ErrorDetails, is_installed
from exp.spelling import show

# The package of each launcher, which the extra of the same word installs.
PACKAGES = {SLURM: "submitit", RAY: "ray"}
COUNT = Annotated[int, Ge(1)]
COUNT_OR_NONE = Annotated[int, Ge(0)]
AMOUNT = Annotated[float, Gt(0)]
SHARE = Annotated[float, Ge(0)]
TEXT = Annotated[str, "a text", MinLen(1)]
# SLURM's spelling of memory and of resources: 4GB, gpu:a100:2, or a plain number.
SIZE = TEXT | COUNT

# The default and the kind of each setting. None leaves a setting to the cluster.
SETTINGS: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    SLURM: {
        # local: submitit's stand-in on this machine, to try a sweep without a cluster.
        "cluster": ("slurm", Literal["slurm", "local"]),
        "timeout_min": (60, AMOUNT),
        # Seconds before the end of its time at which a job gets SIGUSR1, and saves.
        "signal_delay_s": (120, COUNT_OR_NONE),
        # How often a job that saved so is queued again and resumes.
        "max_num_timeout": (3, COUNT_OR_NONE),
        # Jobs that are queued or run at once. A number in sweep.jobs takes precedence.
        "array_parallelism": (256, COUNT),
        # None is launch.nodes. The tasks of a node are the ranks that launch.devices and the strategy ask for.
        "nodes": (None, COUNT | None),
        "gpus_per_node": (None, COUNT_OR_NONE | None),
        "mem_gb": (None, AMOUNT | None),
        **dict.fromkeys(("cpus_per_task", "cpus_per_gpu"), (None, COUNT | None)),
        **dict.fromkeys(("gpus_per_task", "mem_per_cpu", "mem_per_gpu"), (None, SIZE | None)),
        **dict.fromkeys(("partition", "account", "qos", "constraint"), (None, TEXT | None)),
        **dict.fromkeys(("exclude", "nodelist", "gres", "comment"), (None, TEXT | None)),
        "exclusive": (None, bool | TEXT | None),
        "job_name": ("exp", TEXT),
        # Lines of the batch script before srun.
        "setup": ([], list[str]),
        "srun_args": ([], list[str]),
        # More options of sbatch, such as {reservation: mine}.
        "additional_parameters": ({}, dict[str, Any]),
    },
    RAY: {
        # None starts Ray on this machine for this sweep; auto or HOST:PORT joins a cluster.
        "address": (None, TEXT | None),
        # Of each job, 0.5 for half of one. None: a core a rank, and the GPUs that launch.devices asks for.
        **dict.fromkeys(("num_cpus", "num_gpus"), (None, SHARE | None)),
        "resources": ({}, dict[str, Annotated[float, Ge(0)]]),
        # Jobs that are queued or run at once. None: as many as the cluster has room for.
        "max_jobs": (None, COUNT | None),
    },
}


def _settings(name: str, target: str) -> type[Any]:
    """Return the dataclass of a launcher, whose fields take anything."""
    fields: list[tuple[str, Any, Any]] = [("_target_", Any, field(default=target))]
    for key, (default, _) in SETTINGS[target].items():
        is_mutable = isinstance(default, list | dict)
        own = field(default_factory=partial(copy.copy, default)) if is_mutable else field(default=default)
        fields.append((key, Any, own))
    return make_dataclass(name, fields)


SlurmSettings = _settings("SlurmSettings", SLURM)
RaySettings = _settings("RaySettings", RAY)
# Options of sbatch that exp gives itself.
OWN_OPTIONS = ("array", "ntasks", "ntasks-per-node", "nodes", "output", "error", "signal", "open-mode", "requeue")


def launcher_errors(settings: Mapping[str, Any]) -> Iterator[ErrorDetails]:
    """Yield the errors of hydra.launcher, of which `_target_` is SLURM or RAY."""
    from exp.check.kinds import describe_type, fits

    target = settings["_target_"]
    word, package, known = CLUSTERS[target].word, PACKAGES[target], SETTINGS[target]
    if not is_installed(package):
        yield ErrorDetails(
            key="hydra/launcher",
            got=f"{word}, without the package {package}",
            expected="the package, which an extra of exp brings",
            fix=f"pip install 'exp-framework[{word}]'",
        )
    wrong = set()
    for name, (_, kind) in known.items():
        if not fits(settings[name], kind):
            wrong.add(name)
            yield ErrorDetails(key=f"hydra.launcher.{name}", got=show(settings[name]), expected=describe_type(kind))
    if target == SLURM:
        yield from (error for name, error in _slurm_errors(settings, wrong) if name not in wrong)


def _slurm_errors(settings: Mapping[str, Any], wrong: set[str]) -> Iterator[tuple[str, ErrorDetails]]:
    """Yield errors of settings that have the right kind, by the setting."""
    is_local = settings["cluster"] == "local"
    missing = [name for name in ("sbatch", "srun") if not shutil.which(name)]
    if not is_local and missing:
        yield (
            "cluster",
            ErrorDetails(
                key="hydra.launcher.cluster",
                got=f"slurm, on a machine without {' and '.join(missing)}",
                expected="a machine that can submit to SLURM",
                fix="Start it on a login node, or try it here with hydra.launcher.cluster=local",
            ),
        )
    if is_local and settings["nodes"] not in (None, 1):
        got = f"{settings['nodes']}, with cluster=local"
        yield "nodes", ErrorDetails(key="hydra.launcher.nodes", got=got, expected="1: this machine")
    timeout, delay = settings["timeout_min"], settings["signal_delay_s"]
    if wrong.isdisjoint({"timeout_min", "signal_delay_s"}) and delay >= 60 * timeout:
        got, expected = f"{delay}, with timeout_min={timeout}", f"less than the {60 * timeout:g} s of a job"
        yield "signal_delay_s", ErrorDetails(key="hydra.launcher.signal_delay_s", got=got, expected=expected)
    own = settings["additional_parameters"]
    for name in own if isinstance(own, dict) else ():
        if name.replace("_", "-") in OWN_OPTIONS or name.replace("-", "_") in SETTINGS[SLURM]:
            key = f"hydra.launcher.additional_parameters.{name}"
            expected = f"options without a key below hydra.launcher, and none of {', '.join(OWN_OPTIONS)}"
            yield "additional_parameters", ErrorDetails(key=key, got=show(own[name]), expected=expected)
