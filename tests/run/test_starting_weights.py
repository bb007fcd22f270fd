"""weights: a network starts from a run, a state dict or safetensors; what does not match is told before the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import exp
from exp.check.plan import plan, resolve
from exp.engine.weight_files import read_weights
from exp.errors import ConfigError, MissingExtraError, RunError
from exp.models.weights import load_weights, match_weights

NETS = """
from torch import nn


class Net(nn.Module):
    def __init__(self, deep: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 10)) if deep else nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)))
"""
NET = "model={_target_: weight_nets.Net}"
SHORT = ["metrics=[]", "hooks=[]", "logger=[]", "trainer.max_epochs=1", "trainer.limit_train_batches=3", "test=false"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "weight_nets", raising=False)
    Path("conf/model").mkdir(parents=True)
    Path("weight_nets.py").write_text(NETS)


def net(classes: int = 10, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    network = nn.Module()
    network.body, network.head = body, nn.Linear(16, classes)
    return network


def checked(*overrides: str):
    return plan(resolve(exp.compose(["hydra.run.dir=run", NET, *overrides])))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "keys", "taken"),
    [
        ({}, {}, 9),
        ({"body.": "encoder."}, {"encoder.*": "body.*"}, 9),
        ({"": "model."}, {"model.*": "*"}, 9),
        ({"body.0": "first"}, {"first.*": "body.0.*", "head.*": None}, 7),
        ({"body.0": "a.x", "body.1": "b.x"}, {"a.x.*": "body.0.*", "*.x.weight": "body.1.weight"}, 5),
    ],
)
def test_names_are_matched_by_patterns_and_values_copied(names, keys, taken):
    given = net(seed=1).state_dict()
    for old, new in names.items():
        given = {name.replace(old, new, 1) if name.startswith(old) else name: one for name, one in given.items()}
    network = net(seed=2)
    matching = match_weights(given, network, keys=keys)
    load_weights(network, given, matching)
    assert len(matching.taken) == taken
    own = network.state_dict()
    assert all(torch.equal(own[name], given[theirs]) for name, theirs in matching.taken.items())
    assert "head.weight" not in matching.taken or torch.equal(own["head.weight"], net(seed=1).head.weight)


def test_what_does_not_match_is_in_the_table_with_its_reason():
    given = {**net(classes=5).state_dict(), "extra.weight": torch.zeros(3)}
    del given["body.0.bias"]
    matching = match_weights(given, net(), keys={"extra.*": None, "nowhere.*": "body.*"})
    table = matching.table("FILE")
    assert "weights: 6 of 9 tensors start from FILE" in table
    assert "body: 6 taken" in table
    assert "head.weight: as initialised, for its shape is [10, 16], and that of head.weight [5, 16]" in table
    assert "body.0.bias: as initialised, for the weights have no such name" in table
    assert "extra.weight of the weights: left out by weights.keys" in table
    assert list(matching.unmatched) == ["nowhere.*"]
    assert not matching.is_whole


def test_a_tied_weight_is_there_under_one_of_its_names():
    network = nn.Module()
    network.first, network.last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    network.last.weight = network.first.weight
    given = {"first.weight": torch.ones(5, 3)}
    assert match_weights(given, network, keys={}).is_whole


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        lambda state: {f"module.{name}": one for name, one in state.items()},
        lambda state: {"state_dict": {f"_orig_mod.module.{name}": one for name, one in state.items()}},
    ],
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_files_of_other_programs_are_read(wrap, is_zip, tmp_path):
    state = net().state_dict()
    torch.save(wrap(state), tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    found = read_weights(tmp_path / "w.pt")
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_what_would_be_code_is_not_read(tmp_path):
    for is_zip in (True, False):
        torch.save(net(), tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
        with pytest.raises(RunError, match="would be code"):
            read_weights(tmp_path / "w.pt")
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(RunError, match="cannot be read as weights"):
        read_weights(tmp_path / "text.pt")
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(RunError, match=r"holds no tensors by name.*It holds a"):
        read_weights(tmp_path / "other.pt")


def test_safetensors_are_read_or_named_as_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"exp-framework\[safetensors\]"):
        read_weights(tmp_path / "w.safetensors")
    monkeypatch.undo()
    safetensors = pytest.importorskip("safetensors.torch", reason="the extra safetensors is not installed")
    safetensors.save_file(net().state_dict(), tmp_path / "w.safetensors")
    assert list(read_weights(tmp_path / "w.safetensors")) != []
    (tmp_path / "broken.safetensors").write_bytes(b"abc")
    with pytest.raises(RunError, match="cannot be read as safetensors"):
        read_weights(tmp_path / "broken.safetensors")


def test_what_does_not_fit_is_told_before_the_run():
    torch.save(net(classes=5).state_dict(), "five.pt")
    told = refused("weights.from=five.pt")
    assert "weights.strict: true, and five.pt is not this network's: head.weight is [5, 16] there and [10, 16]" in told
    assert "weights.strict=false leaves those" in told
    found = checked("weights.from=five.pt", "weights.strict=false")
    assert any("7 of 9 tensors start from five.pt" in note for note in found.notes)
    torch.save({f"old.{name}": one for name, one in net().state_dict().items()}, "old.pt")
    told = refused("weights.from=old.pt")
    assert "weights.from: old.pt, of which no tensor has the name" in told
    assert 'With weights.keys: {"old.*": "*"}' in told
    assert checked("weights.from=old.pt", "+weights.keys={old.*: '*'}").weights.is_whole
    told = refused("weights.from=five.pt", "+weights.keys={bodi.*: x.*}", "weights.strict=false")
    assert "weights.keys.bodi.*: no tensor of five.pt matches" in told
    assert "Did you mean body?" in told
    assert "with 2 stars" in refused("weights.from=old.pt", "+weights.keys={old.*: '*.*'}")
    assert "which both become head.x" in refused("weights.from=five.pt", "+weights.keys={head.*: head.x}")
    assert "that is there" in refused("weights.from=nowhere.pt")
    assert "a directory without weights" in refused("weights.from=conf")
    assert "would be code" in refused("weights.from=weight_nets.py")


def test_a_new_head_on_the_body_of_a_run_over_ranks(ranks):
    """The run directory is its best checkpoint; each rank, and fsdp, starts from the same."""
    before = ranks.train(NET, *SHORT)
    other = NET.replace("Net}", "Net, deep: true}")
    start = [other, *SHORT, f"weights.from={before.directory}", "weights.strict=false", "optimizer.lr=0"]
    old = before.checkpoint("best")["state_dict"]
    for strategy in ("ddp", "fsdp"):
        found = ranks.train(*start, f"strategy={strategy}", "launch.devices=2", ranks=2)
        new = found.checkpoint()["state_dict"]
        for name in ("network.body.0.weight", "network.body.0.bias", "network.body.1.weight"):
            assert torch.equal(new[name], old[name]), (strategy, name)
        assert new["network.head.0.weight"].shape == (12, 16)
    frozen = (found.directory / "config.yaml").read_text()
    assert f"from: {before.directory}/checkpoints/best.ckpt" in frozen
    # Its own checkpoint goes on without the weights, which may be gone.
    (before.directory / "checkpoints" / "best.ckpt").rename(before.directory / "gone")
    again = [*start, "trainer.max_epochs=2", f"resume={found.directory}/checkpoints/last.ckpt"]
    assert ranks.train(*again, "strategy=single").report["status"] == "completed"


def test_of_an_average_either_may_be_the_start(ranks):
    found = ranks.train(NET, *SHORT, "callbacks=[ema]", "optimizer.lr=0.1")
    averaged = read_weights(found.directory / "checkpoints" / "last.ckpt")
    trained = read_weights(found.directory / "checkpoints" / "last.ckpt", averaged=False)
    assert list(averaged) == list(trained)
    assert not torch.equal(averaged["head.weight"], trained["head.weight"])
    other = ranks.train(NET, *SHORT)
    with pytest.raises(RunError, match="has no average"):
        read_weights(other.directory / "checkpoints" / "last.ckpt", averaged=False)


def test_weights_can_be_tested_without_training(ranks):
    torch.save(net().state_dict(), "net.pt")
    found = ranks.train(NET, "metrics=[]", "hooks=[]", "logger=[]", "train=false", "test=true", "weights.from=net.pt")
    assert found.report["status"] == "completed"
