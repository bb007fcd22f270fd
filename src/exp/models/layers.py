"""The one layer that YAML models need and torch does not have: a parameter on its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exp.models.initialisation import Scheme, fill


class Parameter(nn.Module):
    """A parameter among a model's layers, such as a class token, a scale or learned positions.

    In a container of models/containers.py the parameter itself takes this layer's place: its key in the state dict is
    the layer's name alone, and a program uses the name as a tensor. `repeat` of it makes an nn.ParameterList.

    shape: of the parameter; [] makes a single number.
    initialisation: a scheme of models/initialisation.py.
    trainable: false makes a constant that is saved but does not learn.
    """

    def __init__(self, *, shape: Sequence[int], initialisation: Scheme = "zeros", trainable: bool = True) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(tuple(shape)), requires_grad=trainable)
        fill(self.value, initialisation)

    def forward(self) -> Tensor:
        """The parameter, of the shape given."""
        return self.value
