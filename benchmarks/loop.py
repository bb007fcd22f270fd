"""How many optimizer steps a second a small network makes: by hand, in plain Lightning, and here.

    python benchmarks/loop.py [--repetitions 5] [--steps 3000]

The network is an MLP 64-128-10 on digits, batch 64, AdamW, one thread, without validation and checkpoints. All take turns
in one process; a row's ratio is the median of the ratios of the repetitions, each against its neighbour in time.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, WARM_UP = 64, 500


def samples(steps_an_epoch: int) -> tuple[Tensor, Tensor]:
    """Digits, repeated to fill an epoch of so many steps."""
    images, labels = load_digits(return_X_y=True)
    index = torch.arange(steps_an_epoch * BATCH_SIZE) % len(labels)
    return torch.tensor(images, dtype=torch.float32)[index] / 16, torch.tensor(labels)[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Clock:
    """Times the steps between the end of the warm-up and the end."""

    def __init__(self) -> None:
        self.begin, self.steps = 0.0, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            self.begin = time.perf_counter()

    def rate(self) -> float:
        return (self.steps - WARM_UP) / (time.perf_counter() - self.begin)


def by_hand(steps: int, epochs: int) -> float:
    """A PyTorch loop with a stock DataLoader, and no logging."""
    loader = DataLoader(TensorDataset(*samples(steps // epochs)), batch_size=BATCH_SIZE, shuffle=True)
    net, clock = network(), Clock()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), target)
            loss.backward()
            optimizer.step()
            clock.step()
    return clock.rate()


class Plain(L.LightningModule):
    """What the Lightning documentation shows. with_norms: and its gradient norms, by parameter, at every step."""

    def __init__(self, *, with_norms: bool) -> None:
        super().__init__()
        self.network, self.clock, self.with_norms = network(), Clock(), with_norms
        self.measured = 0.0

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
        self.measured = self.clock.rate()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def plain_lightning(steps: int, epochs: int, *, with_norms: bool) -> float:
    loader = DataLoader(TensorDataset(*samples(steps // epochs)), batch_size=BATCH_SIZE, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        module = Plain(with_norms=with_norms)
        trainer = L.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=TensorBoardLogger(folder), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader)
    return module.measured


def here(steps: int, epochs: int, *, overrides: tuple[str, ...] = ()) -> float:
    """exp with gradient norms at every step, memory every 50, throughput, and TensorBoard.

    The time is that between the first event behind the warm-up and the last one of the run's event file.
    """
    import exp

    with tempfile.TemporaryDirectory(dir=".", prefix="loop-") as folder:
        inputs, target = samples(steps // epochs)
        path = Path(folder).resolve() / "digits.pt"
        torch.save({"input": inputs, "target": target}, path)
        config = exp.compose([*_overrides(path, folder, epochs), *overrides])
        exp.fit(config)
        return _rate(next(Path(folder).rglob("events.out.*")))


def _overrides(path: Path, folder: str, epochs: int) -> list[str]:
    return [
        f"hydra.run.dir={folder}/run",
        "data=tensors",
        f"data.dataset.path={path}",
        "data.parts={train: 1.0}",
        "model.layers={flatten: {_target_: torch.nn.Flatten}, "
        "hidden: {_target_: torch.nn.Linear, in_features: 64, out_features: 128}, relu: {_target_: torch.nn.ReLU}, "
        "head: {_target_: torch.nn.Linear, in_features: 128, out_features: 10}}",
        "metrics=[]",
        f"trainer.max_epochs={epochs}",
        "trainer.limit_val_batches=0",
        "test=false",
        "monitor=loss/train",
        "checkpoint.save_last=false",
        "checkpoint.save_best=false",
        "hooks.memory.every_n_steps=50",
        "hooks.gradients.every_n_steps=1",
    ]


def _rate(path: Path) -> float:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for event in EventFileLoader(str(path)).Load() if event.summary.value]
    times = {event.step: event.wall_time for event in events if event.step > WARM_UP}
    first, last = min(times), max(times)
    return (last - first) / (times[last] - times[first])


def measure(contenders: dict[str, Callable[[int, int], float]], steps: int, epochs: int, repetitions: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, contender in contenders.items():
            rates[name].append(contender(steps, epochs))
    names = list(contenders)
    print(f"\n{steps} steps in {epochs} epoch{'s' if epochs > 1 else ''}, {repetitions} repetitions in turn")
    print(f"{'':48} steps/s   us/step   against (a)   against (b)")
    for name in names:
        ratios = [
            statistics.median(own / other for own, other in zip(rates[name], rates[base], strict=True))
            for base in names[:2]
        ]
        rate = statistics.median(rates[name])
        print(f"{name:48}{rate:8.0f}{1e6 / rate:10.0f}{ratios[0]:14.2f}{ratios[1]:14.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--without-exp", action="store_true", help="the two others alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    contenders: dict[str, Callable[[int, int], float]] = {
        "(a) by hand, stock DataLoader, no logging": by_hand,
        "(b) plain Lightning, self.log, TensorBoardLogger": lambda *args: plain_lightning(*args, with_norms=False),
        "(b') and gradient norms by its grad_norm": lambda *args: plain_lightning(*args, with_norms=True),
    }
    if not arguments.without_exp:
        contenders["(c) exp: norms, memory, throughput, TensorBoard"] = here
    for epochs in (1, arguments.steps // 20):
        measure(contenders, arguments.steps, epochs, arguments.repetitions)


if __name__ == "__main__":
    main()
