"""What trains badly without a fault, seen in the first steps and the first epoch, and told once in the log.

Recording asks it while it watches. Then it is gone, and a step costs what it cost before.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exp.engine.datamodule import RunTrainer
from exp.engine.module import TrainingModule
from exp.models.inference import input_names
from exp.objectives.objective import ByWeight, Term
from exp.optim.optimizer import Optimization
from exp.precision.plugin import RunPrecision
from exp.shared_types import Batch, dtype_name
from exp.spelling import among
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.whole_state import local

log = logging.getLogger(__name__)

# Steps in which a parameter may be without a gradient.
STEPS = 3
# Numbers of each parameter that are looked at, and the share of them that a step changes where it can.
SAMPLED, CHANGED = 1000, 0.5
# Batches in which a feature may show a second value: columns that never do are common, and a look costs 0.1 ms.
FEATURE_BATCHES = 128
# By how much a schedule's length may differ from the run's.
TOLERANCE = 0.05


@dataclass
class _Optimizer:
    """What was seen of one optimizer.

    steps: that were looked at for gradients.
    found: whether each of its parameters had a gradient in any of them, by name.
    before: of the step under way, numbers of parameters that have a gradient, and where that is not 0; None where it is
        not looked at.
    """

    steps: int = 0
    found: dict[str, bool] = field(default_factory=dict)
    is_told: bool = False
    is_judged: bool = False
    before: Sequence[tuple[Tensor, Tensor, Tensor]] | None = None


class FirstSteps:
    """Watches the steps until it has seen enough. All ranks of a run call it alike.

    is_watching: whether it wants to be called at batches and steps.
    """

    def __init__(self, trainer: RunTrainer, module: TrainingModule) -> None:
        self._trainer, self._module = trainer, module
        self._names = {id(parameter): name for name, parameter in module.network.named_parameters()}
        self._optimizers: dict[int, _Optimizer] = {}
        # Of a model whose parts lie in several ranks.
        self._parts = trainer.strategy if isinstance(trainer.strategy, ModelParallel) else None
        self._coverage: Coverage | None = None
        self._batches = 0
        self.is_watching = True
        self._say(self._of_schedules())

    def start_batch(self, batch: Batch, batch_idx: int) -> None:
        """See a batch, before its forward."""
        if not self._batches:
            self._say(self._of_batch(batch))
            if not batch_idx:
                self._coverage = Coverage(self._module, self._trainer.datamodule.data.spec.num_classes)
        self._batches += 1
        if self._coverage is not None:
            self._coverage.add(batch.data, is_due=self._batches & (self._batches - 1) == 0)

    def before_step(self, optimizer: Optimizer) -> None:
        """See an optimizer's gradients."""
        seen = self._optimizers.setdefault(id(optimizer), _Optimizer())
        is_warm = not seen.is_judged and _is_warm(optimizer)
        if seen.steps >= STEPS and not is_warm:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        if seen.steps < STEPS:
            seen.steps += 1
            # One without any is of a strategy that keeps gradients elsewhere.
            for parameter in parameters if has_gradients or self._parts is not None else ():
                name = self._names.get(id(parameter))
                # One that an epoch unfreezes later is meant to have none yet.
                if name is not None and parameter.requires_grad:
                    seen.found[name] = seen.found.get(name, False) or parameter.grad is not None
        if is_warm:
            seen.before = list(_samples(parameters))

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        """See what a step has changed."""
        precision = self._trainer.precision_plugin
        for optimizer in optimizers:
            seen = self._optimizers.get(id(optimizer))
            if seen is None:
                continue
            before, seen.before = seen.before, None
            if before is not None and not (isinstance(precision, RunPrecision) and precision.skipped(optimizer)):
                seen.is_judged = True
                self._say(self._of_update(optimizer, before))
            if seen.steps >= STEPS:
                self._say(self._of_gradients(seen))
        seen_enough = all(seen.is_judged and seen.steps >= STEPS for seen in self._optimizers.values())
        if seen_enough and (self._coverage is None or self._coverage.is_full):
            self.is_watching = not self._optimizers

    def end_epoch(self) -> None:
        """See an epoch end; of the first that is whole, say what no batch of it held."""
        coverage, self._coverage = self._coverage, None
        if coverage is not None and self._trainer.is_last_batch:
            self._say(coverage.missing(self._trainer))

    def end(self) -> None:
        """Say what was seen of a run that ends before its first steps are done."""
        for seen in self._optimizers.values():
            self._say(self._of_gradients(seen))

    def _say(self, notes: Iterator[str] | Sequence[str]) -> None:
        for note in notes:
            if self._trainer.is_global_zero:
                log.warning("%s", note)

    def _of_schedules(self) -> Iterator[str]:
        phases = {phase.name: phase.optimization for phase in self._module.phases}
        steps, epochs = self._module.lengths()
        for name, optimization in phases.items() if phases else [("", self._module.optimization)]:
            total = steps if optimization.interval == "step" else epochs
            if total is not None:
                key = f"phases.{name}.scheduler" if name else "scheduler"
                yield from schedule_notes(optimization, total, key=key)

    def _of_batch(self, batch: Batch) -> Iterator[str]:
        data = self._trainer.datamodule
        wanted = data.data.batch_size
        if batch.global_size < wanted and data.batches("train") == 1:
            yield (
                f"data.batch_size is {wanted}, and the training part has {batch.global_size} samples: every step sees "
                f"all of them, once an epoch. Set data.batch_size below {batch.global_size}"
            )

    def _of_update(self, optimizer: Optimizer, before: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Iterator[str]:
        counts = torch.zeros(2, device=self._trainer.strategy.root_device)
        for one, old, learns in before:
            counts += torch.stack([((_strided(one) != old) & learns).sum(), learns.sum()]).to(counts.device)
        if self._parts is not None:
            counts = self._parts.reduce(counts, reduce_op="sum")
        changed, count = counts.tolist()
        share = changed / max(count, 1.0)
        if count and share < CHANGED:
            dtypes = ", ".join(dict.fromkeys(dtype_name(one.dtype) for one, _, _ in before))
            rates = ", ".join(dict.fromkeys(f"{float(group['lr']):.3g}" for group in optimizer.param_groups))
            yield (
                f"the first step changed {share:.0%} of the weights with a gradient: at a learning rate of {rates} an "
                f"update is below what {dtypes} can add to a weight. Raise optimizer.lr, or keep the parameters in "
                "more digits, as precision=fp32 or precision=bf16 do"
            )

    def _of_gradients(self, seen: _Optimizer) -> Iterator[str]:
        if seen.is_told:
            return
        seen.is_told, found = True, seen.found
        if self._parts is not None:
            everywhere = self._parts.maxima({name: torch.tensor([float(has)]) for name, has in found.items()})
            found = {name: bool(most.item()) for name, most in everywhere.items()}
        # Another phase may train the same parameter.
        learned = {
            name for one in self._optimizers.values() for name, has_gradient in one.found.items() if has_gradient
        }
        names = sorted(name for name, has_gradient in found.items() if not has_gradient and name not in learned)
        if names:
            several = f"{len(names)} parameters get" if len(names) > 1 else "a parameter gets"
            yield (
                f"{several} no gradient, and nothing is learned there: {among(names, count=6)}. Use them in the "
                "forward and in the objective, without detach(), or name them in freeze.parameters"
            )


class Coverage:
    """Which classes the targets have shown, and which features of the inputs have had more than one value.

    Every input of floating numbers is looked at: tables `[B, F]` by column, sequences `[B, T, C]` by feature, pictures
    `[B, C, H, W]` and videos by channel. Of a text nothing is: a rare character is no fault.
    """

    def __init__(self, module: TrainingModule, num_classes: int | None) -> None:
        losses = [
            term.loss
            for term in module.objective.terms.values()
            if isinstance(term, Term) and term.target == "target" and term.inputs is None
        ]
        is_classified = any(isinstance(loss, ByWeight) for loss in losses)
        self._classes = num_classes if is_classified and num_classes is not None else 0
        self._shown: Tensor | None = None
        self._names, self._device = input_names(module.network), module.device
        # Of each input and feature the highest value, and the highest of their opposites; None where batches differ
        # in their number of features.
        self._ranges: dict[str, Tensor | None] = {}
        self._batches = 0
        self.is_full = False

    def add(self, data: Any, *, is_due: bool) -> None:
        """Look at a batch. is_due: whether to look whether there is anything left to wait for, too."""
        if self.is_full:
            return
        self._batches += 1
        inputs, target = _pair(data)
        # Of a text the characters are classes, and a rare one is no fault.
        is_text = isinstance(inputs, Tensor) and not inputs.is_floating_point()
        if isinstance(target, Tensor) and self._classes and not (target.is_floating_point() or is_text):
            if self._shown is None:
                # The last place is for targets that are no class, such as ignored ones.
                self._shown = torch.zeros(self._classes + 1, device=target.device)
            is_class = (target >= 0) & (target < self._classes)
            self._shown.index_fill_(0, target.where(is_class, self._classes).flatten().long(), 1.0)
        if self._batches <= FEATURE_BATCHES:
            named = {name: data[name] for name in self._names if name in data} if isinstance(data, Mapping) else {}
            for name, one in (named or {"": inputs}).items():
                if isinstance(one, Tensor) and one.is_floating_point() and one.dim() > 1 and len(one):
                    self._add_range(name, one)
        if is_due:
            classes, features = self._missing(None)
            self.is_full = not classes and (not any(features.values()) or self._batches >= FEATURE_BATCHES)

    def _add_range(self, name: str, values: Tensor) -> None:
        axis = 2 if values.dim() == 3 else 1
        others = [one for one in range(values.dim()) if one != axis]
        found = torch.stack([values.amax(others), -values.amin(others)])
        known = self._ranges.setdefault(name, found)
        is_alike = known is not None and known.shape == found.shape
        self._ranges[name] = torch.maximum(known, found) if known is not None and is_alike else None

    def missing(self, trainer: RunTrainer) -> Iterator[str]:
        """Say what an epoch over all ranks has not shown. Every rank must call it."""
        classes, features = self._missing(trainer)
        if classes:
            yield (
                f"training never showed {_counted(classes, 'class', 'classes')} of {self._classes}: the network cannot "
                "learn what it never sees. Look at how the data is divided (data.parts), and at data.num_classes"
            )
        for name, places in features.items():
            if not places:
                continue
            looked = "all" if self._batches <= FEATURE_BATCHES and not self.is_full else f"{FEATURE_BATCHES} batches"
            yield (
                f"{_counted(places, 'feature', 'features')} of {name or 'the inputs'} had one value in {looked} of "
                "training: they say nothing, and may mislead where they change. Take them out of the data, or look at "
                "how they are read"
            )

    def _missing(self, trainer: RunTrainer | None) -> tuple[list[int], dict[str, list[int]]]:
        reduce = functools.partial(trainer.strategy.reduce, reduce_op="max") if trainer is not None else _as_it_is
        classes: list[int] = []
        features: dict[str, list[int]] = {}
        if self._shown is not None:
            shown = reduce(self._shown)[:-1].tolist()
            classes = [place for place, is_shown in enumerate(shown) if not is_shown]
        # In one order on all ranks, one of which may have had no sample with that input.
        for name in ("", *self._names):
            ranges = self._ranges.get(name)
            width = 0 if ranges is None else ranges.shape[1]
            widest, opposite = reduce(torch.tensor([float(width), float(-width)], device=self._device)).tolist()
            # Ranks may have met features of other numbers.
            if ranges is not None and widest == -opposite:
                high, low = reduce(ranges)
                features[name] = (high == -low).nonzero().flatten().tolist()
        return classes, features


def schedule_notes(optimization: Optimization, total: int, *, key: str) -> Iterator[str]:
    """What does not fit of a schedule and a run of so many of its steps.

    key: of the schedule in the config.
    """
    factory, unit = optimization.schedule_factory, optimization.interval
    given: Mapping[str, Any] = {} if factory is None else factory.keywords
    for name in ("total_steps", "T_max"):
        length = given.get(name)
        if length is not None and abs(length - total) > TOLERANCE * total:
            side = "ends before" if length < total else "is cut off by"
            yield (
                f"{key}.{name} is {length}, and the run has {total} {unit}s: the schedule {side} the end of the run. "
                f"Write {key}.{name}={total}, or leave it to the run where null does so"
            )
    for name in ("warmup_steps", "total_iters"):
        if given.get(name) and given[name] >= total:
            yield (
                f"{key}.{name} is {given[name]}, and the run has {total} {unit}s: the warm-up is longer than the run, "
                f"and the learning rate is never reached. Lower {key}.{name}, or train longer"
            )
    first = min(given.get("milestones") or [given.get("step_size") or 0])
    if first >= total:
        name = "milestones" if given.get("milestones") else "step_size"
        yield (
            f"{key}.{name} begins at {first}, and the run has {total} {unit}s: the learning rate never changes. Lower "
            f"{key}.{name}, or write scheduler=constant"
        )


def _samples(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for parameter in parameters:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            one = local(parameter.detach())
            yield one, _strided(one).clone(), _strided(local(parameter.grad)) != 0


def _strided(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:: max(tensor.numel() // SAMPLED, 1)]


def _is_warm(optimizer: Optimizer) -> bool:
    """Whether a rate is near its own: a warm-up begins with next to nothing."""
    rates = [(float(group["lr"]), float(group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups]
    return any(rate > 0 and rate >= 0.1 * initial for rate, initial in rates)


def _pair(data: Any) -> tuple[Any, Any]:
    if isinstance(data, Mapping):
        return data.get("input"), data.get("target")
    return (data[0], data[1]) if isinstance(data, list | tuple) and len(data) == 2 else (None, None)


def _counted(places: Sequence[int], one: str, many: str) -> str:
    return f"{one if len(places) == 1 else many} {among(map(str, places), count=10)}"


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
