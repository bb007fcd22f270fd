"""What of a network does not learn: parameters by name, by layer or by type; its BatchNorm; until which epoch.

freeze: {parameters: ["encoder.*", Embedding], batch_norm: eval, unfreeze: {10: ["encoder.3.*"]}}
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from exp.errors import ConfigError, ErrorDetails, raise_errors
from exp.models.matching import ANY_BATCH_NORM, parameters_meant

Statistics = Literal["train", "eval"]
NEVER = float("inf")
UNFREEZE = "freeze.unfreeze"


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """What of one network does not learn, and until when.

    until: name of a parameter to the epoch in which it begins to learn, NEVER where none is.
    norms: path of a BatchNorm that keeps its statistics to the epoch in which it goes on with them.
    """

    until: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        """Whether an epoch of training changes what learns."""
        return any(epoch < NEVER for epoch in self.until.values())

    def learns_at_first(self, network: nn.Module) -> bool:
        """Whether anything learns in the first epoch."""
        return any(one.requires_grad and name not in self.until for name, one in network.named_parameters())

    def apply(self, network: nn.Module) -> None:
        """Freeze what never learns; what learns later is left as it is, so that an optimizer takes it."""
        self._set({name: False for name, epoch in self.until.items() if epoch == NEVER}, network)
        self._hold({path: True for path, epoch in self.norms.items() if epoch == NEVER}, network)

    def begin_epoch(self, network: nn.Module, epoch: int) -> None:
        """Freeze and unfreeze as in this epoch, counted from 0; a function of the epoch alone."""
        self._set({name: end <= epoch for name, end in self.until.items()}, network)
        self._hold({path: end > epoch for path, end in self.norms.items()}, network)

    def learning(self, epoch: int) -> frozenset[str]:
        """The names of what learns in an epoch, of what does not in all of them."""
        return frozenset(name for name, end in self.until.items() if end <= epoch)

    def _set(self, learning: Mapping[str, bool], network: nn.Module) -> None:
        for name, one in network.named_parameters(remove_duplicate=False):
            if name in learning:
                one.requires_grad = learning[name]  # by this name a lazy one has it, too

    def _hold(self, held: Mapping[str, bool], network: nn.Module) -> None:
        for path, is_held in held.items():
            norm = network.get_submodule(path)
            if is_held:
                norm.eval()
                # Whoever calls train() on the whole network leaves this one as it is; a copy has its own.
                vars(norm)["train"] = functools.partial(_unchanged, norm)
            elif "train" in vars(norm):
                del vars(norm)["train"]
                norm.train()


def held_norms(network: nn.Module) -> list[nn.Module]:
    """The norms that keep their statistics now."""
    return [module for module in network.modules() if "train" in vars(module)]


def find_frozen(
    network: nn.Module,
    *,
    parameters: Sequence[str],
    batch_norm: Statistics = "train",
    unfreeze: Mapping[int, Sequence[str]] | None = None,
    key: str = "freeze.parameters",
) -> Freezing:
    """Find what of a network the patterns mean; nothing of it is changed.

    parameters: patterns of what does not learn, see `parameters_meant`.
    batch_norm: `eval` lets a BatchNorm whose parameters, or statistics, are frozen keep its statistics, and normalise
        by them; `train` lets it go on with those of each batch.
    unfreeze: epoch, counted from 0, to patterns of what learns from its beginning on, among what is frozen; with 0 it
        is not frozen at all, so that a head can be left out of `*`.
    key: of the patterns in the config.

    Raises: ConfigError with every pattern that means nothing.
    """
    names = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    statistics = {path: f"{path}.running_mean" for path, one in network.named_modules() if _has_statistics(one)}
    errors: list[ErrorDetails] = []
    until: dict[str, float] = {}
    known = (*names, *statistics.values())
    for index, pattern in enumerate(parameters):
        until |= dict.fromkeys(_meant(network, pattern, known, key=f"{key}.{index}", errors=errors), NEVER)
    for epoch, patterns in sorted((unfreeze or {}).items(), reverse=True):
        place = f"{UNFREEZE}.{epoch}"
        for pattern in patterns:
            found = _meant(network, pattern, known, key=place, errors=errors)
            if found and not until.keys() & found:
                got, expected = (
                    f"{pattern!r}, of which nothing is frozen",
                    "a pattern of what freeze.parameters freezes",
                )
                errors.append(ErrorDetails(key=place, got=got, expected=expected))
            until |= {name: epoch for name in found if name in until}
    raise_errors(errors)
    until = {name: epoch for name, epoch in until.items() if epoch > 0}
    norms = {
        path: max(until[name] for name in _of_norm(network, path, mean) if name in until)
        for path, mean in statistics.items()
        if batch_norm == "eval" and _is_frozen(_of_norm(network, path, mean), mean, until)
    }
    return Freezing(until={name: epoch for name, epoch in until.items() if name in names}, norms=norms)


def _meant(
    network: nn.Module, pattern: str, known: Iterable[str], *, key: str, errors: list[ErrorDetails]
) -> frozenset[str]:
    try:
        return frozenset(parameters_meant(network, pattern, known=known, key=key))
    except ConfigError as error:
        errors += error.errors
        return frozenset()


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, ANY_BATCH_NORM) and bool(module.track_running_stats)


def _of_norm(network: nn.Module, path: str, mean: str) -> list[str]:
    prefix = f"{path}." if path else ""
    return [mean, *(f"{prefix}{name}" for name, _ in network.get_submodule(path).named_parameters(recurse=False))]


def _is_frozen(names: Sequence[str], mean: str, until: Mapping[str, float]) -> bool:
    own = [name for name in names if name != mean]
    return mean in until if not own else all(name in until for name in own)


def _unchanged(norm: nn.Module, mode: bool = True) -> nn.Module:
    return norm
