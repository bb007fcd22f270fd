"""What a target takes, read from its signature: names, which must be given, and what kind of value each is."""

from __future__ import annotations

import collections.abc
import datetime
import enum
import inspect
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exp.config.reading import UNKNOWN, is_node
from exp.config.targets import resolve
from exp.errors import ConfigError, MissingExtraError

EMPTY = inspect.Parameter.empty
SEQUENCES = (
    list,
    tuple,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
)
PLAIN = (type(None), bool, int, float, str, list, tuple)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
# What annotated_types declares of a value, by its names there.
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "multiple_of": lambda value, step: value % step == 0,
    "min_length": lambda value, length: len(value) >= length,
    "max_length": lambda value, length: len(value) <= length,
    "func": lambda value, accepts: bool(accepts(value)),
}
# Classes that take names in **kwargs and pick them out by hand. A test holds each against the installed version.
HIDDEN_NAMES: dict[str, dict[str, Any]] = {
    # What it hands on to torch's DistributedDataParallel.
    "lightning.pytorch.strategies.ddp.DDPStrategy": {
        "broadcast_buffers": bool,
        "bucket_cap_mb": float,
        "find_unused_parameters": bool,
        "gradient_as_bucket_view": bool,
        "static_graph": bool,
    },
    "torchmetrics.metric.Metric": {
        "compute_on_cpu": bool,
        "compute_with_cache": bool,
        "dist_sync_on_step": bool,
        "distributed_available_fn": Any,
        "dist_sync_fn": Any,
        "process_group": Any,
        "sync_on_compute": bool,
    },
}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One named parameter of a target. annotation and default are EMPTY where there is none."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is EMPTY


@dataclass(frozen=True, kw_only=True)
class Signature:
    """parameters by name; `open` where any other name is taken, too.

    positional: the names that `_args_` fills, in order. rest: whether it may hold more than those.
    """

    parameters: dict[str, Parameter]
    open: bool
    positional: tuple[str, ...]
    rest: bool


def signature_of(target: Any) -> Signature:
    """The signature of a class or function. A class that only passes `**kwargs` up is read on to its bases."""
    if not inspect.isclass(target):
        return _of_function(target, bound=False)
    own = _overloaded(target)
    if own is not None:
        return own
    maker = _maker(target)
    if maker is None:
        return Signature(parameters={}, open=False, positional=(), rest=False)
    found = _of_function(maker, bound=True)
    return _with_bases(target, maker, found) if found.open else found


def with_defaults(node: Any, *, allow: Sequence[str] = ()) -> Any:
    """Plain values with what the class of each node within mappings takes where the node leaves a parameter out.

    A name that cannot be resolved is left as it is; so is a default that is no plain value.
    """
    if not isinstance(node, Mapping):
        return node
    own = {name: with_defaults(value, allow=allow) for name, value in node.items()}
    if not is_node(own) or not isinstance(own["_target_"], str):
        return own
    try:
        parameters = signature_of(resolve(own["_target_"], allow=allow)).parameters.values()
    except (ConfigError, MissingExtraError):
        return own
    plain = [(one.name, one.default) for one in parameters if isinstance(one.default, PLAIN)]
    return {**{name: list(value) if isinstance(value, tuple) else value for name, value in plain}, **own}


def _maker(target: type) -> Callable[..., Any] | None:
    """The function whose parameters a call of the class takes: its `__new__` where it has one of its own."""
    new = inspect.getattr_static(target, "__new__", None)
    if isinstance(new, staticmethod) and inspect.isfunction(new.__func__) and not _takes_anything(new.__func__):
        return new.__func__
    init = inspect.getattr_static(target, "__init__")
    return init if inspect.isfunction(init) else None


def _takes_anything(function: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in list(inspect.signature(function).parameters.values())[1:]]
    return all(kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for kind in kinds)


def _overloaded(target: type) -> Signature | None:
    """The longest declared overload of `__init__`, where its body says only `*args, **kwargs`, as nn.LSTM's does."""
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
        # Functions written in C may carry no signature.
        return Signature(parameters={}, open=True, positional=(), rest=True)
    if bound:
        parameters = parameters[1:]
    named, positional, rest, is_open = {}, [], False, False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = True
        else:
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                positional.append(parameter.name)
            annotation = _evaluated(parameter.annotation, function)
            named[parameter.name] = Parameter(name=parameter.name, annotation=annotation, default=parameter.default)
    return Signature(parameters=named, open=is_open, positional=tuple(positional), rest=rest)


