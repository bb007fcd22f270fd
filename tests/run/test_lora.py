"""The key lora equals LoRA by hand, also after a resume and with several ranks, and merges into plain weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.construct import build_network, build_starting_network
from exp.errors import ConfigError
from exp.models.lora import LowRank, adapt, merge, merge_state_dict

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.hidden = nn.Linear(16, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.norm(self.stem(x.flatten(1))))))
"""
NET = "model={_target_: lora_nets.Net}"
SHORT = [
    NET, "metrics=[]", "hooks=[]", "logger=[]", "test=false", "optimizer=sgd", "optimizer.lr=0.05",
    "trainer.enable_progress_bar=false", "trainer.limit_val_batches=1", "launch.accelerator=cpu",
]  # fmt: skip
LORA = ["lora.layers=[stem, hidden]", "lora.rank=3", "lora.alpha=12", "lora.trained=[head]", "freeze.batch_norm=eval"]


@pytest.fixture(autouse=True)
def nets(write):
    write("lora_nets.py", NETS)
    write("conf/model/.empty", "")


def checked(*overrides: str):
    return plan(resolve(exp.compose(["hydra.run.dir=run", *SHORT, *overrides])))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    return str(caught.value)


def trained(*overrides: str, directory: str) -> dict:
    exp.fit(exp.compose([f"hydra.run.dir={directory}", *SHORT, *overrides]))
    return torch.load(f"{directory}/checkpoints/last.ckpt", weights_only=True)


class ByHand(nn.Module):
    """Linear layer plus the product of two small matrices."""

    def __init__(self, linear: nn.Linear, a: torch.Tensor, *, alpha: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, alpha / len(a)
        self.a, self.b = nn.Parameter(a), nn.Parameter(torch.zeros(linear.out_features, len(a), dtype=a.dtype))

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.a.T) @ self.b.T


def test_training_equals_lora_by_hand():
    run = ["precision=fp64", "data.batch_size=1258", "trainer.max_epochs=4", "optimizer.momentum=0.9", *LORA]
    found = trained(*run, directory="run")["state_dict"]
    decided = checked(*run)
    start = build_network(decided.settings, decided.spec).state_dict()
    plain = build_network(checked(*run[:4]).settings, decided.spec).double()
    for name in ("stem", "hidden"):
        a = start[f"{name}.parametrizations.weight.0.a"].double()
        setattr(plain, name, ByHand(getattr(plain, name), a, alpha=12))
    learning = [one for name, one in plain.named_parameters() if name.endswith((".a", ".b")) or "head" in name]
    optimizer = torch.optim.SGD(learning, lr=0.05, momentum=0.9)
    ((x, y),) = (batch.data for batch in decided.data.loader("train"))
    plain.norm.eval()
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x.double()), y).backward()
        optimizer.step()
    for name, theirs in {
        "stem.parametrizations.weight.0.a": plain.stem.a, "stem.parametrizations.weight.0.b": plain.stem.b,
        "hidden.parametrizations.weight.0.a": plain.hidden.a, "head.bias": plain.head.bias,
        "stem.parametrizations.weight.original": plain.stem.linear.weight, "stem.bias": plain.stem.linear.bias,
        "norm.running_mean": plain.norm.running_mean,
    }.items():  # fmt: skip
        torch.testing.assert_close(found[f"network.{name}"], theirs.detach(), rtol=1e-12, atol=1e-12)
    assert plain.stem.b.abs().max() > 1e-3


