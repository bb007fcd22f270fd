"""The FLOPs of a training step per sample, counted in a forward and a backward on the meta device."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exp.data.randomness import preserve_generators
from exp.engine.forward import enable_needs, forward_by_name, make_passes
from exp.models.containers import with_forward
from exp.models.flop_count import FlopCount, count_flops
from exp.nested import move_tensors, tensors_in
from exp.objectives.objective import Objective
from exp.optim.parameter_groups import trained_parameters
from exp.optim.phase import Phase
from exp.shared_types import INPUT, Batch

META = torch.device("meta")


def flops_of_a_sample(
    data: Any,
    *,
    network: nn.Module,
    objective: Objective,
    phases: Sequence[Phase] = (),
    inputs: Sequence[str] = INPUT,
) -> FlopCount:
    """Return the FLOPs of a training step per sample, as a mean over a batch.

    The FLOPs of a phase are multiplied by its runs per step: `repeats` divided by `every_n_steps`. Activations that the
    backward recomputes are not counted. A micro-batch is treated like a batch. The result is valid only for sequences
    of the same length as in `data`.

    Args:
        data: A batch of the data set. Only the shapes and dtypes of the batch are used.
        network: Network on the meta device, with the sizes of all layers.
        objective: Objective of the run.
        phases: Phases of the run. Default: no phases.
        inputs: Names of the network's inputs in the data. Default: `input`.

    Raises:
        Exception: The network or the objective cannot run on tensors without numbers.
    """
    with preserve_generators(), torch.device(META):
        network.train()
        fake = move_tensors(data, META)
        size = next(len(tensor) for tensor in tensors_in(fake))
        batch = Batch(data=fake, size=size, global_size=size, world_size=1)
        # Floats, because the number of runs of a phase per step may be a fraction.
        forward: defaultdict[str, float] = defaultdict(float)
        backward: defaultdict[str, float] = defaultdict(float)
        is_estimated = False
        for run, share in _passes(network, objective, phases, inputs):
            there, back = _count_pass(functools.partial(run, batch))
            is_estimated = is_estimated or back is None
            for operator, flops in there.items():
                forward[operator] += flops * share / size
                backward[operator] += (2 * flops if back is None else 0) * share / size
            for operator, flops in (back or Counter()).items():
                backward[operator] += flops * share / size
        network.zero_grad()
    return FlopCount(
        forward=sum(forward.values()),
        backward=sum(backward.values()),
        by_operator={name: forward[name] + backward[name] for name in {**forward, **backward}},
        is_estimated=is_estimated,
    )


def _passes(
    network: nn.Module, objective: Objective, phases: Sequence[Phase], inputs: Sequence[str]
) -> Iterator[tuple[Callable[[Batch], Tensor], float]]:
    """Yield the loss function of each phase, and the number of runs of the phase per step.

    A run without phases has a single loss function, which runs once per step.
    """
    if not phases:
        yield _loss_of(network, objective, inputs), 1.0
    for phase in phases:
        trained = {id(parameter) for parameter in trained_parameters(network, phase.parameters)}
        learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
        for parameter in learning:
            parameter.requires_grad_(id(parameter) in trained)
        view = network if phase.forward is None else with_forward(network, phase.forward)
        yield _loss_of(view, objective.only(phase.terms), inputs), phase.repeats / phase.every_n_steps
        for parameter in learning:
            parameter.requires_grad_(True)


def _loss_of(network: nn.Module, objective: Objective, inputs: Sequence[str]) -> Callable[[Batch], Tensor]:
    run = forward_by_name(network, inputs)

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor
        if not objective.needs:
            loss, _ = objective(run(network, batch.data), batch)
            return loss
        with enable_needs(objective.needs, network):
            passes = make_passes(objective.needs, network=network, run=run, data=batch.data, inputs=inputs)
            loss, _ = objective(passes.run(), batch, passes)
        return loss

    return loss_of


def _count_pass(loss_of: Callable[[], Tensor]) -> tuple[Counter[str], Counter[str] | None]:
    """Return the FLOPs of a forward and of its backward, by operator.

    The second value is None if the backward cannot run on tensors without numbers.
    """
    loss, forward = count_flops(loss_of)
    if not loss.requires_grad:
        return forward, Counter()
    try:
        return forward, count_flops(loss.backward)[1]
    except (NotImplementedError, RuntimeError):
        return forward, None
