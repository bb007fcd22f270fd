"""Tests of torch's optimizers and schedules in whole runs, for test_against_torch.py.

Each case of torch's optim_db, and each schedule of torch.optim.lr_scheduler by step and by epoch, becomes a node of a
config. A run of a few epochs must end with the weights of a loop by hand, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

import exp
from exp.errors import ConfigError

HERE = Path(__file__).parent
EPOCHS, BATCHES, SIZE = 4, 3, 4
COMMON = [
    "data={_target_: exp.data.data.Data, dataset: {_target_: steps.Rows}, parts: {train: 1.0, val: 0, test: 0}}",
    *("objective=[mse]", "metrics=[]", "hooks=[]", "logger=[]", "test=false", "monitor=loss/train"),
    *("precision=fp64", f"data.batch_size={SIZE}", f"trainer.max_epochs={EPOCHS}", "data.shuffle=false"),
    *("security.allow=[steps]", "trainer.enable_progress_bar=false"),
]
TORCHS = "torch.optim.lr_scheduler"
PARTS = [
    {"_target_": f"{TORCHS}.LinearLR", "start_factor": 0.1, "total_iters": 2},
    {"_target_": f"{TORCHS}.StepLR", "step_size": 1, "gamma": 0.5},
]
# Arguments of each schedule. A YAML cannot contain the function that LambdaLR and MultiplicativeLR need.
SCHEDULES: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": 0.5},
    "MultiplicativeLR": {"lr_lambda": 0.5},
    "StepLR": {"step_size": 2, "gamma": 0.3},
    "MultiStepLR": {"milestones": [1, 3], "gamma": 0.2},
    "ConstantLR": {"factor": 0.25, "total_iters": 3},
    "LinearLR": {"start_factor": 0.1, "total_iters": 3},
    "ExponentialLR": {"gamma": 0.7},
    "SequentialLR": {"schedulers": PARTS, "milestones": [2]},
    "CosineAnnealingLR": {"T_max": 5, "eta_min": 0.001},
    "ChainedScheduler": {"schedulers": PARTS},
    "ReduceLROnPlateau": {"monitor": "loss/train", "patience": 0, "factor": 0.5, "threshold": 0.5},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": EPOCHS * BATCHES},
    "PolynomialLR": {"total_iters": 5, "power": 2.0},
}


def load(name: str) -> Any:
    """Return the module of a file next to this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layers = load("layers")
operators = layers.operators


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Data set of inputs `[6]`, or of indices `[3]` of an embedding if sparse, and targets `[3]` in float64."""

    def __init__(self, *, sparse: bool = False) -> None:
        draw, count = torch.Generator().manual_seed(5), SIZE * BATCHES
        given = torch.randn(count, 6, generator=draw, dtype=torch.float64)
        self.x = torch.randint(7, (count, 3), generator=draw) if sparse else given
        self.target = torch.randn(count, 3, generator=draw, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.target[index]


class Network(nn.Module):
    """Network of two layers, without biases if `matrices`; an embedding with sparse gradients if `sparse`."""

    def __init__(self, *, matrices: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse
        if sparse:
            self.table = nn.Embedding(7, 3, sparse=True)
            return
        self.first, self.second = nn.Linear(6, 5, bias=not matrices), nn.Linear(5, 3, bias=not matrices)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).sum(1) if self.sparse else self.second(torch.tanh(self.first(x)))


def kind_of_network(optimizer: str) -> dict[str, bool]:
    if optimizer == "SparseAdam":
        return {"sparse": True}
    return {"matrices": True} if optimizer == "Muon" else {}


def text(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text, value)) + "]"
    if isinstance(value, float):
        return repr(value) if "." in repr(value) or "e" not in repr(value) else repr(value).replace("e", ".0e")
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def by_exp(optimizer: Mapping[str, Any], schedule: Mapping[str, Any] | None, start: Mapping[str, Tensor]) -> Any:
    """Return the last weights of a run, or raise ConfigError if the check refuses it."""
    kind = kind_of_network(optimizer["_target_"].rpartition(".")[2])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        torch.save(start, "start.pt")
        lines = [
            *COMMON,
            f"model={text({'_target_': 'steps.Network', **kind})}",
            f"optimizer={text(optimizer)}",
            "weights.from=start.pt",
        ]
        lines += ["data.dataset.sparse=true"] if "sparse" in kind else []
        lines += [f"scheduler={text(schedule)}"] if schedule else []
        with contextlib.redirect_stdout(io.StringIO()):
            directory = Path(exp.fit(exp.compose(lines)).directory)
        found = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return {name: next(found[one] for one in found if one.endswith(name)) for name in start}


def by_hand(
    optimizer: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    schedule: Any,
    start: Mapping[str, Tensor],
    *,
    by_epoch: bool = False,
) -> Any:
    """Return the last weights of the loop of PyTorch's tutorials."""
    kind = kind_of_network(optimizer.__name__)
    network, rows = Network(**kind).double(), Rows(sparse="sparse" in kind)
    network.load_state_dict(start)
    # exp uses the fused step if the optimizer has one.
    fused = {"fused": True} if "fused" in inspect.signature(optimizer).parameters else {}
    stepper = optimizer(network.parameters(), **arguments, **fused)
    scheduler = schedule(stepper) if schedule is not None else None
    for _ in range(EPOCHS):
        losses = []
        for batch in range(BATCHES):
            share = slice(batch * SIZE, (batch + 1) * SIZE)

            def closure(share: slice = share) -> Tensor:
                stepper.zero_grad()
                loss = nn.functional.mse_loss(network(rows.x[share]), rows.target[share])
                loss.backward()
                return loss

            losses.append(stepper.step(closure))
            if scheduler is not None and not by_epoch:
                scheduler.step()
        if scheduler is not None and by_epoch:
            is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([sum(map(float, losses)) / BATCHES] if is_plateau else []))
    return network.state_dict()