@pytest.mark.any_processor
def test_a_run_resumes_exactly_and_merges_into_a_plain_network():
    run = [*LORA, "trainer.max_epochs=2", "trainer.limit_train_batches=3"]
    whole = trained(*run, directory="whole")
    trained(*run, "trainer.max_steps=2", directory="first")
    again = trained(*run, "resume=first/checkpoints/last.ckpt", directory="again")
    assert all(torch.equal(again["state_dict"][name], one) for name, one in whole["state_dict"].items())
    assert len(whole["optimizer_states"][0]["param_groups"][0]["params"]) == 6
    decided = checked("weights.from=whole")
    plain = build_starting_network(decided.settings, decided.spec).eval()
    adapted = build_network(checked(*LORA).settings, decided.spec).eval()
    adapted.load_state_dict({name.removeprefix("network."): one for name, one in whole["state_dict"].items()})
    x = torch.randn(5, 64)
    torch.testing.assert_close(plain(x), adapted(x), rtol=1e-5, atol=1e-6)
    merge(adapted)
    assert [type(one) for one in adapted.modules()] == [type(one) for one in plain.modules()]
    torch.testing.assert_close(adapted.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
    # A second run with lora starts from the merged weights.
    second = checked(*LORA, "lora.rank=1", "weights.from=whole")
    network = build_starting_network(second.settings, second.spec).eval()
    assert torch.equal(network.stem.parametrizations.weight.original, plain.stem.weight)
    assert torch.equal(network.stem.weight, plain.stem.weight)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
        (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 5)),
        (lambda: nn.Embedding(9, 5), None),
        (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (2, 3, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
    ],
)
def test_any_layer_with_a_weight_learns_and_merges(layer, shape):
    torch.manual_seed(0)
    network = nn.Sequential(layer()).double()
    inputs = torch.randint(9, (2, 3)) if shape is None else torch.randn(shape, dtype=torch.float64)
    given = [inputs] * (3 if isinstance(network[0], nn.MultiheadAttention) else 1)
    before = network[0](*given)
    adapt(network, layers=["*"], rank=2, alpha=4)
    result = network[0](*given)
    total = sum(one.square().sum() for one in ([result] if isinstance(result, torch.Tensor) else result))
    torch.testing.assert_close(result, before, rtol=1e-12, atol=1e-12)
    total.backward()
    added = [one for one in network.modules() if isinstance(one, LowRank)]
    assert added
    assert all(one.b.grad is not None and one.b.grad.abs().max() > 0 for one in added)
    assert {id(one) for one in network.parameters() if one.requires_grad} == {
        id(one) for part in added for one in (part.a, part.b)
    }
    with torch.no_grad():
        for one in added:
            one.b.normal_()
    state, network = merge_state_dict(network.state_dict()), network.eval()
    with torch.no_grad():
        changed = network[0](*given)
        merge(copy.deepcopy(network))  # merging a copy does not change the original
        merge(network)
        torch.testing.assert_close(network[0](*given), changed, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(network.state_dict(), state, rtol=1e-12, atol=1e-12)


def test_a_layer_that_cannot_be_adapted_is_refused():
    message = refused("lora.layers=[stme, norm]", "lora.trained=[haed]")
    assert "lora.layers.0: no parameter matches 'stme'" in message
    assert "Did you mean stem?" in message
    assert (
        "lora.layers.1: 'norm', which matches norm.weight, norm.bias; expected a layer with a weight of two or"
        in message
    )
    assert "lora.trained.0: no parameter matches 'haed'" in message
    # lora.trained takes precedence: head is trained in full, although lora.layers matches it.
    names = [
        name for name, _ in checked("lora.layers=[Linear]", "lora.trained=[head]").shapes.network.named_parameters()
    ]
    assert "head.weight" in names
    assert "stem.parametrizations.weight.0.a" in names
    message = refused(*LORA, "freeze.parameters=[norm]")
    assert "freeze.parameters: ['norm'] with lora.layers; expected an empty value" in message
    for strategy in ("pipeline", "tensor_parallel", "deepspeed"):
        assert f"lora.layers: LoRA with strategy={strategy}" in refused(
            f"strategy={strategy}", "launch.devices=2", *LORA
        )
    with pytest.raises(ConfigError, match="that is not recurrent"):
        adapt(nn.LSTM(3, 4), layers=["LSTM"], rank=1, alpha=None)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_adapt_as_one_process_does(ranks, strategy):
    run = [*SHORT, "precision=fp64", "trainer.limit_train_batches=3", "trainer.max_epochs=1", *LORA]
    alone = ranks.train(*run).checkpoint()["state_dict"]
    found = ranks.train(*run, f"strategy={strategy}", "launch.devices=2", ranks=2).checkpoint()["state_dict"]
    torch.testing.assert_close(dict(found), dict(alone), rtol=1e-10, atol=1e-10)
