"""Parameter groups by name pattern: which parameters an optimizer gets, and with which options of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from exp.errors import ConfigError, Fault
from exp.models.matching import NORMS

REST = "default"
# A norm of the user's own is known by its class's name, as in RMSNorm or ScaleNorm2d.
NORM_NAME = re.compile(r"norm(\d+d)?$", re.IGNORECASE)
# What the config's optimizer.groups holds, by name: patterns of parameters, and options of the optimizer.
Groups = Mapping[str, Mapping[str, Any]]


@dataclass(kw_only=True, eq=False)
class _Trained:
    """A parameter that is trained: all the names it goes by (tied ones have several), and whether it is exempt."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    exempt: bool = False

    def matches(self, *patterns: str) -> bool:
        """Whether one of its names matches one of the patterns."""
        return matches_any(self.names, patterns)


@dataclass(kw_only=True)
class _Parameters:
    """A network's parameters: those that are trained, in its order, and the names of the frozen ones."""

    trained: list[_Trained]
    frozen: list[str]

    @classmethod
    def of(cls, network: nn.Module) -> _Parameters:
        trained: dict[int, _Trained] = {}
        frozen: list[str] = []
        for name, parameter in network.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                trained.setdefault(id(parameter), _Trained(parameter=parameter)).names.append(name)
            else:
                frozen.append(name)
        return cls(trained=list(trained.values()), frozen=frozen)

    def matched(self, pattern: str) -> list[_Trained]:
        return [entry for entry in self.trained if entry.matches(pattern)]

    def no_match(self, pattern: str, *, key: str, words: str = "") -> Fault:
        """The fault of a pattern that matches nothing. words: that may stand in its place."""
        if matches_any(self.frozen, [pattern]):
            got = f"{pattern!r} matches only frozen parameters"
            return Fault(key=key, got=got, expected="parameters that are trained")
        names = [entry.names[0] for entry in self.trained]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return Fault(
            key=key,
            got=f"{pattern!r} matches no parameter",
            expected=f"{words}a pattern of a parameter's name: {shown}",
            cure="A whole layer is its name with a star, as in encoder.*",
        )


def parameter_groups(
    network: nn.Module,
    *,
    groups: Groups,
    exempt_from_decay: Sequence[str],
    parameters: Sequence[str] | None = None,
    shared: bool = False,
) -> list[dict[str, Any]]:
    """Splits the trained parameters of a network into groups, as torch.optim.Optimizer takes them.

    Every parameter with requires_grad is in exactly one group; a tied one is there once and goes by all its names;
    frozen ones are in none.

    groups: name to {parameters: pattern or list of patterns, and any options of the optimizer}. Patterns are those
        of the shell: `encoder.*`. What no pattern matches is in the group `default`.
    exempt_from_decay: `norms` (parameters of normalisation layers), `biases`, or patterns of parameter names. These
        are split off into `<group>_exempt` with weight_decay 0.
    parameters: patterns; only parameters that one of them matches are taken. None takes all.
    shared: the groups are also those of other optimizers, so that a pattern may match parameters of theirs alone.
    Raises: ConfigError, with all its faults, where a pattern matches no trained parameter, a parameter is in two
        groups, or nothing is left to train.
    """
    everything = _Parameters.of(network)
    taken = [entry for entry in everything.trained if parameters is None or entry.matches(*parameters)]
    own = _Parameters(trained=taken, frozen=everything.frozen)
    if not taken:
        frozen = len(everything.frozen)
        got = f"all {frozen} parameters are frozen" if frozen else "a model without parameters"
        expected = "at least one parameter to train"
        raise ConfigError([Fault(key="model", got=got, expected=expected, cure="Or set train=false")])
    known = everything if shared else own
    faults: list[Fault] = []
    owners = _owners(own, known, groups, faults)
    _mark_exempt(network, own, known, exempt_from_decay, faults)
    if faults:
        raise ConfigError(faults)

    built: dict[str, dict[str, Any]] = {}
    for entry, owner in zip(taken, owners, strict=True):
        name = f"{owner}_exempt" if entry.exempt else owner
        if name not in built:
            options = (
                {} if owner == REST else {key: value for key, value in groups[owner].items() if key != "parameters"}
            )
            if entry.exempt:
                options["weight_decay"] = 0.0
            built[name] = {"params": [], "name": name, **options}
        built[name]["params"].append(entry.parameter)
    order = [name for group in (REST, *groups) for name in (group, f"{group}_exempt")]
    return [built[name] for name in order if name in built]


def trained_parameters(network: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    """The parameters with requires_grad that one of the patterns matches, by any of their names, each once."""
    return [entry.parameter for entry in _Parameters.of(network).trained if entry.matches(*patterns)]


def pattern_faults(network: nn.Module, patterns: Sequence[str], *, key: str) -> list[Fault]:
    """The patterns that match no parameter with requires_grad. key: theirs in the config."""
    own = _Parameters.of(network)
    return [own.no_match(pattern, key=key) for pattern in patterns if not own.matched(pattern)]


def unmatched_parameters(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the parameters with requires_grad that none of the patterns matches."""
    return [entry.names[0] for entry in _Parameters.of(network).trained if not entry.matches(*patterns)]


def matches_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether one of the names that a parameter goes by matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _owners(own: _Parameters, known: _Parameters, groups: Groups, faults: list[Fault]) -> list[str]:
    """The group of each parameter in `own`. known: those that a pattern may match."""
    if REST in groups:
        expected = "another name: what no pattern matches is called so"
        faults.append(Fault(key=f"optimizer.groups.{REST}", got="a group of this name", expected=expected))
    found: list[list[str]] = [[] for _ in own.trained]
    for group, options in groups.items():
        key = f"optimizer.groups.{group}.parameters"
        if "parameters" not in options:
            faults.append(Fault(key=key, got="missing", expected="a pattern of parameter names, or a list of them"))
            continue
        patterns = options["parameters"]
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        faults += [own.no_match(pattern, key=key) for pattern in patterns if not known.matched(pattern)]
        for entry, owners in zip(own.trained, found, strict=True):
            if entry.matches(*patterns):
                owners.append(group)
    faults += [
        Fault(
            key="optimizer.groups",
            got=f"{' and '.join(owners)} both match {' = '.join(entry.names)}",
            expected="each parameter in one group",
            cure="Narrow the patterns of one",
        )
        for entry, owners in zip(own.trained, found, strict=True)
        if len(owners) > 1
    ]
    return [owners[0] if owners else REST for owners in found]


def _mark_exempt(
    network: nn.Module, own: _Parameters, known: _Parameters, exempt_from_decay: Sequence[str], faults: list[Fault]
) -> None:
    norms = {
        id(parameter) for module in network.modules() if _is_norm(module) for parameter in module.parameters(False)
    }
    for word in exempt_from_decay:
        if word == "norms":
            chosen = [entry for entry in own.trained if id(entry.parameter) in norms]
        elif word == "biases":
            chosen = [entry for entry in own.trained if any(_is_bias(name) for name in entry.names)]
        else:
            chosen = own.matched(word)
            if not known.matched(word):
                faults.append(own.no_match(word, key="optimizer.exempt_from_decay", words="norms, biases, or "))
        for entry in chosen:
            entry.exempt = True


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or NORM_NAME.search(type(module).__name__) is not None


def _is_bias(name: str) -> bool:
    """bias, in_proj_bias of an attention, bias_ih_l0 of an LSTM."""
    return "bias" in name.rpartition(".")[2].split("_")
