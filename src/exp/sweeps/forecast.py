"""Whether jobs are faster stacked than side by side, and how many of them fit: asked before a stack is made.

What a stack saves is the time between operators; what it costs is that some operators, convolutions first of all, run
slower for several networks at once than for one after the other. Which of the two is more is measured, in a tenth of a
second, on the network itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from exp.check.plan import Plan
from exp.construct import build_network, build_optimization
from exp.engine.forward import forward_by_name
from exp.hooks.saved_tensors import kept_by
from exp.nested import tensors_in
from exp.shared_types import Batch
from exp.sweeps.stacked_network import StackedNetwork

# Of the schedules that an optimizer is made with here, longer than any warm-up.
LENGTH = 10**9
# Members in the trial, and its rounds, of which the fastest counts: the machine may have other work.
TRIED, ROUNDS = 8, 3
# What takes longer has little to gain: not even the trial is made of such a step, nor of operators of so many
# multiply-adds.
LONG_SECONDS, LARGE_OPERATOR = 10e-3, 2**26
# So much slower a member's step is taken to be where no trial is made: convolutions and attention on a CPU.
UNTRIED = 2.0
# A stack that gains less is no reason to give up a process for each job.
GAIN = 0.9
# The share of the memory that is free, of which stacks together take no more.
SHARE = 0.5
# Behind it another member costs what it costs in a stack of its own: the numbers of so many no longer share a cache.
MOST = 64


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Processor seconds of a job beside its network's: in all, of each epoch, of each step."""

    start: float
    epoch: float
    step: float

    def of(self, *, epochs: float, steps: int, step: float) -> float:
        """Of a whole job. step: of its network and its optimizer."""
        return self.start + epochs * self.epoch + steps * (self.step + step)


# Of a job that has a process, and of a member of a stack: digits, 64-128-10, 1 and 21 epochs of 20 steps, 4 to 40 jobs,
# an AMD EPYC; docs/stacking.md.
ALONE = Costs(start=0.35, epoch=12e-3, step=0.25e-3)
MEMBER = Costs(start=0.09, epoch=2.5e-3, step=0.1e-3)


def is_faster(decided: Plan, *, members: int) -> bool:
    """Whether so many jobs like this one take less time in a stack than one after the other, on one thread."""
    if decided.plain["runtime"]["compile"]:
        return True  # which takes many times what a job does, and is done once for all of them
    if decided.operator is None or decided.operator >= LARGE_OPERATOR:
        return False
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            alone, together = _times(decided, members=min(TRIED, members))
    finally:
        torch.set_num_threads(before)
    epochs, steps = _length(decided)
    return MEMBER.of(epochs=epochs, steps=steps, step=together) < GAIN * ALONE.of(
        epochs=epochs, steps=steps, step=alone
    )


def _length(decided: Plan) -> tuple[float, int]:
    """The epochs and the steps of a job; parts of an epoch where it has fewer steps."""
    trainer = decided.plain["trainer"]
    each = -(-len(decided.data.loader("train")) // trainer["accumulate_grad_batches"])
    steps = each * trainer["max_epochs"]
    if trainer["max_steps"] not in (None, -1):
        steps = min(steps, trainer["max_steps"])
    return steps / each, steps


def most_members(decided: Plan, *, stacks: int = 1, free: int | None = None) -> int:
    """How many members a stack of such jobs has at most, of so many stacks at once: one at least.

    free: bytes of memory; None asks the system.
    """
    free = psutil.virtual_memory().available if free is None else free
    return max(1, min(MOST, int(SHARE * free / stacks / member_bytes(decided))))


def member_bytes(decided: Plan) -> int:
    """The memory of one more member: parameters, gradients, the optimizer's state, what the forward keeps.

    The parameters and the state once more for its best checkpoint, and what the forward keeps once more for what the
    backward makes of it.
    """
    network, batch = _network(decided), _batch(decided)
    optimizer, _ = build_optimization(decided.plain).make(network, total_steps=LENGTH, total_epochs=LENGTH)
    learned = [one for one in network.parameters() if one.requires_grad]
    held = sum(one.nbytes for one in (*network.parameters(), *network.buffers()))
    losses: list[torch.Tensor] = []
    kept = kept_by(lambda: losses.append(_loss(decided, network, batch)), network=network, data=batch.data)
    [loss] = losses
    loss.backward()
    optimizer.step()
    state = sum(tensor.nbytes for tensor in tensors_in([optimizer.state]))
    data = sum(tensor.nbytes for tensor in tensors_in(batch.data))
    return 2 * (held + state + kept.size) + sum(one.nbytes for one in learned) + data


def _times(decided: Plan, *, members: int) -> tuple[float, float]:
    """The seconds of a step of one network alone, and of each of several in a stack."""
    network, batch = _network(decided), _batch(decided)
    optimizer, _ = build_optimization(decided.plain).make(network, total_steps=LENGTH, total_epochs=LENGTH)

    def alone() -> None:
        optimizer.zero_grad()
        _loss(decided, network, batch).backward()
        optimizer.step()

    def together() -> None:
        stack.gradients(batch, is_shared=True, epoch=0, index=0)
        for _ in range(members):
            optimizer.step()

    first = _fastest(alone, repeats=1)
    if first > LONG_SECONDS:
        return first, UNTRIED * first
    stack = StackedNetwork(
        [_network(decided) for _ in range(members)],
        run=_run(decided, network),
        objectives=[decided.objective] * members,
        autocast=nullcontext,
        seeds=list(range(members)),
    )
    return _fastest(alone, repeats=members), _fastest(together, repeats=1) / members


def _fastest(work: Callable[[], Any], *, repeats: int) -> float:
    """Seconds of one call, of several rounds the fastest; the first call is not counted.

    Of this process's own time: what else the machine does is no reason to stack, or not to.
    """
    work()
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(repeats):
            work()
        found.append((time.process_time() - start) / repeats)
    return min(found)


def _network(decided: Plan) -> nn.Module:
    return build_network(decided.plain, decided.spec).train()


def _batch(decided: Plan) -> Batch:
    return next(iter(decided.data.loader("train")))


def _run(decided: Plan, network: nn.Module) -> Callable[[Callable[..., Any], Any], dict[str, Any]]:
    return forward_by_name(network, tuple(decided.spec.inputs))


def _loss(decided: Plan, network: nn.Module, batch: Batch) -> torch.Tensor:
    values: Mapping[str, Any] = _run(decided, network)(network, batch.data)
    loss: torch.Tensor = decided.objective(values, batch)[0]
    return loss
