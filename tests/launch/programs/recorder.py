"""A callback of the user's own: each rank records what it really trained with."""

import json
import os
from pathlib import Path

from lightning.pytorch import Callback


class Recorder(Callback):
    """lr, fail: the config's. fail names the lr whose second rank dies alone."""

    def __init__(self, *, lr: float, fail: float) -> None:
        self.lr, self.fail = lr, fail

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1 and self.lr == self.fail:
            raise ValueError("alone")

    def on_train_end(self, trainer, pl_module):
        record = {
            "rank": trainer.global_rank,
            "lr": self.lr,
            "lr_used": trainer.optimizers[0].param_groups[0]["lr"],
            "world_size": trainer.world_size,
        }
        Path("records").mkdir(exist_ok=True)
        Path("records", f"{self.lr}-{trainer.world_size}-{os.getpid()}.json").write_text(json.dumps(record))
