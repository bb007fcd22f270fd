"""operators and dtypes: what torch calls in a step, held against a mode of torch's own around a loop by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import exp
from exp.errors import ConfigError
from exp.hooks.dtypes import Dtypes
from exp.hooks.module_calls import ModuleCalls, next_number, nodes_behind, number_of, running_node
from exp.hooks.step import Step

BOTH = "hooks=[operators,dtypes]"
SHORT = [
    "trainer.max_steps=3",
    "test=false",
    "trainer.enable_progress_bar=false",
    "model.layers.hidden.out_features=16",
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    count = iter(range(100))

    def run(*overrides: str) -> Path:
        directory = tmp_path / "outputs" / f"{next(count)}"
        exp.fit(exp.compose([f"hydra.run.dir={directory}", *SHORT, *overrides]))
        return directory

    return run


def rows(path: Path) -> list[tuple[str, list[str]]]:
    """Of a Markdown file with operators: the direction, and the cells."""
    found, direction = [], ""
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            direction = line.split()[1].rstrip(":")
        elif line.startswith("| ") and not line.startswith("| calls"):
            found.append((direction, [cell.strip() for cell in line.split("|")[1:-1]]))
    return found


def text(directory: Path, tag: str) -> str:
    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    (event,) = events.Tensors(tag)
    return event.tensor_proto.string_val[0].decode()


def checkpoint(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("word", ["fp32", "bf16"])
def test_it_counts_what_a_loop_by_hand_calls(run, build_model, word: str) -> None:
    counted: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for direction, cells in rows(
        run(BOTH, f"precision={word}", "trainer.accumulate_grad_batches=2") / "operators" / "step-1.md"
    ):
        counted[direction][cells[2]] += int(cells[0])
    network = build_model("sequential", "model.layers.hidden.out_features=16")
    inputs, targets = torch.rand(64, 1, 8, 8), torch.arange(64) % 10
    forward, backward = Count(), Count()
    for _ in range(2):
        with forward, torch.autocast("cpu", dtype=torch.bfloat16, enabled=word == "bf16", cache_enabled=False):
            output = network(inputs)
            # As the objective does, which leaves autocast.
            with torch.autocast("cpu", enabled=False):
                loss = nn.functional.cross_entropy(output.float(), targets)
        with backward:
            (loss / 2).backward()
    # The objective detaches its parts for the record, and Lightning divides by the number of micro-batches.
    aside = {"detach", "div.Tensor", "add_.Tensor", "ones_like"}
    for direction, by_hand in (("forward", forward.counts), ("backward", backward.counts)):
        expected = {name: count for name, count in by_hand.items() if name not in aside}
        assert {name: count for name, count in counted[direction].items() if name not in aside} == expected


def test_it_says_what_autocast_did_and_whose_call_it_was(run) -> None:
    directory = run(BOTH, "precision=bf16", "hooks.operators.steps=[2,9]")
    assert [path.name for path in (directory / "operators").iterdir()] == ["step-2.md"]
    path = directory / "operators" / "step-2.md"
    assert text(directory, "operators").splitlines()[0] == "## forward: 19 calls"
    assert text(directory, "operators") in path.read_text()
    found = rows(path)
    product = "[16] [64, 64] [64, 16] → [64, 16]"
    half = "bfloat16 bfloat16 bfloat16 → bfloat16"
    assert ("forward", ["1", "hidden", "addmm", product, half, "given float32"]) in found
    assert (
        "forward",
        ["1", "hidden", "_to_copy", "[16, 64] → [16, 64]", "float32 → bfloat16", "its own cast"],
    ) in found
    assert (
        "backward",
        ["1", "head", "mm", "[64, 10] [10, 128] → [64, 128]", "bfloat16 bfloat16 → bfloat16", ""],
    ) in found
    assert {cells[1] for direction, cells in found if direction == "backward"} >= {"head", "hidden", "objective"}
    # The loss is outside autocast, and its cast of the output is no choice of autocast's.
    assert ("forward", ["1", "objective", "_to_copy", "[64, 10] → [64, 10]", "bfloat16 → float32", ""]) in found


@pytest.mark.parametrize(
    ("more", "hidden", "head"),
    [
        (["precision=fp16"], "float32 | float16 | float32 |", "float16 | float16 | float32 |"),
        (["precision=fp64"], "float64 | float64 | float64 |", "float64 | float64 | float64 |"),
        (["precision=bf16_true"], "bfloat16 | bfloat16 | bfloat16 |", "bfloat16 | bfloat16 | bfloat16 |"),
        (
            ["precision=bf16", "+precision.keep={head: fp32}"],
            "float32 | bfloat16 | float32 |",
            "float32 | float32 | float32 | float32",
        ),
    ],
)
def test_the_table_of_dtypes(run, more: list[str], hidden: str, head: str) -> None:
    table = text(run("hooks=[dtypes]", *more), "dtypes")
    assert table.startswith("| layer | type | inputs | output | parameters | kept |")
    assert f"| hidden | Linear | {hidden}" in table
    assert f"| head | Linear | {head}" in table


def test_a_layer_that_has_no_kernel_in_the_precision_is_told_as_kept() -> None:
    """As an LSTM under fp16 on a CPU: in no config, but in what the run's precision does."""
    hook, network = Dtypes(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hook.attach(network)
    with hook.engaged(), torch.no_grad():
        network(torch.ones(1, 2))
    step = Step(
        index=1, network=network, optimizers=[], batch_size=1, device=torch.device("cpu"), kept={"1": torch.float32}
    )
    lines = hook.after_step(step)["dtypes"].markdown.splitlines()
    assert [line.split("|")[-2].strip() for line in lines[-2:]] == ["", "float32"]


@pytest.mark.parametrize(
    "more",
    [
        ["strategy=layer_split"],
        ["phases=[body_and_head]", "precision=fp16"],
        ["runtime.compile=true", "runtime.compile_backend=aot_eager"],
    ],
)
def test_losses_are_equal_bit_for_bit_with_them(run, more: list[str]) -> None:
    steps = ["hooks.operators.steps=[1,2]", "hooks.dtypes.every_n_steps=2"]
    with_them, without = run(BOTH, *steps, *more), run("hooks=[]", *more)
    for key in ("state_dict", "optimizer_states", "exp_recording"):  # the last has the sum of the losses
        one, other = (str(checkpoint(directory)[key]) for directory in (with_them, without))
        assert one == other
    assert len(list((with_them / "operators").iterdir())) == 2


def test_of_two_ranks_the_first_one_looks(ranks) -> None:
    trained = ranks.train(*SHORT, "strategy=ddp", BOTH, ranks=2)
    (path,) = (trained.directory / "operators").iterdir()
    assert "| 1 | hidden | addmm | [16] [32, 64] [64, 16] → [32, 16] |" in path.read_text()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("strategy=fsdp", "a Operators hook with strategy=fsdp"),
        ("strategy=pipeline", "a Dtypes hook with strategy=pipeline"),
        (
            "hooks.operators.steps=[2];hooks.operators.every_n_steps=3",
            "steps: [2], beside every_n_steps 3",
        ),
        ("hooks.operators.steps=[]", "hooks.operators.steps: []; expected optimizer steps counted from 1"),
        ("hooks.operators.modules=[encoder]", "hooks.operators.modules: 'encoder'; expected a pattern of module names"),
    ],
)
def test_what_they_cannot_do_is_said_before_the_run(line: str, expected: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([BOTH, *line.split(";"), "launch.accelerator=cpu"]))
    assert expected in str(caught.value)


def test_a_node_is_numbered_by_when_it_was_made_and_known_while_it_runs() -> None:
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
    nodes = {node.name(): node for node in nodes_behind(loss)}
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
