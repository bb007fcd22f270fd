"""The log warns once of a run that trains badly without an error, and never of a healthy run."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, MultiStepLR, StepLR

from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.engine.first_steps import Coverage
from exp.engine.phased_module import PhasedModule
from exp.objectives.objective import Objective
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase
from exp.optim.schedules import Constant, Cosine


class Detached(nn.Module):
    """A network of which two layers get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.side, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + self.side(x).detach())


def samples(*, classes: int = 2, constant: int | None = None) -> Data:
    inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
    target = (inputs.sum(dim=1) > 0).long()
    if constant is not None:
        inputs[:, constant] = 7.0
    dataset = Tensors(entries=(inputs, target), num_classes=classes)
    return Data(dataset=dataset, batch_size=16, parts={"train": 0.7, "val": 0.2, "test": 0.1})


@pytest.fixture
def notes(tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that runs, and returns the warnings of the first steps."""

    def run(*, lr: float = 1e-2, schedule: Any = None, interval: Any = "step", **settings: Any) -> list[str]:
        small = small_run.Small(tmp_path, metrics={}, **{"max_epochs": 2, **settings})
        optimizer = functools.partial(torch.optim.AdamW, lr=lr)
        small.module.optimization = Optimization(
            optimizer_factory=optimizer, schedule_factory=schedule, interval=interval
        )
        with caplog.at_level(logging.WARNING, logger="exp.engine.first_steps"):
            small.fit()
        return [record.getMessage() for record in caplog.records if record.name == "exp.engine.first_steps"]

    return run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": Detached()}, "nothing is learned there: side.bias, side.weight. Use"),
        ({"model": Detached(), "limit_train_batches": 1}, "2 parameters get no gradient"),
        ({"data": samples(classes=4)}, "training never showed classes 2, 3 of 4: the network cannot learn"),
        ({"data": samples(constant=3)}, "feature 3 of the inputs had one value in all of training"),
        ({"batch_size": 500}, "data.batch_size is 500, and the training part has 105 samples: every step sees all"),
        ({"lr": 1e-11, "accumulate_grad_batches": 2}, "below what float32 can add to a weight. Raise"),
        (
            {"schedule": functools.partial(Constant, warmup_steps=14)},
            "scheduler.warmup_steps is 14, and the run has 14",
        ),
        (
            {"schedule": functools.partial(Cosine, total_steps=7)},
            "is 7, and the run has 14 steps: the schedule ends before",
        ),
        (
            {"schedule": functools.partial(CosineAnnealingLR, T_max=50)},
            "T_max is 50, and the run has 14 steps: the schedule is cut off",
        ),
        ({"schedule": functools.partial(LinearLR, total_iters=20)}, "the warm-up is longer than the run"),
        (
            {"schedule": functools.partial(StepLR, step_size=2), "interval": "epoch"},
            "2 epochs: the learning rate never",
        ),
        ({"schedule": functools.partial(MultiStepLR, milestones=[30, 40])}, "scheduler.milestones begins at 30"),
    ],
)
def test_a_warning_names_its_cure(notes: Any, settings: dict[str, Any], message: str) -> None:
    (line,) = notes(**settings)
    assert message in line


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"word": "bf16_true"},
        {"word": "fp16"},
        {"phases": True},
        {"accumulate_grad_batches": 3},
        {"loss": {"ignore_index": 0}},
        {"schedule": functools.partial(Cosine, warmup_steps=5)},
        # The rate is 0 in the first step, and next to it in the others.
        {"schedule": functools.partial(LambdaLR, lr_lambda=lambda done: min(1.0, done * 1e-9 if done < 3 else 1.0))},
        {"schedule": functools.partial(StepLR, step_size=1), "interval": "epoch"},
    ],
    ids=["plain", "bf16", "fp16", "phases", "accumulated", "ignored", "warmup", "from_zero", "by_epoch"],
)
def test_a_healthy_run_says_nothing(notes: Any, settings: dict[str, Any]) -> None:
    assert notes(**settings) == []


class TwoPrograms(nn.Module):
    """A network of which one of two programs has no gradient for the body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def fixed_body(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).detach())


@pytest.mark.parametrize(("first", "count"), [(None, 0), ("fixed_body", 2)])
def test_a_parameter_that_another_phase_trains_is_learned(notes: Any, first: str | None, count: int) -> None:
    optimization = Optimization(optimizer_factory=functools.partial(torch.optim.AdamW, lr=1e-2))
    phases = [
        Phase(name=name, terms=["ce"], parameters=["*"], optimization=optimization, forward=forward)
        for name, forward in (("first", first), ("second", "fixed_body"))
    ]
    told = notes(model=TwoPrograms(), module=functools.partial(PhasedModule, phases=phases))
    assert [line for line in told if "nothing is learned there: body.bias, body.weight" not in line] == []
    assert len(told) == count


def told_of(*batches: Any, names: tuple[str, ...] = ("x",)) -> list[str]:
    """Return the warnings of an epoch of these batches."""
    namespace: dict[str, Any] = {}
    exec(f"def forward(self, {', '.join(names)}): pass", namespace)
    network = type("Network", (nn.Module,), {"forward": namespace["forward"]})()
    module: Any = SimpleNamespace(
        network=network, device=torch.device("cpu"), objective=Objective({"mse": nn.MSELoss()})
    )
    coverage = Coverage(module, None)
    for batch in batches:
        coverage.add(batch, is_due=True)
    one_rank: Any = SimpleNamespace(strategy=SimpleNamespace(reduce=lambda values, reduce_op: values))
    return list(coverage.missing(one_rank))


def test_constant_features_of_all_kinds_are_named() -> None:
    torch.manual_seed(0)
    sequence, picture, text = torch.randn(4, 7, 3), torch.randn(4, 3, 5, 5), torch.zeros(4, 6, dtype=torch.int64)
    target = torch.randn(4, 1)
    assert told_of((sequence, target)) == told_of((picture, target)) == told_of((text, target)) == []
    # A pixel, or a place of a sequence, that is always the same is no feature.
    picture[:, :, 2, 2] = 0.0
    sequence[:, 4] = 0.0
    assert told_of((sequence, target)) == told_of((picture, target)) == []
    sequence[..., 1], picture[:, 2] = 5.0, 0.5
    (line,) = told_of((sequence, target))
    assert line.startswith("feature 1 of the inputs had one value")
    (line,) = told_of({"left": picture, "right": torch.randn(4, 2), "other": torch.ones(4, 2)}, names=("left", "right"))
    assert line.startswith("feature 2 of left had one value in all of training")
    # Recordings of other lengths.
    assert told_of((torch.zeros(4, 8), target), (torch.zeros(4, 9), target), (torch.zeros(4, 9), target)) == []


IDLE = """
from torch import nn


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x):
        return self.used(x) + self.idle(x).detach()
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "tensor_parallel"])
@pytest.mark.parametrize("lr", [1e-3, 1e-12])
def test_sharded_models_are_watched(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, lr: float
) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    monkeypatch.syspath_prepend(tmp_path)
    short = ["trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "test=false"]
    run = ranks.train(
        f"strategy={strategy}", "launch.devices=2", "launch.accelerator=cpu", "hooks=[]", f"optimizer.lr={lr}",
        "+model.layers.idle={_target_: idle.Idle}", "security.allow=[idle]", *short, ranks=2,
    )  # fmt: skip
    log = (run.directory / "train.log").read_text()
    told = log.count("2 parameters get no gradient, and nothing is learned there: idle.idle.bias, idle.idle.weight")
    assert told == 1
    assert log.count("the first step changed 0%") == (lr < 1e-9)
