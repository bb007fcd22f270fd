"""Compare a precision with float32 on one batch, layer by layer: dtypes, errors, overflow, underflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exp.nested import map_tensors, tensors_in
from exp.precision.conversion import Arguments, Keywords, cast
from exp.precision.plugin import RunPrecision, TensorFloat32
from exp.shared_types import dtype_name

Loss = Callable[[nn.Module], Tensor]
Reference = Callable[[str, Arguments, Keywords], object]


@dataclass(kw_only=True)
class Record:
    """What one layer gave. A layer that is called several times has all of its outputs here.

    reference_outputs: what float32 gives for the same inputs. output_gradients: scaled, where the loss was.
    """

    kind: str
    dtype: torch.dtype
    outputs: list[Tensor] = field(default_factory=list)
    reference_outputs: list[Tensor] = field(default_factory=list)
    output_gradients: list[Tensor] = field(default_factory=list)
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    has_finite_inputs: bool = True

    def output(self) -> Tensor:
        return _joined(self.outputs)

    def reference(self) -> Tensor:
        return _joined(self.reference_outputs)


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
    """Comparison of all layers, in the order in which they ran.

    loss_scale: at which the gradients were measured, 1 without.
    """

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
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), dropout_off(reference, chosen):
        torch.manual_seed(seed)
        handles = record_outputs(reference, expected)
        # torch lets convolutions take TensorFloat-32 unless told otherwise; the reference must be float32.
        with TensorFloat32(allowed=False):
            value32 = loss(reference)
            torch.autograd.backward(value32)
        for handle in handles:
            handle.remove()
        precision.convert_module(chosen)
        try:
            record_outputs(chosen, found, reference=_in_float32(reference, device.type))
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


def _in_float32(reference: nn.Module, device_type: str) -> Reference:
    """A layer's output in float32 for given inputs: what it computes wrong by itself shows against this."""
    modules = dict(reference.named_modules())

    def run(name: str, args: Arguments, kwargs: Keywords) -> object:
        with torch.no_grad(), torch.autocast(device_type, enabled=False), TensorFloat32(allowed=False):
            return modules[name](*cast(args, torch.float32), **cast(kwargs, torch.float32))

    return run


def _backward(value: Tensor, network: nn.Module, precision: RunPrecision, found: Mapping[str, Record]) -> float:
    """Backward at the greatest scale, from the first one down, at which every gradient is finite. Returns: the scale.

    A run finds it by skipped steps.
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
        own_error=_error(output, found.reference()),
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
    """Counts the numbers that fell below the smallest normal one, and those that are not 0."""
    if value.shape != expected.shape:
        return 0, 0
    counted = expected != 0
    return int(((value.abs() < smallest) & counted).sum()), int(counted.sum())


def record_outputs(
    network: nn.Module, records: dict[str, Record], *, reference: Reference | None = None
) -> list[RemovableHandle]:
    """Records the outputs of every layer: what has no modules in it, or parameters of its own. Returns: handles."""
    handles = []
    for name, module in network.named_modules():
        if name and (not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))):
            calls: list[tuple[Arguments, Keywords]] = []
            hook = partial(_record, name=name, records=records, reference=reference, calls=calls)
            if reference is not None:
                handles.append(module.register_forward_pre_hook(partial(_note, calls=calls), with_kwargs=True))
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    return handles


def _note(module: nn.Module, args: Arguments, kwargs: Keywords, *, calls: list[tuple[Arguments, Keywords]]) -> None:
    """Keep copies of what a layer is given: ReLU(inplace=True) leaves other numbers behind in it."""
    calls.append((map_tensors(args, _copied), map_tensors(kwargs, _copied)))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _record(
    module: nn.Module,
    args: Arguments,
    kwargs: Keywords,
    output: object,
    *,
    name: str,
    records: dict[str, Record],
    reference: Reference | None,
    calls: list[tuple[Arguments, Keywords]],
) -> None:
    # Of the last call that began: a layer may call itself.
    args, kwargs = calls.pop() if reference is not None else (args, kwargs)
    value = _first(output)
    if value is None:
        return
    record = records.setdefault(name, Record(kind=type(module).__name__, dtype=value.dtype))
    record.outputs.append(_host(value))
    if value.requires_grad:
        # The first backward of a call is that of the last one: put in front.
        value.register_hook(lambda gradient: record.output_gradients.insert(0, _host(gradient)))
    if reference is not None:
        inputs = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
        record.has_finite_inputs &= all(bool(part.isfinite().all()) for part in inputs)
        other = _first(reference(name, args, kwargs))
        record.reference_outputs.append(_host(value) if other is None else _host(other))


def record_gradients(network: nn.Module, records: Mapping[str, Record], *, scale: float) -> None:
    """Fills in the layers' gradients, divided by the scale: of their own parameters, or of their outputs."""
    modules = dict(network.named_modules())
    for name, record in records.items():
        own = [_host(p.grad) for p in modules[name].parameters(recurse=False) if p.grad is not None]
        record.gradient = _joined(own or record.output_gradients) / scale


@contextmanager
def dropout_off(*networks: nn.Module) -> Iterator[None]:
    """Turns dropout off: two precisions would draw different masks."""
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
    """The first floating tensor of what a layer returns."""
    return next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)


def _host(tensor: Tensor) -> Tensor:
    # A copy, of float64 on the CPU too: what follows the layer may work in place.
    return tensor.detach().to("cpu", torch.float64, copy=True).flatten()


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
