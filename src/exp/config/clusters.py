"""Names of the Hydra launchers that run the jobs of a sweep on a cluster.

The package exp.extras.clusters implements these launchers and checks their settings.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exp.errors import ErrorDetails, config_error

SLURM = "hydra_plugins.exp.launcher.SlurmLauncher"
RAY = "hydra_plugins.exp.launcher.RayLauncher"


@dataclass(frozen=True)
class Cluster:
    """Kind of cluster, such as SLURM.

    Args:
        word: Option of the config group hydra/launcher, such as "slurm".
        executor: Dotted name of the class that runs the jobs.
    """

    word: str
    executor: str


# Clusters by the `_target_` of hydra.launcher.
CLUSTERS: Mapping[str, Cluster] = {
    SLURM: Cluster("slurm", "exp.extras.clusters.slurm.SlurmExecutor"),
    RAY: Cluster("ray", "exp.extras.clusters.ray_jobs.RayExecutor"),
}
# The module that checks the settings of these launchers.
SETTINGS = "exp.extras.clusters.launcher_settings"


def refuse_cluster(target: str) -> None:
    """Raise ConfigError if a single run uses the launcher of a cluster.

    Args:
        target: `_target_` of hydra.launcher.
    """
    if target in CLUSTERS:
        raise config_error(
            "hydra/launcher",
            got=f"{CLUSTERS[target].word}, for a single run",
            expected="a sweep, because a launcher starts the jobs of a sweep",
            fix="Write -m in front of the overrides. A sweep may have a single job",
        )


def cluster_errors(settings: Mapping[str, object]) -> Iterator[ErrorDetails]:
    """Yield the errors in the settings of a cluster's launcher. For other launchers, yield nothing.

    Args:
        settings: Values of the node hydra.launcher.
    """
    if settings.get("_target_") in CLUSTERS:
        yield from importlib.import_module(SETTINGS).launcher_errors(settings)
