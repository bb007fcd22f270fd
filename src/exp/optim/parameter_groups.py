"""Parameter groups by name pattern: which parameters an optimizer gets, and with which options of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from exp.errors import ConfigError, Fault
from exp.models.normalisation import NORMS

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
    everything, frozen = _trained(network)
    trained = [entry for entry in everything if parameters is None or matches_any(entry.names, parameters)]
    faults: list[Fault] = []
    if not trained:
        raise ConfigError([_nothing_to_train(frozen)])
    others = [entry for entry in everything if shared and entry not in trained]
    owners = _owners(trained, others, frozen, groups, faults)
    _mark_exempt(network, trained, others, frozen, exempt_from_decay, faults)
    if faults:
        raise ConfigError(faults)

    built: dict[str, dict[str, Any]] = {}
    for entry, owner in zip(trained, owners, strict=True):
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
    return [entry.parameter for entry in _trained(network)[0] if matches_any(entry.names, patterns)]


def pattern_faults(network: nn.Module, patterns: Sequence[str], *, key: str) -> list[Fault]:
    """The patterns that match no parameter with requires_grad. key: theirs in the config."""
    trained, frozen = _trained(network)
    return [
        _no_match(key, pattern, trained, frozen)
        for pattern in patterns
        if not any(_matches(entry.names, pattern) for entry in trained)
    ]


def unmatched_parameters(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the parameters with requires_grad that none of the patterns matches."""
    return [entry.names[0] for entry in _trained(network)[0] if not matches_any(entry.names, patterns)]


def matches_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether one of the names that a parameter goes by matches one of the patterns."""
    return any(_matches(names, pattern) for pattern in patterns)


def _trained(network: nn.Module) -> tuple[list[_Trained], list[str]]:
    """The trained parameters in the network's order, and the names of the frozen ones."""
    trained: dict[int, _Trained] = {}
    frozen: list[str] = []
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            trained.setdefault(id(parameter), _Trained(parameter=parameter)).names.append(name)
        else:
            frozen.append(name)
    return list(trained.values()), frozen


def _owners(
    trained: Sequence[_Trained],
    others: Sequence[_Trained],
    frozen: Sequence[str],
    groups: Groups,
    faults: list[Fault],
) -> list[str]:
    """Each trained parameter's group."""
    if REST in groups:
        faults.append(
            Fault(
                key=f"optimizer.groups.{REST}",
                got="a group of this name",
                expected="another name: what no pattern matches is called so",
            )
        )
    found: list[list[str]] = [[] for _ in trained]
    for group, options in groups.items():
        key = f"optimizer.groups.{group}.parameters"
        if "parameters" not in options:
            faults.append(Fault(key=key, got="missing", expected="a pattern of parameter names, or a list of them"))
            continue
        for pattern in _patterns(options["parameters"]):
            matched = [index for index, entry in enumerate(trained) if _matches(entry.names, pattern)]
            if not matched and not any(_matches(entry.names, pattern) for entry in others):
                faults.append(_no_match(key, pattern, trained, frozen))
            for index in matched:
                if group not in found[index]:
                    found[index].append(group)
    for entry, owners in zip(trained, found, strict=True):
        if len(owners) > 1:
            faults.append(
                Fault(
                    key="optimizer.groups",
                    got=f"{' and '.join(owners)} both match {' = '.join(entry.names)}",
                    expected="each parameter in one group",
                    cure="Narrow the patterns of one",
                )
            )
    return [owners[0] if owners else REST for owners in found]


def _mark_exempt(
    network: nn.Module,
    trained: Sequence[_Trained],
    others: Sequence[_Trained],
    frozen: Sequence[str],
    exempt_from_decay: Sequence[str],
    faults: list[Fault],
) -> None:
    norms = {
        id(parameter) for module in network.modules() if _is_norm(module) for parameter in module.parameters(False)
    }
    for word in exempt_from_decay:
        if word == "norms":
            chosen = [entry for entry in trained if id(entry.parameter) in norms]
        elif word == "biases":
            chosen = [entry for entry in trained if any(_is_bias(name) for name in entry.names)]
        else:
            chosen = [entry for entry in trained if _matches(entry.names, word)]
            if not chosen and not any(_matches(entry.names, word) for entry in others):
                faults.append(
                    _no_match("optimizer.exempt_from_decay", word, trained, frozen, words="norms, biases, or ")
                )
        for entry in chosen:
            entry.exempt = True


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or NORM_NAME.search(type(module).__name__) is not None


def _is_bias(name: str) -> bool:
    """bias, in_proj_bias of an attention, bias_ih_l0 of an LSTM."""
    return "bias" in name.rpartition(".")[2].split("_")


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _patterns(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _no_match(key: str, pattern: str, trained: Sequence[_Trained], frozen: Sequence[str], words: str = "") -> Fault:
    if _matches(frozen, pattern):
        return Fault(key=key, got=f"{pattern!r} matches only frozen parameters", expected="parameters that are trained")
    names = [entry.names[0] for entry in trained]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return Fault(
        key=key,
        got=f"{pattern!r} matches no parameter",
        expected=f"{words}a pattern of a parameter's name: {shown}",
        cure="A whole layer is its name with a star, as in encoder.*",
    )


def _nothing_to_train(frozen: Sequence[str]) -> Fault:
    got = f"all {len(frozen)} parameters are frozen" if frozen else "a model without parameters"
    return Fault(key="model", got=got, expected="at least one parameter to train", cure="Or set train=false")
