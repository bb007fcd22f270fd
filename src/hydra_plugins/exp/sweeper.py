"""The Hydra sweeper `exp`, which runs a grid over lists of values or a search in intervals.

The package exp.sweeps implements the sweeper.
"""

# This module must not import annotations from __future__. Hydra's scanner runs the module before it is in sys.modules,
# so dataclasses could not evaluate annotations that are text.
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional  # noqa: UP035

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class ExpSweeperConf:
    _target_: str = "hydra_plugins.exp.sweeper.ExpSweeper"
    # Swept values as text, by config key. The file of an experiment may set them.
    params: Optional[Dict[str, str]] = field(default_factory=dict)  # noqa: UP006, UP045


ConfigStore.instance().store(group="hydra/sweeper", name="exp", node=ExpSweeperConf, provider="exp")


class ExpSweeper(Sweeper):
    """Hydra sweeper that calls the sweep of `python -m exp.train -m`, which creates the jobs."""

    def __init__(self, params: Any = None) -> None:
        """Ignore `params`, because exp.config.hydra_adapter.swept_texts reads the swept values from the config."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from exp.sweeps.sweep import Sweep

        if not isinstance(task_function, Sweep):
            raise TypeError("hydra/sweeper=exp works only with `python -m exp.train -m`")
        self.sweep_of_exp = task_function

    def sweep(self, arguments: List[str]) -> Any:  # noqa: UP006
        return self.sweep_of_exp.go_over_space()