def _with_bases(target: type, maker: Callable[..., Any], found: Signature) -> Signature:
    """Adds what the bases take to an `__init__` that passes `**kwargs` up, until one of them takes no more."""
    parameters = dict(found.parameters)
    holder = _holder(target, maker)
    if holder is not None and _hidden(holder):
        return replace(found, parameters={**_hidden(holder), **parameters}, open=False)
    for base in _bases_above(target, maker):
        if "__init__" not in vars(base):
            continue
        above = _of_function(vars(base)["__init__"], bound=True)
        for name, parameter in above.parameters.items():
            # The subclass may fill it in itself, so only what the subclass asks for is required.
            default = None if parameter.required else parameter.default
            parameters.setdefault(name, Parameter(name=name, annotation=parameter.annotation, default=default))
        if not above.open or _hidden(base):
            return replace(found, parameters={**_hidden(base), **parameters}, open=False)
    return replace(found, parameters=parameters, open=True)


def _hidden(base: type) -> dict[str, Parameter]:
    names = HIDDEN_NAMES.get(f"{base.__module__}.{base.__qualname__}", {})
    return {name: Parameter(name=name, annotation=kind, default=None) for name, kind in names.items()}


def _holder(target: type, maker: Callable[..., Any]) -> type | None:
    """The class whose own function makes the target."""
    return next((base for base in target.__mro__ if maker in vars(base).values()), None)


def _bases_above(target: type, maker: Callable[..., Any]) -> Iterator[type]:
    holder = _holder(target, maker)
    above = holder is None
    for base in target.__mro__:
        if base is object:
            return
        # nn.Module's own `*args, **kwargs` take nothing: a name that reached it would be refused there.
        if above and f"{base.__module__}.{base.__qualname__}" != "torch.nn.modules.module.Module":
            yield base
        above = above or base is holder


def _evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
    """An annotation with its names looked up in the module that wrote it; EMPTY where that module lacks them."""
    if annotation is EMPTY or not _holds_text(annotation):
        return annotation
    stand_in = type("Annotated", (), {"__annotations__": {"value": annotation}})
    try:
        names = vars(inspect.getmodule(inspect.unwrap(function)))
        return typing.get_type_hints(stand_in, globalns=names, include_extras=True)["value"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        # Names under TYPE_CHECKING are not there at run time: such a parameter takes any value.
        return EMPTY


def _holds_text(annotation: Any) -> bool:
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    return any(
        _holds_text(argument) for argument in typing.get_args(annotation) if not isinstance(argument, list)
    ) and (typing.get_origin(annotation) is not typing.Literal)


def fits(value: Any, annotation: Any, default: Any = EMPTY) -> bool:
    """Whether a plain value (scalar, list or mapping of a config) may be given for a parameter.

    A parameter without an annotation is judged by its default's type, and takes anything where that says nothing. A
    node with a `_target_` becomes an object later: only a plain scalar annotation refuses it.
    """
    if value is UNKNOWN or (value is None and default is None):
        return True
    if annotation is EMPTY or annotation is Any or annotation is object:
        return _like_default(value, default)
    return _is(value, annotation)


def worded(annotation: Any, default: Any = EMPTY) -> str:
    """The kind in words: `an integer`, `one of min, max`, `a list of 2 numbers`."""
    if annotation is EMPTY or annotation is Any or annotation is object:
        return WORDS[type(default)] if type(default) in WORDS and default is not None else "another value"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    base = origin or annotation
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(word) for word in arguments)
    if _is_union(origin):
        return _worded_union(arguments)
    if origin is typing.Annotated:
        return _worded_bounds(arguments[0], arguments[1:])
    if base in SEQUENCES:
        return _worded_list(arguments)
    if base in MAPPINGS:
        return "a mapping"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(member.name for member in annotation)
    if inspect.isclass(annotation) and issubclass(annotation, os.PathLike):
        return "a path"
    if base is collections.abc.Callable:
        return "a node with a _target_ and _partial_: true"
    return f"a node whose _target_ is a {base.__name__}" if inspect.isclass(base) else str(annotation)


def _worded_union(arguments: tuple[Any, ...]) -> str:
    plain = [kind for kind in arguments if not _is_object(kind)] or list(arguments)
    kinds = [worded(kind) for kind in plain if kind is not type(None)]
    if WORDS[float] in kinds and WORDS[int] in kinds:
        kinds.remove(WORDS[int])
    if type(None) in arguments:
        kinds.append(WORDS[type(None)])
    return (", or " if any("," in kind for kind in kinds) else " or ").join(dict.fromkeys(kinds))


