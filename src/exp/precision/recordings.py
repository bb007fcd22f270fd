"""What a layer gives in one forward and backward, recorded on the host in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Apart = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(kw_only=True)
class Record:
    """One layer. A layer that is called several times has all of its outputs here.

    outputs_apart: what float32 gives for the same inputs. output_gradients: scaled, where the loss was.
    """

    kind: str
    dtype: torch.dtype
    outputs: list[Tensor] = field(default_factory=list)
    outputs_apart: list[Tensor] = field(default_factory=list)
    output_gradients: list[Tensor] = field(default_factory=list)
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    has_finite_inputs: bool = True

    def output(self) -> Tensor:
        return _joined(self.outputs)

    def apart(self) -> Tensor:
        return _joined(self.outputs_apart)


def outputs_of(network: nn.Module, records: dict[str, Record], *, apart: Apart | None = None) -> list[Any]:
    """Records the outputs of every layer: what has no modules in it, or parameters of its own. Returns: handles."""
    handles = []
    for name, module in network.named_modules():
        if name and (not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))):
            hook = partial(_record, name=name, records=records, apart=apart)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    return handles


def _record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    *,
    name: str,
    records: dict[str, Record],
    apart: Apart | None,
) -> None:
    value = _first(output)
    if value is None:
        return
    record = records.setdefault(name, Record(kind=type(module).__name__, dtype=value.dtype))
    record.outputs.append(_host(value))
    if value.requires_grad:
        # The first backward of a call is that of the last one: put in front.
        value.register_hook(lambda gradient: record.output_gradients.insert(0, _host(gradient)))
    if apart is not None:
        inputs = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
        record.has_finite_inputs &= all(bool(part.isfinite().all()) for part in inputs)
        other = _first(apart(name, args, kwargs))
        record.outputs_apart.append(_host(value) if other is None else _host(other))


def gradients(network: nn.Module, records: Mapping[str, Record], *, scale: float) -> None:
    """Fills in the layers' gradients, divided by the scale: of their own parameters, or of their outputs."""
    modules = dict(network.named_modules())
    for name, record in records.items():
        own = [_host(p.grad) for p in modules[name].parameters(recurse=False) if p.grad is not None]
        record.gradient = _joined(own or record.output_gradients) / scale


@contextmanager
def silent_dropout(*networks: nn.Module) -> Iterator[None]:
    """Dropout layers in evaluation: two precisions would draw different masks."""
    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    silent = [m for network in networks for m in network.modules() if isinstance(m, layers) and m.training]
    for module in silent:
        module.eval()
    try:
        yield
    finally:
        for module in silent:
            module.train()


def _first(output: Any) -> Tensor | None:
    """The first floating tensor of what a layer returns."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return next((found for part in parts if (found := _first(part)) is not None), None)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64).flatten()


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
