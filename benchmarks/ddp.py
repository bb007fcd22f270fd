"""Time of a step with strategy=ddp, compared with a script that calls DistributedDataParallel by hand.

    python benchmarks/ddp.py [--pairs 9] [--steps 1500]

Both train LeNet on digits with AdamW and a global batch of 64, on two gloo ranks of one thread each. They run
alternately in the same two processes: a pair is one run of each. The printed ratio is the median of the ratios of all
pairs. The start of the processes, the building of the network and the first 500 steps are not measured. Neither writes
checkpoints or validates.
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
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.multiprocessing
from loop_clock import Clock, ClockHook
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import exp
from exp import run
from exp.check import plan
from exp.config.freeze import freeze
from exp.strategies.process_group import join
from exp.strategies.rank import Rank

RANKS = 2
BATCH_SIZE = 64
VARIANTS = {
    "exp: norms every step, memory, throughput, TensorBoard": ["hooks.gradients.every_n_steps=1"],
    "exp: default settings": [],
    "exp: hooks=[] logger=[]": ["~hooks.gradients", "~hooks.memory", "~hooks.throughput", "logger=[]"],
}


def samples(steps: int) -> tuple[Tensor, Tensor]:
    """Return images `[N, 1, 8, 8]` and labels of digits, repeated to fill an epoch of `steps` steps."""
    images, labels = load_digits(return_X_y=True)
    index = torch.arange(steps * BATCH_SIZE) % len(labels)
    return torch.tensor(images, dtype=torch.float32)[index].view(-1, 1, 8, 8) / 16, torch.tensor(labels)[index]


def lenet() -> nn.Module:
    """Return the network of conf/model/lenet.yaml."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def by_hand(steps: int) -> tuple[float, float]:
    """Return the wall and processor microseconds of a step with a stock DataLoader and without logging."""
    dataset = TensorDataset(*samples(steps))
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // RANKS, sampler=DistributedSampler(dataset))
    network, clock = DistributedDataParallel(lenet(), gradient_as_bucket_view=True), Clock()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(inputs), target)
        loss.backward()
        optimizer.step()
        clock.step()
    return clock.microseconds()


def frozen(folder: Path, name: str, overrides: list[str], steps: int) -> Path:
    path = folder / "digits.pt"
    if not path.is_file():
        inputs, target = samples(steps)
        torch.save({"input": inputs, "target": target}, path)
    line = [
        f"hydra.run.dir={folder / name}",
        *("strategy=ddp", "launch.accelerator=cpu", f"launch.devices={RANKS}", "model=lenet"),
        *("data=tensors", f"data.dataset.path={path}", f"data.batch_size={BATCH_SIZE}"),
        *("data.parts.train=1.0", "data.parts.val=0", "data.parts.test=0", "data.input_shape=[1,8,8]"),
        *("data.input_dtype=float32", "data.num_classes=10", "data.num_outputs=10", "metrics=[]"),
        *("trainer.max_epochs=1", "trainer.limit_val_batches=0", "test=false", "monitor=loss/train"),
        *("checkpoint.save_last=false", "checkpoint.save_best=false", "trainer.enable_progress_bar=false"),
        *("+hooks.clock={_target_: loop_clock.ClockHook}", "security.allow=[loop_clock]"),
        *overrides,
    ]
    config = exp.compose(line)
    exp.validate(config)
    return freeze(config)


def live(number: int, store: str, directories: list[Path], steps: int, results: str) -> None:
    """Run all variants of each pair on one rank, and write the times of rank 0 to a file.

    Args:
        number: rank
        store: path of the file that the ranks use to find each other
        directories: run directories of exp, for each pair those of all VARIANTS
        steps: optimizer steps of each run
        results: path of the file with the times, one line per pair
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank = Rank(global_rank=number, local_rank=number, world_size=RANKS, local_world_size=RANKS, store=store)
    join(rank, plan.adopt(plan.read_resolved(directories[0][0]), rank=rank).placement, timeout_seconds=600)
    for turn in directories:
        times = [*by_hand(steps)]
        for directory in turn:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run.run(directory, rank=rank)
            times += ClockHook.measured
        if rank.is_first:
            with open(results, "a") as file:
                print(*times, file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix="ddp-") as name:
        folder = Path(name).resolve()
        directories = [
            [frozen(folder, f"{pair}-{n}", more, arguments.steps) for n, more in enumerate(VARIANTS.values())]
            for pair in range(arguments.pairs)
        ]
        results = folder / "times"
        shared = (str(folder / "store"), directories, arguments.steps, str(results))
        torch.multiprocessing.spawn(live, args=shared, nprocs=RANKS)
        turns = [[float(time) for time in line.split()] for line in results.read_text().splitlines()]
    print(f"{'':52}{'wall clock: step   ratio':>26}{'all pairs':>16}{'processor: step   ratio':>26}{'all pairs':>16}")
    for number, contender in enumerate(["by hand", *VARIANTS]):
        cells = ""
        for kind in (0, 1):
            steps = [turn[2 * number + kind] for turn in turns]
            ratios = sorted(turn[2 * number + kind] / turn[kind] for turn in turns)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            cells += f"{statistics.median(steps):16.0f} us {statistics.median(ratios):7.3f}{spread:>15}"
        print(f"{contender:52}{cells}")


if __name__ == "__main__":
    main()
