"""The check of how losses and metrics are called: with an output and a target, or with values that `inputs` names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

from exp.errors import ErrorDetails, unknown_key, unsuitable
from exp.spelling import among


def call_error(
    function: Callable[..., object],
    *,
    name: str,
    given: Sequence[str],
    key: str,
    node: str | None = None,
    inputs: Iterable[str] | None = None,
    what: str = "loss",
) -> ErrorDetails | None:
    """Return the error of a loss or metric if a training step cannot call it. Return None if the call is possible.

    Args:
        function: Method that a step calls.
        name: Name of the class.
        given: Names of the values passed by position. With `inputs`, names of further values passed by name.
        key: Key of the loss or metric.
        node: Key of the node that may have `inputs`. None if `inputs` is not possible.
        inputs: Names of the parameters in the config's `inputs`. None without `inputs`.
        what: Noun for messages. Default: loss.
    """
    signature = inspect.signature(function)
    known, named = list(signature.parameters), list(inputs or ())
    try:
        if inputs is None:
            signature.bind(*given)
        else:
            signature.bind(**dict.fromkeys([*named, *given]))
    except TypeError as error:
        refusal = str(error)
    else:
        return None
    if inputs is None:
        parameters = signature.parameters.values()
        needed = [one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
        expected = f"a {what} with the parameters ({', '.join(given)})"
        fix = (
            node and f"Name a value for each parameter: {node}.inputs={{{', '.join(f'{one}: ...' for one in needed)}}}"
        )
        return unsuitable(key, name, f"which has the parameters ({', '.join(known)})", expected, fix)
    unknown = next((one for one in named if one not in known), None)
    if unknown is None:
        expected = f"a value for each of {', '.join(known)}"
        return unsuitable(f"{node}.inputs", among(named), refusal, expected)
    return unknown_key(f"{node}.inputs.{unknown}", known, holder=name)
