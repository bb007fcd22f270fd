"""Whether a value of a config is of the kind that a parameter's annotation, or its default, says."""

from __future__ import annotations

import collections.abc
import datetime
import enum
import inspect
import os
import types
import typing
from typing import Any

EMPTY = inspect.Parameter.empty
UNKNOWN_KIND = Any
SEQUENCES = (
    list,
    tuple,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


class Unknown:
    """Stands in for a value that could not be read, so that one fault is not reported twice."""

    def __repr__(self) -> str:
        return "(unknown)"


UNKNOWN = Unknown()


def fits(value: Any, annotation: Any, default: Any = EMPTY) -> bool:
    """Whether a plain value (scalar, list or mapping of a config) may be given for a parameter.

    A parameter without an annotation is judged by its default's type, and takes anything where that says nothing. A
    node with a `_target_` becomes an object later: only a plain scalar annotation refuses it.
    """
    if value is UNKNOWN or (value is None and default is None):
        return True
    if annotation is EMPTY or annotation is Any:
        return _like_default(value, default)
    return _is(value, annotation)


def worded(annotation: Any, default: Any = EMPTY) -> str:
    """The kind in words: `an integer`, `one of min, max`, `a list of 2 numbers`."""
    if annotation is EMPTY or annotation is Any:
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
        return worded(arguments[0])
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
    return " or ".join(dict.fromkeys(kinds))


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


def is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


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
    if value is UNKNOWN or annotation is Any or isinstance(annotation, typing.TypeVar | str | typing.ForwardRef):
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if origin is typing.Literal:
        return any(value == word and type(value) is type(word) for word in arguments)
    if _is_union(origin):
        return any(_is(value, argument) for argument in arguments)
    if origin is typing.Annotated:
        return _is(value, arguments[0])
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
    return (
        inspect.isclass(base)
        and base not in WORDS
        and base not in SEQUENCES
        and base not in MAPPINGS
        and not (issubclass(base, enum.Enum | os.PathLike))
    )


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType
