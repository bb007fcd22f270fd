"""Optimizer steps per second of a small network: by hand, in plain Lightning, and in exp.

    python benchmarks/loop.py [--repetitions 5] [--steps 3000] [--non-finite]

The network is an MLP 64-128-10 on digits, trained with batch size 64 and AdamW on one thread, without validation and
checkpoints. The variants run alternately in one process. A ratio is the median over the repetitions, each compared with
the run next to it. --non-finite measures the time of exp's checks for nan and inf per step instead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from loop_clock import Clock, ClockHook
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import exp
from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.engine import module, recording

BATCH_SIZE = 64
Times = tuple[float, float]


def samples(steps: int) -> tuple[Tensor, Tensor]:
    """Return the images `[N, 64]` and labels of digits, repeated to fill an epoch of `steps` steps."""
    images, labels = load_digits(return_X_y=True)
    index = torch.arange(steps * BATCH_SIZE) % len(labels)
    return torch.tensor(images, dtype=torch.float32)[index] / 16, torch.tensor(labels)[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def stock_loader(steps: int) -> DataLoader:
    return DataLoader(TensorDataset(*samples(steps)), batch_size=BATCH_SIZE, shuffle=True)


def by_hand(steps: int, epochs: int) -> Times:
    """Train in a PyTorch loop with a stock DataLoader and no logging; return the times of a step."""
    loader, net, clock = stock_loader(steps // epochs), network(), Clock()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), target)
            loss.backward()
            optimizer.step()
            clock.step()
    return clock.microseconds()


def by_hand_on_our_batches(steps: int, epochs: int) -> Times:
    """Train in a PyTorch loop with exp's loader, which gathers many batches at once; return the times of a step."""
    inputs, target = samples(steps // epochs)
    data = Data(train=Tensors(entries=(inputs, target), num_classes=10), batch_size=BATCH_SIZE)
    loader, net, clock = data.loader("train", rank=0, world_size=1), network(), Clock()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in loader:
            inputs, target = batch.data
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), target)
            loss.backward()
            optimizer.step()
            clock.step()
    return clock.microseconds()


def by_an_expert(steps: int, epochs: int) -> Times:
    """Train in a loop written for speed: batches by index, fused optimizer, no logging. Return the times of a step."""
    (inputs, target), net, clock = samples(steps // epochs), network(), Clock()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for _ in range(epochs):
        for index in torch.randperm(len(inputs)).split(BATCH_SIZE):
            loss = functional.cross_entropy(net(inputs[index]), target[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.step()
    return clock.microseconds()


class Plain(L.LightningModule):
    """Module as in Lightning's documentation; `with_norms` logs the gradient norm of each parameter at each step."""

    def __init__(self, *, with_norms: bool) -> None:
        super().__init__()
        self.network, self.clock, self.with_norms = network(), Clock(), with_norms
        self.measured = (0.0, 0.0)

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        loss = functional.cross_entropy(self.network(inputs), target)
        self.log("loss/train", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.with_norms:
            self.log_dict(grad_norm(self.network, norm_type=2))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.clock.step()

    def on_train_end(self):
        self.measured = self.clock.microseconds()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def plain_lightning(steps: int, epochs: int, *, with_norms: bool) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        module = Plain(with_norms=with_norms)
        trainer = L.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=TensorBoardLogger(folder), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, stock_loader(steps // epochs))
    return module.measured


def here(steps: int, epochs: int, *more: str) -> Times:
    """Train in exp with gradient norms at each step, memory every 50 steps, throughput and TensorBoard.

    Args:
        steps: optimizer steps in total
        epochs: number of epochs
        more: further overrides

    Returns:
        wall and processor microseconds of a step
    """
    with tempfile.TemporaryDirectory(dir=".", prefix="loop-") as folder:
        inputs, target = samples(steps // epochs)
        path = Path(folder).resolve() / "digits.pt"
        torch.save({"input": inputs, "target": target}, path)
        exp.fit(exp.compose([*_overrides(path, folder, epochs), *more]))
    return ClockHook.measured


def unguarded(steps: int, epochs: int) -> Times:
    """Train in exp without checks for nan and inf, and return the times of a step."""
    looks = module.require_finite, recording.refuse_lost
    module.require_finite = recording.refuse_lost = lambda *_, **__: None
    try:
        return here(steps, epochs)
    finally:
        module.require_finite, recording.refuse_lost = looks


def _overrides(path: Path, folder: str, epochs: int) -> list[str]:
    return [
        f"hydra.run.dir={folder}/run",
        *("data=tensors", f"data.dataset.path={path}", f"data.batch_size={BATCH_SIZE}"),
        *("data.parts.train=1.0", "data.parts.val=0", "data.parts.test=0"),
        *("data.input_shape=[64]", "data.input_dtype=float32", "data.num_classes=10", "data.num_outputs=10"),
        *("model.layers.hidden.out_features=128", "model.layers.activation._target_=torch.nn.ReLU"),
        *("~model.layers.flatten", "~model.layers.hidden2", "~model.layers.activation2"),
        *(f"trainer.max_epochs={epochs}", "trainer.limit_val_batches=0", "test=false"),
        *("metrics=[]", "monitor=loss/train", "checkpoint.save_last=false", "checkpoint.save_best=false"),
        *("hooks.gradients.every_n_steps=1", "hooks.memory.every_n_steps=50"),
        *("+hooks.clock={_target_: loop_clock.ClockHook}", "security.allow=[loop_clock]"),
    ]


def measure(contenders: dict[str, Callable[[int, int], Times]], steps: int, epochs: int, repetitions: int) -> None:
    times: dict[str, list[Times]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, contender in contenders.items():
            with contextlib.redirect_stdout(io.StringIO()):
                times[name].append(contender(steps, epochs))
    names = list(contenders)
    print(f"\n{steps} steps in {epochs} epoch{'s' if epochs > 1 else ''}, {repetitions} alternating repetitions")
    bases = names[: 4 if len(names) > 3 else 3]
    heads = "".join(f"{name.partition(' ')[0]:>8}" for name in bases)
    print(f"{'':50} wall clock: step   speed against{'':13}  processor: step   speed against")
    print(f"{'':50}{'us':>13}{heads}   {'us':>13}{heads}")
    for name in names:
        cells = ""
        for kind in (0, 1):
            own = [time[kind] for time in times[name]]
            ratios = [
                statistics.median(base[kind] / time for base, time in zip(times[other], own, strict=True))
                for other in bases
            ]
            cells += f"{statistics.median(own):13.0f}{''.join(f'{ratio:8.2f}' for ratio in ratios)}   "
        print(f"{name:50}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--non-finite", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    contenders = {
        "(a) by hand, stock DataLoader, no logging": by_hand,
        "(a') the same on exp's own batches": by_hand_on_our_batches,
        "(b) plain Lightning, self.log, TensorBoardLogger": lambda *args: plain_lightning(*args, with_norms=False),
        "(e) for speed: by index, fused, no logging": by_an_expert,
        "(b') the same with Lightning's grad_norm": lambda *args: plain_lightning(*args, with_norms=True),
        "(c) exp: norms, memory, throughput, TensorBoard": here,
    }
    if arguments.non_finite:
        contenders = {
            "(a) no check": unguarded,
            "(a') runtime.non_finite=stop, the default": here,
            "(b) runtime.non_finite=skip": lambda *args: here(*args, "runtime.non_finite=skip"),
        }
    for epochs in (1, arguments.steps // 20):
        measure(contenders, arguments.steps, epochs, arguments.repetitions)


if __name__ == "__main__":
    main()
