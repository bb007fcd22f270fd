"""Lightning trains in the process group of the ranks, which other machines cannot reach.

In a rank of exp, Lightning 2.6.6 starts no process and opens no port.
"""

import json

import torch

from exp.strategies.placement import Machine, placement
from exp.strategies.process_group import join
from exp.strategies.rank import ALONE

TRAIN = """
torch = joined(rank)
import psutil
from lightning.pytorch import LightningModule, Trainer
from exp.strategies.ddp import DDP
from exp.strategies.placement import Machine, adopt_placement
from exp.strategies.strategy import trainer_arguments

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(rank.global_rank)  # ddp replaces the network by that of rank 0
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

arguments = trainer_arguments(DDP(), placement=adopt_placement(rank, "ddp", machine=Machine(gpus=0)), rank=rank)
trainer = Trainer(
    max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    **arguments,
)
module = Line()
rows = torch.arange(24.0).reshape(12, 2)[rank.global_rank :: 2] / 24
trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
note(rank, {
    "world": [trainer.world_size, trainer.global_rank, trainer.num_nodes],
    "weight": module.layer.weight.tolist(),
    "children": len(psutil.Process().children()),
    "addresses": [connection.laddr.ip for connection in psutil.Process().net_connections("inet")],
})
"""


def test_lightning_trains_in_a_group_without_open_ports(launched, run_directory):
    launched(TRAIN, warm=True)
    first, second = (json.loads((run_directory / f"note{rank}").read_text()) for rank in range(2))
    assert (first["world"], second["world"]) == ([2, 0, 1], [2, 1, 1])
    assert first["weight"] == second["weight"]
    assert first["children"] == second["children"] == 0
    addresses = first["addresses"] + second["addresses"]
    assert addresses, "gloo must have sockets, otherwise the test does not find them"
    assert all(address.removeprefix("::ffff:").startswith(("127.", "::1")) for address in addresses)


def test_one_rank_has_no_process_group():
    join(ALONE, placement("ddp", devices=1, machine=Machine(gpus=0)), timeout_seconds=60)
    assert not torch.distributed.is_initialized()
