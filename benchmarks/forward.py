"""Time of a forward call of a forward program, compared with the hand-written nn.Module with the same weights.

    python benchmarks/forward.py [--repetitions 200] [--threads 1]

The batch has 64 samples of 10 features, and no gradients are computed. Each repetition measures both networks in
alternating order and gives one ratio. The table shows the medians. The limits are 1.05 for 2 layers and 1.02 for 20.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from exp.models.containers import ModuleDictModel, ModuleListModel


class ByHandList(nn.Module):
    """The network of docs/models.md that calls a list of layers in a loop."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(10, 10) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for i, linear in enumerate(self.linears):
            x = self.linears[i // 2](x) + linear(x)
        return x


class ByHandNames(nn.Module):
    """A module with its layers as attributes, which is the fastest form by hand."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for i in range(count):
            setattr(self, f"linear{i}", nn.Linear(10, 10))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ByHandTwoNames(ByHandNames):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.linear0(x))
        return self.linear1(x)


def twenty_names() -> type[ByHandNames]:
    """Return a class with a forward method of 20 lines, which is compiled from text."""
    lines = [f"    x = torch.relu(self.linear{i}(x))" for i in range(19)]
    namespace: dict = {"torch": torch}
    exec("\n".join(["def forward(self, x):", *lines, "    return self.linear19(x)"]), namespace)
    return type("ByHandTwentyNames", (ByHandNames,), {"forward": namespace["forward"]})


def list_program(count: int) -> ModuleListModel:
    return ModuleListModel(
        layers={"linears": [nn.Linear(10, 10) for _ in range(count)]},
        forward="for i, linear in enumerate(linears):\n    x = linears[i // 2](x) + linear(x)\nreturn x",
    )


def names_program(count: int) -> ModuleDictModel:
    lines = [f"x = relu(linear{i}(x))" for i in range(count - 1)]
    return ModuleDictModel(
        layers={f"linear{i}": nn.Linear(10, 10) for i in range(count)},
        forward="\n".join([*lines, f"return linear{count - 1}(x)"]),
    )


def seconds(network: nn.Module, x: Tensor, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        network(x)
    return (time.perf_counter() - start) / calls


def compare(by_hand: nn.Module, program: nn.Module, *, repetitions: int, calls: int) -> tuple[float, float, float]:
    """Return the medians of the seconds per call by hand, of the program, and of the ratio of each pair."""
    program.load_state_dict(by_hand.state_dict())
    x = torch.randn(64, 10)
    with torch.inference_mode():
        if not torch.equal(by_hand(x), program(x)):
            raise SystemExit("the two networks do not agree")
        rows = []
        for index in range(repetitions):
            pair = (by_hand, program) if index % 2 == 0 else (program, by_hand)
            times = {network: seconds(network, x, calls) for network in pair}
            rows.append((times[by_hand], times[program], times[program] / times[by_hand]))
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module], int, float]] = [
        ("2 layers, list", lambda: ByHandList(2), lambda: list_program(2), 200, 1.05),
        ("20 layers, list", lambda: ByHandList(20), lambda: list_program(20), 30, 1.02),
        ("2 layers, names", lambda: ByHandTwoNames(2), lambda: names_program(2), 200, 1.05),
        ("20 layers, names", lambda: twenty_names()(20), lambda: names_program(20), 30, 1.02),
    ]
    print(f"{'network':<18}{'by hand':>10}{'program':>10}{'ratio':>8}{'limit':>7}")
    for name, by_hand, program, calls, limit in cases:
        hand, ours, ratio = compare(by_hand(), program(), repetitions=options.repetitions, calls=calls)
        print(f"{name:<18}{hand * 1e6:>7.1f} us{ours * 1e6:>7.1f} us{ratio:>8.3f}{limit:>7.2f}")


if __name__ == "__main__":
    main()
