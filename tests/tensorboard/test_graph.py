"""The Graphs tab: layers and functions by name, connected as in the forward."""

from __future__ import annotations

import inspect

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.models.forward_trace import ForwardTrace, Recorder
from exp.tensorboard.summaries import graph_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu_()


def traced(network: nn.Module, *inputs: torch.Tensor) -> ForwardTrace:
    with Recorder() as recorder, torch.device("meta"):
        return recorder.trace(network, dict(zip(inspect.signature(network.forward).parameters, inputs, strict=False)))


def nodes(graph) -> dict[str, list[str]]:
    return {node.name: list(node.input) for node in graph.node}


def test_the_graph_of_a_residual_block():
    network = nn.Sequential(Block(), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    before = torch.random.get_rng_state()
    graph = graph_of(traced(network.to("meta"), torch.zeros(3, 4, device="meta")))
    assert nodes(graph) == {
        "input": [],
        "0/norm/batch_norm": ["input"],
        "0/linear/linear": ["0/norm/batch_norm"],
        "0/relu": ["0/linear/linear"],
        "0/add": ["input", "0/relu"],
        "1/dropout": ["0/add"],
        "2/linear": ["1/dropout"],
        "output": ["2/linear"],
    }
    (shape,) = graph.node[-2].attr["_output_shapes"].list.shape
    assert [dim.size for dim in shape.dim] == [3, 2]
    # The network is unchanged.
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(module.training for module in network.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("overrides", ["model=shared", "model=rnn", "data=text"])
def test_the_graph_connects_input_and_output(overrides):
    seen = plan(resolve(exp.compose([overrides]))).shapes
    network = seen.network
    wires = nodes(graph_of(seen.traces[None]))
    reached, waiting = set(), ["output"]
    while waiting:
        reached.add(name := waiting.pop())
        waiting += [source for source in wires[name] if source not in reached]
    assert "input" in reached
    parameters = nn.ParameterList | nn.ParameterDict
    called = {name for name, child in network.named_children() if not isinstance(child, parameters)}
    assert called <= {name.partition("/")[0] for name in wires}


# Its forward reads a number, which the meta device does not have.
REFUSING = """
from torch import nn

class Refusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.linear(x * 2 if x.sum().item() > 0 else x)
"""


def test_a_run_draws_its_graph_on_request(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    small = ["trainer.max_steps=2", "test=false", "logger.tensorboard.graph=true", "hooks=[]"]
    report = exp.fit(exp.compose(small))
    read = EventAccumulator(f"{report.directory}/tensorboard").Reload()
    assert "head/linear" in {node.name for node in read.Graph().node}
    (tmp_path / "conf" / "model").mkdir(parents=True)
    yaml = "# Needs numbers: model=refusing\n_target_: refusing.Refusing\n"
    (tmp_path / "conf" / "model" / "refusing.yaml").write_text(yaml)
    (tmp_path / "refusing.py").write_text(REFUSING)
    assert exp.fit(exp.compose([*small, "model=refusing"])).status == "completed"
    assert "the graph is left out" in caplog.text
