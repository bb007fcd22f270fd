"""Division of a network's parameters into the groups of an optimizer, by patterns of names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from exp.errors import ErrorDetails, config_error, raise_errors
from exp.models.matching import NORMS
from exp.spelling import among

REST = "default"
# Normalization layers of users are recognized by the name of the class, such as RMSNorm or ScaleNorm2d.
NORM_NAME = re.compile(r"norm(\d+d)?$", re.IGNORECASE)
# A group of an optimizer: its parameters and options.
Group = dict[str, Any]
# The value of optimizer.groups in the config: patterns of parameters, and options of the optimizer, by group name.
Groups = Mapping[str, Mapping[str, Any]]
# The parameters with requires_grad, each with all its names. A parameter that several layers share has several names.
Trained = Mapping[nn.Parameter, Sequence[str]]


def parameter_groups(
    network: nn.Module,
    *,
    groups: Groups,
    exempt_from_decay: Sequence[str],
    parameters: Sequence[str] | None = None,
    shared: bool = False,
) -> list[Group]:
    """Return the trained parameters of a network as groups for a torch.optim.Optimizer.

    Each parameter with requires_grad is in exactly one group. If several layers share a parameter, a pattern matches
    the parameter if it matches any of the names.

    Args:
        network: The network.
        groups: For each group name, a mapping with `parameters` and options of the optimizer. `parameters` is a shell
            pattern such as `encoder.*`, or a list of patterns. Unmatched parameters are in the group `default`.
        exempt_from_decay: The parameters without weight decay: `norms` (parameters of normalization layers), `biases`,
            or patterns of parameter names. They are in a separate group `<group>_exempt` with weight_decay 0.
        parameters: Patterns of the parameters to include. None (default): all parameters.
        shared: Whether other optimizers use the same `groups`. If true, a pattern may match only parameters of the
            other optimizers. Default: false.

    Raises:
        ConfigError: A pattern matches no trained parameter, a parameter is in two groups, or no parameter is trained.
    """
    everything = _names_of_trained(network)
    taken = {one: names for one, names in everything.items() if parameters is None or matches_any(names, parameters)}
    if not taken:
        frozen = sum(not one.requires_grad for one in network.parameters())
        got = f"all {frozen} parameters are frozen" if frozen else "a model without parameters"
        raise config_error("model", got=got, expected="at least one parameter to train, or train=false")
    known = everything if shared else taken
    errors: list[ErrorDetails] = []
    owners = _owners(network, taken, known, groups, errors)
    exempt = _exempt(network, taken, known, exempt_from_decay, errors)
    raise_errors(errors)
    built: dict[str, Group] = {}
    for parameter, owner in owners.items():
        name = f"{owner}_exempt" if parameter in exempt else owner
        if name not in built:
            given = {} if owner == REST else groups[owner]
            options = {key: value for key, value in given.items() if key != "parameters"}
            if parameter in exempt:
                options["weight_decay"] = 0.0
            built[name] = {"params": [], "name": name, **options}
        built[name]["params"].append(parameter)
    order = [name for group in (REST, *groups) for name in (group, f"{group}_exempt")]
    return [built[name] for name in order if name in built]


def trained_parameters(network: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters with requires_grad that match a pattern. Each parameter occurs only once."""
    return [one for one, names in _names_of_trained(network).items() if matches_any(names, patterns)]


def pattern_errors(network: nn.Module, patterns: Sequence[str], *, key: str) -> list[ErrorDetails]:
    """Return an error for each pattern that matches no parameter with requires_grad.

    Args:
        network: The network.
        patterns: Shell patterns of parameter names.
        key: The config key of the patterns, for the errors.
    """
    trained = _names_of_trained(network)
    return [_no_match(network, trained, pattern, key=key) for pattern in patterns if not _match(trained, pattern)]


