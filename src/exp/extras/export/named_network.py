"""Wrapper of the network of a saved run with named input and output tensors, for exports."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from exp.errors import RunError
from exp.models.inference import network_call
from exp.models.lora import is_adapted, merge
from exp.nested import named_parts
from exp.saved_runs.run_files import RunFiles
from exp.shared_types import DataSpec, TensorSpec

OUTPUT = "output"


class NamedNetwork(nn.Module):
    """Wrapper of a network. Its forward takes named tensors `[B, ...]`, and returns a dict of named tensors.

    A single output tensor has the name `output`. Tensors in nested outputs have names such as `a.b`; see
    nested.named_parts. Outputs that are not tensors are left out.

    Args:
        network: The network in evaluation mode.
        declared: Names of all inputs that the data provide.
        inputs: Shape and dtype of each input that the network's forward takes, by name.
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        declared: Sequence[str],
        inputs: Mapping[str, TensorSpec],
    ) -> None:
        super().__init__()
        self.network, self.inputs = network, dict(inputs)
        self._call = network_call(network, tuple(declared))
        by_name = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]
        signature = inspect.Signature(by_name)

        def forward(*given: Tensor, **named: Tensor) -> dict[str, Tensor]:
            return self._run(signature.bind(*given, **named).arguments)

        vars(forward)["__signature__"] = signature
        # The attribute is set on the instance, because torch.export reads the names of the inputs from the signature.
        self.__dict__["forward"] = forward

    def _run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}
        output = self._call(self.network, inputs)
        found = {OUTPUT: output} if isinstance(output, Tensor) else _tensors(named_parts(output))
        if not found:
            raise RunError(f"{type(self.network).__name__} returns a {type(output).__name__} without tensors")
        return found


def named_network(run: RunFiles, *, weights: str | Path | None) -> NamedNetwork:
    """Return the network of a run in evaluation mode and in float32. LoRA weights are merged into the layers.

    Args:
        run: The run.
        weights: Checkpoint with the weights: `best`, `last`, or a path. None means the best, or else the last.
    """
    spec = DataSpec.of(run.settings.data)
    # fp32 is used because other precisions insert casts between layers.
    precision = dataclasses.replace(run.settings.precision, word="fp32", keep={})
    settings = dataclasses.replace(run.settings, precision=precision)
    network = dataclasses.replace(run, settings=settings).network(weights)
    if is_adapted(network):
        merge(network)
    declared = tuple(spec.inputs)
    taken: list[str] = network_call(network, declared)(
        lambda *given, **named: [*given, *named.values()], dict(zip(declared, declared, strict=True))
    )
    inputs = {name: spec.inputs[name] for name in taken}
    named = NamedNetwork(network=network, declared=declared, inputs=inputs)
    return named.eval().requires_grad_(False)


def _tensors(parts: Mapping[str, object], above: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        found |= {above + name: part} if isinstance(part, Tensor) else _tensors(named_parts(part), f"{above}{name}.")
    return found