def torchs_own(name: str, arguments: Mapping[str, Any], stepper: torch.optim.Optimizer) -> Any:
    """Return a schedule that is built in Python."""
    given = {key: value for key, value in arguments.items() if key not in ("monitor", "_target_")}
    if "schedulers" in given:
        given["schedulers"] = [torchs_own(one["_target_"].rpartition(".")[2], one, stepper) for one in PARTS]
    return getattr(lr_scheduler, name)(optimizer=stepper, **given)


def start_of(optimizer: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return Network(**kind_of_network(optimizer)).double().state_dict()


def optimizer_rows(*, most: int, only: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the results for all cases of torch's optimizers."""
    for kind, cases in operators.load("torch_databases").optimizers():
        if only and kind.__name__ not in only:
            continue
        row = operators.Row(name=f"torch.optim.{kind.__name__}", form="optimizer")
        for arguments in cases[:most]:
            node = {"_target_": row.name, **{name: layers.plain(value) for name, value in arguments.items()}}
            given = {name: value for name, value in node.items() if name != "_target_"}
            start = start_of(kind.__name__)
            _compare(row, node, None, start, functools.partial(by_hand, kind, given, None, start))
        yield row


def schedule_rows(*, only: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the results for all schedules of torch, by step and by epoch."""
    for name, arguments in SCHEDULES.items():
        if only and name not in only:
            continue
        row = operators.Row(name=f"torch.optim.lr_scheduler.{name}", form="schedule")
        for interval in ("step", "epoch"):
            if name == "ReduceLROnPlateau" and interval == "step":
                continue
            node = {"_target_": row.name, **arguments, "interval": interval}
            optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1}

            def hand(arguments: Any = arguments, name: str = name, by_epoch: bool = interval == "epoch") -> Any:
                def schedule(stepper: torch.optim.Optimizer) -> Any:
                    return torchs_own(name, arguments, stepper)

                return by_hand(torch.optim.SGD, {"lr": 0.1}, schedule, start_of("SGD"), by_epoch=by_epoch)

            _compare(row, optimizer, node, start_of("SGD"), hand)
        yield row


def _compare(row: Any, optimizer: Any, schedule: Any, start: Any, hand: Any) -> None:
    try:
        found = by_exp(optimizer, schedule, start)
    except ConfigError as error:
        row.refused["; ".join(f"{one.got}; expected {one.expected}" for one in error.errors)] += 1
        return
    except Exception as error:
        row.wrong.append(f"{optimizer} {schedule}: {error!r}")
        return
    wanted = hand()
    if all(operators.same(found[name], value) for name, value in wanted.items()):
        row.equal += 1
    else:
        most = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
        row.wrong.append(f"{optimizer} {schedule}: other weights, by {most:.1e}")


def seen(*, most: int, only: Sequence[str] = ()) -> list[Any]:
    """Return the results for all optimizers and schedules, or for those in `only`."""
    sys.modules.setdefault("steps", sys.modules[__name__])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*optimizer_rows(most=most, only=only), *schedule_rows(only=only)]
