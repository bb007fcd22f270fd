"""Runs several networks with the same structure at once, by torch.func.vmap over stacked parameters.

https://docs.pytorch.org/tutorials/intermediate/ensembling.html
"""

from __future__ import annotations

import copy
from typing import Annotated

from annotated_types import Ge
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.parameter import UninitializedParameter

from exp.models.matching import ANY_BATCH_NORM


class Ensemble(nn.Module):
    """Ensemble of networks that get the same input and differ in their initial parameters.

    For E members, a parameter `weight` of a member is stored as `member.weight`, `[E, *shape]`, with one row per
    member. Dropout masks differ between members.

    Args:
        members: Number of members E.
        member: The first member. The other members are copies that draw new initial parameters with `reset_parameters`.
            All sizes of its layers must be given. Running statistics are not supported, because vmap does not support
            them.

    Raises:
        ValueError: The member has layers without sizes, parameters without `reset_parameters`, or running statistics.
    """

    def __init__(self, *, members: Annotated[int, Ge(1)], member: nn.Module) -> None:
        super().__init__()
        _require_stackable(member)
        self.members = members
        copies = [member, *(copy.deepcopy(member) for _ in range(members - 1))]
        for one in copies[1:]:
            for module in one.modules():
                _reset(module)
        parameters, buffers = stack_module_state(copies)
        self.member = copy.deepcopy(member)
        for name, value in parameters.items():
            owner, _, own = name.rpartition(".")
            setattr(self.member.get_submodule(owner), own, nn.Parameter(value.detach()))
        for name, value in buffers.items():
            owner, _, own = name.rpartition(".")
            self.member.get_submodule(owner).register_buffer(own, value)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all members, `[E, B, ...]`, for a batch `[B, ...]`."""
        state: dict[str, Tensor] = {**dict(self.member.named_parameters()), **dict(self.member.named_buffers())}

        def run(own: dict[str, Tensor]) -> Tensor:
            found: Tensor = functional_call(self.member, own, (x,))
            return found

        found: Tensor = vmap(run, randomness="different")(state)
        return found


def _reset(module: nn.Module) -> None:
    if _has_reset(module):
        module.reset_parameters()  # type: ignore[operator]  # checked above


def _has_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _require_stackable(member: nn.Module) -> None:
    if any(isinstance(parameter, UninitializedParameter) for parameter in member.parameters()):
        raise ValueError("the member of an ensemble has layers without sizes; expected all sizes, such as in_features")
    for name, module in member.named_modules():
        if isinstance(module, ANY_BATCH_NORM) and getattr(module, "running_mean", None) is not None:
            raise ValueError(f"{name} of the member keeps running statistics; expected track_running_stats: false")
        if list(module.parameters(recurse=False)) and not _has_reset(module):
            raise ValueError(f"{name or 'the member'} has no initialization; expected a method reset_parameters")
