"""Sweep by hand: one process without a framework, which trains the jobs one after the other in a PyTorch loop.

    python bare.py --data digits.pt --network mlp --epochs 10 --rates 1e-3,3e-3 --seeds 0,1 [--save] [--events]
        [--threads 1] [--batches 2] [--without-ends]

--save: write last.pt of each job at each epoch, and best.pt if the validation loss is lower than before. --events:
write loss and gradient norm of each step, and loss and accuracy of each validation, for TensorBoard. Without it,
nothing is logged. --batches: training batches per epoch, all by default. --without-ends: neither validate nor save at
the end of an epoch.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from parts import Batches, loaders, network, note
from torch import nn
from torch.nn import functional


@torch.no_grad()
def evaluate(net: nn.Module, loader: Batches) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    net.eval()
    loss, right, count = 0.0, 0, 0
    for inputs, target in loader:
        output = net(inputs)
        loss += functional.cross_entropy(output, target, reduction="sum").item()
        right += int((output.argmax(1) == target).sum())
        count += target.numel()
    net.train()
    return loss / count, right / count


def warm_up() -> None:
    """Make one optimizer step, so that the imports of torch's first step are not part of a job's time."""
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


def events(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def train(options: argparse.Namespace, rate: float, seed: int, folder: Path) -> None:
    began = time.time()
    torch.manual_seed(seed)
    training, validation, test = loaders(options.data)
    net = network(options.network)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    best, best_weights = math.inf, net.state_dict()
    writer, step = events(folder) if options.events else None, 0
    for _ in range(options.epochs):
        for inputs, target in itertools.islice(training, options.batches):
            optimizer.zero_grad()
            loss_of_step = functional.cross_entropy(net(inputs), target)
            loss_of_step.backward()
            if writer is not None:
                norm = torch.nn.utils.get_total_norm([one.grad for one in net.parameters() if one.grad is not None])
                writer.add_scalar("loss/train", loss_of_step.item(), step)
                writer.add_scalar("gradient_norm", norm.item(), step)
            optimizer.step()
            step += 1
        if options.without_ends:
            continue
        loss, right = evaluate(net, validation)
        if writer is not None:
            writer.add_scalar("loss/val", loss, step)
            writer.add_scalar("accuracy/val", right, step)
        state = {"weights": net.state_dict(), "optimizer": optimizer.state_dict()}
        if options.save:
            folder.mkdir(exist_ok=True)
            torch.save(state, folder / "last.pt")
        if loss < best:
            best, best_weights = loss, {name: tensor.clone() for name, tensor in net.state_dict().items()}
            if options.save:
                torch.save(state, folder / "best.pt")
    if writer is not None:
        writer.close()
    net.load_state_dict(best_weights)
    _, accuracy = evaluate(net, test)
    note(began=began, ended=time.time(), loss=best, accuracy=accuracy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--rates", required=True)
    parser.add_argument("--seeds", required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batches", type=int)
    parser.add_argument("--without-ends", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--events", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warm_up()
    jobs = itertools.product(map(float, options.rates.split(",")), map(int, options.seeds.split(",")))
    for number, (rate, seed) in enumerate(jobs):
        train(options, rate, seed, Path(str(number)))


if __name__ == "__main__":
    main()
