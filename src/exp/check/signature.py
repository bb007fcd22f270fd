"""The parameters of a target, read from its signature: names, annotations and defaults."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exp.check.foreign import HIDDEN_NAMES, with_bounds
from exp.config.annotations import EMPTY, evaluate_annotation
from exp.config.plain_tree import is_node
from exp.config.targets import resolve
from exp.errors import LIBRARIES, ConfigError, MissingExtraError

PLAIN = (type(None), bool, int, float, str, list, tuple)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A named parameter of a target. A missing annotation or default is EMPTY."""

    name: str
    annotation: object
    default: object

    @property
    def required(self) -> bool:
        return self.default is EMPTY


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The parameters of a target.

    Attributes:
        parameters: Parameters by name.
        open: Whether the target also accepts other parameter names, because of `**kwargs`.
        positional: Names of the parameters that `_args_` sets, in order.
        rest: Whether `_args_` may have more values than `positional` has names, because of `*args`.
    """

    parameters: dict[str, Parameter]
    open: bool
    positional: tuple[str, ...]
    rest: bool


def signature_of(target: Any) -> Signature:
    """Return the signature of a class or function.

    If a class passes `**kwargs` on to its base classes, the parameters of the base classes are included.
    """
    if not inspect.isclass(target):
        return _of_function(target, bound=False)
    found = _of_class(target)
    parameters = {
        name: replace(one, annotation=with_bounds(target, name, one.annotation, one.default))
        for name, one in found.parameters.items()
    }
    return replace(found, parameters=parameters)


def _of_class(target: type) -> Signature:
    own = _find_overload(target)
    if own is not None:
        return own
    maker = _maker(target)
    if maker is None:
        return Signature(parameters={}, open=False, positional=(), rest=False)
    found = _of_function(maker, bound=True)
    return _with_bases(target, maker, found) if found.open else found


def with_defaults(node: Any, *, allow: Sequence[str] = ()) -> Any:
    """Return a config node in which each node with a `_target_` also contains the defaults of its class.

    Nodes in lists and nodes with an unknown target are not changed. Defaults that YAML cannot express are left out.

    Args:
        node: A config node or value.
        allow: Packages of users that targets may come from. Default: no packages.
    """
    if not isinstance(node, Mapping):
        return node
    own = {name: with_defaults(value, allow=allow) for name, value in node.items()}
    if not is_node(own) or not isinstance(own["_target_"], str):
        return own
    try:
        target = resolve(own["_target_"], returns=("builtins.object",), allow=allow)
        parameters = signature_of(target).parameters.values()
    except (ConfigError, MissingExtraError):
        return own
    plain = [(one.name, one.default) for one in parameters if isinstance(one.default, PLAIN)]
    return {**{name: list(value) if isinstance(value, tuple) else value for name, value in plain}, **own}


def _maker(target: type) -> Callable[..., Any] | None:
    """Return `__new__` of a class if this method declares parameters, and otherwise `__init__`.

    Return None if `__init__` is not written in Python.
    """
    new = inspect.getattr_static(target, "__new__", None)
    if isinstance(new, staticmethod) and inspect.isfunction(new.__func__) and not _takes_anything(new.__func__):
        return new.__func__
    init = inspect.getattr_static(target, "__init__")
    return init if inspect.isfunction(init) else None


def _takes_anything(function: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in list(inspect.signature(function).parameters.values())[1:]]
    return all(kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for kind in kinds)


def _find_overload(target: type) -> Signature | None:
    """Return the overload of `__init__` with the most parameters, if `__init__` takes only `*args, **kwargs`.

    An example is nn.LSTM. Return None for other classes.
    """
    init = inspect.getattr_static(target, "__init__")
    if not inspect.isfunction(init) or not _takes_anything(init):
        return None
    overloads = typing.get_overloads(init)
    if not overloads or not _of_function(init, bound=True).open:
        return None
    return max((_of_function(overload, bound=True) for overload in overloads), key=lambda found: len(found.parameters))


def _of_function(function: Callable[..., Any], *, bound: bool) -> Signature:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        # Functions written in C may have no signature.
        return Signature(parameters={}, open=True, positional=(), rest=True)
    if bound:
        parameters = parameters[1:]
    named, positional, rest, is_open = {}, [], False, _wrapper_takes_more(function)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = True
        else:
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                positional.append(parameter.name)
            annotation = evaluate_annotation(parameter.annotation, function)
            named[parameter.name] = Parameter(name=parameter.name, annotation=annotation, default=parameter.default)
    return Signature(parameters=named, open=is_open, positional=tuple(positional), rest=rest)


def _wrapper_takes_more(function: Callable[..., Any]) -> bool:
    """Return whether a wrapper made by functools.wraps accepts parameters that the wrapped function does not have.

    inspect.signature reads only the wrapped function. The result is False for wrappers in libraries, because they
    accept exactly the parameters of the wrapped function.
    """
    if not hasattr(function, "__wrapped__") or _is_library(function):
        return False
    shown = inspect.signature(function, follow_wrapped=False).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in shown)


def _with_bases(target: type, maker: Callable[..., Any], found: Signature) -> Signature:
    """Return a signature extended by the parameters of base classes, up to the first base without `**kwargs`."""
    parameters = dict(found.parameters)
    holder = _holder(target, maker)
    if holder is not None and _hidden_parameters(holder):
        return replace(found, parameters={**_hidden_parameters(holder), **parameters}, open=False)
    reads = not _is_library(maker)
    for base in _bases_above(target, maker):
        if "__init__" not in vars(base):
            continue
        above = _of_function(vars(base)["__init__"], bound=True)
        for name, parameter in above.parameters.items():
            # Parameters of a base are not required, because the constructor of the subclass may pass their values.
            default = None if parameter.required else parameter.default
            parameters.setdefault(name, Parameter(name=name, annotation=parameter.annotation, default=default))
        if not above.open or _hidden_parameters(base):
            return replace(found, parameters={**_hidden_parameters(base), **parameters}, open=reads)
        reads = reads or not _is_library(vars(base)["__init__"])
    return replace(found, parameters=parameters, open=True)


def _is_library(function: Callable[..., Any]) -> bool:
    """Return whether a constructor belongs to a library."""
    return (function.__module__ or "").partition(".")[0] in LIBRARIES


def _hidden_parameters(base: type) -> dict[str, Parameter]:
    names = HIDDEN_NAMES.get(f"{base.__module__}.{base.__qualname__}", {})
    return {name: Parameter(name=name, annotation=kind, default=None) for name, kind in names.items()}


def _holder(target: type, maker: Callable[..., Any]) -> type | None:
    """Return the class that defines a constructor: the target or one of its base classes."""
    return next((base for base in target.__mro__ if maker in vars(base).values()), None)


def _bases_above(target: type, maker: Callable[..., Any]) -> Iterator[type]:
    holder = _holder(target, maker)
    above = holder is None
    for base in target.__mro__:
        if base is object:
            return
        # Skip nn.Module: its signature is `*args, **kwargs`, but it raises an exception for any argument.
        if above and f"{base.__module__}.{base.__qualname__}" != "torch.nn.modules.module.Module":
            yield base
        above = above or base is holder
