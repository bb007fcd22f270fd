"""Hooks run once an optimizer step, loggers get each value once, and little of it costs anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from exp.engine.buffer import Recorded, StepBuffer, gathered
from exp.hooks.hook import Hook
from exp.hooks.step import Step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Watch(Hook):
    """Notes each of its calls, and gives a value of each kind."""

    def __init__(self, *, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.calls: list[tuple[Any, ...]] = []

    def setup(self, network: Any) -> None:
        self.calls.append(("setup",))

    @contextlib.contextmanager
    def _noted(self, step: Step) -> Iterator[None]:
        self.calls.append(("enter", step.index))
        yield
        self.calls.append(("leave", step.index, torch.is_grad_enabled()))

    def around_forward(self, step: Step) -> Any:
        return self._noted(step)

    def after_backward(self, step: Step) -> Any:
        self.calls.append(("backward", step.index, step.batch_size))
        gradients = [parameter.grad for parameter in step.network.parameters()]
        return {"watch/norm": torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients]))}

    def after_step(self, step: Step) -> Any:
        self.calls.append(("step", step.index, step.batch_size))
        assert step.loss is not None
        assert step.device.type == "cpu"
        assert len(step.optimizers) == 1
        return {"watch/loss": step.loss, "watch/index": float(step.index)}

    def pause(self) -> None:
        self.calls.append(("pause",))

    def teardown(self) -> None:
        self.calls.append(("teardown",))


def test_a_hook_is_called_in_order_once_an_optimizer_step(tmp_path: Path, small_run: ModuleType) -> None:
    hook = Watch(every_n_steps=2)
    small_run.Small(tmp_path, hooks={"watch": hook}, max_epochs=1, accumulate_grad_batches=2).fit()
    in_steps = [call for call in hook.calls if call[0] != "pause"]
    window = [("enter", 1), ("leave", 1, True)]
    assert in_steps[:8] == [
        ("setup",),
        *window * 2,
        ("backward", 1, 32),
        ("step", 1, 32),
        ("enter", 2),
    ]
    # Steps 1 and 2 and 4 of the four; the last one is a window of the 9 samples that are left.
    assert [call for call in in_steps if call[0] == "step"] == [("step", 1, 32), ("step", 2, 32), ("step", 4, 9)]
    assert in_steps[-1] == ("teardown",)
    assert ("pause",) in hook.calls


def test_every_value_is_logged_once_at_its_step(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, hooks={"watch": Watch()}, max_epochs=2)
    small.fit()
    seen = small.values.seen
    for tag in ("loss/train", "watch/norm", "watch/loss", "watch/index"):
        assert [step for found, step in seen if found == tag] == list(range(1, 15))
    assert all(seen["watch/index", step] == step for step in range(1, 15))
    assert all(seen["watch/loss", step] == seen["loss/train", step] for step in range(1, 15))
    assert all(type(value) is float for value in seen.values())
    assert [step for tag, step in seen if tag == "loss/val"] == [7, 14]


def test_gradients_are_true_and_not_clipped(tmp_path: Path, small_run: ModuleType) -> None:
    runs = {}
    for word, clip in (("fp32", None), ("fp32", 1e-3), ("fp16", 1e-3)):
        small = small_run.Small(
            tmp_path / f"{word}{clip}", hooks={"watch": Watch()}, word=word, gradient_clip_val=clip, max_epochs=1
        )
        small.fit()
        runs[word, clip] = small.values.seen
    assert runs["fp32", 1e-3]["watch/norm", 1] == runs["fp32", None]["watch/norm", 1] > 0.1
    assert runs["fp16", 1e-3]["watch/norm", 1] == pytest.approx(runs["fp32", None]["watch/norm", 1], rel=0.02)
    assert runs["fp16", 1e-3]["precision/loss_scale", 1] == 65536.0
    assert runs["fp16", 1e-3]["precision/skipped_steps", 1] == 0.0
    assert not any(tag.startswith("precision") for tag, _ in runs["fp32", None])


def test_a_step_that_the_loss_scale_skips_is_counted_and_its_schedule_waits(
    tmp_path: Path, small_run: ModuleType
) -> None:
    class Overflow(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 0:
                pl_module.network[0].weight.grad.fill_(float("inf"))

    small = small_run.Small(
        tmp_path, word="fp16", schedule="cosine", callbacks=(Overflow(),), max_epochs=1, log_every_n_steps=1
    )
    small.fit()
    seen = small.values.seen
    assert seen["precision/skipped_steps", 2] == 1.0
    assert seen["precision/loss_scale", 2] == 32768.0
    assert seen["optimizer/lr/default", 1] == seen["optimizer/lr/default", 2] < seen["optimizer/lr/default", 3]


def test_a_failing_run_takes_its_hooks_down(tmp_path: Path, small_run: ModuleType) -> None:
    hook = Watch()

    def fail() -> None:
        raise small_run.Killed

    small = small_run.Small(tmp_path, hooks={"watch": hook}, callbacks=(small_run.At("on_train_batch_end", 3, fail),))
    with pytest.raises(small_run.Killed):
        small.fit()
    assert hook.calls[-1] == ("teardown",)


def test_values_reach_the_loggers_early_and_then_every_n_steps(tmp_path: Path, small_run: ModuleType) -> None:
    writes: list[int] = []
    small = small_run.Small(
        tmp_path, max_epochs=1, log_every_n_steps=5, limit_val_batches=0, every_n_steps=None, stages=()
    )
    log_metrics = small.values.log_metrics
    at: list[int] = []

    def noted(metrics: Any, step: int | None = None) -> None:
        writes.append(small.trainer.global_step)
        at.append(step or 0)
        log_metrics(metrics, step)

    small.values.log_metrics = noted
    small.fit()
    # The last one is the epoch's mean loss.
    assert at == [1, 2, 3, 4, 5, 6, 7, 7]
    assert writes == [1, 2, 4, 4, 5, 7, 7, 7]


def test_the_terms_of_two_ranks_are_reduced(tmp_path: Path, elsewhere: Any, logged: Any) -> None:
    ranks = elsewhere.ranks(tmp_path, 2, max_epochs=1)
    assert [elsewhere.end(rank) for rank in ranks] == [0, 0]
    assert ("loss/train", 7) in logged(tmp_path)
    assert not (tmp_path / "values.1.jsonl").exists()


class Sum:
    """A strategy as the buffer sees it."""

    def reduce(self, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        assert reduce_op == "mean"
        return tensor * 2


def test_the_buffer_gives_back_what_was_added() -> None:
    buffer = StepBuffer()
    for index in (1, 2):
        values = {"a": torch.tensor(0.1 * index), "b": torch.tensor(index), "c": 7.5}
        buffer.add(Recorded(index, 16, [torch.tensor(1.0 * index), torch.tensor(3.0)], values))
    assert len(buffer) == 2
    (first, losses), (second, _) = buffer.take(Sum())  # type: ignore[arg-type]
    assert (first.index, second.index) == (1, 2)
    assert losses == [2.0, 6.0]
    assert second.values == {"a": float(torch.tensor(0.2)), "b": 2, "c": 7.5}
    assert buffer.take(Sum()) == []  # type: ignore[arg-type]


def test_one_copy_keeps_the_order_of_mixed_kinds() -> None:
    values = [
        torch.tensor(2.0),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor(4.0),
        torch.tensor(0.1, dtype=torch.float64),
    ]
    assert gathered([torch.tensor([0.0, 1.0]), *values]) == [0.0, 1.0, 2.0, 3.0, 4.0, 0.1]
    assert gathered([torch.tensor([5.0])]) == [5.0]


# --- the order of everything in a step, and what is relied on of Lightning's loop ---


class Order(Callback):
    """Notes the callback hooks of training."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for name in (
            "on_train_start",
            "on_train_epoch_start",
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
            "on_validation_start",
            "on_validation_epoch_end",
            "on_validation_end",
            "on_train_epoch_end",
            "on_save_checkpoint",
            "on_train_end",
        ):
            setattr(self, name, lambda *_, name=name, **__: self.calls.append(name))


