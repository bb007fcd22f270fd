"""Layers that ranks share: what the ranks send each other, the layers in parts, and a plan carried out on a network.

The functions can be differentiated any number of times. Each stands for two collectives, of the forward and of the
backward (Shoeybi et al., Megatron-LM, 2019, section 3; Korthikanti et al., Reducing Activation Recomputation, 2022,
section 4.2.2, for those along the sequence).

    name            forward                 backward                where
    copy            nothing                 adds up                 whole values enter a layer in parts
    add_up          adds up                 nothing                 a layer in parts gives whole values
    gather          joins parts             takes its own           parts become whole, and are used alike by all
    split           takes its own           joins parts             whole values become parts
    gather_partial  joins parts             adds up, takes its own  parts become whole, used by each rank in its way
    add_up_split    adds up, takes its own  joins parts             a layer in parts gives parts of the sequence

The layers are torch's own, whose class and weights are replaced in place. A layer keeps its place and its names; its
weights are plain tensors of this rank's part, so that optimizers, scalers and hooks meet nothing new.

Why not torch.distributed.tensor.parallel (seen in torch 2.13, gloo, float64): values and first gradients of gpt agree
to 1e-16, along the sequence and over the vocabulary, too, but the backward of a DTensor that changes its layout cannot
be differentiated again. A penalty of gradients then trains by wrong gradients, without an error: of two cut layers the
norms were 0.27 and 0.19, where the whole network's are 5.37 and 6.72. `test_a_penalty_of_gradients` and
`test_functions_can_be_differentiated_twice` (tests/strategies/test_tensor_parallel.py) forbid it.
`clip_grad_norm_` and fused AdamW refuse parameters of which only some are DTensors, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from exp.errors import RunError
from exp.models.containers import ProgramModel
from exp.strategies.tensor_plan import Plan, count_of

Group = dist.ProcessGroup
# torch 2.13 has new names, and warns of the old ones.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Of activations `[B, T, C]`.
SEQUENCE = 1


def copy(value: Tensor, group: Group) -> Tensor:
    return _exchange(value, _same, partial(_sum, group=group))


def add_up(value: Tensor, group: Group) -> Tensor:
    return _exchange(value, partial(_sum, group=group), _same)


def gather(value: Tensor, group: Group, *, dim: int, size: int | None = None) -> Tensor:
    """size: of the whole along dim; None where the ranks have equal parts."""
    size = size or value.shape[dim] * group.size()
    return _exchange(value, partial(join, group=group, dim=dim, size=size), partial(own, group=group, dim=dim))


def split(value: Tensor, group: Group, *, dim: int) -> Tensor:
    """Raises: RunError where the ranks would get unequal parts."""
    require_even(value.shape[dim], group, dim=dim)
    whole = partial(join, group=group, dim=dim, size=value.shape[dim])
    return _exchange(value, partial(own, group=group, dim=dim), whole)


def gather_partial(value: Tensor, group: Group, *, dim: int) -> Tensor:
    whole = partial(join, group=group, dim=dim, size=value.shape[dim] * group.size())
    return _exchange(value, whole, partial(_sum_own, group=group, dim=dim))


def add_up_split(value: Tensor, group: Group, *, dim: int) -> Tensor:
    """Raises: RunError where the ranks would get unequal parts."""
    require_even(value.shape[dim], group, dim=dim)
    whole = partial(join, group=group, dim=dim, size=value.shape[dim])
    return _exchange(value, partial(_sum_own, group=group, dim=dim), whole)


def require_even(size: int, group: Group, *, dim: int) -> None:
    if size % group.size():
        raise RunError(
            f"dimension {dim} is {size}, which {group.size()} ranks cannot share evenly; expected a "
            "multiple. Write strategy.sequence=false, or another length"
        )


def own(value: Tensor, group: Group, *, dim: int) -> Tensor:
    """This rank's part along dim. All have ceil(size / ranks) of it, but for the last ones, which may have less."""
    size, ranks = value.shape[dim], group.size()
    each = -(-size // ranks)
    first = min(group.rank() * each, size)
    return value.narrow(dim, first, min(each, size - first)).contiguous()


def join(part: Tensor, group: Group, *, dim: int, size: int) -> Tensor:
    """The whole of which `own` is the part; size: of the whole along dim."""
    ranks = group.size()
    each = -(-size // ranks)
    part = part.movedim(dim, 0)
    if part.shape[0] < each:
        # gloo and NCCL want equal parts.
        part = torch.cat([part, part.new_zeros(each - part.shape[0], *part.shape[1:])])
    part = part.contiguous()
    whole = part.new_empty(ranks * each, *part.shape[1:])
    _gather_into(whole, part, group=group)
    return whole[:size].movedim(0, dim).contiguous()


def _same(value: Tensor) -> Tensor:
    return value.view_as(value)


def _sum(value: Tensor, group: Group) -> Tensor:
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, group=group)
    return value


def _sum_own(value: Tensor, group: Group, *, dim: int) -> Tensor:
    value = value.movedim(dim, 0).contiguous()
    part = value.new_empty(value.shape[0] // group.size(), *value.shape[1:])
    _scatter_from(part, value, group=group)
    return part.movedim(0, dim).contiguous()


Collective = Callable[[Tensor], Tensor]


class _Exchange(Function):
    """One collective forward and another backward, which has these two the other way round as its own."""

    @staticmethod
    def forward(ctx: _Kept, value: Tensor, there: Collective, back: Collective) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(value)

    @staticmethod
    def backward(ctx: _Kept, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(gradient, ctx.back, ctx.there), None, None


class _Kept(Protocol):
    """What an _Exchange keeps between its forward and its backward."""

    there: Collective
    back: Collective


_exchange: Callable[[Tensor, Collective, Collective], Tensor] = _Exchange.apply


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a parameter is in parts: along which dimension, and its size there in the whole."""

    dim: int
    size: int


class ColumnLinear(nn.Linear):
    """Each rank gives a part of the outputs. Input `[B, ..., C]` whole, or a part of the sequence."""

    group: dist.ProcessGroup
    takes_sequence: bool
    gives_whole: bool
    whole_features: int

    def forward(self, input: Tensor) -> Tensor:
        x = gather_partial(input, self.group, dim=SEQUENCE) if self.takes_sequence else copy(input, self.group)
        y = F.linear(x, self.weight, self.bias)
        return gather(y, self.group, dim=y.dim() - 1, size=self.whole_features) if self.gives_whole else y


class RowLinear(nn.Linear):
    """Each rank takes a part of the inputs, as a ColumnLinear gives them. Output whole, or a part of the sequence."""

    group: dist.ProcessGroup
    gives_sequence: bool

    def forward(self, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight)
        if self.gives_sequence:
            y = add_up_split(y, self.group, dim=SEQUENCE)
            # Each rank adds the bias to its own part: its gradient is in parts, too.
            return y if self.bias is None else y + copy(self.bias, self.group)
        y = add_up(y, self.group)
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Embedding):
    """Each rank has a part of the vocabulary, and gives zeros for the other words. Input and output whole."""

    group: dist.ProcessGroup
    first: int

    def forward(self, input: Tensor) -> Tensor:
        place = input - self.first
        elsewhere = (place < 0) | (place >= self.weight.shape[0])
        # An empty part would have no place to look up at all.
        if self.weight.shape[0] == 0:
            found = self.weight.new_zeros(*input.shape, self.embedding_dim) + 0.0 * self.weight.sum()
        else:
            found = F.embedding(place.masked_fill(elsewhere, 0), self.weight)
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return add_up(found, self.group)


class SequenceLayerNorm(nn.LayerNorm):
    """On a part of the sequence: the gradients of its weights are added up over the parts."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (None if one is None else copy(one, self.group) for one in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class SequenceRMSNorm(nn.RMSNorm):
    """On a part of the sequence: the gradient of its weight is added up over the parts."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else copy(self.weight, self.group)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def cut_column(
    layer: nn.Linear, group: dist.ProcessGroup, *, takes_sequence: bool = False, gives_whole: bool = False
) -> dict[str, Cut]:
    """Returns: how each of the layer's parameters is in parts now, by its name in the layer."""
    cuts = {name: Cut(dim=0, size=layer.out_features) for name, _ in layer.named_parameters()}
    _become(
        layer, ColumnLinear, group,
        takes_sequence=takes_sequence, gives_whole=gives_whole, whole_features=layer.out_features,
    )  # fmt: skip
    _keep_own(layer, cuts, group)
    layer.out_features = layer.weight.shape[0]
    return cuts


def cut_row(layer: nn.Linear, group: dist.ProcessGroup, *, gives_sequence: bool = False) -> dict[str, Cut]:
    """See cut_column. The bias stays whole on every rank."""
    cuts = {"weight": Cut(dim=1, size=layer.in_features)}
    _become(layer, RowLinear, group, gives_sequence=gives_sequence)
    _keep_own(layer, cuts, group)
    layer.in_features = layer.weight.shape[1]
    return cuts


def cut_vocabulary(layer: nn.Embedding, group: dist.ProcessGroup) -> dict[str, Cut]:
    """See cut_column."""
    words = layer.num_embeddings
    cuts = {"weight": Cut(dim=0, size=words)}
    first = min(group.rank() * -(-words // group.size()), words)
    _become(layer, VocabularyEmbedding, group, first=first)
    _keep_own(layer, cuts, group)
    return cuts


def run_on_sequence(layer: nn.LayerNorm | nn.RMSNorm, group: dist.ProcessGroup) -> None:
    _become(layer, SequenceLayerNorm if isinstance(layer, nn.LayerNorm) else SequenceRMSNorm, group)


def split_input(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Its first input becomes this rank's part of the sequence."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (split(inputs[0], group, dim=SEQUENCE), *inputs[1:])

    layer.register_forward_pre_hook(hook)


def gather_output(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Its output becomes the whole sequence again."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return gather(output, group, dim=SEQUENCE)

    layer.register_forward_hook(hook)


def _become(layer: nn.Module, kind: type[nn.Module], group: dist.ProcessGroup, **settings: bool | int) -> None:
    layer.__class__ = kind
    for name, value in {"group": group, **settings}.items():
        setattr(layer, name, value)


def _keep_own(layer: nn.Module, cuts: dict[str, Cut], group: dist.ProcessGroup) -> None:
    for name, cut in cuts.items():
        whole = getattr(layer, name)
        part = own(whole.detach(), group, dim=cut.dim).clone()
        setattr(layer, name, nn.Parameter(part, requires_grad=whole.requires_grad))


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
        container.rebind({constant: count_of(container, constant) // group.size() for constant in constants})
    return cuts


def _carry_out(layer: nn.Module, words: Sequence[str], group: dist.ProcessGroup) -> dict[str, Cut]:
    cuts: dict[str, Cut] = {}
    for word in words:
        # The plan has seen that each word stands for a layer of its kind.
        if word in ("column", "column_whole", "column_of_sequence"):
            assert isinstance(layer, nn.Linear)
            cuts |= cut_column(
                layer, group, takes_sequence=word == "column_of_sequence", gives_whole=word == "column_whole"
            )
        elif word in ("row", "row_to_sequence"):
            assert isinstance(layer, nn.Linear)
            cuts |= cut_row(layer, group, gives_sequence=word == "row_to_sequence")
        elif word == "vocabulary":
            assert isinstance(layer, nn.Embedding)
            cuts |= cut_vocabulary(layer, group)
        elif word == "sequence":
            assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
            run_on_sequence(layer, group)
        elif word == "split_sequence":
            split_input(layer, group)
        else:
            gather_output(layer, group)
    return cuts
