"""weights: a network starts from a run, a state dict or safetensors, and unmatched tensors are early errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import exp
from exp.check.examination import examine
from exp.check.resolution import resolve
from exp.engine.checkpoint import read_weights
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
def nets(write):
    write("weight_nets.py", NETS)
    write("conf/model/.empty", "")


def net(classes: int = 10, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    network = nn.Module()
    network.body, network.head = body, nn.Linear(16, classes)
    return network


def checked(*overrides: str):
    examined = examine(resolve(exp.compose(["hydra.run.dir=run", NET, *overrides])))
    examined.plan()
    return examined


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
def test_patterns_match_names_and_copy_values(names, keys, taken):
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


def test_the_summary_names_each_unmatched_tensor():
    given = {**net(classes=5).state_dict(), "extra.weight": torch.zeros(3)}
    del given["body.0.bias"]
    matching = match_weights(given, net(), keys={"extra.*": None, "nowhere.*": "body.*"})
    assert matching.summary("FILE") == (
        "weights: 6 of 9 tensors start from FILE; head.weight is [5, 16] in the file and [10, 16] in the "
        "network; head.bias is [5] in the file and [10] in the network; missing in the file: body.0.bias; "
        "left out by weights.keys: extra.weight"
    )
    assert list(matching.unmatched) == ["nowhere.*"]
    assert not matching.is_whole


def test_a_tied_weight_needs_one_of_its_names():
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
def test_weight_files_of_other_programs_are_read(wrap, tmp_path):
    state = net().state_dict()
    torch.save(wrap(state), tmp_path / "w.pt")
    found = read_weights(tmp_path / "w.pt")
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_file_that_contains_code_is_refused(tmp_path):
    torch.save(net(), tmp_path / "w.pt")
    with pytest.raises(RunError, match="would execute code"):
        read_weights(tmp_path / "w.pt")
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(RunError, match="is damaged, or is not a file of"):
        read_weights(tmp_path / "text.pt")
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(RunError, match=r"contains no state dict.*has the entries a"):
        read_weights(tmp_path / "other.pt")


def test_safetensors_are_read_or_reported_as_an_extra(tmp_path, monkeypatch):
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


def test_weights_that_do_not_fit_are_refused():
    torch.save(net(classes=5).state_dict(), "five.pt")
    message = refused("weights.from=five.pt")
    assert (
        "weights.strict: true, and five.pt does not match the network: head.weight is [5, 16] in the file and [10, 16]"
        in message
    )
    assert "weights.strict=false to load only the matching tensors" in message
    found = checked("weights.from=five.pt", "weights.strict=false")
    assert any("7 of 9 tensors start from five.pt" in note for note in found.notes)
    torch.save({f"old.{name}": one for name, one in net().state_dict().items()}, "old.pt")
    message = refused("weights.from=old.pt")
    assert "weights.from: old.pt, which has no tensor with a name and shape of the network" in message
    assert 'Write weights.keys: {"old.*": "*"}' in message
    assert checked("weights.from=old.pt", "+weights.keys={old.*: '*'}").matching.is_whole
    message = refused("weights.from=five.pt", "+weights.keys={bodi.*: x.*}", "weights.strict=false")
    assert "weights.keys.bodi.*: no tensor of five.pt matches" in message
    assert "Did you mean body?" in message
    assert "with 2 stars" in refused("weights.from=old.pt", "+weights.keys={old.*: '*.*'}")
    assert "which both become head.x" in refused("weights.from=five.pt", "+weights.keys={head.*: head.x}")
    assert "expected an existing run directory" in refused("weights.from=nowhere.pt")
    assert "contains no checkpoint" in refused("weights.from=conf")
    assert "is damaged, or is not a file of torch.save" in refused("weights.from=weight_nets.py")


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_put_a_new_head_on_the_body_of_a_run(ranks, strategy):
    """weights.from with a run directory means its best checkpoint."""
    before = ranks.train(NET, *SHORT)
    other = NET.replace("Net}", "Net, deep: true}")
    start = [other, *SHORT, f"weights.from={before.directory}", "weights.strict=false", "optimizer.lr=0"]
    old = before.checkpoint("best")["state_dict"]
    found = ranks.train(*start, f"strategy={strategy}", "launch.devices=2", ranks=2)
    new = found.checkpoint()["state_dict"]
    for name in ("network.body.0.weight", "network.body.0.bias", "network.body.1.weight"):
        assert torch.equal(new[name], old[name]), name
    assert new["network.head.0.weight"].shape == (12, 16)
    frozen = (found.directory / "config.yaml").read_text()
    assert f"from: {before.directory}/checkpoints/best.ckpt" in frozen
    # A resume does not need the file of weights.from.
    (before.directory / "checkpoints" / "best.ckpt").rename(before.directory / "gone")
    again = [*start, "trainer.max_epochs=2", f"resume={found.directory}/checkpoints/last.ckpt"]
    assert ranks.train(*again, "strategy=single").report["status"] == "completed"


def test_a_run_starts_from_the_average_or_the_trained_weights():
    first = exp.fit(exp.compose([NET, *SHORT, "callbacks=[ema]", "optimizer.lr=0.1"]))
    checkpoint = Path(first.directory, "checkpoints", "last.ckpt")
    averaged, trained = read_weights(checkpoint), read_weights(checkpoint, averaged=False)
    assert list(averaged) == list(trained)
    assert not torch.equal(averaged["head.weight"], trained["head.weight"])
    other = exp.fit(exp.compose([NET, *SHORT]))
    with pytest.raises(RunError, match="has no average"):
        read_weights(Path(other.directory, "checkpoints", "last.ckpt"), averaged=False)


def test_weights_can_be_tested_without_training():
    torch.save(net().state_dict(), "net.pt")
    words = ["metrics=[]", "hooks=[]", "logger=[]", "train=false", "test=true", "weights.from=net.pt"]
    assert exp.fit(exp.compose([NET, *words])).status == "completed"
