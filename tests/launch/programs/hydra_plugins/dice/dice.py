"""hydra/sweeper=dice: a sweeper whose every value is drawn anew, in whichever process asks."""

import random
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


@dataclass
class DiceConf:
    _target_: str = "hydra_plugins.dice.dice.Dice"
    key: str = "optimizer.lr"
    jobs: int = 2


ConfigStore.instance().store(group="hydra/sweeper", name="dice", node=DiceConf, provider="dice")


class Dice(Sweeper):
    def __init__(self, key, jobs):
        self.key, self.jobs = key, jobs

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        draw = random.SystemRandom()
        for job in range(self.jobs):
            values = [f"{self.key}={draw.uniform(0.001, 0.1):.6f}"]
            self.launcher.launch([[*arguments, *values]], initial_job_idx=job)
