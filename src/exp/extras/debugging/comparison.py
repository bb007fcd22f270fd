"""Compares the layers of a network in a precision with those in float32, on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exp.nested import tensors_in
from exp.precision.plugin import RunPrecision, TensorFloat32
from exp.shared_types import dtype_name

Loss = Callable[[nn.Module], Tensor]


@dataclass(kw_only=True)
class Record:
    """Recorded outputs and gradients of one layer, over all calls of the layer.

    Attributes:
        kind: Name of the layer's class.
        dtype: Dtype of the layer's output.
        outputs: Outputs, flattened and in float64, one entry per call.
        output_gradients: Gradients with respect to the outputs, one entry per call, multiplied by the loss scale.
        gradient: Gradient of the layer's parameters, or of its outputs if the layer has no parameters. It is divided by
            the loss scale.
    """

    kind: str
    dtype: torch.dtype
    outputs: list[Tensor] = field(default_factory=list)
    output_gradients: list[Tensor] = field(default_factory=list)
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """Differences between a layer in the chosen precision and the same layer in float32.

    An error is the 2-norm of the difference from float32, relative to the 2-norm in float32: |x - x32| / |x32|.

    Attributes:
        name: Name of the layer in the network.
        kind: Name of the layer's class.
        dtype: Name of the output's dtype, without `torch.`. If precision.keep contains the layer, the dtype in which it
            is kept.
        output_error: Error of the output. It includes the errors of earlier layers.
        gradient_error: Error of the gradients of the parameters, or of the output if the layer has no parameters.
        overflow: Number of values in output and gradient that are infinite or NaN, although they are finite in float32.
        underflow: Fraction, from 0 to 1, of the nonzero values in float32 that are 0 or subnormal in the precision. It
            covers output and gradient.
    """

    name: str
    kind: str
    dtype: str
    output_error: float
    gradient_error: float
    overflow: int
    underflow: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of all layers of a network with float32.

    Attributes:
        word: Name of the precision.
        layers: The layers, in the order of their calls.
        loss: Loss in the precision.
        loss_float32: Loss in float32.
        loss_scale: Loss scale at which the gradients were computed; 1 if the precision has no loss scale.
    """

    word: str
    layers: tuple[LayerComparison, ...]
    loss: float
    loss_float32: float
    loss_scale: float


