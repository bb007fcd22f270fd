"""Parameter groups by name pattern: which parameters an optimizer gets, and with which options of their own."""

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
# A norm of the user's own is known by its class's name, as in RMSNorm or ScaleNorm2d.
NORM_NAME = re.compile(r"norm(\d+d)?$", re.IGNORECASE)
# What the config's optimizer.groups holds, by name: patterns of parameters, and options of the optimizer.
Groups = Mapping[str, Mapping[str, Any]]
# Parameters with requires_grad, each with all of its names: tied ones have several.
Trained = Mapping[nn.Parameter, Sequence[str]]


def parameter_groups(
    network: nn.Module,
    *,
    groups: Groups,
    exempt_from_decay: Sequence[str],
    parameters: Sequence[str] | None = None,
    shared: bool = False,
) -> list[dict[str, Any]]:
    """Split the trained parameters of a network into groups, as torch.optim.Optimizer takes them.

    Every parameter with requires_grad is in exactly one group; a tied one is there once and goes by all its names;
    frozen ones are in none.

    groups: name to {parameters: pattern or list of patterns, and any options of the optimizer}. Patterns are those
        of the shell: `encoder.*`. What no pattern matches is in the group `default`.
    exempt_from_decay: `norms` (parameters of normalisation layers), `biases`, or patterns of parameter names. These
        are split off into `<group>_exempt` with weight_decay 0.
    parameters: patterns; only parameters that one of them matches are taken. None takes all.
    shared: the groups are also those of other optimizers, so that a pattern may match parameters of theirs alone.
    Raises: ConfigError, with all errors, if a pattern matches no trained parameter, a parameter is in two groups, or
        nothing is left to train.
    """
    everything = _trained(network)
    taken = {one: names for one, names in everything.items() if parameters is None or matches_any(names, parameters)}
    if not taken:
        frozen = sum(not one.requires_grad for one in network.parameters())
        got = f"all {frozen} parameters are frozen" if frozen else "a model without parameters"
        raise config_error("model", got=got, expected="at least one parameter to train", fix="Or set train=false")
    known = everything if shared else taken
    errors: list[ErrorDetails] = []
    owners = _owners(network, taken, known, groups, errors)
    exempt = _exempt(network, taken, known, exempt_from_decay, errors)
    raise_errors(errors)
    built: dict[str, dict[str, Any]] = {}
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
    """Return the parameters with requires_grad that one of the patterns matches, by any of their names, each once."""
    return [one for one, names in _trained(network).items() if matches_any(names, patterns)]


def pattern_errors(network: nn.Module, patterns: Sequence[str], *, key: str) -> list[ErrorDetails]:
    """Return an error for each pattern that matches no parameter with requires_grad. key: theirs in the config."""
    trained = _trained(network)
    return [_no_match(network, trained, pattern, key=key) for pattern in patterns if not _matched(trained, pattern)]


def unmatched_parameters(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the parameters with requires_grad that none of the patterns matches."""
    return [names[0] for names in _trained(network).values() if not matches_any(names, patterns)]


def matches_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether one of the names that a parameter goes by matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _trained(network: nn.Module) -> Trained:
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(parameter, []).append(name)
    return found


def _matched(trained: Trained, pattern: str) -> list[nn.Parameter]:
    return [one for one, names in trained.items() if matches_any(names, [pattern])]


def _no_match(network: nn.Module, trained: Trained, pattern: str, *, key: str, words: str = "") -> ErrorDetails:
    """Return the error of a pattern that matches nothing. words: that may stand instead of it."""
    if any(fnmatchcase(name, pattern) for name, one in network.named_parameters() if not one.requires_grad):
        return ErrorDetails(
            key=key, got=f"{pattern!r} matches only frozen parameters", expected="parameters that are trained"
        )
    shown = among([names[0] for names in trained.values()], count=6)
    return ErrorDetails(
        key=key,
        got=f"{pattern!r} matches no parameter",
        expected=f"{words}a pattern of a parameter's name: {shown}",
        fix="A whole layer is its name with a star, as in encoder.*",
    )


def _owners(
    network: nn.Module, taken: Trained, known: Trained, groups: Groups, errors: list[ErrorDetails]
) -> dict[nn.Parameter, str]:
    """Return the group of each parameter in `taken`. known: the parameters that a pattern may match."""
    if REST in groups:
        expected = "another name: what no pattern matches is called so"
        errors.append(ErrorDetails(key=f"optimizer.groups.{REST}", got="a group of this name", expected=expected))
    found: dict[nn.Parameter, str] = {}
    for group, options in groups.items():
        key = f"optimizer.groups.{group}.parameters"
        if "parameters" not in options:
            errors.append(
                ErrorDetails(key=key, got="missing", expected="a pattern of parameter names, or a list of them")
            )
            continue
        patterns = options["parameters"]
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        errors += [_no_match(network, taken, one, key=key) for one in patterns if not _matched(known, one)]
        for parameter, names in taken.items():
            if matches_any(names, patterns) and (other := found.setdefault(parameter, group)) != group:
                got = f"{other} and {group} both match {' = '.join(names)}"
                fix = "Narrow the patterns of one"
                errors.append(
                    ErrorDetails(key="optimizer.groups", got=got, expected="each parameter in one group", fix=fix)
                )
    return {parameter: found.get(parameter, REST) for parameter in taken}


def _exempt(
    network: nn.Module, taken: Trained, known: Trained, exempt_from_decay: Sequence[str], errors: list[ErrorDetails]
) -> set[nn.Parameter]:
    """Return the parameters whose weight decay is 0."""
    found: set[nn.Parameter] = set()
    for word in exempt_from_decay:
        if word == "norms":
            found |= {one for module in network.modules() if _is_norm(module) for one in module.parameters(False)}
        elif word == "biases":
            found |= {one for one, names in taken.items() if any(map(_is_bias, names))}
        else:
            found |= set(_matched(taken, word))
            if not _matched(known, word):
                key = "optimizer.exempt_from_decay"
                errors.append(_no_match(network, taken, word, key=key, words="norms, biases, or "))
    return found


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or NORM_NAME.search(type(module).__name__) is not None


def _is_bias(name: str) -> bool:
    """bias, in_proj_bias of an attention, bias_ih_l0 of an LSTM."""
    return "bias" in name.rpartition(".")[2].split("_")
