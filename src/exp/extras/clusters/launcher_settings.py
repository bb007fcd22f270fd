"""The settings of hydra/launcher=slurm and hydra/launcher=ray, and the errors in their values.

The dataclasses accept any value, so that Hydra composes them. `launcher_faults` then reports all errors together,
before a job is submitted.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from exp.config.clusters import CLUSTERS, RAY, SLURM
from exp.errors import Fault, is_installed
from exp.spelling import among, did_you_mean, show

# The package of each launcher, which the extra of the same word installs.
PACKAGES = {SLURM: "submitit", RAY: "ray"}
Test = tuple[Callable[[Any], bool], str]


@dataclass
class SlurmSettings:
    """What a job asks of SLURM. None leaves a key to the cluster; what is not here goes into additional_parameters.

    cluster: slurm; local: submitit's stand-in on this machine, which tries a sweep without a cluster.
    timeout_min: of one job. signal_delay_s: so long before it, SIGUSR1 tells the job to save.
    max_num_timeout: how often a job that was told so is queued again, and goes on; 0: never.
    nodes: null is launch.nodes. The tasks of a node are the ranks that launch.devices and the strategy ask for.
    array_parallelism: jobs that are queued or run at once; sweep.jobs, where it is a number, goes before it.
    setup: lines of the batch script before srun. additional_parameters: more of sbatch's options, {reservation: mine}.
    """

    _target_: str = SLURM
    cluster: Any = "slurm"
    timeout_min: Any = 60
    nodes: Any = None
    cpus_per_task: Any = None
    gpus_per_node: Any = None
    gpus_per_task: Any = None
    cpus_per_gpu: Any = None
    mem_gb: Any = None
    mem_per_cpu: Any = None
    mem_per_gpu: Any = None
    partition: Any = None
    account: Any = None
    qos: Any = None
    constraint: Any = None
    exclude: Any = None
    nodelist: Any = None
    gres: Any = None
    exclusive: Any = None
    comment: Any = None
    job_name: Any = "exp"
    signal_delay_s: Any = 120
    max_num_timeout: Any = 3
    array_parallelism: Any = 256
    setup: Any = field(default_factory=list)
    srun_args: Any = field(default_factory=list)
    additional_parameters: Any = field(default_factory=dict)


@dataclass
class RaySettings:
    """What a job asks of Ray.

    address: null starts Ray on this machine, for this sweep alone; auto or HOST:PORT joins a cluster.
    num_cpus, num_gpus: of each job, 0.5 for half a one; null: a core, and the GPUs that launch.devices asks for.
    max_jobs: jobs that are queued or run at once; null: as many as the cluster has room for.
    """

    _target_: str = RAY
    address: Any = None
    num_cpus: Any = None
    num_gpus: Any = None
    memory: Any = None
    resources: Any = field(default_factory=dict)
    max_jobs: Any = None
    runtime_env: Any = field(default_factory=dict)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _or_null(test: Test) -> Test:
    accepts, words = test
    return lambda value: value is None or accepts(value), f"{words}, or null"


TEXT: Test = (lambda value: isinstance(value, str) and bool(value.strip()), "a text")
TEXTS: Test = (lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts")
COUNT: Test = (lambda value: _is_count(value) and value >= 1, "a whole number, 1 or more")
COUNT_OR_NONE: Test = (lambda value: _is_count(value) and value >= 0, "a whole number, 0 or more")
AMOUNT: Test = (lambda value: _is_number(value) and value > 0, "a number above 0")
SHARE: Test = (lambda value: _is_number(value) and value >= 0, "a number, 0 or more")
# SLURM's own spelling of memory and of resources: 4GB, gpu:a100:2, or a plain number.
SIZE: Test = (lambda value: TEXT[0](value) or COUNT[0](value), "a size as SLURM writes it, such as 4GB")
PLAIN: Test = (
    lambda value: (
        isinstance(value, dict)
        and all(
            isinstance(name, str) and (TEXT[0](one) or _is_number(one) or one is True) for name, one in value.items()
        )
    ),
    "options by name, each with a text, a number or true",
)
AMOUNTS: Test = (
    lambda value: (
        isinstance(value, dict) and all(isinstance(name, str) and SHARE[0](one) for name, one in value.items())
    ),
    "numbers by name",
)
MAPPING: Test = (lambda value: isinstance(value, dict), "keys and values")

TESTS: Mapping[str, Mapping[str, Test]] = {
    SLURM: {
        "cluster": (lambda value: value in ("slurm", "local"), "slurm or local"),
        "timeout_min": AMOUNT,
        "signal_delay_s": COUNT_OR_NONE,
        "max_num_timeout": COUNT_OR_NONE,
        "array_parallelism": COUNT,
        "job_name": TEXT,
        "setup": TEXTS,
        "srun_args": TEXTS,
        "additional_parameters": PLAIN,
        "gpus_per_node": _or_null(COUNT_OR_NONE),
        "mem_gb": _or_null(AMOUNT),
        **dict.fromkeys(("nodes", "cpus_per_task", "cpus_per_gpu"), _or_null(COUNT)),
        **dict.fromkeys(("gpus_per_task", "mem_per_cpu", "mem_per_gpu"), _or_null(SIZE)),
        "exclusive": _or_null((lambda value: isinstance(value, bool) or TEXT[0](value), "true, or user or mcs")),
        **dict.fromkeys(
            ("partition", "account", "qos", "constraint", "exclude", "nodelist", "gres", "comment"), _or_null(TEXT)
        ),
    },
    RAY: {
        "address": _or_null(TEXT),
        "num_cpus": _or_null(SHARE),
        "num_gpus": _or_null(SHARE),
        "memory": _or_null(COUNT),
        "resources": AMOUNTS,
        "max_jobs": _or_null(COUNT),
        "runtime_env": MAPPING,
    },
}
# What exp gives sbatch itself.
OWN_OPTIONS = ("array", "ntasks", "ntasks-per-node", "nodes", "output", "error", "signal", "open-mode", "requeue")


def launcher_faults(settings: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the errors of hydra.launcher, of which `_target_` is SLURM or RAY."""
    target = settings["_target_"]
    word, package = CLUSTERS[target].word, PACKAGES[target]
    if not is_installed(package):
        yield Fault(
            key="hydra/launcher",
            got=f"{word}, without the package {package}",
            expected="the package, which an extra of exp brings",
            cure=f"pip install 'exp-framework[{word}]'",
        )
    tests = TESTS[target]
    for name in settings:
        if name != "_target_" and name not in tests:
            yield Fault(
                key=f"hydra.launcher.{name}",
                got=f"hydra/launcher={word} has no such key",
                expected=f"one of {among(tests, word=name)}",
                cure=did_you_mean(name, tests),
            )
    for name, (accepts, words) in tests.items():
        if not accepts(settings[name]):
            yield Fault(key=f"hydra.launcher.{name}", got=show(settings[name]), expected=words)
    if target == SLURM:
        yield from _slurm_faults(settings)


def _slurm_faults(settings: Mapping[str, Any]) -> Iterator[Fault]:
    missing = [] if settings["cluster"] == "local" else [name for name in ("sbatch", "srun") if not shutil.which(name)]
    if settings["cluster"] == "slurm" and missing:
        yield Fault(
            key="hydra.launcher.cluster",
            got=f"slurm, on a machine without {' and '.join(missing)}",
            expected="a machine that can submit to SLURM",
            cure="Start it on a login node, or try it here with hydra.launcher.cluster=local",
        )
    if settings["cluster"] == "local" and _is_count(settings["nodes"]) and settings["nodes"] > 1:
        yield Fault(
            key="hydra.launcher.nodes",
            got=f"{settings['nodes']}, with cluster=local",
            expected="1: this machine",
        )
    timeout, delay = settings["timeout_min"], settings["signal_delay_s"]
    if AMOUNT[0](timeout) and COUNT_OR_NONE[0](delay) and delay >= 60 * timeout:
        yield Fault(
            key="hydra.launcher.signal_delay_s",
            got=f"{delay}, with timeout_min={timeout}",
            expected=f"less than the {60 * timeout:g} s of a job",
        )
    own = settings["additional_parameters"]
    for name in own if isinstance(own, dict) else ():
        plain = str(name).replace("_", "-")
        if plain in OWN_OPTIONS:
            cure = None if plain != "signal" else "Write hydra.launcher.signal_delay_s"
            key = f"hydra.launcher.additional_parameters.{name}"
            yield Fault(key=key, got=show(own[name]), expected="options that exp does not give itself", cure=cure)
        elif str(name).replace("-", "_") in TESTS[SLURM]:
            key = f"hydra.launcher.additional_parameters.{name}"
            cure = f"Write hydra.launcher.{str(name).replace('-', '_')}={own[name]}"
            yield Fault(key=key, got=show(own[name]), expected="options that have no key of their own", cure=cure)
