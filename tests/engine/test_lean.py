"""The lean loop, which makes several steps in one call of Lightning's loop, gives the same results and hook calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import pkgutil
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader

import exp.strategies
from exp.data.data import Data
from exp.engine.lean_loop import TRAINING_HOOKS, VALIDATION_HOOKS
from exp.errors import Interrupted
from exp.hooks.gradients import Gradients
from exp.hooks.hook import Hook
from exp.hooks.memory import Memory
from exp.hooks.throughput import Throughput
from exp.optim.optimizer import Optimization


class Logging(Callback):
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("epoch/val", float(trainer.current_epoch))


PLANS: dict[str, dict[str, Any]] = {
    "logged_by_a_callback": {"callbacks": (Logging(),)},
    "accumulated_fp16_clipped": {"accumulate_grad_batches": 3, "word": "fp16", "gradient_clip_val": 0.1},
    "cosine_averaged": {"schedule": "cosine", "callbacks": ("ema",)},
    "plateau_within_epochs": {"schedule": "plateau", "val_check_interval": 3, "every_n_steps": 1},
    "steps_by_epoch_limited": {"schedule": "steps", "limit_train_batches": 5, "max_steps": 13},
    "validation_across_epochs": {"check_val_every_n_epoch": None, "val_check_interval": 5},
    "stopped_early": {"callbacks": ("early_stopping",), "max_epochs": 20},
    "phases_accumulated": {"phases": True, "accumulate_grad_batches": 3, "every_n_steps": 1, "schedule": "cosine"},
}


class Seen(Callback):
    """Callback that records the visible position of the run at every hook."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        for name in (*TRAINING_HOOKS, *VALIDATION_HOOKS, "on_train_epoch_end", "on_validation_start", "on_train_end"):
            setattr(self, name, functools.partial(self._note, name))

    def _note(self, name: str, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.notes.append(
            (
                name,
                trainer.global_step,
                trainer.current_epoch,
                trainer.fit_loop.batch_idx,
                trainer.fit_loop.total_batch_idx,
                trainer.is_last_batch,
                trainer.fit_loop._should_accumulate(),
                loop._batches_that_stepped,
                dataclasses.asdict(loop.batch_progress),
                dataclasses.asdict(loop.val_loop.batch_progress),
                module.training,
                torch.is_grad_enabled(),
                dataclasses.asdict(loop.scheduler_progress),
                dataclasses.asdict(loop.automatic_optimization.optim_progress),
                [group["lr"] for group in trainer.optimizers[0].param_groups],
                [p.grad is None for p in module.network.parameters()],
            )
        )


# The lean loop calls the step hooks only of callbacks in modules of exp.
Seen.__module__ = "exp.seen"


class At(Hook):
    """Hook that calls an action after the n-th optimizer step of this process."""

    def __init__(self, count: int, action: Any) -> None:
        super().__init__()
        self._left, self._action = count, action

    def after_step(self, step: Any) -> None:
        self._left -= 1
        if not self._left:
            self._action()


def run(small_run: ModuleType, directory: Path, count: int | None, **plan: Any) -> tuple[Any, Seen]:
    seen = Seen()
    small = small_run.Small(directory, steps_per_execution=count, callbacks=(*plan.pop("callbacks", ()), seen), **plan)
    small.fit()
    return small, seen


def assert_equal(one: Any, other: Any) -> None:
    assert computed(one.values.seen) == computed(other.values.seen)
    assert one.values.seen.keys() == other.values.seen.keys()
    assert all(torch.equal(tensor, other.weights()[name]) for name, tensor in one.weights().items())
    assert computed(one.recording.metrics) == computed(other.recording.metrics)
    assert one.trainer.fit_loop.state_dict() == other.trainer.fit_loop.state_dict()
    module = sys.modules[type(one).__module__]
    for name in ("last.ckpt", "best.ckpt"):
        assert module.saved(one.last.with_name(name)) == module.saved(other.last.with_name(name)), name


def computed(values: dict[Any, float]) -> dict[Any, float]:
    """Return the values, by tag or by (tag, step), without measurements of time and memory."""
    tags = {key: key if isinstance(key, str) else key[0] for key in values}
    return {key: one for key, one in values.items() if not tags[key].startswith(("memory/", "throughput/"))}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_steps_are_those_of_lightnings_own_loop(tmp_path: Path, small_run: ModuleType, plan: dict[str, Any]) -> None:
    plan = {"max_epochs": 3, **plan}
    own, at_own = run(small_run, tmp_path / "own", 1, **plan)
    for count in (3, None):
        lean, at_lean = run(small_run, tmp_path / str(count), count, **plan)
        assert lean.is_lean
        assert_equal(own, lean)
        assert at_lean.notes == at_own.notes


class GradientsAfterForward(Hook):
    """Hook that records after each forward if the network has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def passed(self, boundary: str, step: Any) -> None:
        if boundary == "forward":
            self.found.append(any(parameter.grad is not None for parameter in step.network.parameters()))


@pytest.mark.parametrize("window", [1, 3])
def test_gradients_are_dropped_before_a_forward(tmp_path: Path, small_run: ModuleType, window: int) -> None:
    ends = []
    for count in (1, None):
        hook = GradientsAfterForward()
        plan = {"max_epochs": 1, "accumulate_grad_batches": window, "hooks": {"gradients": hook}}
        small = small_run.Small(tmp_path / str(count), steps_per_execution=count, **plan)
        small.fit()
        ends.append(small)
    assert small.is_lean
    assert_equal(*ends)
    assert hook.found == [place % window > 0 for place in range(7)]


def test_an_execution_ends_before_a_validation(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, steps_per_execution=2, max_epochs=2, val_check_interval=3, max_steps=12)
    loop, ends = small.trainer.fit_loop.epoch_loop, []

    def count(*arguments: Any) -> None:
        _TrainingEpochLoop.on_advance_end(loop, *arguments)
        ends.append(loop.total_batch_idx + 1)

    loop.on_advance_end = count
    small.fit()
    # An epoch has 7 batches, with validations after batches 3 and 6.
    assert ends == [2, 3, 5, 6, 7, 9, 10, 12]


def test_a_run_killed_within_an_execution_resumes_exactly(tmp_path: Path, small_run: ModuleType) -> None:
    plan = {"accumulate_grad_batches": 2, "schedule": "cosine", "word": "fp16"}
    whole = small_run.Small(tmp_path / "whole", steps_per_execution=1, **plan)
    whole.fit()
    values: dict[Any, float] = {}
    for count in (6, 5, None):
        hooks = {} if count is None else {"at": At(count, small_run.kill)}
        part = small_run.Small(tmp_path / "parts", steps_per_execution=50, hooks=hooks, **plan)
        with contextlib.suppress(small_run.Killed):
            part.fit(resume=part.last if part.last.is_file() else None)
        assert part.is_lean
        values |= part.values.seen
    assert {key: values[key] for key in whole.values.seen} == whole.values.seen
    assert all(torch.equal(tensor, part.weights()[name]) for name, tensor in whole.weights().items())


def test_a_signal_ends_an_execution_after_its_batch(tmp_path: Path, small_run: ModuleType) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        part = small_run.Small(tmp_path / "part", hooks={"at": At(5, interrupt)}, every_n_steps=None)
        with pytest.raises(Interrupted):
            part.fit()
    finally:
        signal.signal(signal.SIGINT, before)
    assert part.is_lean
    assert part.trainer.global_step == 5
    again, whole = small_run.Small(tmp_path / "part"), small_run.Small(tmp_path / "whole")
    again.fit(resume=part.last)
    whole.fit()
    assert all(torch.equal(tensor, whole.weights()[name]) for name, tensor in again.weights().items())


class Twice(torch.optim.SGD):
    """Optimizer that calls the closure twice, as sharpness-aware methods do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


OPTIMIZERS: dict[str, Any] = {
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "twice": functools.partial(Twice, lr=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, fused=True),
}


@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_of_all_kinds_make_the_same_steps(tmp_path: Path, small_run: ModuleType, factory: Any) -> None:
    runs = []
    for count in (1, 50):
        hooks = {"gradients": Gradients(), "memory": Memory(), "throughput": Throughput()}
        small = small_run.Small(tmp_path / str(count), steps_per_execution=count, max_epochs=2, hooks=hooks)
        small.module.optimization = Optimization(optimizer_factory=factory)
        small.fit()
        runs.append(small)
    assert runs[1].is_lean
    assert_equal(*runs)


class Stream(torch.utils.data.IterableDataset):
    """Stream of samples without a length."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.samples = list(zip(inputs, targets, strict=True))

    def __iter__(self) -> Any:
        return iter(self.samples)


def test_a_stream_of_unknown_length_ends_where_it_ends(tmp_path: Path, small_run: ModuleType) -> None:
    runs = []
    for count in (1, 3):
        inputs, targets = small_run.samples()
        data = Data(
            train=Stream(inputs[:100], targets[:100]), val=Stream(inputs[100:], targets[100:]),
            batch_size=16, num_classes=2,
        )  # fmt: skip
        small = small_run.Small(tmp_path / str(count), data=data, steps_per_execution=count, max_epochs=3)
        small.fit()
        runs.append(small)
    assert runs[1].is_lean
    assert runs[1].trainer.global_step == 21
    assert_equal(*runs)


class Watching(Callback):
    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.batches.append(batch_idx)
        module.log("seen/val", float(batch_idx), batch_size=1)


def test_callbacks_of_validation_batches_keep_lightnings_loop(tmp_path: Path, small_run: ModuleType) -> None:
    watching = Watching()
    small = small_run.Small(tmp_path, max_epochs=2, callbacks=(watching,))
    small.fit()
    assert small.is_lean  # for the training steps
    batches = len(watching.batches) // 2
    assert watching.batches == [*range(batches)] * 2
    assert float(small.trainer.callback_metrics["seen/val"]) == (batches - 1) / 2


def test_own_strategies_leave_the_rest_of_a_step_to_lightning() -> None:
    for found in pkgutil.iter_modules(exp.strategies.__path__):
        importlib.import_module(f"exp.strategies.{found.name}")
    known, kinds = [LightningStrategy, DDPStrategy], [LightningStrategy]
    for kind in kinds:
        kinds += kind.__subclasses__()
    own = [kind for kind in kinds if kind.__module__.startswith("exp.strategies.")]
    assert len(own) > 3
    for name in ("batch_to_device", "pre_backward", "post_backward", "on_train_batch_start", "validation_step"):
        assert all(getattr(kind, name) in [getattr(one, name) for one in known] for kind in own), name


class Refusing(Hook):
    needs = frozenset({"one_step_a_call"})


def test_callbacks_of_steps_keep_lightnings_loop(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(Callback):
        def on_train_batch_end(self, *_: Any) -> None: ...

    cases: dict[str, dict[str, Any]] = {
        "the callback Mine acts at every step, in on_train_batch_end": {"callbacks": (Mine(),)},
        "the callback LearningRateMonitor acts at every step, in on_train_batch_start": {
            "callbacks": (LearningRateMonitor(),)
        },
        "the profiler SimpleProfiler is not a class of exp": {"profiler": "simple"},
        "the hook refusing needs one step per call of the loop": {"hooks": {"refusing": Refusing()}},
    }
    for number, (reason, plan) in enumerate(cases.items()):
        for count in (None, 5):
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="exp.engine.lean_loop"):
                small = small_run.Small(
                    tmp_path / f"{number}-{count}", steps_per_execution=count, max_steps=1, limit_val_batches=0, **plan
                )
                small.fit()
            said = [record for record in caplog.records if record.name == "exp.engine.lean_loop"]
            assert [record.levelno for record in said] == [logging.INFO if count is None else logging.WARNING]
            assert said[0].message.endswith(reason)
            assert "runtime.steps_per_execution is 1" in said[0].message
            assert not small.is_lean


def test_lightnings_loop_has_what_the_adapter_leans_on(tmp_path: Path, small_run: ModuleType) -> None:
    """The lean loop uses these names of Lightning 2.6.6, of which some are private."""
    small = small_run.Small(tmp_path, max_epochs=1)
    loop = small.trainer.fit_loop.epoch_loop
    own = _TrainingEpochLoop(small.trainer)
    for name in ("on_run_start", "advance", "on_advance_end", "teardown", "_should_check_val_epoch", "global_step"):
        assert name in vars(_TrainingEpochLoop)
    assert set(loop.state_dict()) == set(own.state_dict())
    assert vars(own.val_loop).keys() == vars(loop.val_loop).keys() - {"_is_lean"}
    assert "_evaluation_step" in vars(type(own.val_loop))
    assert list(dataclasses.asdict(loop.batch_progress)) == ["total", "current", "is_last_batch"]
    fetcher, loader = _PrefetchDataFetcher(), range(2)
    fetcher.setup(CombinedLoader(loader, "max_size_cycle"))
    iter(fetcher)
    assert fetcher.combined_loader.flattened == [loader]
    assert (fetcher.fetched, fetcher.done, fetcher.length) == (0, False, 2)


STRATEGIES: dict[str, Any] = {
    "ddp": ("strategy=ddp", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1", "precision=fp16"),
    "fsdp": ("strategy=fsdp", "trainer.accumulate_grad_batches=2"),
    "pipeline": ("strategy=pipeline",),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_strategies_of_several_ranks_make_the_same_steps(ranks: Any, strategy: tuple[str, ...]) -> None:
    overrides = (
        *strategy,
        *("trainer.max_steps=4", "test=false", "hooks=[gradients]", "hooks.gradients.every_n_steps=1"),
    )
    own = ranks.train(*overrides, "runtime.steps_per_execution=1", ranks=2)
    lean = ranks.train(*overrides, ranks=2)
    assert lean.values == own.values
    assert "steps_per_execution is 1" not in (lean.directory / "train.log").read_text()
    weights = [trained.checkpoint()["state_dict"] for trained in (own, lean)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
