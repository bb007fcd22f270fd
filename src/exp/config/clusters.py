"""Hydra launchers that run the jobs of a sweep on a cluster.

The settings and executors of these launchers are in extras/clusters.
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
    """A type of cluster.

    Args:
        word: Option of the group hydra/launcher.
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
    """Yield the errors in the node hydra.launcher if its `_target_` is the launcher of a cluster."""
    if settings.get("_target_") in CLUSTERS:
        yield from importlib.import_module(SETTINGS).launcher_errors(settings)
