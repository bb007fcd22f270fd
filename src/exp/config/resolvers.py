"""Resolvers of the user's own, which the node `resolvers` names: `resolvers: {half: mine.half}`, `${half:64}`.

Each is a function that passes the wall of targets: its name is looked at before anything is imported, and its module
is imported when an interpolation first asks for it, or when the check looks at it. OmegaConf keeps the names of
resolvers for the process; the functions are those that the config names which is read, and each is called once for the
same arguments: a config is read by the check, the plan and whatever writes it down, and all are to see one value.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import UnsupportedInterpolationType

from exp.config.targets import TargetError, resolve_resolver
from exp.errors import ConfigError, ErrorDetails
from exp.spelling import show

NODE = "resolvers"
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
EXAMPLE = "the dotted name of a function of yours, such as mine.half of mine.py beside ./conf"

_registered: set[str] = set()


class _Calls:
    """What the resolvers of one config gave, and the packages that it trusts.

    values: by function and arguments, so that whoever reads the config, or a copy of it, sees the same.
    """

    def __init__(self, allow: Sequence[str], values: dict[tuple[str, str], Any]) -> None:
        self.allow, self.values = allow, values

    def __deepcopy__(self, memo: object) -> _Calls:
        return self


def use_resolvers(config: DictConfig, *, allow: Sequence[str]) -> None:
    """Let interpolations of a config, and of its copies, call the functions that it names as resolvers.

    Each is called once with the same arguments. What another config names stays as it is.

    allow: the packages that the command line trusts. A name that OmegaConf or Hydra has stays theirs.
    """
    kept = OmegaConf.get_cache(config)
    kept[NODE] = _Calls(allow, kept[NODE].values if NODE in kept else {})
    for name in _named(config):
        if name in _registered or not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, _late(name), replace=True)
            _registered.add(name)


def resolver_errors(plain: Mapping[str, Any], *, allow: Sequence[str]) -> Iterator[ErrorDetails]:
    """What is wrong with the names of resolvers, and with the functions that they name."""
    named = plain[NODE] if isinstance(plain.get(NODE), dict) else {}
    for name, dotted in named.items():
        key = f"{NODE}.{name}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            yield ErrorDetails(key=key, got=show(name), expected="a name of letters, as ${name:...} has it")
        elif name not in _registered and OmegaConf.has_resolver(name):
            yield ErrorDetails(
                key=key,
                got=f"{name}, which OmegaConf or Hydra has",
                expected="a name of your own",
                fix=f"Write resolvers.my_{name.replace('.', '_')}",
            )
        elif not isinstance(dotted, str) or "." not in dotted:
            yield ErrorDetails(key=key, got=show(dotted), expected=EXAMPLE)
        else:
            try:
                resolve_resolver(dotted, allow=allow)
            except TargetError as error:
                (detail,) = error.errors
                yield ErrorDetails(key=key, got=detail.got, expected=EXAMPLE, fix=detail.fix)
            except ConfigError as error:
                yield from error.errors


def held(config: DictConfig, name: str) -> DictConfig | ListConfig | None:
    """Return the mapping or list of a config under a name. None for another value, `???` and interpolations."""
    if name not in list(config) or OmegaConf.is_interpolation(config, name) or OmegaConf.is_missing(config, name):
        return None
    value = config[name]
    return value if isinstance(value, DictConfig | ListConfig) else None


def _named(config: DictConfig) -> dict[str, str]:
    """Each resolver with the function that it names, where both can be names."""
    node = held(config, NODE)
    if not isinstance(node, DictConfig):
        return {}
    named = cast("dict[Any, Any]", OmegaConf.to_container(node, resolve=False))
    return {
        name: dotted
        for name, dotted in named.items()
        if isinstance(name, str) and NAME.fullmatch(name) and isinstance(dotted, str) and "${" not in dotted
    }


def _late(name: str) -> Callable[..., Any]:
    """A resolver that calls the function which the config that asks names, when that has passed the wall."""

    def called(*arguments: Any, _root_: DictConfig) -> Any:
        named, kept = _named(_root_), OmegaConf.get_cache(_root_)
        if name not in named or NODE not in kept:
            # OmegaConf's own words for one that it does not know.
            raise UnsupportedInterpolationType(f"Unsupported interpolation type {name}")
        dotted, calls = named[name], kept[NODE]
        function = resolve_resolver(dotted, allow=calls.allow)
        call = (dotted, repr([_plain(argument) for argument in arguments]))
        if call not in calls.values:
            calls.values[call] = function(*arguments)
        # A container becomes a part of the config that asks.
        return copy.deepcopy(calls.values[call])

    return called


def _plain(argument: Any) -> Any:
    return OmegaConf.to_container(argument, resolve=True) if OmegaConf.is_config(argument) else argument
