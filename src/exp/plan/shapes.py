"""Do the layers fit the data and each other? One forward on the meta device, which has shapes and no numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from exp.errors import ConfigError, Fault
from exp.models.config_keys import config_key
from exp.models.inference import example_inputs
from exp.models.named_forward import forward_name, forward_names, with_forward
from exp.models.program_error import ProgramError
from exp.objectives.objective import Objective
from exp.optim.phase import Phase
from exp.plan.output_fit import output_faults
from exp.plan.phases import objectives_by_forward
from exp.plan.shape_words import layer_fault, program_fault
from exp.plan.watch import Watch
from exp.types import DataSpec

# What torch says where an operator cannot run without numbers. Such a network is not judged.
UNDECIDABLE = ("meta", "same device", "data-dependent", "data dependent")


@dataclass(frozen=True, kw_only=True)
class ShapeExamination:
    """What one forward on the meta device showed.

    faults: of the config, each at the key of the layer that fails.
    notes: why nothing could be said, where that is so. Not faults.
    parameters: numbers that the network holds, P; None where it could not be built.
    """

    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()
    parameters: int | None = None


def examine_shapes(
    *,
    network_factory: Callable[[], nn.Module],
    spec: DataSpec,
    objective: Objective | None = None,
    phases: Sequence[Phase] = (),
) -> ShapeExamination:
    """Build the network on the meta device, feed it a batch of the data's shape, and look at what comes out.

    network_factory: builds the network with every layer sized (models/inference.py), under torch.device("meta").
    spec: the shape and dtype that the data declares, and how many outputs it asks for.
    objective: what the outputs are compared by; without it the last axis alone is held against the data.
    phases: whose forwards are run, too, each held against its own terms.
    """
    with Watch() as watch, torch.device("meta"), torch.no_grad():
        try:
            network = network_factory()
        except Exception as error:  # a user's own layer may raise anything; each is reported by its key
            return _failure(error, watch, watch.root, parameters=None)
        _refuse_integers(network)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        terms = {None: objective} if objective is None else objectives_by_forward(phases, objective)
        faults: list[Fault] = []
        for name in [None, *(name for name in terms if name in forward_names(network))]:
            watch.clear()
            seen = network if name is None else with_forward(network, name)
            try:
                output = seen(*example_inputs(spec, device="meta"))
            except Exception as error:
                return _failure(error, watch, seen, parameters=parameters)
            if name in terms:
                faults += output_faults(seen, output, watch.calls, spec, terms[name])
    return ShapeExamination(faults=tuple(dict.fromkeys(faults)), parameters=parameters)


def _refuse_integers(network: nn.Module) -> None:
    """Lets a linear layer that is fed integers fail, as it does with numbers: on the meta device it would not."""

    def refuse(module: nn.Linear, inputs: tuple[Any, ...]) -> None:
        if inputs and not inputs[0].is_floating_point() and module.weight.is_floating_point():
            raise RuntimeError(f"the input is {inputs[0].dtype}, the weight {module.weight.dtype}")

    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(refuse)


def _failure(error: Exception, watch: Watch, network: nn.Module | None, *, parameters: int | None) -> ShapeExamination:
    if isinstance(error, ConfigError):
        return ShapeExamination(faults=error.faults, parameters=parameters)
    if isinstance(error, ProgramError):
        got = f"line {error.line}, column {error.column}: {error.message}"
        fault = Fault(key=error.key or "model.forward", got=got, expected=error.expected)
        return ShapeExamination(faults=(fault,), parameters=parameters)
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError) or any(word in str(error) for word in UNDECIDABLE):
        note = f"the model's shapes were not checked: {message.splitlines()[0]}"
        return ShapeExamination(faults=(), notes=(note,), parameters=parameters)
    if watch.inside is None or network is None:
        fault = Fault(key="model", got=message.splitlines()[0], expected="a model that can be built")
        return ShapeExamination(faults=(fault,), parameters=parameters)
    call = watch.inside
    key = config_key(network, watch.path_of(network, call.module))
    fault = program_fault(error, key, call) or layer_fault(error, key, call)
    name = forward_name(network)
    if name is not None and fault.key == "model.forward":
        fault = replace(fault, key=f"model.programs.{name}")
    return ShapeExamination(faults=(fault,), parameters=parameters)
