"""Run the forward of a step: call the network with a batch, name its values, give terms what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from exp.engine.compilation import as_needed
from exp.errors import RunError
from exp.models.inference import input_names, network_call
from exp.nested import Nested, map_tensors, named_parts
from exp.objectives.passes import Passes
from exp.objectives.term import TWICE
from exp.shared_types import INPUT

# The values of a forward by name, as terms, metrics and hooks find them.
Values = Mapping[str, Any]
# Called with a network's inputs, it gives its output: the network itself, or what stands in its place.
Runner = Callable[..., Any]
# Of what runs the network, and a batch's data.
Forward = Callable[[Runner, Any], dict[str, Any]]


def forward_by_name(network: nn.Module, inputs: Sequence[str] = INPUT) -> Forward:
    """Return one forward pass: of what runs the network and a batch's data it makes the values by name.

    inputs: the names of the data's inputs, as network_call takes them.
    They are the batch's own entries (`input` and `target` where they have no names), what the network returns by name
    (nested.named_parts), and `output`, which is all that it returns unless it names one so.
    """
    call = network_call(network, inputs)

    def forward(run_network: Runner, data: Any) -> dict[str, Any]:
        if type(data) is not tuple and isinstance(data, Mapping):  # the first takes a seventh of the time
            output = call(run_network, data)
            values = dict(data)
        else:
            values = named_values(data)
            output = run_network(values["input"])
        values["output"] = output
        if type(output) is not Tensor:
            values.update(named_parts(output))
        return values

    return forward


def named_values(data: Any) -> dict[str, Any]:
    """Name the values of a batch: input and target, or input alone where the data set has no targets."""
    if isinstance(data, Mapping):
        return dict(data)
    if type(data) in (tuple, list) and len(data) == 2:
        return {"input": data[0], "target": data[1]}
    if isinstance(data, Tensor):
        return {"input": data}
    if isinstance(data, Sequence) and 1 <= len(data) <= 2:
        return dict(zip(("input", "target"), data, strict=False))
    got = f"{len(data)} values" if isinstance(data, Sequence) else f"a {type(data).__name__}"
    raise RunError(
        f"the data set gives {got} for a sample; expected (input, target), the input alone, or a mapping of names"
    )


def make_passes(
    needs: frozenset[str],
    *,
    network: nn.Module,
    run: Forward,
    data: object,
    inputs: Sequence[str] = INPUT,
    runner: Runner | None = None,
    loss_scale: Tensor | float | None = None,
) -> Passes:
    """Return the passes of one step, made inside `needing`, under the step's autocast; its forward is `passes.run()`.

    needs: of the objective, or of the terms of one phase. inputs: the names of the data's inputs.
    run, runner, loss_scale: as Passes takes them.
    """
    return Passes(
        network=network,
        run=run,
        data=_outside_inference(data) if not torch.is_inference_mode_enabled() else data,
        inputs=(*input_names(network), *inputs),
        runner=runner,
        loss_scale=loss_scale,
        inputs_require_grad="input_gradients" in needs,
    )


@contextmanager
def needing(needs: frozenset[str], network: nn.Module) -> Iterator[None]:
    """Turn gradients on around a step's forward and objective, also in evaluation, to be differentiated twice.

    Fused attention has no derivative of its backward, nor have the recurrent layers of oneDNN and cuDNN: such steps
    take the plain kernels, which compute the same.
    """
    with as_needed(needs, network), ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if needs & TWICE:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if any(isinstance(module, nn.RNNBase) for module in network.modules()):
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _outside_inference(data: Nested) -> Nested:
    """Copy the tensors of inference mode, in which evaluation reads its batches: no gradient can pass them."""
    return map_tensors(data, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


def detached(output: Nested) -> Nested:
    """Return what a network gave, without the graph that led to it."""
    return map_tensors(output, Tensor.detach)
