"""Several steps in one call of Lightning's loop are the steps of its own loop: bit for bit, and at every hook."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle

from exp.data.data import Data
from exp.engine.lean_loop import LeanEpochLoop
from exp.engine.overhead import EVALUATION_HOOKS, TRAINING_HOOKS
from exp.errors import Interrupted
from exp.hooks.gradients import Gradients
from exp.hooks.hook import Hook
from exp.hooks.memory import Memory
from exp.hooks.throughput import Throughput
from exp.optim.optimizer import Optimization

pytestmark = [
    # Lightning 2.6 on torch 2.13, in its copy of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

# Of a checkpoint, and of its manifest.
MEASURED = ("exp_seconds", "exp_latest")
PLANS: dict[str, dict[str, Any]] = {
    "accumulated_fp16_clipped": {"accumulate_grad_batches": 3, "word": "fp16", "gradient_clip_val": 0.1},
    "cosine_averaged": {"schedule": "cosine", "callbacks": ("ema",)},
    "plateau_within_epochs": {"schedule": "plateau", "val_check_interval": 3, "every_n_steps": 1},
    "steps_by_epoch_limited": {"schedule": "steps", "limit_train_batches": 5, "max_steps": 13},
    "validation_across_epochs": {"check_val_every_n_epoch": None, "val_check_interval": 5},
    "stopped_early": {"callbacks": ("early_stopping",), "max_epochs": 20},
    "overfitted": {"overfit_batches": 2, "max_epochs": 3},
    "phases_accumulated": {"phases": True, "accumulate_grad_batches": 3, "every_n_steps": 1, "schedule": "cosine"},
}


class Seen(Callback):
    """Notes, at every hook of a batch, all that a callback can see of where the run is."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        for name in (*TRAINING_HOOKS, *EVALUATION_HOOKS, "on_train_epoch_end", "on_validation_start", "on_train_end"):
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


# To the loop it is one of exp's own, which are called at every step.
Seen.__module__ = "exp.seen"


class At(Hook):
    """Does something behind the n-th optimizer step of this process."""

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


def is_lean(small: Any) -> bool:
    loop = small.trainer.fit_loop.epoch_loop
    return loop.steps_per_execution != 1 and loop._told is None


def assert_equal(one: Any, other: Any) -> None:
    assert computed(one.values.seen) == computed(other.values.seen)
    assert one.values.seen.keys() == other.values.seen.keys()
    assert all(torch.equal(tensor, other.weights()[name]) for name, tensor in one.weights().items())
    assert computed(one.recording.metrics) == computed(other.recording.metrics)
    assert one.trainer.fit_loop.state_dict() == other.trainer.fit_loop.state_dict()
    for path in ("last.ckpt", "best.ckpt"):
        files = [torch.load(small.checkpointing.directory / path, weights_only=True) for small in (one, other)]
        assert flat(files[0]) == flat(files[1])


def computed(values: dict[Any, float]) -> dict[Any, float]:
    """By tag, or by tag and step: but not what was measured of the machine."""
    tags = {key: key if isinstance(key, str) else key[0] for key in values}
    return {key: one for key, one in values.items() if not tags[key].startswith(("memory/", "throughput/"))}


