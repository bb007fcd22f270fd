"""The plan is made once per process with one forward pass on the meta device, and does not change the config."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import exp
from exp.build import build
from exp.check.examination import config_errors, examine, plan
from exp.check.first_samples import refuse_other_data
from exp.check.plan import adopt, read_resolved
from exp.check.resolution import resolve
from exp.config.freeze import freeze
from exp.strategies.rank import ALONE

# With these sizes in the config, the check does not build the data set.
SIZES = "input_shape: [4], input_dtype: float32, num_outputs: 3, num_classes: 3"
FAULTY = ["model=lenet", "data=wine", "trainer.max_epochs=-1", "hooks.gradients.modules=[nothing]", "monitor=los/val"]
# Classes that count constructions and forward passes on the meta device.
COUNTING = """
import torch
from exp.hooks.hook import Hook
from exp.strategies.single import Single
from torch import nn
from torch.utils.data import TensorDataset

made, forwards = [], []


class CountedSingle(Single):
    def __init__(self, *, name="single"):
        made.append("strategy")
        super().__init__(name=name)


class Samples(TensorDataset):
    def __init__(self):
        made.append("dataset")
        super().__init__(torch.ones(200, 4), torch.arange(200) % 3)


class Loss(nn.CrossEntropyLoss):
    def __init__(self):
        made.append("loss")
        super().__init__()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        if x.is_meta:
            forwards.append(tuple(x.shape))
        return self.head(x)


class Counting(Hook):
    def __init__(self):
        made.append("hook")
        super().__init__()

    def after_step(self, step):
        pass
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """The module with counting classes, and a config that uses them."""
    name = f"counting_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = f"{{_target_: exp.data.data.Data, dataset: {{_target_: {name}.Samples}}, {SIZES}}}"
    overrides = [
        f"model={{_target_: {name}.Net}}",
        f"data={data}",
        f"strategy={{_target_: {name}.CountedSingle, name: single}}",
    ]
    overrides += [
        "objective=[]",
        f"+objective.counted={{_target_: {name}.Loss}}",
        f"+hooks.counting={{_target_: {name}.Counting}}",
    ]
    overrides += [
        f"security.allow=[{name}]",
        "launch.accelerator=cpu",
        "trainer.max_steps=2",
        "test=false",
    ]
    return importlib.import_module(name), exp.compose(overrides)


@pytest.mark.parametrize("overrides", [["data=text"], FAULTY])
def test_the_check_does_not_change_a_config(overrides: list[str]) -> None:
    config = exp.compose(overrides)
    before = copy.deepcopy(config)
    found = [examine(resolve(config)).errors for _ in range(2)]
    assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(before)
    assert found[0] == found[1]
    assert bool(found[0]) == (overrides is FAULTY)


def test_the_data_fill_in_missing_sizes() -> None:
    config = exp.compose(["data=text"])
    resolved = resolve(config)
    assert config.data.input_shape is None
    assert len(resolved.config.data.input_shape) == 1
    assert resolved.plain["data"]["num_classes"] == resolved.plain["model"]["layers"]["tokens"]["num_embeddings"]


def test_data_without_targets_have_neither_classes_nor_outputs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"input": torch.rand(80, 1, 8, 8)}, "faces.pt")
    data = ["data=tensors", "data.dataset.path=faces.pt", "data.dataset.target=null", "metrics=[]"]
    decided = plan(resolve(exp.compose([*data, "experiment=gan", "launch.accelerator=cpu"])))
    assert (decided.spec.input_shape, decided.spec.num_classes, decided.spec.num_outputs) == ((1, 8, 8), None, None)
    (error,) = config_errors(exp.compose(data))
    assert "${data.num_outputs}, which is null" in str(error)


def test_a_rank_plans_what_its_parent_planned() -> None:
    decided = plan(resolve(exp.compose(["data=wine", "model=mlp", "+precision=bf16"])))
    adopted = adopt(read_resolved(freeze(decided.resolved.config)), rank=ALONE)
    assert adopted.resolved.yaml == decided.resolved.yaml
    assert (adopted.placement, adopted.spec) == (decided.placement, decided.spec)
    shapes = [(name, tuple(p.shape)) for name, p in decided.shapes.network.named_parameters()]
    assert [(name, tuple(p.shape)) for name, p in adopted.shapes.network.named_parameters()] == shapes


def test_the_trace_records_inputs_and_outputs_of_modules() -> None:
    decided = plan(resolve(exp.compose(["model=lenet"])))
    trace = decided.shapes.traces[None]
    calls = trace.by_path()
    assert calls[""][0].inputs[0].shape == (2, *decided.spec.input_shape)
    assert calls[""][0].output.shape == (2, 10)
    for path, module in trace.network.named_modules():
        if isinstance(module, nn.Linear):
            (call,) = calls[path]
            assert call.inputs[0].shape[-1] == module.in_features
            assert call.output.shape[-1] == module.out_features
    assert all(parameter.device == torch.device("meta") for parameter in trace.network.parameters())


def test_a_run_constructs_and_traces_once(counting) -> None:
    module, config = counting
    once = dict.fromkeys(("dataset", "hook", "loss", "strategy"), 1)
    decided = plan(resolve(config))
    refuse_other_data(decided)
    assert (Counter(module.made), len(module.forwards)) == (once, 1)
    assert build(decided, freeze(decided.resolved.config), rank=ALONE).data.data is decided.data
    assert (Counter(module.made), len(module.forwards)) == (once, 1)
    module.made.clear()
    module.forwards.clear()
    exp.fit(config)
    assert (Counter(module.made), len(module.forwards)) == (once, 1)
