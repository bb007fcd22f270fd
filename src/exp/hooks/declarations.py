"""Needs that the class of a hook may declare, and checks of a hook's methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType

from exp.errors import ErrorDetails
from exp.spelling import find_nearest

NEEDS = {
    "whole_parameters": "each rank holds whole weights and whole gradients",
    "whole_outputs": "each rank has whole layer outputs and the whole gradients of these outputs",
    "all_layers": "each rank runs every layer, on whole micro-batches",
    "one_rank": "one rank sees the whole batch",
    "one_thread": "no replicas run at once in threads of one process",
    "own_backward": "exp runs the backward and the optimizer step, not another engine such as DeepSpeed",
    "gradient_flow": "gradients can be changed while they flow back",
    "one_objective": "one objective trains the whole network in each step",
    "one_batch_a_step": "an optimizer step sees one micro-batch",
    "one_step_a_call": "Lightning's own loop makes each step; without it nothing is refused",
    "known_values": "the inputs and outputs of the network are known by name",
    "known_step": "the forward and backward of a step can be repeated outside the run",
    "vmap": "torch.func.vmap supports every layer",
    "float32": "the network computes in float32 or more",
}


def class_errors(kind: type, base: type, *, key: str) -> Iterator[ErrorDetails]:
    """Yield the errors of a hook's class: mistyped method names, wrong parameters, or no overridden method.

    Args:
        kind: Class of the hook.
        base: Base class of hooks. A hook must override at least one of the methods that are called during a run.
        key: Key of the hook in the config.
    """
    known = _methods(base)
    own = {name: one for each in reversed(kind.__mro__) if _derives(each, base) for name, one in _methods(each).items()}
    errors = []
    for name, method in own.items():
        if name in known:
            problem = _misfit(name, method, known[name])
            errors += [problem] if problem else []
        elif near := find_nearest(name, known, likeness=0.85):
            errors.append((f" with a method {name}, which is never called", f"the name {near[0]}, or a different name"))
    acting = known.keys() - {"errors", "error", "due", "overrides", "attach", "engaged", "disengage", "detach"}
    if not errors and not own.keys() & acting:
        methods = ", ".join(sorted(acting))
        errors.append((", which overrides no method of Hook", f"one or more of {methods}"))
    for got, expected in errors:
        yield ErrorDetails(key=key, got=f"{kind.__name__}{got}", expected=expected)


def _methods(kind: type) -> dict[str, FunctionType]:
    return {name: one for name, one in vars(kind).items() if inspect.isfunction(one) and name[0] != "_"}


def _derives(kind: type, base: type) -> bool:
    return issubclass(kind, base) and kind is not base


def _misfit(name: str, method: FunctionType, base: FunctionType) -> tuple[str, str] | None:
    """Return the error in an overridden method's parameters, and the correct definition of the method.

    Return None if the parameters are correct.
    """
    signature, parameters = inspect.signature(method), list(inspect.signature(base).parameters)
    try:
        signature.bind(*parameters)
    except TypeError as error:
        return f" with {name}{signature}: {error}", f"def {name}({', '.join(parameters)})"
    return None
