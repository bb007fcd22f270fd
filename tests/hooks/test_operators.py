"""The hooks operators and dtypes: the operators of a step equal those of a loop by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from exp.extras.debugging.dtypes import Dtypes
from exp.extras.debugging.module_calls import ModuleCalls, next_number, nodes_of, number_of, running_node

BOTH = ["hooks=[operators,dtypes]", "logger=[tensorboard]", "trainer.max_steps=2"]
SMALL = "model.layers.hidden.out_features=16"


def rows(text: str) -> list[tuple[str, list[str]]]:
    """Return the direction and the cells of each line of a Markdown text with operators."""
    found, direction = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            direction = line.split()[1].rstrip(":")
        elif line.startswith("| ") and not line.startswith("| calls"):
            found.append((direction, [cell.strip() for cell in line.split("|")[1:-1]]))
    return found


def text_of(read, tag: str) -> str:
    (event,) = read.Tensors(tag)
    return event.tensor_proto.string_val[0].decode()


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("word", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_the_counts_equal_a_loop_by_hand(fit, events, build_model, word: str) -> None:
    counted: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    run = fit(*BOTH, SMALL, f"precision={word}", "trainer.accumulate_grad_batches=2")
    for direction, cells in rows(text_of(events(run.directory), "operators")):
        counted[direction][cells[2]] += int(cells[0])
    network = build_model("sequential", SMALL)
    inputs, targets = torch.rand(64, 1, 8, 8), torch.arange(64) % 10
    forward, backward = Count(), Count()
    for _ in range(2):
        with forward, torch.autocast("cpu", dtype=torch.bfloat16, enabled=word == "bf16", cache_enabled=False):
            output = network(inputs)
            # The objective runs without autocast.
            with torch.autocast("cpu", enabled=False):
                loss = nn.functional.cross_entropy(output.float(), targets)
        with backward:
            (loss / 2).backward()
    # These operators are not compared: the objective detaches losses to log them, and Lightning divides by the
    aside = {"detach", "div.Tensor", "add_.Tensor", "ones_like"}
    for direction, by_hand in (("forward", forward.counts), ("backward", backward.counts)):
        expected = {name: count for name, count in by_hand.items() if name not in aside}
        assert {name: count for name, count in counted[direction].items() if name not in aside} == expected


def test_the_table_shows_dtypes_and_the_module(fit, events) -> None:
    directory = fit(*BOTH, SMALL, "precision=bf16", "hooks.operators.steps=[2,9]").directory
    read = events(directory)
    assert [event.step for event in read.Tensors("operators")] == [2]
    assert text_of(read, "operators").splitlines()[0] == "## forward: 19 calls"
    product, half = "[16] [64, 64] [64, 16] → [64, 16]", "bfloat16 bfloat16 bfloat16 → bfloat16"
    found = rows(text_of(read, "operators"))
    for direction, *cells in (
        ("forward", "1", "hidden", "addmm", product, half),
        ("forward", "1", "hidden", "_to_copy", "[16, 64] → [16, 64]", "float32 → bfloat16"),
        ("backward", "1", "head", "mm", "[64, 10] [10, 128] → [64, 128]", "bfloat16 bfloat16 → bfloat16"),
        ("forward", "1", "objective", "_to_copy", "[64, 10] → [64, 10]", "bfloat16 → float32"),
    ):
        assert (direction, cells) in found
    assert {cells[1] for direction, cells in found if direction == "backward"} >= {"head", "hidden", "objective"}
    assert "| hidden | Linear | float32 | bfloat16 | float32 |" in text_of(read, "dtypes")


def test_computations_of_observers_are_no_operators(fit, events) -> None:
    tables = []
    for hooks in ("operators", "operators,memory,activations,retain_gradients"):
        directory = fit(f"hooks=[{hooks}]", SMALL, "trainer.max_steps=1", "logger=[tensorboard]").directory
        tables.append(text_of(events(directory), "operators"))
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("more", "hidden", "head"),
    [
        (
            ["precision=bf16", "+precision.keep={head: fp32}"],
            "float32 | bfloat16 | float32 |",
            "float32 | float32 | float32 | float32",
        ),
        *(
            pytest.param([f"precision={word}"], hidden, head, marks=pytest.mark.slow)
            for word, hidden, head in (
                ("fp16", "float32 | float16 | float32 |", "float16 | float16 | float32 |"),
                ("fp64", "float64 | float64 | float64 |", "float64 | float64 | float64 |"),
                ("bf16_true", "bfloat16 | bfloat16 | bfloat16 |", "bfloat16 | bfloat16 | bfloat16 |"),
            )
        ),
    ],
)
def test_the_dtypes_of_a_precision(fit, events, more: list[str], hidden: str, head: str) -> None:
    table = text_of(events(fit(*BOTH, SMALL, "hooks=[dtypes]", *more).directory), "dtypes")
    assert table.startswith("| layer | type | inputs | output | parameters | kept |")
    assert f"| hidden | Linear | {hidden}" in table
    assert f"| head | Linear | {head}" in table


def test_a_layer_without_kernel_is_shown_as_kept(step) -> None:
    """The precision, not the config, keeps such a layer in float32, for example an LSTM under fp16 on a CPU."""
    hook, network = Dtypes(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hook.attach(network)
    with hook.engaged(), torch.no_grad():
        network(torch.ones(1, 2))
    lines = hook.after_step(step(network, kept={"1": torch.float32}))["dtypes"].markdown.splitlines()
    assert [line.split("|")[-2].strip() for line in lines[-2:]] == ["", "float32"]


def test_a_node_knows_its_module_and_run() -> None:
    x = torch.ones(2, requires_grad=True)
    calls = ModuleCalls(outside="loss")
    before = next_number()
    calls.begin("outer")
    y = x * 2
    calls.begin("inner")
    z = y.exp()
    calls.end("inner")
    w = z + y
    calls.end("outer")
    loss = w.sum()
    assert number_of(y.grad_fn) == before
    assert next_number() == number_of(loss.grad_fn) + 1
    nodes = {node.name(): node for node in nodes_of(loss)}
    assert {name: calls.maker(node) for name, node in nodes.items() if "Accumulate" not in name} == {
        "MulBackward0": "outer", "ExpBackward0": "inner", "AddBackward0": "outer", "SumBackward0": "loss",
    }  # fmt: skip
    assert number_of(nodes["torch::autograd::AccumulateGrad"]) > next_number()
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = running_node()
            seen.append((str(func), None if node is None else node.name()))
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.autograd.grad(loss, x, torch.ones(()))
    assert ("aten.mul.Tensor", "ExpBackward0") in seen
    assert ("aten.mul.Tensor", "MulBackward0") in seen
    assert running_node() is None
