"""The comparison of config values with type annotations, and descriptions of annotations in words."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from exp.config.annotations import EMPTY, is_array
from exp.config.plain_tree import is_node, leaves
from exp.config.reading import UNKNOWN
from exp.errors import LIBRARIES

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
# Types that a parameter without an annotation accepts, by the type of its default.
LIKE = {bool: bool, int: float, float: float, str: str, list: list | float | bool, tuple: list | float | bool}
# Descriptions of config values that become objects of torch.
TORCHS = {"torch.dtype": "a dtype, such as torch.float64", "torch.Tensor": "numbers, or lists of them"}
# Tests for the bounds of annotated_types, by the attribute that contains the bound. A test takes a value and the bound.
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
NUMERIC = ("gt", "ge", "lt", "le", "multiple_of")


def fits(value: object, annotation: object, default: object = EMPTY) -> bool:
    """Return whether a config value (scalar, list or mapping) is valid for a parameter.

    If the parameter has no annotation, the type of the default decides. If the parameter has no default either, any
    value is valid. A mapping with a `_target_` becomes an object later, so it is valid for any annotation except a
    scalar.

    Args:
        value: The config value.
        annotation: Annotation of the parameter. EMPTY if the parameter has no annotation.
        default: Default of the parameter. EMPTY (default) if the parameter has no default.
    """
    if value is UNKNOWN or (value is None and default is None):
        return True
    if annotation is EMPTY or annotation is Any or annotation is object:
        return _like_default(value, default)
    return _is(value, annotation)


def describe_type(annotation: object, default: object = EMPTY) -> str:
    """Return a description of an annotation, such as `an integer`, `one of min, max` or `a list of 2 numbers`.

    Args:
        annotation: Annotation of a parameter. EMPTY describes the type of the default.
        default: Default of the parameter. EMPTY (default) if the parameter has no default.
    """
    if annotation is EMPTY or annotation is Any or annotation is object:
        return WORDS[type(default)] if type(default) in WORDS and default is not None else "another value"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    base = origin or annotation
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(word) for word in arguments)
    if _is_union(origin):
        return _describe_union(arguments)
    if origin is typing.Annotated:
        return _describe_bounds(arguments[0], arguments[1:])
    if base in SEQUENCES:
        return _describe_list(arguments)
    if base in MAPPINGS:
        named = len(arguments) == 2 and arguments[1] is not Any
        return f"a mapping of names to {describe_type(arguments[1])}" if named else "a mapping"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(member.name for member in annotation)
    if inspect.isclass(annotation) and issubclass(annotation, os.PathLike):
        return "a path"
    if base is collections.abc.Callable:
        return "a node with a _target_ and _partial_: true"
    if inspect.isclass(base) and _name_of(base) in TORCHS:
        return TORCHS[_name_of(base)]
    return f"a node whose _target_ is a {base.__name__}" if inspect.isclass(base) else str(annotation)


def _describe_union(arguments: tuple[Any, ...]) -> str:
    arguments = _without_tensors(arguments)
    kinds = [describe_type(kind) for kind in arguments if kind is not type(None)]
    if WORDS[float] in kinds and WORDS[int] in kinds:
        kinds.remove(WORDS[int])
    if type(None) in arguments:
        kinds.append(WORDS[type(None)])
    return (", or " if any("," in kind for kind in kinds) else " or ").join(dict.fromkeys(kinds))


def _describe_bounds(annotation: object, metadata: Sequence[Any]) -> str:
    """Return a description of a type with bounds, such as `a number above 0`.

    A text in the metadata replaces the description of the type.

    Args:
        annotation: The type.
        metadata: Bounds of the type, and optionally a text.
    """
    bounds = bounds_of(metadata)
    text = next((text for text in metadata if isinstance(text, str)), None)
    words = text or describe_type(annotation)
    if "ge" in bounds and "le" in bounds:
        words += f" between {bounds['ge']} and {bounds['le']}"
    else:
        lower = f", {bounds['ge']} or more" if "ge" in bounds else f" above {bounds['gt']}" if "gt" in bounds else ""
        upper = f" below {bounds['lt']}" if "lt" in bounds else f" at most {bounds['le']}" if "le" in bounds else ""
        words += lower + (" and" if lower and upper else "" if "lt" in bounds else "," if upper else "") + upper
    if "multiple_of" in bounds:
        words += f", a multiple of {bounds['multiple_of']}"
    if "min_length" in bounds and not text:
        words += f" with {bounds['min_length']} or more entries"
    if "max_length" in bounds and not text:
        words += f" with at most {bounds['max_length']} entries"
    return words


def bounds_of(metadata: Sequence[Any]) -> dict[str, Any]:
    """Return the bounds in the metadata of an `Annotated` type, by their names in annotated_types, such as `ge`."""
    declared = [(name, getattr(entry, name, None)) for entry in metadata for name in BOUNDS]
    return {name: bound for name, bound in declared if bound is not None}


def _is_within(value: object, metadata: Sequence[Any]) -> bool:
    """Return whether a value, or each entry of a list, is within the bounds.

    A number with bounds must also be finite.
    """
    bounds = bounds_of(metadata)
    if bounds and isinstance(value, float) and not math.isfinite(value):
        return False
    return all(_keeps(value, name, bound) for name, bound in bounds.items())


def _keeps(value: object, name: str, bound: object) -> bool:
    if name in NUMERIC and isinstance(value, list):
        return all(_keeps(entry, name, bound) for entry in value)
    if name == "func" and isinstance(value, list) and any(entry is UNKNOWN for entry in value):
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return BOUNDS[name](value, bound) if is_number or name not in NUMERIC else True


def _describe_list(arguments: tuple[Any, ...]) -> str:
    kinds = [describe_type(kind) for kind in arguments if kind is not ...]
    if not kinds:
        return "a list"
    if len(set(kinds)) > 1:
        return f"a list of {', '.join(kinds)}"
    many = {"an integer": "integers", "a number": "numbers", "text": "texts", "a mapping": "mappings"}
    count = f"{len(kinds)} " if len(kinds) > 1 else ""
    return f"a list of {count}{many[kinds[0]]}" if kinds[0] in many else f"a list, each {kinds[0]}"


def words_of(annotation: object) -> list[str]:
    """Return the words that an annotation allows. They come from each Literal, enum and bool in the annotation."""
    if annotation is bool:
        return ["true", "false"]
    if typing.get_origin(annotation) is typing.Literal:
        return [str(word) for word in typing.get_args(annotation)]
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [member.name for member in annotation]
    return [word for part in typing.get_args(annotation) if not isinstance(part, list) for word in words_of(part)]


def _like_default(value: object, default: object) -> bool:
    kind = next((kind for base, kind in LIKE.items() if isinstance(default, base)), Any)
    return value is None or _is(value, kind)


def _is(value: object, annotation: object) -> bool:
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
        return any(_is(value, argument) for argument in _without_tensors(arguments))
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


def _is_scalar(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind in (float, complex):
        return isinstance(value, int | float)
    return isinstance(value, kind)


def _is_sequence(value: object, base: Any, arguments: tuple[Any, ...]) -> bool:
    if not isinstance(value, list):
        return False
    if base is tuple and arguments and arguments[-1] is not ...:
        return len(value) == len(arguments) and all(map(_is, value, arguments))
    return not arguments or all(_is(item, arguments[0]) for item in value)


def _is_class(value: object, base: Any) -> bool:
    if not inspect.isclass(base):
        return True
    if issubclass(base, enum.Enum):
        return value in [member.name for member in base] or value in [member.value for member in base]
    if issubclass(base, os.PathLike):
        return isinstance(value, str)
    named = _name_of(base)
    if named == "torch.device":
        return isinstance(value, str | int) and not isinstance(value, bool)
    if named == "torch.dtype":
        return isinstance(value, str) and _is_dtype(value)
    if named == "torch.Tensor" and is_array(value):
        return True
    # A mapping or list may contain nodes that become objects of the class. A scalar cannot become an object.
    if base.__module__.partition(".")[0] in LIBRARIES and not issubclass(base, tuple | dict):
        return any(is_node(inner) for _, inner in leaves(value))
    return isinstance(value, list | dict)


def _is_dtype(name: str) -> bool:
    """Return whether a text names a dtype of torch, with or without the prefix `torch.`."""
    import torch

    return isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype)


def _without_tensors(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the types of a union. Tensor is removed if the union also allows a number.

    A config contains the number instead of a tensor, so messages need not mention tensors.
    """
    if float not in kinds:
        return kinds
    return tuple(kind for kind in kinds if not (inspect.isclass(kind) and _name_of(kind) == "torch.Tensor"))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType
