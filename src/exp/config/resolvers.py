"""Resolvers of interpolations that a config declares in its node `resolvers`.

With `resolvers: {half: mine.half}`, the value of `${half:64}` is the result of mine.half(64). The dotted name of the
function is checked like a `_target_`. Its module is imported by the check, or when an interpolation is first resolved.

OmegaConf registers the name of a resolver for the whole process. Several configs may use the same name for different
functions, so the function is looked up in the config that is being resolved. The function is called only once for equal
arguments, so that the check, the plan and the frozen config contain the same values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import UnsupportedInterpolationType

from exp.config.reading import held_node, raw_values
from exp.config.targets import TargetError, resolve_resolver
from exp.errors import ConfigError, ErrorDetails, invalid_value

NODE = "resolvers"
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
EXAMPLE = "the dotted name of a function of yours, such as mine.half of mine.py next to ./conf"

_registered: set[str] = set()


class _Calls:
    """Cached results of resolver functions. A config and its copies share one cache.

    Args:
        allow: Packages that the command line allows.
        values: Results of calls. A key is a pair: dotted name of the function, and `repr` of its arguments.
    """

    def __init__(self, allow: Sequence[str], values: dict[tuple[str, str], object]) -> None:
        self.allow, self.values = allow, values

    def __deepcopy__(self, memo: object) -> _Calls:
        return self


def use_resolvers(config: DictConfig, *, allow: Sequence[str]) -> None:
    """Register the resolvers that a config declares. Interpolations in the config and its copies can then use them.

    Resolvers of OmegaConf and Hydra are not replaced.

    Args:
        config: Config with the node `resolvers`.
        allow: Packages that the command line allows.
    """
    kept = OmegaConf.get_cache(config)
    kept[NODE] = _Calls(allow, kept[NODE].values if NODE in kept else {})
    for name in _declared_functions(config):
        if name in _registered or not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, _make_resolver(name), replace=True)
            _registered.add(name)


def resolver_errors(plain: Mapping[str, object], *, allow: Sequence[str]) -> Iterator[ErrorDetails]:
    """Yield the errors in the node `resolvers`: names that are not allowed, and functions that are not allowed.

    Args:
        plain: Plain values of the config.
        allow: Packages that the command line allows.
    """
    declared = plain.get(NODE)
    for name, dotted in declared.items() if isinstance(declared, dict) else ():
        key = f"{NODE}.{name}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            yield invalid_value(key, name, "a name of letters, as in ${name:...}")
        elif name not in _registered and OmegaConf.has_resolver(name):
            fix = f"Write resolvers.my_{name.replace('.', '_')}"
            yield invalid_value(key, name, "another name", fix, because="a name of OmegaConf or Hydra")
        elif not isinstance(dotted, str) or "." not in dotted:
            yield invalid_value(key, dotted, EXAMPLE)
        else:
            try:
                resolve_resolver(dotted, allow=allow)
            except TargetError as error:
                yield replace(error.errors[0], key=key, expected=EXAMPLE)
            except ConfigError as error:
                yield from error.errors


def _declared_functions(config: DictConfig) -> dict[str, str]:
    """Return the dotted names of functions in the node `resolvers`, by resolver name. Invalid entries are left out."""
    node = held_node(config, NODE)
    return {
        name: dotted
        for name, dotted in (raw_values(node) if isinstance(node, DictConfig) else {}).items()
        if isinstance(name, str) and NAME.fullmatch(name) and isinstance(dotted, str) and "${" not in dotted
    }


def _make_resolver(name: str) -> Callable[..., object]:
    """Return a resolver for OmegaConf. It calls the function that the config declares for this resolver.

    Args:
        name: Name of the resolver.
    """

    def call_function(*arguments: object, _root_: DictConfig) -> object:
        declared, kept = _declared_functions(_root_), OmegaConf.get_cache(_root_)
        if name not in declared or NODE not in kept:
            # OmegaConf's message for an unknown resolver.
            raise UnsupportedInterpolationType(f"Unsupported interpolation type {name}")
        dotted, calls = declared[name], kept[NODE]
        function = resolve_resolver(dotted, allow=calls.allow)
        plain = [OmegaConf.to_container(one, resolve=True) if OmegaConf.is_config(one) else one for one in arguments]
        call = (dotted, repr(plain))
        if call not in calls.values:
            calls.values[call] = function(*arguments)
        # A copy, because a returned container becomes a part of the resolved config and may be changed.
        return copy.deepcopy(calls.values[call])

    return call_function
