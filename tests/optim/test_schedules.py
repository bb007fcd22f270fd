"""Schedules: the learning rates of each group equal those of torch and of formulas, also after a resume."""

# ruff: noqa: E501   a message is compared whole

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import exp
from exp.errors import ConfigError
from exp.optim.optimizer import Optimization
from exp.optim.schedules import Constant, Cosine, OneCycle, lengths_of, take_length

pytestmark = pytest.mark.numeric

RATES = (0.1, 0.003)


def sgd(momentum: float = 0.9) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in RATES]
    return torch.optim.SGD(groups, lr=1.0, momentum=momentum)


def rates(schedule: Any, steps: int) -> list[tuple[float, ...]]:
    """Return the learning rates of all groups for steps 1, 2, ..."""
    optimizer = schedule.optimizer
    seen = []
    for _ in range(steps):
        seen.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return seen


def close(left: list[tuple[float, ...]], right: list[tuple[float, ...]]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


@given(total=st.integers(1, 60), share=st.floats(0.0, 0.9), end=st.sampled_from([0.0, 0.1, 1.0]))
def test_cosine_equals_torchs_warm_up_and_cosine(total: int, share: float, end: float) -> None:
    warmup = min(int(share * total), total - 1)
    ours = rates(Cosine(sgd(), total_steps=total, warmup_steps=warmup, end_factor=end), total + 1)
    for group, rate in enumerate(RATES):  # each group has its own reference, because torch's eta_min is a single number
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
        down = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=end * rate)
        reference: Any = down
        if warmup:
            up = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), end_factor=1.0, total_iters=warmup)
            reference = lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[warmup])
        seen = []
        for _ in range(total + 1):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            reference.step()
        assert [step[group] for step in ours] == pytest.approx(seen, rel=1e-7, abs=1e-9)


def test_cosine_follows_its_formula_and_stays_flat() -> None:
    ours = rates(Cosine(sgd(), total_steps=10, warmup_fraction=0.2, end_factor=0.1), 13)
    factors = [1 / 3, 2 / 3, *(0.1 + 0.9 * (1 + math.cos(math.pi * n / 8)) / 2 for n in range(8)), 0.1, 0.1, 0.1]
    close(ours, [tuple(rate * factor for rate in RATES) for factor in factors])


def test_constant_warms_up() -> None:
    ours = rates(Constant(sgd(), warmup_steps=3), 6)
    close(ours, [tuple(rate * factor for rate in RATES) for factor in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)])


def test_one_cycle_has_the_peak_of_each_group() -> None:
    ours = rates(OneCycle(sgd(), total_steps=20), 20)
    assert ours == rates(lr_scheduler.OneCycleLR(sgd(), max_lr=list(RATES), total_steps=20), 20)
    assert [max(rate) for rate in zip(*ours, strict=True)] == pytest.approx(RATES)


def optimization(factory: Any, **options: Any) -> Optimization:
    return Optimization(
        optimizer_factory=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), schedule_factory=factory, **options
    )


