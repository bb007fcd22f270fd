"""Does what the network gives fit what the data asks for, seen through the terms of the objective?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from exp.errors import Fault
from exp.models.config_keys import config_key
from exp.objectives.loss_inputs import ELEMENTWISE
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL, CrossEntropy
from exp.plan.shape_words import described
from exp.plan.watch import Call, path_of
from exp.types import DataSpec

CLASSES_LAST = (CrossEntropy, NLL)
CLASSES_ON_AXIS_1 = (nn.CrossEntropyLoss, nn.NLLLoss)
WIDTHS = ("out_features", "out_channels")


def output_faults(
    network: nn.Module, output: Any, calls: Sequence[Call], spec: DataSpec, objective: Objective | None
) -> list[Fault]:
    """The faults of the network's output: a name that no term finds, a head that does not fit the data.

    output: what the network returned for a batch. calls: of all its modules, in the order in which they returned.
    """
    named = {"output": output, **output} if isinstance(output, Mapping) else {"output": output}
    faults = []
    for name, loss, wanted in _terms(objective):
        if wanted not in named:
            continue  # it may be an entry of the batch
        value = named[wanted]
        if not isinstance(value, Tensor):
            cure = f"Set objective.{name}.output to one of {', '.join(output)}" if isinstance(output, Mapping) else None
            got = f"the network returns {described(value)}"
            faults.append(Fault(key=f"objective.{name}", got=got, expected="one tensor to compare", cure=cure))
            continue
        fault = _width_fault(network, value, calls, spec, loss)
        if fault is not None and fault not in faults:
            faults.append(fault)
    return faults


def _terms(objective: Objective | None) -> list[tuple[str, nn.Module | None, str]]:
    """Name, loss and output of every term that compares with the data's target."""
    if objective is None:
        return [("", None, "output")]
    compared = {name: term for name, term in objective.terms.items() if isinstance(term, Term)}
    return [(name, term.loss, term.output) for name, term in compared.items() if term.target == "target"]


def _width_fault(
    network: nn.Module, value: Tensor, calls: Sequence[Call], spec: DataSpec, loss: nn.Module | None
) -> Fault | None:
    wanted, what = _wanted(spec, loss)
    if wanted is None:
        return None
    axis = 1 if isinstance(loss, CLASSES_ON_AXIS_1) else -1
    if value.dim() < 2:
        if wanted == 1 and spec.num_classes is None and value.dim() == 1:
            return None
        key = config_key(network, "")
        expected = f"{what}: [B, ..., {wanted}]"
        return Fault(key=key, got=f"the network returns {described(value)}", expected=expected)
    width = value.shape[axis]
    if width == wanted:
        return None
    head = _head(value, calls, width)
    if head is None:
        got = f"the network returns {described(value)}, {width} wide"
        return Fault(key="model", got=got, expected=f"{wanted}: {what}")
    module, size = head
    key = f"{config_key(network, path_of(network, module))}.{size}"
    return Fault(key=key, got=f"{width}", expected=f"{wanted}: {what}", cure=f"Write {size}: ${{data.num_outputs}}")


def _wanted(spec: DataSpec, loss: nn.Module | None) -> tuple[int | None, str]:
    """How wide the output has to be for a loss, and why; None where the loss does not say."""
    classes = "the data has that many classes"
    if spec.num_classes is not None and (loss is None or isinstance(loss, CLASSES_LAST + CLASSES_ON_AXIS_1)):
        return spec.num_classes, classes
    if spec.num_classes is None and (loss is None or isinstance(loss, ELEMENTWISE)):
        return spec.num_outputs, "the data's target has that many numbers"
    return None, ""


def _head(value: Tensor, calls: Sequence[Call], width: int) -> tuple[nn.Module, str] | None:
    """The layer that made the output as wide as it is: the one that gave this tensor, else the last of that width."""
    sized = [
        (call, name)
        for call in calls
        for name in WIDTHS
        if not any(call.module.children()) and call.module.__dict__.get(name) == width
    ]
    exact = [pair for pair in sized if pair[0].output is value]
    return next(((call.module, name) for call, name in reversed(exact or sized)), None)
