"""The check that a training step can call each loss and metric.

A step passes an output and a target by position. If the config of a loss or metric has `inputs`, a step passes the
values that `inputs` lists, by parameter name.
"""

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
    """Return the error of a loss or metric that a training step cannot call. Otherwise return None.

    Args:
        function: Method that a step calls: `forward` of a loss, or `update` of a metric.
        name: Class name of the loss or metric, for the message.
        given: Names of the values that every step passes: by name if the config has `inputs`, otherwise by position.
        key: Config key of the loss or metric.
        node: Config key of the node in which `inputs` is valid. None if the loss or metric does not support `inputs`.
        inputs: Parameter names in the `inputs` of the config. None if the config has no `inputs`.
        what: Noun for the message, loss or metric. Default: loss.
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
