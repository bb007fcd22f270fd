"""The settings of `hydra/launcher=slurm` and `hydra/launcher=ray`, and the checks of their values.

The fields of the dataclasses accept any value, so that Hydra composes wrong values as well. `launcher_errors` then
reports all errors together, before a job is submitted.
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
from exp.errors import ErrorDetails, invalid_value, is_installed, not_supported_with, unsuitable

# Python package that each launcher needs. The extra `slurm` or `ray` of exp installs the package.
PACKAGES = {SLURM: "submitit", RAY: "ray"}
COUNT = Annotated[int, Ge(1)]
COUNT_OR_NONE = Annotated[int, Ge(0)]
AMOUNT = Annotated[float, Gt(0)]
SHARE = Annotated[float, Ge(0)]
TEXT = Annotated[str, "a text", MinLen(1)]
# Memory and resources as SLURM spells them: 4GB, gpu:a100:2, or a number.
SIZE = TEXT | COUNT

# Default and type of each setting. If a value is None, the cluster decides, unless a comment states otherwise.
SETTINGS: Mapping[str, Mapping[str, tuple[object, object]]] = {
    SLURM: {
        # local: submitit starts processes on this machine, so that users can try a sweep without a cluster.
        "cluster": ("slurm", Literal["slurm", "local"]),
        "timeout_min": (60, AMOUNT),
        # SIGUSR1 is sent this many seconds before the time limit of a job. The job then saves a checkpoint.
        "signal_delay_s": (120, COUNT_OR_NONE),
        # Largest number of times that a job at its time limit is queued again and resumes.
        "max_num_timeout": (3, COUNT_OR_NONE),
        # Largest number of jobs that are queued or running. A number in sweep.jobs takes precedence.
        "array_parallelism": (256, COUNT),
        # None: the value of launch.nodes. A node runs one task per rank.
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
        # None: the sweep starts Ray on this machine. auto or HOST:PORT: the sweep joins a running cluster.
        "address": (None, TEXT | None),
        # CPU cores and GPUs of a job. 0.5 is half a device. None: one core per rank, and the GPUs of launch.devices.
        **dict.fromkeys(("num_cpus", "num_gpus"), (None, SHARE | None)),
        "resources": ({}, dict[str, Annotated[float, Ge(0)]]),
        # Largest number of jobs that are queued or running. None: as many as the cluster has room for.
        "max_jobs": (None, COUNT | None),
    },
}


def _settings(name: str, target: str) -> type[Any]:
    """Return the dataclass with the settings of a launcher. The fields accept any value.

    Args:
        name: Name of the dataclass.
        target: SLURM or RAY, the `_target_` of the launcher.
    """
    fields: list[tuple[str, Any, Any]] = [("_target_", Any, field(default=target))]
    for key, (default, _) in SETTINGS[target].items():
        is_mutable = isinstance(default, list | dict)
        own = field(default_factory=partial(copy.copy, default)) if is_mutable else field(default=default)
        fields.append((key, Any, own))
    return make_dataclass(name, fields)


SlurmSettings = _settings("SlurmSettings", SLURM)
RaySettings = _settings("RaySettings", RAY)
# Options of sbatch that exp sets.
OWN_OPTIONS = ("array", "ntasks", "ntasks-per-node", "nodes", "output", "error", "signal", "open-mode", "requeue")


def launcher_errors(settings: Mapping[str, Any]) -> Iterator[ErrorDetails]:
    """Yield the errors in the values of the node hydra.launcher.

    Args:
        settings: The node. Its `_target_` is SLURM or RAY.
    """
    from exp.check.kinds import describe_type, fits

    target = settings["_target_"]
    word, package = CLUSTERS[target].word, PACKAGES[target]
    if not is_installed(package):
        fix, got = f"pip install 'exp-framework[{word}]'", f"{word}, without the package {package}"
        yield ErrorDetails("hydra/launcher", got, f"an installed package {package}", fix)
    wrong = {name for name, (_, kind) in SETTINGS[target].items() if not fits(settings[name], kind)}
    for name in SETTINGS[target]:
        if name in wrong:
            yield invalid_value(f"hydra.launcher.{name}", settings[name], describe_type(SETTINGS[target][name][1]))
    if target == SLURM:
        yield from _slurm_errors({name: value for name, value in settings.items() if name not in wrong})


def _slurm_errors(settings: Mapping[str, Any]) -> Iterator[ErrorDetails]:
    """Yield the errors of unsupported SLURM settings.

    Args:
        settings: Settings with values of the correct types.
    """
    cluster, missing = settings.get("cluster"), [name for name in ("sbatch", "srun") if not shutil.which(name)]
    if cluster == "slurm" and missing:
        yield unsuitable(
            "hydra.launcher.cluster",
            cluster,
            f"on a machine without {' and '.join(missing)}",
            "a machine that can submit to SLURM",
            "Start the sweep on a login node, or try it here with hydra.launcher.cluster=local",
        )
    if cluster == "local" and settings.get("nodes") not in (None, 1):
        yield not_supported_with("hydra.launcher.nodes", settings["nodes"], "cluster=local", "1, this machine")
    delay, timeout = settings.get("signal_delay_s"), settings.get("timeout_min")
    if delay is not None and timeout is not None and delay >= 60 * timeout:
        expected = f"less than the time limit of a job, {60 * timeout:g} s"
        yield not_supported_with("hydra.launcher.signal_delay_s", delay, f"timeout_min={timeout}", expected)
    for name, value in settings.get("additional_parameters", {}).items():
        if name.replace("_", "-") in OWN_OPTIONS or name.replace("-", "_") in SETTINGS[SLURM]:
            expected = f"options without a key below hydra.launcher, and none of {', '.join(OWN_OPTIONS)}"
            yield invalid_value(f"hydra.launcher.additional_parameters.{name}", value, expected)
