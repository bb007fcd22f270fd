"""Does a network compute the same after it was cut? Asked of the network itself, before a run begins.

A plan that cuts a layer whose neighbour does not know it, and a mask that would be drawn for a part alone, change what
a run finds without any error. Outputs and gradients of a stand-in batch tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.nested import tensors_in
from exp.spelling import among
from exp.types import DataSpec

log = logging.getLogger(__name__)

# Of a tensor's largest number, and of the largest of all gradients: one that is 0 but for rounding is not judged by
# itself. A wrong plan is off by as much as the numbers themselves.
TOLERANCE = {torch.float64: (1e-9, 1e-11), torch.float32: (1e-2, 1e-4)}
HALF = (1e-1, 1e-2)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a network gave for a stand-in batch: outputs as it trains and as it is evaluated, gradients by name.

    coarsest: of the dtypes that it computes in, the one with the fewest digits.
    """

    training: list[Tensor]
    evaluation: list[Tensor]
    gradients: dict[str, Tensor]
    coarsest: torch.dtype


def try_out(network: nn.Module, inputs: Tensor) -> Trial:
    """Forward and backward with the same random numbers every time. Leaves the network as it was."""
    was_training = {module: module.training for module in network.modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        network.train()
        outputs = list(_tensors(network(inputs)))
        weights = [torch.randn(output.shape, dtype=output.dtype).to(output.device) for output in outputs]
        sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True)).backward()
        network.eval()
        with torch.no_grad():
            evaluated = list(_tensors(network(inputs)))
    gradients = {
        name: parameter.grad.detach() for name, parameter in network.named_parameters() if parameter.grad is not None
    }
    for parameter in network.parameters():
        parameter.grad = None
    for module, training in was_training.items():
        module.training = training
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
    dtypes = [value.dtype for value in (*network.parameters(), *evaluated) if value.is_floating_point()]
    return Trial(
        training=[output.detach() for output in outputs],
        evaluation=evaluated,
        gradients=gradients,
        coarsest=max(dtypes, key=lambda dtype: torch.finfo(dtype).eps),
    )


def stand_in(spec: DataSpec, network: nn.Module, *, device: torch.device) -> Tensor:
    """`[2, *input_shape]`: the same random numbers on every rank, classes or words where the data has whole numbers."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, *spec.input_shape)
    dtype = getattr(torch, spec.input_dtype)
    if dtype.is_floating_point:
        floating = next((one.dtype for one in network.parameters() if one.is_floating_point()), dtype)
        return torch.randn(shape, generator=generator).to(device=device, dtype=floating)
    return torch.randint(0, spec.num_classes or 2, shape, generator=generator).to(device=device, dtype=dtype)


def require_same(whole: Trial, placed: Trial, *, part: Callable[[str, Tensor], Tensor], strategy: str) -> None:
    """Holds what a placed network gave against what it gave as a whole.

    part: this rank's part of a whole gradient, by the parameter's name.
    Raises: RunError that names what differs.
    """
    expected = {name: part(name, gradient) for name, gradient in whole.gradients.items()}
    largest = max((float(gradient.abs().max()) for gradient in whole.gradients.values()), default=0.0)
    limits = TOLERANCE.get(whole.coarsest, HALF)
    wrong = []
    for what, before, after in (
        ("the output", whole.training, placed.training),
        ("the output in evaluation", whole.evaluation, placed.evaluation),
    ):
        if len(before) != len(after) or any(
            _differ(*pair, scale=0.0, limits=limits) for pair in zip(before, after, strict=True)
        ):
            wrong.append(what)
    wrong += [
        f"the gradient of {name}"
        for name, gradient in expected.items()
        if name not in placed.gradients or _differ(gradient, placed.gradients[name], scale=largest, limits=limits)
    ]
    if wrong:
        raise RunError(
            f"strategy={strategy} changes what the network computes: {among(wrong)} of a random batch differ from the "
            "whole network's. A plan must cut layers that follow each other (column, then row), divide the constants "
            "that count heads (strategy.divide), and leave dropout where values are whole. strategy.verify=false goes "
            "on all the same"
        )


def _differ(whole: Tensor, placed: Tensor, *, scale: float, limits: tuple[float, float]) -> bool:
    if whole.shape != placed.shape:
        return True
    if whole.numel() == 0:
        return False
    limit = limits[0] * float(whole.abs().max()) + limits[1] * scale
    return not float((whole - placed).abs().max()) <= limit


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every floating-point tensor in an output."""
    return (tensor for tensor in tensors_in(value) if tensor.is_floating_point())