def compare(reference: nn.Module, chosen: nn.Module, *, loss: Loss, precision: RunPrecision, seed: int) -> Comparison:
    """Return the comparison of two networks with equal weights after one forward and one backward pass.

    The call changes both networks.

    Args:
        reference: Network that runs in float32.
        chosen: Network with float32 weights that is converted to the precision.
        loss: Function that returns the 0-d loss of a network. For `chosen`, it is called under the precision's
            autocast.
        precision: Precision of `chosen`. The object must not be used by a run.
        seed: Seed for layers that draw random numbers.
    """
    expected: dict[str, Record] = {}
    found: dict[str, Record] = {}
    device = next((p.device for p in reference.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), dropout_off(reference, chosen):
        torch.manual_seed(seed)
        handles = record_outputs(reference, expected)
        # TensorFloat-32 is disabled, because torch uses it for convolutions by default.
        with TensorFloat32(allowed=False):
            value32 = loss(reference)
            torch.autograd.backward(value32)
        for handle in handles:
            handle.remove()
        precision.convert_module(chosen)
        try:
            record_outputs(chosen, found)
            torch.manual_seed(seed)
            with precision.forward_context():
                value = loss(chosen)
            scale = _backward(value, chosen, precision, found)
        finally:
            precision.teardown()
    half = precision.word.compute
    record_gradients(reference, expected, scale=1.0)
    record_gradients(chosen, found, scale=scale)
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


def _backward(value: Tensor, network: nn.Module, precision: RunPrecision, found: Mapping[str, Record]) -> float:
    """Run the backward pass, and return the loss scale that it used.

    The scale starts at the initial value of the loss scaler and is halved until all gradients are finite. A training
    run finds the same scale by skipping steps.

    Args:
        value: Loss, 0-d.
        network: The network.
        precision: Precision with the initial loss scale.
        found: Records of the layers. Gradients of failed attempts are removed from them.
    """
    scale = float(precision.scale(value.detach().new_ones(()))) if precision.is_scaled else 1.0
    while True:
        torch.autograd.backward(value * scale, retain_graph=scale > 1.0)
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
    output, output32 = _join(found.outputs), _join(expected.outputs)
    gradient, gradient32 = found.gradient, expected.gradient
    # Under autocast, gradients of float32 parameters are computed in half precision, so they underflow at its limit.
    lost = [_count_lost(output, output32, torch.finfo(found.dtype).smallest_normal)]
    lost.append(_count_lost(gradient * scale, gradient32, torch.finfo(half).smallest_normal))
    counted = sum(count for _, count in lost)
    return LayerComparison(
        name=name,
        kind=found.kind,
        dtype=dtype_name(dtype),
        output_error=_error(output, output32),
        gradient_error=_error(gradient, gradient32),
        overflow=_overflow(output, output32) + _overflow(gradient, gradient32),
        underflow=sum(share for share, _ in lost) / counted if counted else 0.0,
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


def _count_lost(value: Tensor, expected: Tensor, smallest: float) -> tuple[int, int]:
    """Return the number of values that underflowed, and the number of values that are nonzero in float32.

    Args:
        value: Values in the precision.
        expected: Values in float32.
        smallest: Smallest normal number of the precision. Smaller values count as underflow.
    """
    if value.shape != expected.shape:
        return 0, 0
    counted = expected != 0
    return int(((value.abs() < smallest) & counted).sum()), int(counted.sum())


def record_outputs(network: nn.Module, records: dict[str, Record]) -> list[RemovableHandle]:
    """Register hooks that record the outputs of layers, and return the handles of the hooks.

    A layer is a module without children, or a module with parameters outside its children.

    Args:
        network: The network.
        records: Mapping to which the hooks add a record for each layer, by name.
    """
    handles = []
    for name, module in network.named_modules():
        if name and (not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))):
            handles.append(module.register_forward_hook(partial(_record, name=name, records=records)))
    return handles


def _record(module: nn.Module, inputs: object, output: object, *, name: str, records: dict[str, Record]) -> None:
    value = _first(output)
    if value is None:
        return
    record = records.setdefault(name, Record(kind=type(module).__name__, dtype=value.dtype))
    record.outputs.append(_host(value))
    if value.requires_grad:
        # Gradients are inserted at the front, because the backward visits the calls in reverse order.
        value.register_hook(lambda gradient: record.output_gradients.insert(0, _host(gradient)))


def record_gradients(network: nn.Module, records: Mapping[str, Record], *, scale: float) -> None:
    """Set `gradient` of each record to the gradient of the layer's parameters, divided by the loss scale.

    If a layer has no parameters, the gradient of its outputs is used instead.

    Args:
        network: Network after the backward pass.
        records: Records by name of the layer.
        scale: The loss scale.
    """
    modules = dict(network.named_modules())
    for name, record in records.items():
        own = [_host(p.grad) for p in modules[name].parameters(recurse=False) if p.grad is not None]
        record.gradient = _join(own or record.output_gradients) / scale


@contextmanager
def dropout_off(*networks: nn.Module) -> Iterator[None]:
    """Disable dropout within the block, because two precisions would draw different masks."""
    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    silent = [m for network in networks for m in network.modules() if isinstance(m, layers) and m.training]
    for module in silent:
        module.eval()
    try:
        yield
    finally:
        for module in silent:
            module.train()


def _first(output: object) -> Tensor | None:
    """Return the first floating-point tensor in an output; None if the output has no such tensor."""
    return next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)


def _host(tensor: Tensor) -> Tensor:
    # `copy` is needed for tensors that are already float64 on the CPU, because later operations may change them in
    # place.
    return tensor.detach().to("cpu", torch.float64, copy=True).flatten()


def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
