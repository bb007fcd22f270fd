"""A plan carried out: layers cut in place, and constants that count parts divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from exp.models.containers import ProgramModel
from exp.strategies.tensor_layers import (
    Cut,
    cut_column,
    cut_row,
    cut_vocabulary,
    gather_output,
    run_on_sequence,
    split_input,
)
from exp.strategies.tensor_plan import Plan


def carry_out(plan: Plan, network: nn.Module, group: dist.ProcessGroup) -> dict[str, Cut]:
    """Leaves each rank of the group its part of every layer in the plan.

    Returns: how each parameter that is in parts was cut, by its name in the network.
    """
    cuts: dict[str, Cut] = {}
    for name, words in plan.layers.items():
        layer = network.get_submodule(name)
        for parameter, cut in _carry_out(layer, words, group).items():
            cuts[f"{name}.{parameter}"] = cut
    for name, constants in plan.constants.items():
        container = network.get_submodule(name)
        assert isinstance(container, ProgramModel)
        container.rebind({constant: container.constants[constant] // group.size() for constant in constants})
    return cuts


def _carry_out(layer: nn.Module, words: Sequence[str], group: dist.ProcessGroup) -> dict[str, Cut]:
    cuts: dict[str, Cut] = {}
    for word in words:
        if word in ("column", "column_whole", "column_of_sequence"):
            cuts |= cut_column(
                layer, group, takes_sequence=word == "column_of_sequence", gives_whole=word == "column_whole"
            )
        elif word in ("row", "row_to_sequence"):
            cuts |= cut_row(layer, group, gives_sequence=word == "row_to_sequence")
        elif word == "vocabulary":
            cuts |= cut_vocabulary(layer, group)
        elif word == "sequence":
            run_on_sequence(layer, group)
        elif word == "split_sequence":
            split_input(layer, group)
        else:
            gather_output(layer, group)
    return cuts
