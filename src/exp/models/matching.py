"""Selection of modules and parameters of a network by a pattern of names, or by type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from exp.errors import ErrorDetails, raise_errors
from exp.spelling import among, did_you_mean

# The base class of torch's batch norms and of users' variants. The class has no public name in torch 2.13, but
# nn.SyncBatchNorm.convert_sync_batchnorm also uses this class.
ANY_BATCH_NORM = nn.BatchNorm2d.__mro__[1]
# The base classes of torch's other norms are private, so the classes are listed.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Norms with num_features, the size of axis 1 of their input.
FEATURE_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)
NORMS = (*FEATURE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def matches(name: str, module: nn.Module, pattern: str) -> bool:
    """Return whether a pattern matches the name (`blocks.*.norm1`) or type (`LayerNorm`, `torch.nn.Softmax`) of a
    module.

    A type also matches its subclasses.

    Args:
        name: The name of the module in the network; empty for the network.
        module: The module.
        pattern: The pattern.
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
    """Return the modules that match at least one of the patterns, by name, in the network's order.

    Args:
        network: The network.
        patterns: The patterns.
        key: The config key of the patterns, for error messages.
        modules: The modules to search, by name. Default: None, for all modules of the network.
        got: Text that follows the pattern in the error message. Default: empty.

    Raises:
        ConfigError: A pattern matches no module. The message lists the names and types in the network.
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
    """Return the error for a pattern that matches no module. The error lists the names and types in the network."""
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
    """Return the names of the parameters that a pattern matches, in the network's order.

    A pattern is one of the following:

    - a pattern of names in the state dict (`encoder.*`);
    - a module's name (`encoder`) or type (`LayerNorm`, `torch.nn.Linear`), which matches all parameters in the module;
    - a type and a parameter name (`Linear.weight`).

    A tied parameter has several names. All of them are returned.

    Args:
        network: The network.
        pattern: The pattern.
        key: The config key of the pattern, for error messages.
        known: The names to search. Default: None, for the names of all parameters.
        errors: A list that receives the error of an unmatched pattern. Default: None, which raises the error.

    Raises:
        ConfigError: The pattern matches no parameter. The message proposes the closest name.
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
    # The modules of torch's classes are deeper than their public names, such as torch.nn.modules.linear.
    public = f"torch.nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else full
    return pattern in (kind.__name__, full, public)
