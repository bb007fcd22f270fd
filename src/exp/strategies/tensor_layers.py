"""Layers of which each rank holds a part: torch's own, whose class and weights are replaced in place.

A layer keeps its place and its names; its weights are plain tensors of this rank's part, so that optimizers, scalers
and hooks meet nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exp.strategies.tensor_functions import add_up, add_up_split, copy, gather, gather_partial, own, split

# Of activations `[B, T, C]`.
SEQUENCE = 1


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
    first = min(dist.get_rank(group) * -(-words // dist.get_world_size(group)), words)
    _become(layer, VocabularyEmbedding, group, first=first)
    _keep_own(layer, cuts, group)
    return cuts


def run_on_sequence(layer: nn.LayerNorm | nn.RMSNorm, group: dist.ProcessGroup) -> None:
    _become(layer, SequenceLayerNorm if isinstance(layer, nn.LayerNorm) else SequenceRMSNorm, group)


def split_input(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Its first input becomes this rank's part of the sequence."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (split(inputs[0], group, dim=SEQUENCE), *inputs[1:])

    layer.register_forward_pre_hook(hook)


def gather_output(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Its output becomes the whole sequence again."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return gather(output, group, dim=SEQUENCE)

    layer.register_forward_hook(hook)


def _become(layer: nn.Module, kind: type[nn.Module], group: dist.ProcessGroup, **settings: Any) -> None:
    layer.__class__ = kind
    layer.group = group
    for name, value in settings.items():
        setattr(layer, name, value)


def _keep_own(layer: nn.Module, cuts: dict[str, Cut], group: dist.ProcessGroup) -> None:
    for name, cut in cuts.items():
        whole = getattr(layer, name)
        part = own(whole.detach(), group, dim=cut.dim).clone()
        setattr(layer, name, nn.Parameter(part, requires_grad=whole.requires_grad))
