"""The order of everything that is called in a step, as one list."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from exp.hooks.hook import Hook
from exp.optim.optimizer import Optimization

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

# Two micro-batches of one optimizer step at a linear layer, then what follows at the end of an epoch of one step.
STEP = [
    "hook passed batch",
    "callback on_train_batch_start",
    "hook around_forward, in",
    "hook forward_pre",
    "hook forward",
    "hook around_forward, out",
    "hook after_forward",
    "hook passed forward",
    "callback on_before_zero_grad",
    "callback on_before_backward",
    "hook tensor_gradient",
    "hook post_accumulate_grad 1.weight",
    "hook full_backward",
    "hook passed backward",
    "callback on_after_backward",
    "callback on_train_batch_end",
    #
    "hook passed batch",
    "callback on_train_batch_start",
    "hook around_forward, in",
    "hook forward_pre",
    "hook forward",
    "hook around_forward, out",
    "hook after_forward",
    "hook passed forward",
    "callback on_before_backward",
    "hook tensor_gradient",
    "hook post_accumulate_grad 1.weight",
    "hook full_backward",
    "hook passed backward",
    "callback on_after_backward",
    "hook before_update",
    "hook after_backward",
    "callback on_before_optimizer_step",
    "hook after_clipping",
    "hook passed optimizer",
    "hook after_step",
    "callback on_train_batch_end",
    #
    "hook pause",
    "callback on_validation_start",
    "hook evaluated val",
    "hook after_evaluation val",
    "callback on_validation_end",
    "hook pause",
    "callback on_train_epoch_end",
    "hook state_dict_save",
]


class Everything(Hook):
    """Notes each of its calls, and gives a value from each method that may."""

    def __init__(self, calls: list[str], **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = calls

    def _note(self, call: str) -> dict[str, float]:
        self.calls.append(f"hook {call}")
        return {f"everything/{call.replace(' ', '_')}": float(len(self.calls))}

    def pause(self) -> None:
        if self.calls[-1] != "hook pause":
            self._note("pause")

    def passed(self, boundary, step):
        self._note(f"passed {boundary}")

    @contextlib.contextmanager
    def _around(self):
        self._note("around_forward, in")
        yield
        self._note("around_forward, out")

    def around_forward(self, step):
        return self._around()

    def after_forward(self, step, values):
        assert values["output"].requires_grad
        assert {"input", "target", "output"} <= values.keys()
        return self._note("after_forward")

    def before_update(self, step, update):
        self._note("before_update")

    def after_backward(self, step):
        return self._note("after_backward")

    def after_clipping(self, step):
        return self._note("after_clipping")

    def after_step(self, step):
        return self._note("after_step")

    def forward_pre(self, name, module, inputs):
        self._note("forward_pre")

    def forward(self, name, module, inputs, output):
        self._note("forward")

    def full_backward(self, name, module, grad_inputs, grad_outputs):
        self._note("full_backward")

    def tensor_gradient(self, name, gradient):
        self._note("tensor_gradient")

    def post_accumulate_grad(self, name, parameter):
        self._note(f"post_accumulate_grad {name}")

    def state_dict_save(self, name, module, state):
        if self.calls[-1] != "hook state_dict_save":
            self._note("state_dict_save")

    def evaluated(self, stage, values):
        assert not values["output"].requires_grad
        self._note(f"evaluated {stage}")

    def after_evaluation(self, stage, gather):
        return self._note(f"after_evaluation {stage}")


class Noting(Callback):
    """Lightning's own places, of those where something of ours happens."""

    def __init__(self, calls: list[str]) -> None:
        for name in dict.fromkeys(call.split()[1] for call in STEP if call.startswith("callback")):
            setattr(self, name, lambda *_, name=name, **__: calls.append(f"callback {name}"))


def calls_of(small_run: ModuleType, directory: Path, *, with_callback: bool, **settings: Any) -> tuple[list[str], Any]:
    calls: list[str] = []
    run = small_run.Small(
        directory,
        hooks={"everything": Everything(calls, modules=["1"])},
        callbacks=(Noting(calls),) if with_callback else (),
        model=nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, bias=False)),
        max_epochs=1,
        accumulate_grad_batches=2,
        limit_train_batches=2,
        limit_val_batches=1,
        **settings,
    )
    run.fit()
    return calls, run


def test_the_order_of_all_hooks_in_a_step(tmp_path: Path, small_run: ModuleType) -> None:
    calls, run = calls_of(small_run, tmp_path, with_callback=True)
    assert calls[: len(STEP)] == STEP
    seen = {tag for tag, _ in run.values.seen}
    methods = ("after_forward", "after_backward", "after_clipping", "after_step", "after_evaluation_val")
    assert {f"everything/{method}" for method in methods} <= seen


@pytest.mark.parametrize("word", ["fp32", "fp16"])
def test_hooks_keep_it_in_the_lean_loop_and_under_a_loss_scale(
    tmp_path: Path, small_run: ModuleType, word: str
) -> None:
    calls, _ = calls_of(small_run, tmp_path, with_callback=False, word=word)
    alone = [call for call in STEP if call.startswith("hook")]
    assert calls[: len(alone)] == alone


def test_phases_pass_their_own_boundaries_and_say_whose_they_are(tmp_path: Path, small_run: ModuleType) -> None:
    passed: list[tuple[str, str | None]] = []

    class Boundaries(Hook):
        def passed(self, boundary, step):
            passed.append((boundary, step.phase))

    small_run.Small(tmp_path, hooks={"boundaries": Boundaries()}, phases=True, max_epochs=1).fit()
    head = [("forward", "head"), ("backward", "head"), ("optimizer", "head")] * 2
    body = [("forward", "body"), ("backward", "body"), ("optimizer", "body")]
    # The body learns at every second step, from the first on.
    expected = [("batch", None), *head, *body, ("batch", None), *head, ("batch", None), *head, *body]
    assert passed[: len(expected)] == expected


def test_an_optimizer_that_evaluates_its_closure_again_has_hooks_around_each(
    tmp_path: Path, small_run: ModuleType
) -> None:
    calls: list[str] = []
    run = small_run.Small(
        tmp_path,
        hooks={"everything": Everything(calls, modules=["1"])},
        model=nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)),
        max_steps=1,
        limit_val_batches=0,
    )
    run.module.optimization = Optimization(optimizer_factory=functools.partial(torch.optim.LBFGS, max_iter=3))
    run.fit()
    assert calls.count("hook around_forward, in") == calls.count("hook around_forward, out") == 3
    assert calls.count("hook after_backward") == calls.count("hook after_step") == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_a_hook_that_asks_has_the_micro_batches_of_a_step(tmp_path: Path, small_run: ModuleType, keeps: bool) -> None:
    seen: list[tuple[int, list[int], list[int]]] = []

    class Batches(Hook):
        keeps_batches = keeps

        def after_backward(self, step):
            rows = [(index, len(batch.data[0])) for batch, index in step.batches]
            seen.append((step.index, [index for index, _ in rows], [size for _, size in rows]))

    small_run.Small(
        tmp_path, hooks={"batches": Batches()}, max_epochs=1, accumulate_grad_batches=2, limit_val_batches=0
    ).fit()
    # 105 samples in batches of 16.
    expected = [(1, [0, 1], [16, 16]), (2, [2, 3], [16, 16]), (3, [4, 5], [16, 16]), (4, [6], [9])]
    assert seen == (expected if keeps else [(index, [], []) for index in range(1, 5)])