FACTORIES = {
    "constant": functools.partial(Constant, warmup_steps=5),
    "cosine": functools.partial(Cosine, total_steps=None, warmup_steps=4),
    "one_cycle": functools.partial(OneCycle, total_steps=None),
    "step": functools.partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("done", [0, 4, 11])
def test_a_schedule_resumes_exactly(name: str, done: int, tmp_path: Path) -> None:
    make = optimization(FACTORIES[name]).make
    optimizer, whole = make(nn.Linear(2, 2), total_steps=20)
    before = rates(whole, done)
    torch.save({"optimizer": optimizer.state_dict(), "schedule": whole.state_dict()}, tmp_path / "state.pt")
    rest = rates(whole, 20 - done)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    optimizer, resumed = make(nn.Linear(2, 2), total_steps=20)
    resumed.load_state_dict(state["schedule"])
    optimizer.load_state_dict(state["optimizer"])
    assert rates(resumed, 20 - done) == rest
    assert len(before) == done


def test_a_plateau_resumes_exactly() -> None:
    losses = [1.0, 0.9, 0.95, 0.94, 0.93, 0.8, 0.85, 0.86, 0.9, 0.91, 0.92, 0.93]
    factory = functools.partial(lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.5, patience=1)

    def run(values: list[float], state: Any = None) -> tuple[list[float], Any]:
        make = optimization(factory, interval="epoch", monitor="loss/val").make
        optimizer, schedule = make(nn.Linear(2, 2), total_steps=None)
        if state:
            schedule.load_state_dict(state[1])
            optimizer.load_state_dict(state[0])
        seen = []
        for value in values:
            schedule.step(value)
            seen.append(optimizer.param_groups[0]["lr"])
        return seen, (optimizer.state_dict(), schedule.state_dict())

    whole, _ = run(losses)
    head, state = run(losses[:4])
    assert head + run(losses[4:], state)[0] == whole
    assert whole[-1] < whole[0]


def test_a_resumed_run_can_be_made_longer(tmp_path: Path) -> None:
    make = optimization(functools.partial(Cosine, total_steps=None)).make
    _, short = make(nn.Linear(2, 2), total_steps=10)
    rates(short, 10)
    state = short.state_dict()
    _, longer = make(nn.Linear(2, 2), total_steps=20)
    longer.load_state_dict(state)
    [first, *_] = rates(longer, 2)[1:]
    assert first[0] == pytest.approx(0.1 * (1 + math.cos(math.pi * 11 / 20)) / 2)


def test_the_default_length_is_that_of_the_run() -> None:
    factory = functools.partial(Cosine, total_steps=None)
    network = nn.Linear(2, 2)
    _, by_step = optimization(factory).make(network, total_steps=8, total_epochs=2)
    _, by_epoch = optimization(factory, interval="epoch").make(network, total_steps=8, total_epochs=2)
    _, given_length = optimization(functools.partial(Cosine, total_steps=4)).make(network, total_steps=8)
    halves = [rates(schedule, steps)[-1][0] for schedule, steps in ((by_step, 5), (by_epoch, 2), (given_length, 3))]
    assert halves == pytest.approx([0.05, 0.05, 0.05])


def test_torchs_one_cycle_gets_the_run_length() -> None:
    cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1)
    own = functools.partial(cycle, epochs=2, steps_per_epoch=5)
    for factory, total in ((cycle, 30), (own, 10)):
        _, schedule = optimization(factory).make(nn.Linear(2, 2), total_steps=30)
        expected = lr_scheduler.OneCycleLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 0.1, total)
        assert [row[0] for row in rates(schedule, total - 1)] == [row[0] for row in rates(expected, total - 1)]


def test_a_schedule_without_effect_is_not_created() -> None:
    network = nn.Linear(2, 2)
    assert optimization(functools.partial(Constant, warmup_steps=0)).make(network, total_steps=8)[1] is None
    assert optimization(None).make(network, total_steps=8)[1] is None
    assert optimization(functools.partial(Constant, warmup_steps=1)).make(network, total_steps=8)[1] is not None


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (functools.partial(Cosine, total_steps=None), {}, "scheduler.total_steps: null, and the length of the run is not known; expected a number of steps. Or set trainer.max_epochs or trainer.max_steps"),
        (functools.partial(Cosine, total_steps=None), {"interval": "epoch"}, "expected a number of epochs. Or set trainer.max_epochs"),
        (functools.partial(Cosine, total_steps=5, warmup_steps=5), {}, "scheduler.warmup_steps: 5; expected fewer than the 5 steps of the run"),
        (functools.partial(Cosine, total_steps=5, warmup_steps=1, warmup_fraction=0.5), {}, "scheduler.warmup_fraction: 0.5, and warmup_steps is 1; expected one of the two"),
        (functools.partial(lr_scheduler.OneCycleLR, max_lr=1.0, epochs=3, steps_per_epoch=4, total_steps=5), {}, "scheduler.epochs: 3, and total_steps is 5; expected only one of the two"),
        (functools.partial(lr_scheduler.OneCycleLR, max_lr=1.0, steps_per_epoch=4), {}, "scheduler.steps_per_epoch: 4, and OneCycleLR refused its values"),
        (functools.partial(OneCycle, total_steps=5, pct_start=2.0), {}, "scheduler.pct_start: 2.0, and OneCycle refused its values"),
    ],
)  # fmt: skip
def test_errors_name_the_key(factory: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optimization(factory, **options).make(nn.Linear(2, 2), total_steps=None)
    assert message in str(caught.value)


TORCHS = "torch.optim.lr_scheduler"
PARTS = f"[{{_target_: {TORCHS}.LinearLR, total_iters: 3}}, {{_target_: {TORCHS}.ExponentialLR, gamma: 0.9}}]"


@pytest.mark.parametrize("node", [f"{TORCHS}.LambdaLR, lr_lambda: mine.halve", f"{TORCHS}.MultiplicativeLR"])
def test_a_schedule_with_functions_is_refused(node) -> None:
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([f"scheduler={{_target_: {node}}}"]))
    (error,) = raised.value.errors
    assert error.key == "scheduler._target_"
    assert "a Python function" in error.got
    assert "Derive a class that creates the function" in error.fix


