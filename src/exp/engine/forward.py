"""Functions that run the network on a batch and name the values for terms, metrics and hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from exp.engine.runtime import EAGER, run_uncompiled
from exp.errors import RunError
from exp.models.inference import input_names, network_call
from exp.nested import Nested, map_tensors, named_parts
from exp.objectives.passes import Passes
from exp.objectives.term import TWICE
from exp.shared_types import INPUT

# Values of one forward by name.
Values = Mapping[str, Any]
# Callable that returns the output for the inputs of a network: the network itself or a replacement.
Runner = Callable[..., Any]
# Function that returns the values of one forward by name. Its arguments are a Runner and the data of a batch.
Forward = Callable[[Runner, Any], dict[str, Any]]


def forward_by_name(network: nn.Module, inputs: Sequence[str] = INPUT) -> Forward:
    """Return a function that runs one forward and names its values.

    The names are:
      - the entries of the batch: `input` and `target` if the batch has no names;
      - the outputs that the network names (see nested.named_parts);
      - `output`: the whole output, unless the network gives this name to one of several outputs.

    Args:
        network: The network.
        inputs: Names of the data's inputs; see network_call. Default: input.
    """
    call = network_call(network, inputs)

    def forward(run_network: Runner, data: Any) -> dict[str, Any]:
        if type(data) is not tuple and isinstance(data, Mapping):  # isinstance alone takes 7 times as long
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
    """Return the values of a batch by name. Values without names become `input` and, if present, `target`."""
    if isinstance(data, Mapping):
        return dict(data)
    if isinstance(data, Tensor):
        return {"input": data}
    if isinstance(data, Sequence) and 1 <= len(data) <= 2:
        return dict(zip(("input", "target"), data, strict=False))
    got = f"{len(data)} values" if isinstance(data, Sequence) else f"a {type(data).__name__}"
    raise RunError(
        f"the data set returned {got} for a sample; expected (input, target), the input alone, or a mapping of names"
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
    """Return the Passes object of one step, which loss terms use to run further forwards.

    Call this function inside `enable_needs`, and under the autocast of the step.

    Args:
        needs: Needs of the objective, or of the terms of one phase.
        network: The network.
        run: Function that runs one forward; see Passes.
        data: Data of the batch.
        inputs: Names of the data's inputs. Default: input.
        runner: Callable used instead of the network; see Passes. Default: None.
        loss_scale: Loss scale of the precision; see Passes. Default: None.
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
def enable_needs(needs: frozenset[str], network: nn.Module) -> Iterator[None]:
    """Return a context that enables gradients for the forward and the objective of a step, even in evaluation.

    For second derivatives, attention and recurrent layers use plain kernels. The backward of the fused kernels of
    attention, oneDNN and cuDNN cannot be differentiated.
    """
    with ExitStack() as stack:
        if needs & EAGER:
            stack.enter_context(run_uncompiled(network))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if needs & TWICE:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if any(isinstance(module, nn.RNNBase) for module in network.modules()):
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _outside_inference(data: Nested) -> Nested:
    """Return the data with clones of all inference tensors, because autograd does not support inference tensors.

    Evaluation reads its batches in inference mode.
    """
    return map_tensors(data, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


def detach_output(output: Nested) -> Nested:
    """Return the output of a network without its graph."""
    return map_tensors(output, Tensor.detach)
