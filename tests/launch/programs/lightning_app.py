"""The usual program: hydra.main and Trainer(strategy="ddp"), launched by Lightning. Each rank records its job."""

import json
import os
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, Trainer


class Line(LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        if self.config.fail and self.global_rank == 1:
            Path("failed").touch()
            raise ValueError("alone")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.config.lr)


@hydra.main(version_base="1.3", config_path=".", config_name="lightning_app")
def main(config):
    trainer = Trainer(
        accelerator="cpu",
        devices=config.devices,
        strategy=config.strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(config), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
    record = {
        "job": HydraConfig.get().job.num,
        "rank": trainer.global_rank,
        "lr": config.lr,
        "lr_used": trainer.optimizers[0].param_groups[0]["lr"],
        "world_size": trainer.world_size,
    }
    Path("records").mkdir(exist_ok=True)
    Path("records", f"{record['job']}-{os.getpid()}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
