"""Low-rank adaptation (LoRA): weights are frozen, and a trained product of two thin matrices is added to each weight.

    weight = original + alpha / rank * b a        a [rank, in], b [out, rank], b is 0 at the start

E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, equation 3. The sum is computed whenever a layer
reads its weight (torch.nn.utils.parametrize). LoRA therefore also works in convolutions, attention and torch's fast
paths.

lora: {layers: ["*.query", "*.value"], rank: 8, alpha: 16, trained: ["classifier.*"]}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from exp.errors import ErrorDetails, RunError, invalid_value, raise_errors
from exp.models.freezing import Statistics, find_frozen
from exp.models.matching import find_parameters
from exp.spelling import among

# torch.nn.utils.parametrize inserts this text between the names of a layer and its weight.
INSIDE = ".parametrizations."
ORIGINAL, OWN = ".original", (".0.a", ".0.b", ".0.alpha")


class LowRank(nn.Module):
    """The low-rank product that is added to a weight.

    The product is computed as a matrix: its rows are the first axis of the weight, its columns all other axes.

    Args:
        weight: The weight. The matrices have its device and its dtype.
        rank: The rank of the product.
        alpha: The product is multiplied by alpha / rank.
    """

    alpha: Tensor

    def __init__(self, weight: Tensor, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Parameter(weight.new_empty(rank, weight[0].numel()))
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = alpha / rank
        # alpha is a buffer, so that the state dict contains all that `merge_state_dict` needs.
        self.register_buffer("alpha", torch.tensor(float(alpha), device=weight.device))

    def forward(self, original: Tensor) -> Tensor:
        # Autocast would round the product to half precision. The meta device has no autocast.
        device = original.device.type
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            return original + self.scale * (self.b @ self.a).view_as(original)


def adapt(
    network: nn.Module,
    *,
    layers: Sequence[str],
    rank: int,
    alpha: float | None,
    trained: Sequence[str] = (),
    batch_norm: Statistics = "train",
) -> None:
    """Add a LowRank to each weight that a pattern matches, in place, and freeze all other parameters.

    Args:
        network: The network.
        layers: Patterns; see `find_parameters`. Matched weights with two or more axes are adapted.
        rank: See LowRank.
        alpha: See LowRank. None uses the rank.
        trained: Patterns of parameters that are trained without LoRA, such as a new head, even if `layers` matches
            them.
        batch_norm: See `find_frozen`.

    Raises:
        ConfigError: A pattern matches no parameter, or matches only parameters that cannot be adapted. Each such
            pattern has an error in the exception.
    """
    errors: list[ErrorDetails] = []
    found = [_weights(network, one, key=f"lora.layers.{index}", errors=errors)
             for index, one in enumerate(layers)]  # fmt: skip
    whole = [find_parameters(network, one, key=f"lora.trained.{index}", errors=errors)
             for index, one in enumerate(trained)]  # fmt: skip
    raise_errors(errors)
    targets = [name for name in dict.fromkeys(itertools.chain(*found)) if name not in set(itertools.chain(*whole))]
    unfreeze = {0: trained} if trained else {}
    find_frozen(network, parameters=["*"], batch_norm=batch_norm, unfreeze=unfreeze).apply(network)
    for name in targets:
        path, _, own = name.rpartition(".")
        module = network.get_submodule(path)
        weight = module.get_parameter(own)
        added = LowRank(weight, rank=rank, alpha=rank if alpha is None else alpha)
        parametrize.register_parametrization(module, own, added)


def is_adapted(network: nn.Module) -> bool:
    """Return whether the network contains a LowRank."""
    return any(isinstance(module, LowRank) for module in network.modules())


@torch.no_grad()
def merge(network: nn.Module) -> None:
    """Add each low-rank product to its weight and remove the LowRank modules, in place.

    remove_parametrizations of torch is not used, because it changes the class of an adapted layer. Copies of the layer
    have the same class and would fail (seen in torch 2.13, and tested).

    Raises:
        RunError: A layer has parametrizations other than LowRank.
    """
    for path, module in list(network.named_modules()):
        held = module.parametrizations if parametrize.is_parametrized(module) else None
        if not isinstance(held, nn.ModuleDict) or not is_adapted(held):
            continue
        if not all(isinstance(one, LowRank) for made in held.children() for one in made.children()):
            raise RunError(f"layer {path} has parametrizations other than LoRA, so that LoRA cannot be merged")
        weights = {own: getattr(module, own).detach() for own in held}
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]
        for own, weight in weights.items():
            module.register_parameter(own, nn.Parameter(weight))


def merge_state_dict(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of an adapted network with each low-rank product added to its weight.

    A state dict without LoRA is returned unchanged.
    """
    found = originals(weights)
    for name, tensor in weights.items():
        base = name.removesuffix(ORIGINAL)
        if name.endswith(ORIGINAL) and all(base + own in weights for own in OWN):
            a, b, alpha = (weights[base + own] for own in OWN)
            product = (b.double() @ a.double()).view(tensor.shape) * (alpha.double() / len(a))
            found[base.replace(INSIDE, ".")] = (tensor.double() + product).to(tensor.dtype)
    return found


def originals(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict without those of LoRA. The names are the names before LoRA was added."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base = next((name.removesuffix(end) for end in (ORIGINAL, *OWN) if name.endswith(end)), name)
        is_own = base != name and all(base + own in tensors for own in (ORIGINAL, *OWN))
        if not is_own:
            found[name] = tensor
        elif name.endswith(ORIGINAL):
            found[base.replace(INSIDE, ".")] = tensor
    return found


def _weights(network: nn.Module, pattern: str, *, key: str, errors: list[ErrorDetails]) -> list[str]:
    """Return the names of the weights that a pattern matches and that can be adapted.

    If the pattern matches only weights that cannot be adapted, add an error to `errors`.
    """
    meant = find_parameters(network, pattern, key=key, errors=errors)
    found = [name for name in meant if _is_weight(network, name)]
    if meant and not found:
        because = f"which matches {among(meant, count=4)}"
        expected = "a layer with a weight of two or more axes that is not recurrent, such as Linear or Embedding"
        errors.append(invalid_value(key, pattern, expected, because=because))
    return found


def _is_weight(network: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    # Recurrent layers read their weights from a private list, which bypasses the parametrization.
    is_recurrent = isinstance(network.get_submodule(path), nn.RNNBase)
    return "weight" in own and network.get_parameter(name).dim() > 1 and not is_recurrent
