"""Low-rank adaptation (LoRA): chosen weights stay as they are, and what they learn is a product of two thin matrices.

    weight = original + alpha / rank * b a        a [rank, in], b [out, rank], at first 0

E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, equation 3. The sum is made where a layer reads
its weight (torch.nn.utils.parametrize), so that it holds for whatever reads it: convolutions, attention, torch's own
fast paths.

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

from exp.errors import ConfigError, ErrorDetails, RunError, raise_errors
from exp.models.freezing import Statistics, find_frozen
from exp.models.matching import parameters_meant
from exp.spelling import among

# What torch.nn.utils.parametrize puts between a layer's name and its weight's.
INSIDE = ".parametrizations."
ORIGINAL, OWN = ".original", (".0.a", ".0.b", ".0.alpha")


class LowRank(nn.Module):
    """What is added to one weight, whose first axis is that of the outputs; the others count as one.

    weight: that it is for; its device and dtype are taken.
    rank: of the product. alpha: it is scaled by alpha / rank.
    """

    alpha: Tensor

    def __init__(self, weight: Tensor, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Parameter(weight.new_empty(rank, weight[0].numel()))
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = alpha / rank
        # So that a state dict alone says what the weights are.
        self.register_buffer("alpha", torch.tensor(float(alpha), device=weight.device))

    def forward(self, original: Tensor) -> Tensor:
        # Under autocast the product of the two would be rounded to half precision. The meta device knows none.
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
    """Let what `layers` means learn by LowRank, in place, and freeze everything else.

    layers: patterns, see `parameters_meant`; of what they mean, the weights of two axes and more.
    rank, alpha: see LowRank; None is alpha = rank.
    trained: patterns of what learns whole, such as a new head, whatever `layers` means.
    batch_norm: see `find_frozen`.

    Raises: ConfigError for a pattern that means nothing, or no weight that this can be done to.
    """
    errors: list[ErrorDetails] = []
    found = [_weights(network, one, key=f"lora.layers.{index}", errors=errors)
             for index, one in enumerate(layers)]  # fmt: skip
    whole = [_meant(network, one, key=f"lora.trained.{index}", errors=errors) for index, one in enumerate(trained)]
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
    """Whether a part of the network learns by LowRank."""
    return any(isinstance(module, LowRank) for module in network.modules())


@torch.no_grad()
def merge(network: nn.Module) -> None:
    """Add what was learnt to the weights, in place: the network is one without LowRank again, as before `adapt`.

    Relied on, and tested: torch puts a class derived from the layer's own in its place, which copies of a layer share
    (seen in torch 2.13); remove_parametrizations changes that class, and so spoils the copies.

    Raises: RunError for a layer with parametrizations of another kind beside it.
    """
    for path, module in list(network.named_modules()):
        held = module.parametrizations if parametrize.is_parametrized(module) else None
        if not isinstance(held, nn.ModuleDict) or not is_adapted(held):
            continue
        if not all(isinstance(one, LowRank) for made in held.children() for one in made.children()):
            raise RunError(f"{path} has other parametrizations beside LoRA's; expected LoRA alone, to merge it")
        weights = {own: getattr(module, own).detach() for own in held}
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]
        for own, weight in weights.items():
            module.register_parameter(own, nn.Parameter(weight))


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of an adapted network as that of the same network without LowRank; others stay as they are."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        base = name.removesuffix(ORIGINAL)
        if name.endswith(ORIGINAL) and all(base + own in weights for own in OWN):
            a, b, alpha = (weights[base + own] for own in OWN)
            product = (b.double() @ a.double()).view(tensor.shape) * (alpha.double() / len(a))
            found[base.replace(INSIDE, ".")] = (tensor.double() + product).to(tensor.dtype)
        elif not any(name.endswith(own) and name.removesuffix(own) + ORIGINAL in weights for own in OWN):
            found[name] = tensor
    return found


def originals(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that they have without LowRank, in a state dict; what it adds is left out."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base = next((name.removesuffix(end) for end in (ORIGINAL, *OWN) if name.endswith(end)), name)
        is_own = base != name and all(base + own in tensors for own in (ORIGINAL, *OWN))
        if not is_own:
            found[name] = tensor
        elif name.endswith(ORIGINAL):
            found[base.replace(INSIDE, ".")] = tensor
    return found


def _meant(network: nn.Module, pattern: str, *, key: str, errors: list[ErrorDetails]) -> list[str]:
    try:
        return parameters_meant(network, pattern, key=key)
    except ConfigError as error:
        errors += error.errors
        return []


def _weights(network: nn.Module, pattern: str, *, key: str, errors: list[ErrorDetails]) -> list[str]:
    """The weights that a pattern means."""
    meant = _meant(network, pattern, key=key, errors=errors)
    found = [name for name in meant if _is_weight(network, name)]
    if meant and not found:
        got = f"{pattern!r}, which means {among(meant, count=4)}"
        expected = "layers with a weight of two axes or more, such as Linear, Conv2d and Embedding; no recurrent ones"
        errors.append(ErrorDetails(key=key, got=got, expected=expected))
    return found


def _is_weight(network: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    # Recurrent layers keep their weights in a list of their own, past which a parametrization has no say.
    is_recurrent = isinstance(network.get_submodule(path), nn.RNNBase)
    return "weight" in own and network.get_parameter(name).dim() > 1 and not is_recurrent
