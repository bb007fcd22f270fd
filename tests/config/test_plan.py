"""The decided run: made once a process, from a config that stays as it is, with one forward without memory."""

from __future__ import annotations

import copy
import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import exp
from exp import construct
from exp.build import build
from exp.check.plan import adopt, examine, frozen, plan, refuse_other_data, resolve
from exp.config.freeze import freeze
from exp.strategies.rank import ALONE

FAULTY = ["model=lenet", "data=wine", "trainer.max_epochs=-1", "hooks.gradients.modules=[nothing]", "monitor=los/val"]
# Counts in this process, and in each rank, what a run is to make once; lives in a module that a config may name.
COUNTING = """
import json, os
from pathlib import Path

from exp.hooks.hook import Hook
from exp.strategies.ddp import DDP
from exp.strategies.single import Single
from torch import nn

made, forwards = [], []


class CountedDDP(DDP):
    def __init__(self, *, name="ddp"):
        made.append(name)
        super().__init__(name=name)


class CountedSingle(Single):
    def __init__(self, *, name="single"):
        made.append(name)
        super().__init__(name=name)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.LazyLinear(10)

    def forward(self, x):
        if x.is_meta:
            forwards.append(tuple(x.shape))
        return self.head(self.flatten(x))


class Counting(Hook):
    def after_step(self, step):
        Path(os.environ["COUNTS"], f"{os.getpid()}.json").write_text(json.dumps([made, len(forwards)]))
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("overrides", [[], ["data=text"], ["experiment=gan"], FAULTY])
def test_a_config_is_the_same_before_and_behind_the_check(overrides: list[str]) -> None:
    config = exp.compose(overrides)
    before = copy.deepcopy(config)
    found = [examine(resolve(config)).faults for _ in range(2)]
    assert config == before
    assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(before)
    assert found[0] == found[1]
    assert bool(found[0]) == (overrides is FAULTY)


def test_what_the_data_says_is_in_the_resolved_config() -> None:
    config = exp.compose(["data=text"])
    resolved = resolve(config)
    assert config.data.input_shape is None
    assert len(resolved.config.data.input_shape) == 1
    assert resolved.plain["data"]["num_classes"] == resolved.plain["model"]["layers"]["tokens"]["num_embeddings"]


def test_the_check_of_a_run_builds_nothing_twice_and_the_run_takes_what_it_built(monkeypatch) -> None:
    built = Counter()
    call = construct._call

    def counted(node, *, key, **rest):
        built[key] += 1
        return call(node, key=key, **rest)

    monkeypatch.setattr(construct, "_call", counted)
    decided = plan(resolve(exp.compose([])))
    refuse_other_data(decided)
    assert {"data", "data.dataset", "strategy", "objective.cross_entropy", "hooks.memory"} < built.keys()
    assert set(built.values()) == {1}
    parts = build(decided, freeze(decided.resolved.config), rank=ALONE)
    assert parts.data.data is decided.data
    again = {key.partition(".")[0] for key, count in built.items() if count > 1}
    assert not again & {"data", "objective", "metrics", "hooks", "strategy"}


def test_a_rank_decides_what_its_parent_did() -> None:
    decided = plan(resolve(exp.compose(["data=wine", "model=mlp", "+precision=bf16"])))
    adopted = adopt(frozen(freeze(decided.resolved.config)), rank=ALONE)
    assert adopted.plain == decided.plain
    assert adopted.resolved.yaml == decided.resolved.yaml
    assert (adopted.placement, adopted.spec) == (decided.placement, decided.spec)
    shapes = [(name, tuple(p.shape)) for name, p in decided.shapes.network.named_parameters()]
    assert [(name, tuple(p.shape)) for name, p in adopted.shapes.network.named_parameters()] == shapes
    assert adopted.shapes is adopted.shapes


def test_the_trace_knows_what_each_module_took_and_gave() -> None:
    decided = plan(resolve(exp.compose(["model=lenet"])))
    trace = decided.shapes.traces[None]
    calls = trace.by_path()
    spec = decided.spec
    assert calls[""][0].inputs[0].shape == (2, *spec.input_shape)
    assert calls[""][0].output.shape == (2, 10)
    for path, module in trace.network.named_modules():
        if isinstance(module, nn.Linear):
            (call,) = calls[path]
            assert call.inputs[0].shape[-1] == module.in_features
            assert call.output.shape[-1] == module.out_features
    assert all(parameter.device == torch.device("meta") for parameter in trace.network.parameters())


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_strategy_and_forward_without_memory_are_made_once_a_process(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"counting_{strategy}"  # a module of its own, which no other folder's stands in for
    (tmp_path / f"{name}.py").write_text(COUNTING)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "counted.yaml").write_text(f"# Counts: model=counted\n_target_: {name}.Net\n")
    (tmp_path / "conf" / "strategy").mkdir()
    kind = {"single": "CountedSingle", "ddp": "CountedDDP"}[strategy]
    yaml = f"# Counts: strategy=counted\n_target_: {name}.{kind}\nname: {strategy}\n"
    (tmp_path / "conf" / "strategy" / "counted.yaml").write_text(yaml)
    (tmp_path / "counts").mkdir()
    monkeypatch.setenv("COUNTS", str(tmp_path / "counts"))
    monkeypatch.syspath_prepend(str(tmp_path))
    counting = importlib.import_module(name)
    overrides = ["model=counted", "strategy=counted", "launch.accelerator=cpu", "trainer.max_steps=2", "test=false"]
    overrides += ["logger.tensorboard.graph=true", f"+hooks.counting={{_target_: {name}.Counting}}"]
    exp.fit(exp.compose(overrides))
    assert (counting.made, len(counting.forwards)) == ([strategy], 1)
    counts = [json.loads(file.read_text()) for file in (tmp_path / "counts").glob("*.json")]
    assert len(counts) == (2 if strategy == "ddp" else 1)
    for made, forwards in counts:
        assert made == [strategy]
        assert forwards <= 1