def flat(value: Any) -> Any:
    """Something that compares, of a checkpoint; but not what was measured of the machine."""
    if isinstance(value, dict):
        return {str(key): flat(part) for key, part in value.items() if not str(key).startswith(MEASURED)}
    if isinstance(value, list | tuple):
        return [flat(part) for part in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", PLANS)
def test_steps_are_those_of_lightnings_own_loop(tmp_path: Path, small_run: ModuleType, name: str) -> None:
    own, at_own = run(small_run, tmp_path / "own", 1, **PLANS[name])
    for count in (3, None):
        lean, at_lean = run(small_run, tmp_path / str(count), count, **PLANS[name])
        assert is_lean(lean)
        assert_equal(own, lean)
        assert at_lean.notes == at_own.notes


def test_an_execution_has_so_many_batches_and_ends_before_what_lightning_does_between_them(
    tmp_path: Path, small_run: ModuleType
) -> None:
    ends: list[int] = []

    def counted(loop: Any, *arguments: Any) -> None:
        _TrainingEpochLoop.on_advance_end(loop, *arguments)
        ends.append(loop.total_batch_idx + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeanEpochLoop, "on_advance_end", counted)
        run(small_run, tmp_path, 2, max_epochs=2, val_check_interval=3, max_steps=12)
    # 7 batches an epoch, validations behind batches 3 and 6.
    assert ends == [2, 3, 5, 6, 7, 9, 10, 12]


@pytest.mark.parametrize(
    "plan", [{}, {"accumulate_grad_batches": 2, "schedule": "cosine", "word": "fp16"}], ids=["plain", "accumulated"]
)
def test_a_run_killed_within_an_execution_goes_on_exactly(
    tmp_path: Path, small_run: ModuleType, plan: dict[str, Any]
) -> None:
    def kill() -> None:
        raise small_run.Killed

    whole = small_run.Small(tmp_path / "whole", steps_per_execution=1, **plan)
    whole.fit()
    values: dict[Any, float] = {}
    for count in (6, 5, None):
        hooks = {} if count is None else {"at": At(count, kill)}
        part = small_run.Small(tmp_path / "parts", steps_per_execution=50, hooks=hooks, **plan)
        with contextlib.suppress(small_run.Killed):
            part.fit(resume=part.last if part.last.is_file() else None)
        assert is_lean(part)
        values |= part.values.seen
    assert {key: values[key] for key in whole.values.seen} == whole.values.seen
    assert all(torch.equal(tensor, part.weights()[name]) for name, tensor in whole.weights().items())


def test_a_signal_within_an_execution_ends_it_behind_that_batch(tmp_path: Path, small_run: ModuleType) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        part = small_run.Small(tmp_path / "part", hooks={"at": At(5, interrupt)}, every_n_steps=None)
        with pytest.raises(Interrupted):
            part.fit()
    finally:
        signal.signal(signal.SIGINT, before)
    assert is_lean(part)
    assert part.trainer.global_step == 5
    again, whole = small_run.Small(tmp_path / "part"), small_run.Small(tmp_path / "whole")
    again.fit(resume=part.last)
    whole.fit()
    assert all(torch.equal(tensor, whole.weights()[name]) for name, tensor in again.weights().items())


class Twice(torch.optim.SGD):
    """Asks for its loss twice, as methods of sharpness do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
        functools.partial(Twice, lr=0.1),
        functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, fused=True),
        functools.partial(torch.optim.Adagrad, lr=0.01),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    ],
    ids=["lbfgs", "twice", "amsgrad", "adagrad", "fused_sgd"],
)
def test_optimizers_of_all_kinds_make_the_same_steps(tmp_path: Path, small_run: ModuleType, factory: Any) -> None:
    runs = []
    for count in (1, 50):
        hooks = {"gradients": Gradients(), "memory": Memory(), "throughput": Throughput()}
        small = small_run.Small(tmp_path / str(count), steps_per_execution=count, max_epochs=2, hooks=hooks)
        small.module.optimization = Optimization(optimizer_factory=factory)
        small.fit()
        runs.append(small)
    assert is_lean(runs[1])
    assert_equal(*runs)


class Stream(torch.utils.data.IterableDataset):
    """Samples that nobody counted."""

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
    assert is_lean(runs[1])
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


def test_what_acts_at_a_batch_of_validation_keeps_lightnings_own_validation_and_the_log_says_why(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """What it logs there goes to callbacks, as in Lightning's own loop."""
    watching = Watching()
    with caplog.at_level(logging.INFO, logger="exp.engine.lean_loop"):
        small = small_run.Small(tmp_path, max_epochs=2, callbacks=(watching,))
        small.fit()
    assert is_lean(small)  # its steps
    said = [record.message for record in caplog.records if record.name == "exp.engine.lean_loop"]
    assert said == [
        "each batch of a validation goes through Lightning's own loop: the callback Watching acts at every batch of a "
        "validation, in on_validation_batch_end"
    ]
    batches = len(watching.batches) // 2
    assert watching.batches == [*range(batches)] * 2
    assert float(small.trainer.callback_metrics["seen/val"]) == (batches - 1) / 2


def test_a_callback_may_log_at_the_end_of_a_lean_validation(tmp_path: Path, small_run: ModuleType) -> None:
    class Ending(Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log("epoch/val", float(trainer.current_epoch))

    runs = []
    for count in (None, 1):
        small = small_run.Small(tmp_path / str(count), max_epochs=2, callbacks=(Ending(),), steps_per_execution=count)
        small.fit()
        runs.append(small)
    assert float(runs[0].trainer.callback_metrics["epoch/val"]) == 1.0
    assert [value for (tag, _), value in runs[0].values.seen.items() if tag == "epoch/val"] == [0.0, 1.0]
    assert_equal(*runs)


class Refusing(Hook):
    needs = frozenset({"one_step_a_call"})


def test_what_acts_at_every_step_keeps_lightnings_own_loop_and_the_log_says_why(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(Callback):
        def on_train_batch_end(self, *_: Any) -> None: ...

    cases: dict[str, dict[str, Any]] = {
        "the callback Mine acts at every step, in on_train_batch_end": {"callbacks": (Mine(),)},
        "the callback LearningRateMonitor acts at every step, in on_train_batch_start": {
            "callbacks": (LearningRateMonitor(),)
        },
        "the profiler SimpleProfiler looks into Lightning's loop": {"profiler": "simple"},
        "the hook refusing needs one_step_a_call": {"hooks": {"refusing": Refusing()}},
    }
    for number, (reason, plan) in enumerate(cases.items()):
        for count in (None, 5):
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="exp.engine.lean_loop"):
                small = small_run.Small(tmp_path / f"{number}-{count}", steps_per_execution=count, max_epochs=2, **plan)
                small.fit()
            said = [record for record in caplog.records if record.name == "exp.engine.lean_loop"]
            assert [record.levelno for record in said] == [logging.INFO if count is None else logging.WARNING]
            assert said[0].message.endswith(reason)
            assert "runtime.steps_per_execution is 1" in said[0].message
            assert not is_lean(small)


def test_lightnings_loop_has_what_the_adapter_leans_on(tmp_path: Path, small_run: ModuleType) -> None:
    """Seen in lightning 2.6.6; the runs above compare what it comes to."""
    small = small_run.Small(tmp_path, max_epochs=1)
    loop = small.trainer.fit_loop.epoch_loop
    assert type(loop) is LeanEpochLoop
    for name in ("on_run_start", "advance", "on_advance_end", "teardown", "_should_check_val_epoch", "global_step"):
        assert name in vars(_TrainingEpochLoop)
    assert set(loop.state_dict()) == set(_TrainingEpochLoop(small.trainer).state_dict())
    own = vars(_TrainingEpochLoop(small.trainer).val_loop)
    assert own.keys() == vars(loop.val_loop).keys() - {"_lean", "_told"}
    assert (own["_stage"], own["_trainer_fn"]) == (loop.val_loop._stage, loop.val_loop._trainer_fn)
    for name in ("run", "on_run_start", "_evaluation_step", "_on_evaluation_model_eval", "_on_evaluation_start"):
        assert name in vars(_EvaluationLoop)
    assert "_on_evaluation_epoch_start" in vars(_EvaluationLoop)
    assert list(dataclasses.asdict(loop.batch_progress)) == ["total", "current", "is_last_batch"]
    combined = CombinedLoader([1, 2], "max_size_cycle")
    fetcher = _PrefetchDataFetcher()
    fetcher.setup(CombinedLoader(range(2), "max_size_cycle"))
    iter(fetcher)
    assert combined is not fetcher.iterator
    cycle = fetcher.iterator._iterator
    assert type(cycle) is _MaxSizeCycle
    assert (len(cycle.iterators), cycle._idx, cycle._consumed) == (1, 0, [False])
    assert (fetcher.fetched, fetcher.done, fetcher.length) == (0, False, 2)
    assert next(fetcher)[0] == 0
    assert (cycle._idx, fetcher.fetched, fetcher.done) == (1, 1, False)


STRATEGIES = {
    "ddp": ("strategy=ddp", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1", "precision=fp16"),
    "local_sgd": ("strategy=ddp", "strategy.local_sgd.every_n_steps=2"),
    "fsdp": ("strategy=fsdp", "trainer.accumulate_grad_batches=2"),
    "pipeline": ("strategy=pipeline",),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_of_several_ranks_make_the_same_steps(ranks: Any, name: str) -> None:
    overrides = (
        *STRATEGIES[name],
        *("trainer.max_steps=7", "test=false", "hooks=[gradients]", "hooks.gradients.every_n_steps=1"),
    )
    own = ranks.train(*overrides, "runtime.steps_per_execution=1", ranks=2)
    lean = ranks.train(*overrides, ranks=2)
    assert lean.values == own.values
    assert "steps_per_execution is 1" not in (lean.directory / "train.log").read_text()
    checkpoints = [json.dumps(flat(trained.checkpoint()["state_dict"])) for trained in (own, lean)]
    assert checkpoints[0] == checkpoints[1]
