"""Hooks run once per optimizer step, and loggers get each value once."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from exp.engine.buffer import gather_numbers
from exp.hooks.hook import Hook
from exp.hooks.step import Step


class Watch(Hook):
    """Hook that records its calls with the batch size, and returns tensors and floats."""

    def __init__(self, *, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.calls: list[tuple[Any, ...]] = []

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

    def teardown(self) -> None:
        self.calls.append(("teardown",))


def test_a_hook_is_called_at_its_optimizer_steps(tmp_path: Path, small_run: ModuleType) -> None:
    hook = Watch(every_n_steps=2)
    small_run.Small(tmp_path, hooks={"watch": hook}, max_epochs=1, accumulate_grad_batches=2).fit()
    # The last of four steps has only 9 samples.
    sizes = {1: 32, 2: 32, 4: 9}
    assert hook.calls == [*((name, *one) for one in sizes.items() for name in ("backward", "step")), ("teardown",)]


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
    published = {tag: float(value) for tag, value in small.trainer.callback_metrics.items()}
    assert published == small.recording.metrics


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


def test_a_skipped_step_holds_its_schedule(tmp_path: Path, small_run: ModuleType) -> None:
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


def test_a_failing_run_tears_hooks_down(tmp_path: Path, small_run: ModuleType) -> None:
    hook = Watch()
    failing = small_run.At("on_train_batch_end", 3)
    with pytest.raises(small_run.Killed):
        small_run.Small(tmp_path, hooks={"watch": hook}, callbacks=(failing,)).fit()
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
    # The last call has the mean loss of the epoch.
    assert at == [1, 2, 3, 4, 5, 6, 7, 7]
    assert writes == [1, 2, 4, 4, 5, 7, 7, 7]


def test_one_copy_keeps_the_order_of_mixed_kinds() -> None:
    values = [
        torch.tensor(2.0),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor(4.0),
        torch.tensor(0.1, dtype=torch.float64),
    ]
    assert gather_numbers([torch.tensor([0.0, 1.0]), *values]) == [0.0, 1.0, 2.0, 3.0, 4.0, 0.1]
    assert gather_numbers([torch.tensor([5.0])]) == [5.0]


def test_self_log_of_a_users_callback_still_works(tmp_path: Path, small_run: ModuleType) -> None:
    class Mine(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.log("mine", float(trainer.global_step), on_step=True, on_epoch=False)

    small = small_run.Small(tmp_path, callbacks=(Mine(),), max_epochs=1, limit_val_batches=0)
    small.fit()
    assert float(small.trainer.callback_metrics["mine"]) == 7.0
    assert any(tag == "mine" for tag, _ in small.values.seen)
