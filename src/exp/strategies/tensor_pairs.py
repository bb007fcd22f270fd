"""Two linear layers in turn, of which the first can be cut by columns and the second by rows, in a chain of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# What these do to a number depends on that number alone, so that a part of the values is enough.
ELEMENTWISE = (
    "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip


def pairs(network: nn.Module) -> dict[str, list[str]]:
    """Names of layers to `column` or `row`: in torch.nn.Sequential, and in models that call their layers in turn."""
    from torch import nn

    from exp.models.containers import ProgramModel

    found: dict[str, list[str]] = {}
    for path, module in network.named_modules():
        if isinstance(module, ProgramModel):
            chain = module.chain
        else:
            chain = [name for name, _ in module.named_children()] if type(module) is nn.Sequential else []
        found |= _pairs_of(network, [f"{path}.{name}".lstrip(".") for name in chain])
    return found


def _pairs_of(network: nn.Module, chain: Sequence[str]) -> dict[str, list[str]]:
    from torch import nn

    found: dict[str, list[str]] = {}
    first: str | None = None
    for name in chain:
        layer = network.get_submodule(name)
        if type(layer) is nn.Linear:
            if first is None:
                first = name
            else:
                found |= {first: ["column"], name: ["row"]}
                first = None
        elif type(layer).__name__ not in ELEMENTWISE or not type(layer).__module__.startswith("torch.nn."):
            first = None
    return found
