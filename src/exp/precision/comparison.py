"""One batch in float32 and in a chosen precision, layer by layer: dtypes, errors, overflow, underflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exp.precision.edges import cast
from exp.precision.plugin import RunPrecision
from exp.precision.recordings import Record, gradients, outputs_of, silent_dropout
from exp.precision.tf32 import TensorFloat32
from exp.types import dtype_name

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """One layer against float32. Errors are relative, in the 2-norm: |x - x32| / |x32|.

    dtype: of its output, or of a kept layer its own, before the edge casts it; torch's name without `torch.`.
    output_error: with all the errors of the layers before it. own_error: of its output, for equal inputs.
    gradient_error: of its own parameters' gradients, or where it has none, of the loss with respect to its output.
    overflow: numbers of output and gradient that are infinite or not a number, and finite in float32.
    underflow: the share of both that is 0 or subnormal, of those that are not 0 in float32.
    is_origin: whether its output overflows though its inputs are finite.
    """

    name: str
    kind: str
    dtype: str
    output_error: float
    own_error: float
    gradient_error: float
    overflow: int
    underflow: float
    is_origin: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of all layers, in the order in which they ran. loss_scale: at which the gradients were measured, 1 without."""

    word: str
    layers: tuple[LayerComparison, ...]
    loss: float
    loss_float32: float
    loss_scale: float


def compare(reference: nn.Module, chosen: nn.Module, *, loss: Loss, precision: RunPrecision, seed: int) -> Comparison:
    """Runs both networks forward and backward. They must have equal weights in float32, and are used up.

    loss: of a network, 0-d; called under the precision's autocast for `chosen`. seed: of functions that draw.
    precision: not of a run; it converts `chosen`.
    """
    expected: dict[str, Record] = {}
    found: dict[str, Record] = {}
    device = next((p.device for p in reference.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), silent_dropout(reference, chosen):
        torch.manual_seed(seed)
        handles = outputs_of(reference, expected)
        # torch lets convolutions take TensorFloat-32 unless told otherwise; the reference must be float32.
        with TensorFloat32(allowed=False):
            value32 = loss(reference)
            value32.backward()
        for handle in handles:
            handle.remove()
        precision.convert_module(chosen)
        try:
            outputs_of(chosen, found, apart=_apart(reference, device.type))
            torch.manual_seed(seed)
            with precision.forward_context():
                value = loss(chosen)
            scale = _backward(value, chosen, precision, found)
        finally:
            precision.teardown()
    half = precision.word.compute
    gradients(reference, expected, scale=1.0)
    gradients(chosen, found, scale=scale)
    layers = tuple(
        _layer(name, record, expected[name], half=half, scale=scale, dtype=precision.kept.get(name, record.dtype))
        for name, record in found.items()
        if name in expected
    )
    return Comparison(
        word=precision.word.name,
        layers=layers,
        loss=float(value.detach()),
        loss_float32=float(value32.detach()),
        loss_scale=scale,
    )


def _apart(reference: nn.Module, device_type: str) -> Callable[[str, tuple[Any, ...], dict[str, Any]], Any]:
    """A layer's output in float32 for given inputs: what it computes wrong by itself shows against this."""
    modules = dict(reference.named_modules())

    def run(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with torch.no_grad(), torch.autocast(device_type, enabled=False), TensorFloat32(allowed=False):
            return modules[name](*cast(args, torch.float32), **cast(kwargs, torch.float32))

    return run


def _backward(value: Tensor, network: nn.Module, precision: RunPrecision, found: Mapping[str, Record]) -> float:
    """Backward at the greatest scale, from the first one down, at which every gradient is finite. Returns: the scale.

    A run finds it by skipped steps.
    """
    scale = float(precision.scale(value.detach().new_ones(()))) if precision.is_scaled else 1.0
    while True:
        (value * scale).backward(retain_graph=scale > 1.0)
        own = [p.grad for p in network.parameters() if p.grad is not None]
        if scale <= 1.0 or all(gradient.isfinite().all() for gradient in own):
            return scale
        scale /= 2.0
        network.zero_grad()
        for record in found.values():
            record.output_gradients.clear()


def _layer(
    name: str, found: Record, expected: Record, *, half: torch.dtype, scale: float, dtype: torch.dtype
) -> LayerComparison:
    output, output32 = found.output(), expected.output()
    gradient, gradient32 = found.gradient, expected.gradient
    overflow = _overflow(output, output32) + _overflow(gradient, gradient32)
    # Under autocast the gradients of float32 parameters come out of half precision products.
    lost = [_lost(output, output32, torch.finfo(found.dtype).smallest_normal)]
    lost.append(_lost(gradient * scale, gradient32, torch.finfo(half).smallest_normal))
    counted = sum(count for _, count in lost)
    return LayerComparison(
        name=name,
        kind=found.kind,
        dtype=dtype_name(dtype),
        output_error=_error(output, output32),
        own_error=_error(output, found.apart()),
        gradient_error=_error(gradient, gradient32),
        overflow=overflow,
        underflow=sum(share for share, _ in lost) / counted if counted else 0.0,
        is_origin=found.has_finite_inputs and bool(_overflow(output, output32)),
    )


def _error(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape or not expected.numel():
        return 0.0
    norm = float(expected.norm())
    error = float((value - expected).norm())
    return error / norm if norm else error


def _overflow(value: Tensor, expected: Tensor) -> int:
    if value.shape != expected.shape:
        return 0
    return int((~value.isfinite() & expected.isfinite()).sum())


def _lost(value: Tensor, expected: Tensor, smallest: float) -> tuple[int, int]:
    """How many numbers fell below the smallest normal one, of how many that are not 0."""
    if value.shape != expected.shape:
        return 0, 0
    counted = expected != 0
    return int(((value.abs() < smallest) & counted).sum()), int(counted.sum())
