"""Lightning's side of a pipeline. Imported in a rank only, for it imports Lightning.

Each rank reads the whole network, cuts it, and keeps the layers of its own stages: the parameters of the others are
taken out, so that optimizer and memory are of these alone. Checkpoints are whole (whole_state.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from exp.models.inference import example_inputs
from exp.models.parts import split
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.pipeline_stages import Stage, Stages
from exp.strategies.placement import Placement

if TYPE_CHECKING:
    from exp.strategies.pipeline import Pipeline


class PipelineStrategy(ModelParallel):
    """One rank of a pipeline, or of several that share the data.

    stages: what this rank does, once the model is placed.
    """

    holds_every_name = False

    def __init__(self, *, placement: Placement, plan: Pipeline) -> None:
        super().__init__(placement=placement)
        self.plan = plan
        self.stages: Stages | None = None
        self.back_group: dist.ProcessGroup | None = None

    def _make_groups(self) -> None:
        super()._make_groups()
        ranks, together = self.placement.world_size, self.placement.model_ranks
        models = [list(range(first, first + together)) for first in range(0, ranks, together)]
        self.back_group, _ = dist.new_subgroups_by_enumeration(models)

    def model_to_device(self) -> None:
        if self.stages is not None:
            super().model_to_device()
            return
        # The whole network may not fit on the device: only a rank's own layers go there, by place_model.
        module = self.lightning_module
        network = module.network
        module.network = nn.Identity()
        module.to(self.root_device)
        module.network = network

    def place_model(self) -> None:
        assert self.model_group is not None
        assert self.back_group is not None
        module, ranks = self.lightning_module, self.placement.model_ranks
        network = module.network
        owners = self.plan.owners(ranks)
        parts = split(
            network,
            count=len(owners),
            layers=self.plan.layers,
            inputs=example_inputs(module.trainer.datamodule.data.spec, device="meta"),
        )
        place = dist.get_rank(self.model_group)
        mine = [index for index, owner in enumerate(owners) if owner == place]
        keep_only(network, {name for index in mine for name in parts.parts[index].tensors})
        network.to(self.root_device)
        stages = [Stage(network, parts, index, around=self.precision_plugin.train_step_context) for index in mine]
        self.stages = Stages(
            stages,
            owner=owners,
            group=self.model_group,
            back_group=self.back_group,
            device=self.root_device,
            schedule=self.plan.schedule.torch_name,
        )
        module.pipeline_over(self.stages, split=parts, count=self._count())

    def _count(self) -> int:
        data = self.lightning_module.trainer.datamodule.data
        return self.plan.microbatches_of(data.batch_size // self.placement.data_ranks, self.placement.model_ranks)


def keep_only(network: nn.Module, names: set[str]) -> None:
    """Takes all other parameters and buffers out of a network; its layers stay, without their numbers."""
    for path, module in network.named_modules():
        prefix = f"{path}." if path else ""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, _ in tensors:
            if prefix + name not in names:
                setattr(module, name, None)
