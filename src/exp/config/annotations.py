"""Read what functions annotate: their parameters' kinds, and what they return."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

EMPTY = inspect.Parameter.empty


def evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
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


@functools.lru_cache(maxsize=1024)
def annotations_of(target: Any) -> Mapping[str, Any]:
    """The annotation of each parameter that a class, its bases or a function names; EMPTY where there is none."""
    if inspect.isclass(target):
        makers = [vars(base)[name] for base in target.__mro__ for name in ("__init__", "__new__") if name in vars(base)]
    else:
        makers = [target]
    found: dict[str, Any] = {}
    for maker in makers:
        function = maker.__func__ if isinstance(maker, staticmethod) else maker
        if not inspect.isroutine(function):
            continue
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # functions written in C may carry no signature
            continue
        for parameter in parameters:
            found.setdefault(parameter.name, evaluated(parameter.annotation, function))
    return found


def return_annotation(function: Callable[..., Any]) -> type | None:
    """The class that a function says it returns; None where it says nothing, or no one class."""
    try:
        annotation = inspect.signature(function).return_annotation
    except ValueError:
        return None
    said = type(None) if annotation is None else evaluated(annotation, function)
    said = typing.get_origin(said) or said
    return said if inspect.isclass(said) and said is not EMPTY and said is not object else None


def is_array(value: Any) -> bool:
    """Whether a plain value is a number, or lists of numbers of which each is as long as its neighbours."""
    if isinstance(value, list):
        shapes = {len(item) if isinstance(item, list) else None for item in value}
        return len(shapes) == 1 and all(map(is_array, value))
    return isinstance(value, int | float)


def _holds_text(annotation: Any) -> bool:
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    return any(
        _holds_text(argument) for argument in typing.get_args(annotation) if not isinstance(argument, list)
    ) and (typing.get_origin(annotation) is not typing.Literal)
