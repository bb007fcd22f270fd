"""Trial steps of optimizers and schedules, without the network.

An optimizer steps a small weight, and a schedule makes the steps of the whole run. Errors depend on the results of
these steps, not on the name of the class.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from exp.errors import REFUSALS, ConfigError, ErrorDetails, find_rejected_parameter, message_of, unsuitable
from exp.optim.optimizer import Optimization, sparse_parameters
from exp.optim.schedules import build_schedule, changes_nothing, needs_total
from exp.spelling import show

# Largest number of schedule steps that are simulated.
MOST = 2_000
EXPECTED = "a value for which the schedule covers the whole run and no learning rate is below 0"


def step_errors(
    optimization: Optimization, network: nn.Module, optimizer: Optimizer, *, key: str, has_closure: bool = True
) -> Iterator[ErrorDetails]:
    """Yield the error of an optimizer that cannot make a step, or that has other weights for evaluation.

    Args:
        optimization: Settings that build the optimizer.
        network: Network on the meta device.
        optimizer: Optimizer for the parameters of the network.
        key: Config key of the optimizer.
        has_closure: Whether the optimizer's step receives a closure, which computes the gradients. Default: true. False
            for phases, because phases compute gradients before the step.
    """
    kind, place = type(optimizer), f"{key}._target_"
    # The protocol of schedule-free optimizers: train() and eval() exchange the weights.
    if all(callable(getattr(kind, word, None)) for word in ("train", "eval")):
        expected = "an optimizer with a single set of weights"
        fix = "Write optimizer=adamw callbacks=[ema] to validate and save an average of the weights"
        because = "which has two sets of weights and needs calls of train() and eval() to exchange them"
        yield unsuitable(place, kind.__name__, because, expected, fix)
        return
    if isinstance(optimizer, LBFGS):
        return  # LBFGS evaluates the closure several times per step
    sparse = sparse_parameters(network)
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    kinds = {id(one) in sparse for one in trained}
    for is_sparse in sorted(kinds):
        shape = [2] * next(one.dim() for one in trained if (id(one) in sparse) == is_sparse)
        gradient = _sparse(shape) if is_sparse else torch.ones(shape)
        trouble = _trouble(optimization.optimizer_factory, gradient, has_closure=has_closure)
        if trouble is not None:
            gradients = "sparse gradients (of layers with sparse=true)" if is_sparse else "gradients"
            expected = "an optimizer that can make a step with the gradients of one backward pass"
            fix = "Write sparse=false at the layer, or optimizer=sgd" if is_sparse else "Write optimizer=adamw"
            because = f"which cannot make a step with the {gradients} of this network ({trouble})"
            yield unsuitable(place, kind.__name__, because, expected, fix)
            return


def _sparse(shape: list[int]) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants():  # without this context, torch 2.11 warns
        return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(shape), shape)


def _trouble(factory: functools.partial[Optimizer], gradient: Tensor, *, has_closure: bool) -> str | None:
    """Return the reason why an optimizer makes no correct step. Return None if the step is correct.

    Before the closure is called, parameters have the gradients of the previous step. An optimizer that reads these
    gradients makes a wrong step.

    Args:
        factory: Builds the optimizer.
        gradient: Gradient of the step, dense or sparse.
        has_closure: Whether the step receives a closure, which computes the gradient.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run shows the warnings of torch about sparse tensors
            if not has_closure:
                _take_step(factory, gradient, before=gradient, has_closure=False)
                return None
            # The closure of a run clears the gradients of the previous step, so the result must not depend on them.
            one, other = (_take_step(factory, gradient, before=times * gradient, has_closure=True) for times in (1, 3))
    except REFUSALS as error:
        return f"{type(error).__name__}: {message_of(error)}"
    if torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
        return None
    return "the optimizer reads gradients before it calls the closure, so it uses gradients of the previous step"


def _take_step(factory: functools.partial[Optimizer], gradient: Tensor, *, before: Tensor, has_closure: bool) -> Tensor:
    """Return a small weight after one step of an optimizer.

    Args:
        factory: Builds the optimizer.
        gradient: Gradient of this step.
        before: Gradient in the parameter before the step, as the previous step left it.
        has_closure: Whether the step receives a closure, which sets `gradient`.
    """
    weight = nn.Parameter(torch.ones(gradient.shape))
    weight.grad = before.clone()

    def closure() -> float:
        weight.grad = gradient.clone()
        return float(weight.sum())

    options = {**factory.keywords, "fused": None} if "fused" in factory.keywords else factory.keywords
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # because some optimizers add noise
        optimizer = factory.func([weight], *factory.args, **options)
        if has_closure:
            optimizer.step(closure=closure)  # Lightning passes the closure by name
        else:
            optimizer.step()
    return weight.detach()


def rate_errors(
    optimization: Optimization, optimizer: Optimizer, *, key: str, steps: Callable[[], int | None], epochs: int | None
) -> Iterator[ErrorDetails]:
    """Yield the error of a schedule that raises an exception, ends too early, or sets an invalid learning rate.

    If a parameter of the schedule causes the problem, the error has the config key of this parameter.

    Args:
        optimization: Settings that build the schedule.
        optimizer: Optimizer of the schedule. This function changes the learning rates of the optimizer.
        key: Config key of the schedule.
        steps: Function that returns the number of optimizer steps of the run, or None if the run has no known end. It
            is called only for a schedule that counts steps and does not get their number from exp.
        epochs: Number of epochs of the run. None if the run has no known end.
    """
    factory = optimization.schedule_factory
    if factory is None or changes_nothing(factory):
        return
    length = MOST if needs_total(factory) else steps() if optimization.interval == "step" else epochs
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

    def take_step(**values: Any) -> str | None:
        for group, first in zip(optimizer.param_groups, groups, strict=True):
            group.update({**first, "lr": first.get("initial_lr", first["lr"])})
            group.pop("initial_lr", None)
        changed = functools.partial(factory, **values)
        try:
            made = build_schedule(optimizer, changed, interval=optimization.interval, total_steps=length or MOST)
        except ConfigError as error:
            return str(error.errors[0])
        return _schedule_trouble(made, optimizer, length=length)

    trouble = take_step()
    if trouble is None:
        return
    guilty = find_rejected_parameter(take_step, factory, accepts=lambda told: told is None)
    place = key if guilty is None else f"{key}.{guilty}"
    value = factory.func.__name__ if guilty is None else show(factory.keywords[guilty])
    yield unsuitable(place, value, f"and {trouble}", EXPECTED)


def _schedule_trouble(schedule: LRScheduler, optimizer: Optimizer, *, length: int | None) -> str | None:
    """Return a description of the first problem in the steps of a schedule. Return None if there is no problem.

    Args:
        schedule: The schedule.
        optimizer: Optimizer of the schedule.
        length: Number of steps of the schedule in the run. None if unknown. In that case, only the first steps run.
    """
    if isinstance(schedule, OneCycleLR) and length is not None and schedule.total_steps < length:
        return f"the schedule ends after {schedule.total_steps} steps, but the run has {length} steps"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide the warning that the schedule steps before its optimizer
        for step in range(1, min(MOST, length or 3)):
            try:
                schedule.step(1.0) if isinstance(schedule, ReduceLROnPlateau) else schedule.step()
            except REFUSALS as error:
                return f"step {step} of the schedule raises {type(error).__name__}: {error}"
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            wrong = [rate for rate in rates if not math.isfinite(rate) or rate < 0]
            if wrong:
                return f"the learning rate is {wrong[0]:g} at step {step}"
    return None