NESTED = f"[{{_target_: {TORCHS}.ChainedScheduler, schedulers: {PARTS}}}, {{_target_: {TORCHS}.ConstantLR}}]"


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("schedulers", "milestones", "key", "message"),
    [
        (f"[{{_target_: {TORCHS}.LinearLR, total_itres: 3}}]", "[]", "schedulers.0.total_itres", "total_iters?"),
        (
            "[{_target_: torch.nn.Linear}]",
            "[]",
            "schedulers.0._target_",
            "is not a torch.optim.lr_scheduler.LRScheduler",
        ),
        (PARTS, "[3, 4]", "", "one more than the number of milestone points"),
        (f"[{{_target_: {TORCHS}.OneCycleLR, max_lr: 1}}]", "[]", "schedulers.0.total_steps", "a part of another"),
        (f"[{{_target_: {TORCHS}.ReduceLROnPlateau}}]", "[]", "", "does not support `ReduceLROnPlateau`"),
        ("3", "[]", "schedulers", "expected a list"),
    ],
)
def test_errors_of_nested_schedules_name_the_key(schedulers, milestones, key, message) -> None:
    node = f"{{_target_: {TORCHS}.SequentialLR, schedulers: {schedulers}, milestones: {milestones}}}"
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([f"scheduler={node}"]))
    assert raised.value.errors[0].key == f"scheduler.{key}".removesuffix(".")
    assert message in str(raised.value)


@pytest.mark.any_processor
def test_nested_schedules_resume_exactly(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    node = f"{{_target_: {TORCHS}.SequentialLR, schedulers: {NESTED}, milestones: [3]}}"
    run = ["model=mlp", "optimizer=sgd", "hooks=[]", "test=false", "logger=[]", "metrics=[]", f"scheduler={node}"]
    length = ["trainer.limit_train_batches=4", "trainer.limit_val_batches=1"]

    def ended(*more: str) -> Any:
        directory = Path(exp.fit(exp.compose([*run, *length, *more])).directory)
        return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True), directory

    whole, _ = ended("trainer.max_epochs=2")
    _, first = ended("trainer.max_epochs=1")
    again, _ = ended("trainer.max_epochs=2", f"resume={first}/checkpoints/last.ckpt")
    assert again["optimizer_states"][0]["param_groups"] == whole["optimizer_states"][0]["param_groups"]
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(again["state_dict"][name], tensor)


def restored(make: Any, *, done: int, total: int, factor: float = 1.0) -> Any:
    """Return a schedule over `total` steps with the state after 9 steps of one over `done` steps, and its lengths."""
    before, again = make(sgd(), done), make(sgd(), total)
    rates(before, 9)
    before.optimizer.param_groups[0]["lr"] *= factor  # a hook's
    lengths = lengths_of(again)
    again.optimizer.load_state_dict(before.optimizer.state_dict())
    again.load_state_dict(before.state_dict())
    return again, lengths


def cosine(optimizer: Any, total: int) -> Any:
    return Cosine(optimizer, total_steps=total, warmup_fraction=0.25)


def test_a_restored_function_of_the_steps_takes_the_new_length() -> None:
    again, lengths = restored(cosine, done=12, total=24)
    assert take_length(again, lengths)
    close(rates(again, 15), rates(cosine(sgd(), 24), 24)[9:])


STORED: dict[str, Any] = {
    "one_cycle": lambda optimizer, total: OneCycle(optimizer, total_steps=total),
    "torch": lambda optimizer, total: lr_scheduler.CosineAnnealingLR(optimizer, T_max=total),
    "polynomial": lambda optimizer, total: lr_scheduler.PolynomialLR(optimizer, total_iters=total, power=2.0),
}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_length_cannot_change(name: str) -> None:
    again, lengths = restored(STORED[name], done=12, total=24)
    with pytest.raises(ConfigError, match=r"trainer\.max_epochs: .*another length .* stores its length"):
        take_length(again, lengths)


@pytest.mark.parametrize("make", [cosine, *STORED.values(), lambda optimizer, _: lr_scheduler.StepLR(optimizer, 2)])
def test_a_schedule_of_the_same_length_stays_as_it_was(make: Any) -> None:
    again, lengths = restored(make, done=12, total=12, factor=0.7)
    rate = again.optimizer.param_groups[0]["lr"]
    assert not take_length(again, lengths)
    assert again.optimizer.param_groups[0]["lr"] == rate


def test_a_rate_set_by_hand_refuses_another_length() -> None:
    again, lengths = restored(cosine, done=12, total=24, factor=0.7)
    with pytest.raises(ConfigError, match=r"trainer\.max_epochs: .*another length .* other code than Cosine has set"):
        take_length(again, lengths)
