"""A node of a frozen config becomes an object. The only place where a `_target_` is called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from exp.config.targets import resolve
from exp.errors import ConfigError, ExpError, Fault
from exp.models.inference import lazy_class
from exp.models.program_error import ProgramError


def construct(node: Any, *, key: str, allow: Sequence[str], **offers: Any) -> Any:
    """Builds a plain config node and everything in it, innermost first.

    `{_target_: name, ...}` becomes an instance, with `_partial_: true` a functools.partial. `{repeat: n, layer: {...}}`
    becomes an nn.ModuleList of n layers built one by one. Other mappings and lists keep their kind.

    offers: values for parameters that the outermost target takes and the node leaves out.
    Raises: ConfigError where a constructor refuses its values, naming the key.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            return _call(node, key=key, allow=allow, offers=offers)
        if node.keys() == {"repeat", "layer"}:
            return nn.ModuleList(
                construct(node["layer"], key=f"{key}.layer", allow=allow) for _ in range(node["repeat"])
            )
        return {name: construct(value, key=f"{key}.{name}", allow=allow) for name, value in node.items()}
    if isinstance(node, list):
        return [construct(value, key=f"{key}.{index}", allow=allow) for index, value in enumerate(node)]
    return node


def _call(node: Mapping[str, Any], *, key: str, allow: Sequence[str], offers: Mapping[str, Any]) -> Any:
    target = resolve(node["_target_"], allow=allow)
    arguments = {
        name: construct(value, key=f"{key}.{name}", allow=allow)
        for name, value in node.items()
        if name not in ("_target_", "_partial_", "_args_")
    }
    positional = [construct(value, key=f"{key}._args_", allow=allow) for value in node.get("_args_") or ()]
    if offers:
        takes = inspect.signature(target).parameters
        arguments.update(
            {name: value for name, value in offers.items() if name in takes and arguments.get(name) is None}
        )
    if inspect.isclass(target) and issubclass(target, nn.Module) and not positional:
        target = lazy_class(target, set(arguments)) or target
    if node.get("_partial_"):
        return functools.partial(target, *positional, **arguments)
    try:
        return target(*positional, **arguments)
    except ProgramError as error:
        error.key = error.key or f"{key}.{error.place}"
        raise
    except ConfigError as error:
        raise ConfigError([_placed(fault, key) for fault in error.faults]) from error
    except ExpError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError, OSError) as error:
        fault = Fault(
            key=key,
            got=f"{node['_target_']} refused its values ({type(error).__name__}: {error})",
            expected="values that it accepts",
        )
        raise ConfigError([fault]) from error


def _placed(fault: Fault, key: str) -> Fault:
    """A fault of a constructor names its own parameter; the config's key is that of the node before it."""
    inside = fault.key == key or fault.key.startswith(f"{key.split('.')[0]}.")
    return fault if inside else dataclasses.replace(fault, key=f"{key}.{fault.key}")
