"""Select modules of a network by name pattern or type, and the parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from exp.errors import ErrorDetails, raise_errors
from exp.spelling import among, did_you_mean

# The base class of torch's batch norms and of users' variants. It has no public name in torch.nn.modules.batchnorm;
# nn.SyncBatchNorm.convert_sync_batchnorm uses it, too (seen in torch 2.13).
ANY_BATCH_NORM = nn.BatchNorm2d.__mro__[1]
# The bases of torch's other norms are private, so the classes are listed.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Norms with num_features, the size of axis 1 of their input.
FEATURE_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)
NORMS = (*FEATURE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def matches(name: str, module: nn.Module, pattern: str) -> bool:
    """Return whether a pattern matches a module by name (`blocks.*.norm1`) or type (`LayerNorm`, `torch.nn.Softmax`).

    A type also matches its subclasses. The network itself has the empty name.
    """
    return fnmatchcase(name, pattern) or any(_is_named(kind, pattern) for kind in type(module).__mro__)


def find_modules(
    network: nn.Module,
    patterns: Sequence[str],
    *,
    key: str,
    modules: Mapping[str, nn.Module] | None = None,
    got: str = "",
) -> dict[str, nn.Module]:
    """Return the modules that match one of the patterns, by name, in the network's order.

    Args:
        network: The network.
        patterns: The patterns.
        key: The config key of the patterns.
        modules: The modules to choose from, by name. None: all modules of the network.
        got: Text after the pattern in an error.

    Raises:
        ConfigError: For every pattern that matches no module, with the known names and types.
    """
    modules = dict(network.named_modules()) if modules is None else modules
    raise_errors(
        unmatched_error(pattern, network, key=key, got=f"{pattern!r}{got}")
        for pattern in patterns
        if not any(matches(name, module, pattern) for name, module in modules.items())
    )
    return {
        name: module for name, module in modules.items() if any(matches(name, module, pattern) for pattern in patterns)
    }


def unmatched_error(pattern: str, network: nn.Module, *, key: str, got: str) -> ErrorDetails:
    """Return the error of a pattern that matches no module."""
    names = [name for name, _ in network.named_modules() if name]
    types = _type_names(network)
    expected = (
        f"a pattern of module names, or the name of a type; there are {among(names, word=pattern, count=20)}; "
        f"types {among(types, word=pattern)}"
    )
    return ErrorDetails(key, got, expected, did_you_mean(pattern, [*names, *types]))


def find_parameters(
    network: nn.Module,
    pattern: str,
    *,
    key: str,
    known: Iterable[str] | None = None,
    errors: list[ErrorDetails] | None = None,
) -> list[str]:
    """Return the names of the parameters that a pattern matches, in the network's order. Tied ones have several names.

    A pattern matches names in the state dict (`encoder.*`), everything in modules of a name (`encoder`) or a type
    (`LayerNorm`, `torch.nn.Linear`), or parameters of a type (`Linear.weight`).

    Args:
        network: The network.
        pattern: The pattern.
        key: The pattern's config key.
        known: The names to choose from. None: those of the parameters.
        errors: Receives the error of a pattern that matches nothing. None: raise it.

    Raises:
        ConfigError: If the pattern matches nothing, with the nearest name.
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
        types, paths = _type_names(network), [path for path, _ in network.named_modules() if path]
        got, fix = f"no parameter matches {pattern!r}", did_you_mean(pattern, [*names, *paths, *types])
        if inside or of_type:
            got, fix = f"{pattern!r} matches only layers without parameters", None
        shown = among(names, word=pattern, count=6)
        expected = f"a pattern of parameters, such as {shown}; of layers; or a type, such as {among(types, count=6)}"
        error = ErrorDetails(key, got, expected, fix)
        if errors is None:
            raise_errors([error])
        else:
            errors.append(error)
    return found


def _type_names(network: nn.Module) -> list[str]:
    return list(dict.fromkeys(type(module).__name__ for module in network.modules()))


def _is_named(kind: type, pattern: str) -> bool:
    if kind in (nn.Module, object):
        return False
    full = f"{kind.__module__}.{kind.__qualname__}"
    # torch's classes are defined one module below their usual name.
    public = f"torch.nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else full
    return pattern in (kind.__name__, full, public)
