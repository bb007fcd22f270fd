"""Hydra launchers `exp` (this machine), `slurm` and `ray`. The package exp.sweeps runs the jobs of a sweep."""

# This module must not import annotations from __future__. Hydra's scanner runs the module before it is in sys.modules,
# so dataclasses could not evaluate annotations that are text.
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from exp.cli.commands import has_extra

SETTINGS = "exp.extras.clusters.launcher_settings"


@dataclass
class ExpLauncherConf:
    _target_: str = "hydra_plugins.exp.launcher.ExpLauncher"


nodes = {"exp": ExpLauncherConf}
# Users may remove the folder src/exp/extras/clusters.
if has_extra("clusters"):
    settings = import_module(SETTINGS)
    nodes |= {"slurm": settings.SlurmSettings, "ray": settings.RaySettings}
for name, node in nodes.items():
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="exp")


class ExpLauncher(Launcher):
    """Hydra launcher that passes each batch of jobs to the sweep of `python -m exp.train -m`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from exp.sweeps.sweep import Sweep

        if not isinstance(task_function, Sweep):
            raise TypeError("hydra/launcher=exp works only with `python -m exp.train -m`")
        self.sweep = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep.launch(job_overrides, first=initial_job_idx)


class SlurmLauncher(ExpLauncher):
    """Hydra launcher that submits jobs to SLURM by submitit; see exp.extras.clusters.slurm."""

    def __init__(self, **settings: object) -> None:
        """Ignore the settings, because the sweep reads them from the config."""


class RayLauncher(ExpLauncher):
    """Hydra launcher that runs jobs on Ray; see exp.extras.clusters.ray_jobs."""

    def __init__(self, **settings: object) -> None:
        """Ignore the settings, because the sweep reads them from the config."""
