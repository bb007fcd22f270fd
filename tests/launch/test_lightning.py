"""What exp relies on in Lightning (seen in 2.6.6): it starts no process and opens no store in a rank of exp."""

import json

TRAIN = """
torch = joined(rank)
import psutil
from lightning.pytorch import LightningModule, Trainer
from exp.strategies.ddp import DDP
from exp.strategies.placement import Machine, adopted
from exp.strategies.strategy import trainer_arguments

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(rank.global_rank)  # the network is rank 0's all the same
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

arguments = trainer_arguments(DDP(), placement=adopted(rank, "ddp", machine=Machine(gpus=0)), rank=rank)
trainer = Trainer(
    max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    **arguments,
)
module = Line()
data = torch.arange(24.0).reshape(12, 2) / 24
rows = data[rank.global_rank :: 2]
trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
note(rank, {
    "world": [trainer.world_size, trainer.global_rank, trainer.num_nodes],
    "weight": module.layer.weight.tolist(),
    "children": len(psutil.Process().children()),
    "open": [address.ip for address in listening if not address.ip.startswith(("127.", "::1"))],
})
"""


def test_lightning_trains_in_the_group_that_the_ranks_made(launched, run_directory):
    launched(TRAIN, warm=True)
    first, second = (json.loads((run_directory / f"note{rank}").read_text()) for rank in range(2))
    assert (first["world"], second["world"]) == ([2, 0, 1], [2, 1, 1])
    assert first["weight"] == second["weight"]
    assert first["children"] == second["children"] == 0
    assert first["open"] == second["open"] == []