def _worded_bounds(annotation: Any, metadata: Sequence[Any]) -> str:
    """The kind, or the text among the metadata that stands for it, with its bounds: `a number, 0 or more`."""
    bounds = _bounds(metadata)
    words = next((text for text in metadata if isinstance(text, str)), None) or worded(annotation)
    if "ge" in bounds and "le" in bounds:
        words += f" between {bounds['ge']} and {bounds['le']}"
    else:
        lower = f", {bounds['ge']} or more" if "ge" in bounds else f" above {bounds['gt']}" if "gt" in bounds else ""
        upper = f" below {bounds['lt']}" if "lt" in bounds else f" at most {bounds['le']}" if "le" in bounds else ""
        words += lower + (" and" if lower and upper else "" if "lt" in bounds else "," if upper else "") + upper
    if "multiple_of" in bounds:
        words += f", a multiple of {bounds['multiple_of']}"
    if "min_length" in bounds:
        words += f", {bounds['min_length']} or more of them"
    if "max_length" in bounds:
        words += f", {bounds['max_length']} of them at most"
    return words


def _bounds(metadata: Sequence[Any]) -> dict[str, Any]:
    """The bounds that an Annotated declares by annotated_types, Interval and Len among them, by their names there."""
    declared = [(name, getattr(entry, name, None)) for entry in metadata for name in BOUNDS]
    return {name: bound for name, bound in declared if bound is not None}


def _is_within(value: Any, metadata: Sequence[Any]) -> bool:
    """Whether a value of the right kind keeps its bounds; a number with bounds is finite."""
    bounds = _bounds(metadata)
    if bounds and isinstance(value, float) and not math.isfinite(value):
        return False
    return all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def _worded_list(arguments: tuple[Any, ...]) -> str:
    kinds = [worded(kind) for kind in arguments if kind is not ...]
    if not kinds:
        return "a list"
    if len(set(kinds)) > 1:
        return f"a list of {', '.join(kinds)}"
    many = {"an integer": "integers", "a number": "numbers", "text": "texts", "a mapping": "mappings"}
    count = f"{len(kinds)} " if len(kinds) > 1 else ""
    return f"a list of {count}{many[kinds[0]]}" if kinds[0] in many else f"a list, each {kinds[0]}"


def words_of(annotation: Any) -> list[str]:
    """Every word that a Literal, or an enum, somewhere in the annotation lists."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(word) for word in typing.get_args(annotation)]
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [member.name for member in annotation]
    return [word for part in typing.get_args(annotation) if not isinstance(part, list) for word in words_of(part)]


def _like_default(value: Any, default: Any) -> bool:
    if default is EMPTY or default is None or value is None:
        return True
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, list | tuple):
        return isinstance(value, list | int | float)
    return True


def _is(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if (
        value is UNKNOWN
        or annotation is Any
        or annotation is object
        or isinstance(annotation, typing.TypeVar | str | typing.ForwardRef)
    ):
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if origin is typing.Literal:
        return any(value == word and type(value) is type(word) for word in arguments)
    if _is_union(origin):
        return any(_is(value, argument) for argument in arguments)
    if origin is typing.Annotated:
        return _is(value, arguments[0]) and (is_node(value) or _is_within(value, arguments[1:]))
    base = origin or annotation
    if base in (bool, int, float, str, complex):
        return _is_scalar(value, base)
    if is_node(value):
        return True
    if base in SEQUENCES:
        return _is_sequence(value, base, arguments)
    if base in MAPPINGS:
        return isinstance(value, dict) and (
            len(arguments) != 2 or all(_is(item, arguments[1]) for item in value.values())
        )
    if base is collections.abc.Callable:
        return False
    return _is_class(value, base)


def _is_scalar(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind in (float, complex):
        return isinstance(value, int | float)
    return isinstance(value, kind)


def _is_sequence(value: Any, base: Any, arguments: tuple[Any, ...]) -> bool:
    if not isinstance(value, list):
        return False
    if base is tuple and arguments and arguments[-1] is not ...:
        return len(value) == len(arguments) and all(map(_is, value, arguments))
    return not arguments or all(_is(item, arguments[0]) for item in value)


def _is_class(value: Any, base: Any) -> bool:
    if not inspect.isclass(base):
        return True
    if issubclass(base, enum.Enum):
        return value in [member.name for member in base] or value in [member.value for member in base]
    if issubclass(base, os.PathLike):
        return isinstance(value, str)
    if issubclass(base, datetime.timedelta):
        return False
    if f"{base.__module__}.{base.__qualname__}" == "torch.device":
        return isinstance(value, str | int) and not isinstance(value, bool)
    # A mapping or list may hold the nodes that the class is built from; a scalar can not become one.
    return isinstance(value, list | dict)


def _is_object(annotation: Any) -> bool:
    """Whether only a node with a `_target_`, or nothing in a config, can be such a value."""
    base = typing.get_origin(annotation) or annotation
    if base is typing.Annotated:
        return _is_object(typing.get_args(annotation)[0])
    return (
        inspect.isclass(base)
        and base not in WORDS
        and base not in SEQUENCES
        and base not in MAPPINGS
        and not (issubclass(base, enum.Enum | os.PathLike))
    )


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType
