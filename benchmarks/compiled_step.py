"""Time of a training step that is compiled as a whole (forward, backward and AdamW), compared with the eager step.

    python benchmarks/compiled_step.py [--repetitions 5] [--steps 1000]

Each step of an MLP on digits gathers a batch of 64 by index, computes the gradients and updates the weights. It runs on
one thread, and nothing is logged.

    eager       autograd, and torch.optim.AdamW(fused=True)
    compiled    torch.compile of network and loss, and the same optimizer
    whole       torch.compile of one function: torch.func.grad_and_value, and AdamW written with tensors, in place
    ahead       the same function with torch.export and AOTInductor; it returns the updated tensors

The four variants run alternately in one process, and processor time is measured. A ratio is the median of the ratios
of neighboring runs. The weights of the four variants are compared after the first 10 steps. The benchmark needs a C++
compiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from loop import BATCH_SIZE, samples
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
# Largest difference of float32 weights after ten steps that another order of summation explains.
TOLERANCE = 1e-4
CHECKED_STEPS = 10
Step = Callable[[Tensor, Tensor], object]
Weights = Callable[[], Sequence[Tensor]]
# Parameters, AdamW's two averages of each parameter, and the number of steps.
State = tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def by_autograd(width: int, *, is_compiled: bool) -> tuple[Step, Weights]:
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(model(inputs), targets)

    loss_function = torch.compile(loss_of) if is_compiled else loss_of

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss = loss_function(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, lambda: [parameter.detach() for parameter in model.parameters()]


def updated(model: nn.Module, names: Sequence[str], state: State, inputs: Tensor, targets: Tensor) -> State:
    """Return the state after one step of AdamW (Loshchilov and Hutter 2019, algorithm 2)."""
    weights, first, second, count = state

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (inputs,)), targets)

    found, _ = grad_and_value(loss_of)(dict(zip(names, weights, strict=True)))
    count = count + 1
    gradients = [found[name] for name in names]
    first = [one.lerp(gradient, 1 - BETAS[0]) for one, gradient in zip(first, gradients, strict=True)]
    second = [
        one * BETAS[1] + gradient * gradient * (1 - BETAS[1]) for one, gradient in zip(second, gradients, strict=True)
    ]
    size = RATE / (1 - BETAS[0] ** count)
    root = (1 - BETAS[1] ** count).sqrt()
    weights = [
        one * (1 - RATE * DECAY) - size * mean / (square.sqrt() / root + EPSILON)
        for one, mean, square in zip(weights, first, second, strict=True)
    ]
    return weights, first, second, count


def beginning(model: nn.Module) -> State:
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return (
        weights,
        [torch.zeros_like(one) for one in weights],
        [torch.zeros_like(one) for one in weights],
        torch.zeros(()),
    )


def whole(width: int) -> tuple[Step, Weights]:
    model = network(width)
    names = [name for name, _ in model.named_parameters()]
    state = beginning(model)

    @torch.compile
    def step(inputs: Tensor, targets: Tensor) -> None:
        weights, first, second, count = updated(model, names, state, inputs, targets)
        for old, new in zip(
            (*state[0], *state[1], *state[2], state[3]), (*weights, *first, *second, count), strict=True
        ):
            old.copy_(new)

    return torch.no_grad()(step), lambda: state[0]


def ahead(width: int, folder: str) -> tuple[Step, Weights]:
    model = network(width)
    names = [name for name, _ in model.named_parameters()]
    state = beginning(model)
    example = (*state, torch.zeros(BATCH_SIZE, 64), torch.zeros(BATCH_SIZE, dtype=torch.long))
    with torch.no_grad():
        # make_fx turns the gradients into plain operators, because export refuses tensors wrapped by torch.func.
        graph = make_fx(lambda *values: updated(model, names, values[:4], *values[4:]))(*example)
        exported = torch.export.export(graph, example)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=f"{folder}/step{width}.pt2")
    program = torch._inductor.aoti_load_package(path)

    def step(inputs: Tensor, targets: Tensor) -> None:
        nonlocal state
        state = program(*state, inputs, targets)

    return step, lambda: state[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch.export warns about its own pickling
    with tempfile.TemporaryDirectory() as folder:
        for width in (128, 1024, 4096):
            measure(width, folder, repetitions=options.repetitions, steps=options.steps)


def measure(width: int, folder: str, *, repetitions: int, steps: int) -> None:
    """Print the time of a step of each variant.

    Raises:
        AssertionError: if the weights of two variants differ by more than TOLERANCE
    """
    images, labels = samples(steps)
    ways: dict[str, Callable[[], tuple[Step, Weights]]] = {
        "eager": lambda: by_autograd(width, is_compiled=False),
        "compiled": lambda: by_autograd(width, is_compiled=True),
        "whole": lambda: whole(width),
        "ahead": lambda: ahead(width, folder),
    }
    made, seconds = {}, {}
    for name, make in ways.items():
        began = time.perf_counter()
        made[name] = make()
        for place in range(CHECKED_STEPS):
            chosen = slice(place * BATCH_SIZE, (place + 1) * BATCH_SIZE)
            made[name][0](images[chosen], labels[chosen])
        seconds[name] = time.perf_counter() - began
    expected = list(made["eager"][1]())
    for _, weights in made.values():
        torch.testing.assert_close(list(weights()), expected, rtol=TOLERANCE, atol=TOLERANCE)
    turns = [
        {name: clocked(step, images, labels, steps) for name, (step, _) in made.items()} for _ in range(repetitions)
    ]
    print(f"\nMLP 64-{width}-10, {repetitions} alternating repetitions, processor time of a step in us")
    for name in made:
        own = statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(turn[name] / turn["eager"] for turn in turns)
        print(f"{name:<10}{own:9.0f}   {ratio:5.2f} of eager   {seconds[name]:6.1f} s to build it and run 10 steps")


def clocked(step: Step, images: Tensor, labels: Tensor, steps: int) -> float:
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    began = time.process_time()
    for place in range(steps):
        index = order[place * BATCH_SIZE : (place + 1) * BATCH_SIZE]
        step(images[index], labels[index])
    return (time.process_time() - began) / steps * 1e6


if __name__ == "__main__":
    main()