def test_the_order_of_a_run(tmp_path: Path, small_run: ModuleType) -> None:
    order = Order()
    small_run.Small(tmp_path, callbacks=(order,), max_epochs=1, limit_train_batches=2, every_n_steps=1).fit()
    batch = [
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
    ]
    assert order.calls == [
        "on_train_start",
        "on_train_epoch_start",
        *batch,
        "on_train_batch_start",
        "on_save_checkpoint",
        *batch[1:],
        "on_validation_start",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
        # The last state is saved before other callbacks end the training.
        "on_save_checkpoint",
        "on_train_end",
    ]


def test_hooks_that_nobody_overrides_are_not_asked_for(tmp_path: Path, small_run: ModuleType) -> None:
    class Mine(Callback):
        count = 0

        def on_train_batch_start(self, *_: Any) -> None:
            Mine.count += 1

    mine = Mine()
    small = small_run.Small(tmp_path, callbacks=(mine,), max_epochs=1)
    small.fit()
    assert Mine.count == 7
    assert mine.on_after_backward is None
    assert small.module.on_train_batch_end is None
    assert small.recording.on_train_batch_end is not None


def test_self_log_of_a_users_callback_still_works(tmp_path: Path, small_run: ModuleType) -> None:
    class Mine(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.log("mine", float(trainer.global_step), on_step=True, on_epoch=False)

    small = small_run.Small(tmp_path, callbacks=(Mine(),), max_epochs=1, limit_val_batches=0)
    small.fit()
    assert float(small.trainer.callback_metrics["mine"]) == 7.0
    assert any(tag == "mine" for tag, _ in small.values.seen)


def test_published_values_are_lightnings_callback_metrics(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, max_epochs=1)
    small.fit()
    found = small.trainer.callback_metrics
    assert {tag: float(value) for tag, value in found.items()} == small.recording.metrics
