"""Freezing of parameters and BatchNorm statistics, and unfreezing at given epochs.

Example: freeze: {parameters: ["encoder.*", Embedding], batch_norm: eval, unfreeze: {10: ["encoder.3.*"]}}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from exp.errors import ErrorDetails, invalid_value, raise_errors
from exp.models.matching import ANY_BATCH_NORM, find_parameters

Statistics = Literal["train", "eval"]
NEVER = float("inf")
UNFREEZE = "freeze.unfreeze"


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """The frozen parameters and BatchNorms of a network, and the epochs at which they are unfrozen.

    Args:
        until: The first epoch in which a frozen parameter is trained, by parameter name. NEVER: it is never trained.
        norms: The first epoch in which a frozen BatchNorm updates its statistics, by path. NEVER: it never updates
            them.
    """

    until: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        """True if some parameters are unfrozen in a later epoch."""
        return any(epoch < NEVER for epoch in self.until.values())

    def learns_at_first(self, network: nn.Module) -> bool:
        """Return whether at least one parameter is trained in the first epoch."""
        return any(one.requires_grad and name not in self.until for name, one in network.named_parameters())

    def apply(self, network: nn.Module) -> None:
        """Freeze the parameters and the BatchNorm statistics that are never unfrozen.

        Parameters that are unfrozen later keep requires_grad, because the optimizer must receive them at its creation.
        """
        self._set({name: False for name, epoch in self.until.items() if epoch == NEVER}, network)
        self._hold({path: True for path, epoch in self.norms.items() if epoch == NEVER}, network)

    def begin_epoch(self, network: nn.Module, epoch: int) -> None:
        """Freeze and unfreeze parameters and statistics for an epoch, counted from 0.

        The result depends only on the epoch, and not on earlier calls.
        """
        self._set({name: end <= epoch for name, end in self.until.items()}, network)
        self._hold({path: end > epoch for path, end in self.norms.items()}, network)

    def learning(self, epoch: int) -> frozenset[str]:
        """Return the names of parameters that are frozen at the start of the run and trained in an epoch."""
        return frozenset(name for name, end in self.until.items() if end <= epoch)

    def _set(self, learning: Mapping[str, bool], network: nn.Module) -> None:
        for name, one in network.named_parameters(remove_duplicate=False):
            if name in learning:
                one.requires_grad = learning[name]  # lazy parameters also have this attribute

    def _hold(self, held: Mapping[str, bool], network: nn.Module) -> None:
        for path, is_held in held.items():
            norm = network.get_submodule(path)
            if is_held:
                norm.eval()
                # This attribute overrides the method, so that train() of the whole network does not change this norm.
                vars(norm)["train"] = functools.partial(_keep_mode, norm)
            elif "train" in vars(norm):
                del vars(norm)["train"]
                norm.train()


def held_norms(network: nn.Module) -> list[nn.Module]:
    """Return the BatchNorms that currently have frozen statistics."""
    return [module for module in network.modules() if "train" in vars(module)]


def find_frozen(
    network: nn.Module,
    *,
    parameters: Sequence[str],
    batch_norm: Statistics = "train",
    unfreeze: Mapping[int, Sequence[str]] | None = None,
    key: str = "freeze.parameters",
) -> Freezing:
    """Return the parameters and BatchNorms of a network to freeze. The network is not changed.

    Args:
        network: The network.
        parameters: Patterns of parameters to freeze; see `find_parameters`.
        batch_norm: `eval` freezes the statistics of each BatchNorm with frozen parameters or statistics, and normalizes
            by these statistics. `train` (default) normalizes by the statistics of each batch, and updates the running
            statistics.
        unfreeze: Patterns of frozen parameters by the epoch from which they are trained, counted from 0. Epoch 0 makes
            exceptions, such as a head if `parameters` is `*`.
        key: The config key of the patterns, for error messages.

    Raises:
        ConfigError: A pattern matches no parameter. Each such pattern has an error in the exception.
    """
    names = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    statistics = {path: f"{path}.running_mean" for path, one in network.named_modules() if _has_statistics(one)}
    errors: list[ErrorDetails] = []
    until: dict[str, float] = {}
    known = (*names, *statistics.values())
    for index, pattern in enumerate(parameters):
        meant = find_parameters(network, pattern, known=known, key=f"{key}.{index}", errors=errors)
        until |= dict.fromkeys(meant, NEVER)
    for epoch, patterns in sorted((unfreeze or {}).items(), reverse=True):
        place = f"{UNFREEZE}.{epoch}"
        for pattern in patterns:
            found = find_parameters(network, pattern, known=known, key=place, errors=errors)
            if found and not until.keys() & set(found):
                expected = "a pattern of parameters that freeze.parameters freezes"
                errors.append(invalid_value(place, pattern, expected, because="which matches no frozen parameter"))
            until |= {name: epoch for name in found if name in until}
    raise_errors(errors)
    until = {name: epoch for name, epoch in until.items() if epoch > 0}
    norms = {
        path: max(until[name] for name in _of_norm(network, path, mean) if name in until)
        for path, mean in statistics.items()
        if batch_norm == "eval" and _is_frozen(_of_norm(network, path, mean), mean, until)
    }
    return Freezing(until={name: epoch for name, epoch in until.items() if name in names}, norms=norms)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, ANY_BATCH_NORM) and bool(module.track_running_stats)


def _of_norm(network: nn.Module, path: str, mean: str) -> list[str]:
    prefix = f"{path}." if path else ""
    return [mean, *(f"{prefix}{name}" for name, _ in network.get_submodule(path).named_parameters(recurse=False))]


def _is_frozen(names: Sequence[str], mean: str, until: Mapping[str, float]) -> bool:
    own = [name for name in names if name != mean]
    return mean in until if not own else all(name in until for name in own)


def _keep_mode(norm: nn.Module, mode: bool = True) -> nn.Module:
    return norm
