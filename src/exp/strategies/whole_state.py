"""Whole tensors from the parts of several ranks, and checkpoints that are the same for all strategies.

Checkpoints have the format of a run with one process: tensors have their names in the whole module, and optimizer
states have the indices of a run with one process. torch.distributed.checkpoint.state_dict is not used for two reasons.
It gathers only DTensors, but split layers and pipeline stages are not DTensors. It also stores optimizer states by name
instead of by index (torch 2.13).

`test_each_strategy_resumes_from_another` in tests/strategies/test_whole_checkpoints.py compares the states with those
of one process.
"""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from exp.strategies.placement import Placement
from exp.strategies.strategy import module_of

T = TypeVar("T")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor. Other tensors are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Parts(Protocol):
    """Interface that combines numbers from the parts of tensors on all ranks. Every rank must call the methods."""

    def sums(self, found: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the sums of counts over all parts.

        Args:
            found: Counts of this rank's parts, `[K]`, by parameter name.
            tensors: This rank's parts by parameter name.

        Returns:
            Sums by parameter name, `[K]`, float64.
        """

    def maxima(self, found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the elementwise maxima over all parts, `[K]`, float64, by parameter name."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Shape and dtype of an entry in the state dict of the whole module."""

    shape: torch.Size
    dtype: torch.dtype


class WholeState(DDPStrategy, ABC):
    """Base class of strategies that save and load whole tensors.

    The parts of tensors are DTensors. If they are not, a subclass overrides `gather` and `part`.

    Attributes:
        holds_every_name: Whether every rank has a part of every parameter. False for stages of a pipeline.
        host_group: Process group of all ranks for data on the CPU. Without this group, NCCL would copy the pickled
            checkpoint of the whole model to the device of rank 0. None uses the run's process group.
        whole: Entries of the whole module's state dict by name. None before the module is placed.
    """

    holds_every_name: bool = True
    model_group: dist.ProcessGroup

    def __init__(self, *, placement: Placement) -> None:
        super().__init__(process_group_backend=placement.backend)
        self.placement = placement
        self.host_group: dist.ProcessGroup | None = None
        self.whole: dict[str, Whole] | None = None
        # Names of the parameters in the whole module, for each group of each optimizer.
        self._groups: list[list[list[str]]] = []

    # --- one tensor ---

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Return a whole tensor, given this rank's part.

        Every rank of the model must call this method with the same name.

        Args:
            name: Name in the module's state dict.
            part: Part of the parameter or buffer, or of a gradient or optimizer state with the same layout.
        """
        return part.full_tensor() if isinstance(part, DTensor) else part

    def part(self, name: str, whole: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor. The part has the layout of `like`."""
        if not isinstance(like, DTensor):
            return whole
        # No communication, because every rank has read the same checkpoint.
        whole = whole.to(like.to_local().device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    # --- the module ---

    def gather_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors by name, on the CPU of rank 0. On other ranks, the result is empty.

        Every rank must call this method.

        Args:
            parts: This rank's parts by name.
        """
        found = {name: self._move_to_cpu(self.gather(name, part.detach())) for name, part in parts.items()}
        return self._collect({name: whole for name, whole in found.items() if whole is not None})

    def parts_of(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of whole tensors by name, with the layouts of `like`. No data is sent."""
        return {name: self.part(name, values[name], held) for name, held in like.items() if name in values}

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        return self.gather_all(module_of(self).state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, values = module_of(self), checkpoint["state_dict"]
        if self.whole is not None:
            # This rank loads only its parts. Names that the module lacks are kept, so that torch reports them.
            unknown = {name: value for name, value in values.items() if name not in self.whole}
            held = module.state_dict()
            parts = {**unknown, **self.parts_of(values, held)}
            # copy.copy keeps the attribute with the versions of the modules. Without the versions, torch assumes that a
            # batch norm without its counter belongs to an old checkpoint.
            values = copy.copy(held)
            values.clear()
            values.update(parts)
        module.load_state_dict(values, strict=strict)

    # --- optimizers ---

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        names = self._names()
        self._groups = [
            [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that the optimizer would have in a run with one process, on rank 0.

        Every rank must call this method.
        """
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        members = self._groups[self.optimizers.index(optimizer)]
        names = self._names()
        entries = {
            names[id(parameter)]: {
                key: self._whole_entry(names[id(parameter)], value, parameter) for key, value in entry.items()
            }
            for parameter, entry in optimizer.state.items()
        }
        entries = self._collect(entries)
        index = _indices(members)
        return {
            "state": {number: entries[name] for name, number in index.items() if name in entries},
            "param_groups": [
                {**group, "params": [index[name] for name in held]}
                for group, held in zip(optimizer.state_dict()["param_groups"], members, strict=True)
            ],
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        held = dict(module_of(self).named_parameters())
        for optimizer, owned, saved in zip(self.optimizers, self._groups, checkpoint["optimizer_states"], strict=True):
            index = _indices(owned)
            # The indices count only the parameters of this rank, because torch's optimizer contains only these.
            own = {name: number for number, name in enumerate(name for name in index if name in held)}
            state = {
                own[name]: {
                    key: self._part_of_entry(name, value, held[name])
                    for key, value in saved["state"][index[name]].items()
                }
                for name in own
                if index[name] in saved["state"]
            }
            groups = [
                {**group, "params": [own[name] for name in names if name in own]}
                for group, names in zip(saved["param_groups"], owned, strict=True)
            ]
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _whole_entry(self, name: str, value: object, parameter: Tensor) -> object:
        """Return the whole value of one entry of a parameter's optimizer state.

        A tensor with the shape of the parameter is split like the parameter. Its parts are gathered.
        """
        if not isinstance(value, Tensor):
            return value
        in_parts = isinstance(value, DTensor) or (value.dim() > 0 and value.shape == parameter.shape)
        return self._move_to_cpu(self.gather(name, value) if in_parts else value)

    def _part_of_entry(self, name: str, value: object, parameter: Tensor) -> object:
        assert self.whole is not None
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != self.whole[name].shape:
            return value
        return self.part(name, value, parameter)

    def _move_to_cpu(self, whole: Tensor) -> Tensor | None:
        """Return a whole tensor on the CPU, because a device may be too small for all of them.

        Return None if this rank does not need the tensor.
        """
        return whole.cpu() if self.is_global_zero or not self.holds_every_name else None

    def _collect(self, mine: dict[str, T]) -> dict[str, T]:
        """Return the entries of all ranks of the first model, on rank 0. On other ranks, return an empty mapping."""
        assert self.whole is not None
        if self.holds_every_name:
            return mine if self.is_global_zero else {}
        if self.placement.data_rank(self.global_rank) != 0:
            return {}
        if not self.is_global_zero:
            dist.send_object_list([mine], dst=0, group=self.host_group)
            return {}
        found = dict(mine)
        for source in range(1, self.placement.model_ranks):
            received: list[dict[str, T]] = [{}]
            dist.recv_object_list(received, src=source, group=self.host_group)
            found |= received[0]
        return {name: found[name] for name in [*self.whole, *found] if name in found}

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in module_of(self).named_parameters()}


def _indices(members: list[list[str]]) -> dict[str, int]:
    """Return the index that each parameter has in the optimizer of a run with one process, by name."""
    return {name: number for number, name in enumerate(name for group in members for name in group)}
