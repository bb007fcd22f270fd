"""The order of all calls in a step equals the list in step_order.txt."""

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

LINES = Path(__file__).with_name("step_order.txt").read_text().splitlines()
STEP = [line for line in LINES if line and not line.startswith("#")]


class Everything(Hook):
    """Hook that records its calls, and returns a value from each method that may log one."""

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

    def evaluated(self, stage, values):
        assert not values["output"].requires_grad
        self._note(f"evaluated {stage}")

    def after_evaluation(self, stage, gather):
        return self._note(f"after_evaluation {stage}")


class Noting(Callback):
    """Callback that records the calls of the callback hooks in STEP."""

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


@pytest.mark.parametrize(("with_callback", "word"), [(True, "fp32"), (False, "fp16")], ids=["own loop", "lean fp16"])
def test_the_order_of_all_hooks_in_a_step(
    tmp_path: Path, small_run: ModuleType, with_callback: bool, word: str
) -> None:
    calls, run = calls_of(small_run, tmp_path, with_callback=with_callback, word=word)
    assert run.is_lean != with_callback
    hooks = [call for call in STEP if call.startswith("hook")]
    # Without callbacks, consecutive pauses are one call.
    alone = [call for call, before in zip(hooks, ["", *hooks], strict=False) if call != before or "pause" not in call]
    expected = STEP if with_callback else alone
    assert calls[: len(expected)] == expected
    seen = {tag for tag, _ in run.values.seen}
    methods = ("after_forward", "after_backward", "after_clipping", "after_step", "after_evaluation_val")
    assert {f"everything/{method}" for method in methods} <= seen


def test_hooks_see_the_boundaries_of_phases(tmp_path: Path, small_run: ModuleType) -> None:
    passed: list[tuple[str, str | None]] = []

    class Boundaries(Hook):
        def passed(self, boundary, step):
            passed.append((boundary, step.phase))

    small_run.Small(tmp_path, hooks={"boundaries": Boundaries()}, phases=True, max_epochs=1).fit()
    head = [("forward", "head"), ("backward", "head"), ("optimizer", "head")] * 2
    body = [("forward", "body"), ("backward", "body"), ("optimizer", "body")]
    # The phase body runs at the steps 1, 3, 5, ...
    expected = [("batch", None), *head, *body, ("batch", None), *head, ("batch", None), *head, *body]
    assert passed[: len(expected)] == expected


def test_hooks_surround_each_evaluation_of_a_closure(tmp_path: Path, small_run: ModuleType) -> None:
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


def test_a_step_counts_the_first_evaluation_of_its_closure(tmp_path: Path, small_run: ModuleType) -> None:
    seen = []
    for factory in (functools.partial(torch.optim.LBFGS, max_iter=4), functools.partial(torch.optim.SGD, lr=0.1)):
        run = small_run.Small(tmp_path / factory.func.__name__, batch_size=200, max_epochs=1, limit_val_batches=0)
        run.module.optimization = Optimization(optimizer_factory=factory)
        run.fit()
        seen.append([run.values.seen[tag, 1] for tag in ("loss/train", "accuracy/train")])
    assert seen[0] == seen[1]


def test_a_hook_may_ask_for_micro_batches(tmp_path: Path, small_run: ModuleType) -> None:
    seen: list[tuple[int, list[tuple[int, int]]]] = []

    class Batches(Hook):
        keeps_batches = True

        def after_backward(self, step):
            seen.append((step.index, [(index, len(batch.data[0])) for batch, index in step.batches]))

    small_run.Small(
        tmp_path, hooks={"batches": Batches()}, max_epochs=1, accumulate_grad_batches=2, limit_val_batches=0
    ).fit()
    # 105 samples are 6 batches of 16 and one of 9.
    assert seen == [(1, [(0, 16), (1, 16)]), (2, [(2, 16), (3, 16)]), (3, [(4, 16), (5, 16)]), (4, [(6, 9)])]
