"""Functions that read type annotations of parameters and results."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

EMPTY = inspect.Parameter.empty


def evaluate_annotation(annotation: Any, function: Callable[..., object]) -> Any:
    """Return an annotation as types instead of text. Names in the text are looked up in the function's module.

    Args:
        annotation: Annotation of a parameter or of a result.
        function: Function with the annotation.

    Returns:
        The evaluated annotation. EMPTY if the module does not define a name in the text.
    """
    if annotation is EMPTY:
        return annotation
    stand_in = type("Annotated", (), {"__annotations__": {"value": annotation}})
    try:
        names = vars(inspect.getmodule(inspect.unwrap(function)))
        return typing.get_type_hints(stand_in, globalns=names, include_extras=True)["value"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        # Names that are imported under TYPE_CHECKING do not exist at run time. The parameter then accepts any value.
        return EMPTY


@functools.lru_cache(maxsize=1024)
def annotations_of(target: Callable[..., object]) -> Mapping[str, Any]:
    """Return the annotation of each parameter of a function or a class, by the name of the parameter.

    For a class, the parameters of the constructors of its base classes are included. If a parameter has no annotation,
    its value is EMPTY.
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
    """Return the class in a function's return annotation; None without an annotation or if it is not a class."""
    try:
        annotation = inspect.signature(function).return_annotation
    except ValueError:
        return None
    kind = type(None) if annotation is None else evaluate_annotation(annotation, function)
    kind = typing.get_origin(kind) or kind
    return kind if inspect.isclass(kind) and kind is not EMPTY and kind is not object else None


def is_array(value: object) -> bool:
    """Return whether a plain value can become a tensor: a number, or nested lists of numbers with equal lengths."""
    if isinstance(value, list):
        shapes = {len(item) if isinstance(item, list) else None for item in value}
        return len(shapes) == 1 and all(map(is_array, value))
    return isinstance(value, int | float)
