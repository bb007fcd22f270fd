"""Directions in the space of a network's weights, along which its loss is looked at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exp.functions.at_least_float32 import at_least_float32


def random_direction(parameters: Mapping[str, Tensor], *, generator: torch.Generator) -> dict[str, Tensor]:
    """Normal numbers, filter by filter of the same norm as the weights; zero for biases and the scales of norms.

    Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets", arXiv:1712.09913, section 4: so that two networks
    with the same function have the same landscape, one with large weights and one with small. A filter is what one
    index of a weight's first axis gives: of a linear layer the weights into one output. What has one axis is left as it
    is, as in the authors' own code.

    parameters: by name, of any shape. generator: on the CPU, so that a seed gives one direction on every device.
    """
    direction = {}
    for name, parameter in parameters.items():
        if parameter.dim() < 2:
            direction[name] = torch.zeros_like(parameter)
            continue
        wide = at_least_float32(parameter.dtype)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=wide).to(parameter.device)
        axes = tuple(range(1, parameter.dim()))
        size = torch.linalg.vector_norm(parameter.to(wide), dim=axes, keepdim=True)
        direction[name] = drawn / torch.linalg.vector_norm(drawn, dim=axes, keepdim=True) * size
    return direction


def downhill(gradients: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Against the gradient, as long as `like`; zero where there is no gradient."""
    found = {name: torch.zeros_like(like[name]) if one is None else -one for name, one in gradients.items()}
    factor = torch.nan_to_num(length(like) / length(found), nan=0.0, posinf=0.0)
    return {name: one.to(at_least_float32(one.dtype)) * factor.to(one.device) for name, one in found.items()}


def length(direction: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all of it, 0-d, in float32 at least."""
    norms = [torch.linalg.vector_norm(one, dtype=at_least_float32(one.dtype)) for one in direction.values()]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def moved(parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor], distance: float) -> dict[str, Tensor]:
    """Copies of the parameters so far along; at 0.0 with the same bits."""
    return {
        name: (one + distance * direction[name]).to(one.dtype) if distance else one.detach().clone()
        for name, one in parameters.items()
    }
