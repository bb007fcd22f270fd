"""Read the annotations of functions, which state the types of parameters and results."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

EMPTY = inspect.Parameter.empty


def evaluate_annotation(annotation: Any, function: Callable[..., object]) -> Any:
    """Return an annotation with its names, given as text, replaced by the objects in the function's module.

    Args:
        annotation: Annotation of a parameter or of a result.
        function: Function with the annotation.

    Returns:
        The evaluated annotation. EMPTY if the module lacks a name.
    """
    if annotation is EMPTY:
        return annotation
    stand_in = type("Annotated", (), {"__annotations__": {"value": annotation}})
    try:
        names = vars(inspect.getmodule(inspect.unwrap(function)))
        return typing.get_type_hints(stand_in, globalns=names, include_extras=True)["value"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        # Names under TYPE_CHECKING do not exist at run time. Such a parameter takes any value.
        return EMPTY


@functools.lru_cache(maxsize=1024)
def annotations_of(target: Callable[..., object]) -> Mapping[str, Any]:
    """Return the annotation of each parameter of a function or a class. Parameters of a class's bases are included.

    A parameter without an annotation has the value EMPTY.
    """
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
        except ValueError:  # functions written in C may have no signature
            continue
        for parameter in parameters:
            found.setdefault(parameter.name, evaluate_annotation(parameter.annotation, function))
    return found


def return_annotation(function: Callable[..., object]) -> type | None:
    """Return the class in a function's return annotation; None if there is no annotation or it is not a class."""
    try:
        annotation = inspect.signature(function).return_annotation
    except ValueError:
        return None
    kind = type(None) if annotation is None else evaluate_annotation(annotation, function)
    kind = typing.get_origin(kind) or kind
    return kind if inspect.isclass(kind) and kind is not EMPTY and kind is not object else None


def is_array(value: object) -> bool:
    """Return whether a plain value is a number, or nested lists of numbers with equal lengths."""
    if isinstance(value, list):
        shapes = {len(item) if isinstance(item, list) else None for item in value}
        return len(shapes) == 1 and all(map(is_array, value))
    return isinstance(value, int | float)
