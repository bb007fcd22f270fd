"""The forward of a step whose objective needs more than the values of one pass, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from exp.engine.compiling import as_needed
from exp.engine.naming import input_names
from exp.nested import mapped
from exp.objectives.passes import Passes
from exp.objectives.term import TWICE


def make_passes(
    needs: frozenset[str],
    *,
    network: nn.Module,
    run: Callable[[Callable[..., Any], Any], Mapping[str, Any]],
    data: Any,
    runner: Callable[..., Any] | None = None,
    loss_scale: Tensor | float | None = None,
) -> Passes:
    """The passes of one step, made inside `needing`, under the step's autocast; its forward is `passes.run()`.

    needs: of the objective, or of the terms of one phase. run, runner, loss_scale: as Passes takes them.
    """
    return Passes(
        network=network,
        run=run,
        data=_outside_inference(data) if not torch.is_inference_mode_enabled() else data,
        inputs=(*input_names(network), "input"),
        runner=runner,
        loss_scale=loss_scale,
        inputs_require_grad="input_gradients" in needs,
    )


@contextmanager
def needing(needs: frozenset[str], network: nn.Module) -> Iterator[None]:
    """Around a step's forward and objective: gradients are on, also in evaluation, and can be differentiated twice.

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


def _outside_inference(data: Any) -> Any:
    """Evaluation reads its batches in inference mode, whose tensors no gradient can pass."""
    return mapped(data, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


def detached(output: Any) -> Any:
    """What a network gave, without the graph that led to it."""
    return mapped(output, Tensor.detach)
