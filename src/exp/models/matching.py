"""Which modules of a network are meant: by a pattern of their names, by the name of their type, or as norms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from exp.errors import ConfigError, ErrorDetails, raise_errors
from exp.spelling import among, did_you_mean

# Which layers normalise: torch keeps the bases of its own private, so they are named one by one.
# What the three, and a user's own variants, have in common. The same class in torch.nn.modules.batchnorm has no public
# name; nn.SyncBatchNorm.convert_sync_batchnorm looks for it, too (seen in torch 2.13).
ANY_BATCH_NORM = nn.BatchNorm2d.__mro__[1]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# With num_features: axis 1 of their input.
FEATURE_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)
NORMS = (*FEATURE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def matches(name: str, module: nn.Module, pattern: str) -> bool:
    """Whether `pattern` means this module: `blocks.*.norm1` by name; `LayerNorm` or `torch.nn.Softmax` by type, which
    names subclasses, too. The network itself has the empty name."""
    return fnmatchcase(name, pattern) or any(_is_named(kind, pattern) for kind in type(module).__mro__)


def matching(
    network: nn.Module,
    patterns: Sequence[str],
    *,
    key: str,
    modules: Mapping[str, nn.Module] | None = None,
    got: str = "",
) -> dict[str, nn.Module]:
    """Return the modules that match one of the patterns, by name, in the network's order.

    key: The patterns' key in the config. modules: The modules to choose from, by name; by default all of the network.
    got: Text after the pattern in an error.

    Raises ConfigError: every pattern that means no module, with the names and types that are there.
    """
    modules = dict(network.named_modules()) if modules is None else modules
    raise_errors(
        unmatched(pattern, network, key=key, got=f"{pattern!r}{got}")
        for pattern in patterns
        if not any(matches(name, module, pattern) for name, module in modules.items())
    )
    return {
        name: module for name, module in modules.items() if any(matches(name, module, pattern) for pattern in patterns)
    }


def unmatched(pattern: str, network: nn.Module, *, key: str, got: str) -> ErrorDetails:
    """The error of a pattern that means no module."""
    modules = dict(network.named_modules())
    names = [name for name in modules if name]
    types = list(dict.fromkeys(type(module).__name__ for module in modules.values()))
    return ErrorDetails(
        key=key,
        got=got,
        expected=f"a pattern of module names, or the name of a type; there are {among(names, word=pattern, count=20)}; "
        f"types {among(types, word=pattern)}",
        fix=did_you_mean(pattern, [*names, *types]),
    )


def parameters_meant(network: nn.Module, pattern: str, *, key: str, known: Iterable[str] | None = None) -> list[str]:
    """The names that a pattern of parameters means, in the network's order; a tied one goes by all of its names.

    A pattern is one of names in the state dict (`encoder.*`), of modules by name (`encoder`) or by type (`LayerNorm`,
    `torch.nn.Linear`), of which it means everything, or of a type's own parameters (`Linear.weight`).

    known: the names among which it may choose; None is those of the parameters.
    key: the pattern's key in the config.

    Raises ConfigError where it means nothing, with the nearest name.
    """
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)] if known is None else list(known)
    kind, _, own = pattern.rpartition(".")
    inside = {f"{path}." if path else "" for path, one in network.named_modules() if matches(path, one, pattern)}
    of_type = {
        f"{path}." if path else ""
        for path, one in network.named_modules()
        if kind and any(_is_named(base, kind) for base in type(one).__mro__)
    }
    found = [
        name
        for name in names
        if fnmatchcase(name, pattern)
        or any(name.startswith(prefix) for prefix in inside)
        or any(name.startswith(prefix) and fnmatchcase(name.removeprefix(prefix), own) for prefix in of_type)
    ]
    if not found:
        raise ConfigError([_without_parameters(pattern, network, names, has_modules=bool(inside or of_type), key=key)])
    return found


def _without_parameters(
    pattern: str, network: nn.Module, names: Sequence[str], *, has_modules: bool, key: str
) -> ErrorDetails:
    types = list(dict.fromkeys(type(module).__name__ for module in network.modules()))
    paths = [path for path, _ in network.named_modules() if path]
    return ErrorDetails(
        key=key,
        got=f"{pattern!r} means layers without parameters" if has_modules else f"no parameter matches {pattern!r}",
        expected=f"a pattern of parameters, such as {among(names, word=pattern, count=6)}; of layers; or the name of a "
        f"type, such as {among(types, word=pattern, count=6)}",
        fix=None if has_modules else did_you_mean(pattern, [*names, *paths, *types]),
    )


def _is_named(kind: type, pattern: str) -> bool:
    if kind in (nn.Module, object):
        return False
    full = f"{kind.__module__}.{kind.__qualname__}"
    # torch's classes live one module deeper than the name by which everybody knows them.
    known = f"torch.nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else full
    return pattern in (kind.__name__, full, known)