def unmatched_parameters(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the parameters with requires_grad that do not match any pattern."""
    return [names[0] for names in _names_of_trained(network).values() if not matches_any(names, patterns)]


def matches_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether any of a parameter's names matches any of the patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _names_of_trained(network: nn.Module) -> Trained:
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(parameter, []).append(name)
    return found


def _match(trained: Trained, pattern: str) -> list[nn.Parameter]:
    return [one for one, names in trained.items() if matches_any(names, [pattern])]


def _no_match(network: nn.Module, trained: Trained, pattern: str, *, key: str, words: str = "") -> ErrorDetails:
    """Return the error for a pattern that matches no trained parameter.

    Args:
        network: The network.
        trained: The trained parameters with their names.
        pattern: The pattern.
        key: The config key of the pattern.
        words: Start of the expected value in the message, such as "norms, biases, or ". Default: no text.
    """
    if any(fnmatchcase(name, pattern) for name, one in network.named_parameters() if not one.requires_grad):
        return ErrorDetails(key, f"{pattern!r} matches only frozen parameters", "a pattern of trained parameters")
    shown = among([names[0] for names in trained.values()], count=6)
    expected, fix = (
        f"{words}a pattern of a parameter's name: {shown}",
        "The pattern of a whole layer is its name with a star: encoder.*",
    )
    return ErrorDetails(key, f"{pattern!r} matches no parameter", expected, fix)


def _owners(
    network: nn.Module, taken: Trained, known: Trained, groups: Groups, errors: list[ErrorDetails]
) -> dict[nn.Parameter, str]:
    """Return the name of the group of each parameter in `taken`.

    Args:
        network: The network.
        taken: The parameters of this optimizer, with their names.
        known: The parameters that a pattern may match, with their names.
        groups: The value of optimizer.groups.
        errors: List to which this function adds errors.
    """
    key = "optimizer.groups"
    if REST in groups:
        expected = "another name, because the group of the unmatched parameters has this name"
        errors.append(ErrorDetails(f"{key}.{REST}", f"a group with the name {REST}", expected))
    found: dict[nn.Parameter, str] = {}
    for group, options in groups.items():
        place = f"{key}.{group}.parameters"
        if "parameters" not in options:
            errors.append(ErrorDetails(place, "missing", "a pattern of parameter names, or a list of them"))
            continue
        patterns = options["parameters"]
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        errors += [_no_match(network, taken, one, key=place) for one in patterns if not _match(known, one)]
        for parameter, names in taken.items():
            if matches_any(names, patterns) and (other := found.setdefault(parameter, group)) != group:
                got = f"the groups {other} and {group} both match {' = '.join(names)}"
                errors.append(ErrorDetails(key, got, "each parameter in one group", f"Narrow the patterns of {group}"))
    return {parameter: found.get(parameter, REST) for parameter in taken}


def _exempt(
    network: nn.Module, taken: Trained, known: Trained, exempt_from_decay: Sequence[str], errors: list[ErrorDetails]
) -> set[nn.Parameter]:
    """Return the parameters without weight decay.

    Args:
        network: The network.
        taken: The parameters of this optimizer, with their names.
        known: The parameters that a pattern may match, with their names.
        exempt_from_decay: The value of optimizer.exempt_from_decay.
        errors: List to which this function adds errors of invalid patterns.
    """
    found: set[nn.Parameter] = set()
    for word in exempt_from_decay:
        if word == "norms":
            found |= {one for module in network.modules() if _is_norm(module) for one in module.parameters(False)}
        elif word == "biases":
            found |= {one for one, names in taken.items() if any(map(_is_bias, names))}
        else:
            found |= set(_match(taken, word))
            if not _match(known, word):
                key = "optimizer.exempt_from_decay"
                errors.append(_no_match(network, taken, word, key=key, words="norms, biases, or "))
    return found


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or NORM_NAME.search(type(module).__name__) is not None


def _is_bias(name: str) -> bool:
    """Return whether a parameter name belongs to a bias. Examples are bias, in_proj_bias and bias_ih_l0."""
    return "bias" in name.rpartition(".")[2].split("_")
