"""freeze and initialisation for any network: matched parameters, epochs in which they train, and errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.construct import build_network
from exp.engine.forward import named_values
from exp.errors import ConfigError
from exp.models.freezing import find_frozen
from exp.models.initialisation import initialise
from exp.models.matching import find_parameters

NETS = """
from torch import nn


class Block(nn.Sequential):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 16)
        self.body = Block(nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.plain = nn.BatchNorm1d(16, affine=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.plain(self.body(self.stem(x.flatten(1)))))
"""
NET = "model={_target_: frozen_nets.Net}"
SHORT = [
    NET, "metrics=[]", "hooks=[]", "logger=[]", "test=false", "optimizer=sgd", "optimizer.lr=0.05",
    "trainer.enable_progress_bar=false", "trainer.limit_val_batches=1", "launch.accelerator=cpu",
]  # fmt: skip
LATER = [
    "freeze.parameters=[stem, Block, plain.*]",
    "freeze.batch_norm=eval",
    "+freeze.unfreeze={1: [body.2], 2: ['*']}",
]


@pytest.fixture(autouse=True)
def nets(write):
    write("frozen_nets.py", NETS)
    write("conf/model/.empty", "")


def net() -> nn.Module:
    import frozen_nets

    torch.manual_seed(0)
    return frozen_nets.Net()


def checked(*overrides: str):
    return plan(resolve(exp.compose(["hydra.run.dir=run", *SHORT, *overrides])))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("head.*", "head.weight head.bias"),
        ("head", "head.weight head.bias"),
        ("body", "body.0.weight body.0.bias body.2.weight body.2.bias"),
        ("Block", "body.0.weight body.0.bias body.2.weight body.2.bias"),
        ("BatchNorm1d", "body.0.weight body.0.bias"),
        ("torch.nn.Linear.bias", "stem.bias body.2.bias head.bias"),
        ("Linear.w*", "stem.weight body.2.weight head.weight"),
        ("*.0.weight", "body.0.weight"),
    ],
)
def test_a_pattern_names_parameters_layers_or_types(pattern, names):
    assert find_parameters(net(), pattern, key="freeze.0") == names.split()


def test_a_wrong_freeze_is_refused_with_the_closest_name():
    message = refused("freeze.parameters=['haed.*', ReLU]", "+initialisation={Linaer.weight: zeros}")
    assert "initialisation.Linaer.weight: no parameter matches" in message
    message = refused("freeze.parameters=[haed, ReLU]")
    assert "freeze.parameters.0: no parameter matches 'haed'" in message
    assert "Did you mean head?" in message
    assert "freeze.parameters.1: 'ReLU' matches only layers without parameters" in message
    message = refused("freeze.parameters=[body]", "+freeze.unfreeze={2: [head]}")
    assert "freeze.unfreeze.2: 'head', which matches no frozen parameter" in message
    assert "freeze.parameters: the patterns freeze all parameters until epoch 3" in refused(
        "freeze.parameters=['*']", "+freeze.unfreeze={3: [head]}"
    )
    assert "all 8 parameters are frozen" in refused("freeze.parameters=['*']")
    assert "freeze.unfreeze" in refused("freeze.parameters=[body]", "+freeze.unfreeze={-1: [body]}")
    assert "freeze.unfreeze" in refused("freeze.parameters=[body]", "+freeze.unfreeze={soon: [body]}")
    assert "freeze.batch_norm" in refused("freeze.batch_norm=fixed")


def test_layers_without_a_size_can_be_frozen():
    words = ["model=lenet", "freeze.parameters=[Conv2d]", "+freeze.unfreeze={1: [Conv2d.bias]}"]
    network = plan(resolve(exp.compose([*SHORT[1:], *words]))).shapes.network
    frozen = {
        f"{type(layer).__name__}.{name}"
        for layer in network.modules()
        for name, one in layer.named_parameters(recurse=False)
        if not one.requires_grad
    }
    assert frozen == {"Conv2d.weight"}


def test_initial_values_are_given_by_type():
    network = net()
    initialise(network, {"Linear.weight": {"name": "constant", "val": 2.0}, "head.*": "ones", "BatchNorm1d": "zeros"})
    assert (network.stem.weight == 2).all()
    assert (network.head.weight == 1).all()
    assert not network.body[0].weight.any()
    found = checked("+initialisation={Linear.bias: {name: constant, val: 0.5}}")
    built = build_network(found.settings, found.spec)
    assert (built.stem.bias == 0.5).all()
    assert (built.head.bias == 0.5).all()


def test_a_frozen_batch_norm_keeps_its_statistics():
    network = net()
    freezing = find_frozen(network, parameters=["body", "plain.*"], batch_norm="eval")
    freezing.apply(network)
    for held in (network, copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        held.train()
        before = copy.deepcopy(held.state_dict())
        held(torch.randn(8, 64)).sum().backward()
        assert all(torch.equal(before[name], value) for name, value in held.state_dict().items())
        assert [name for name, one in held.named_parameters() if one.grad is not None] == [
            "stem.weight", "stem.bias", "head.weight", "head.bias",
        ]  # fmt: skip
    # freeze.batch_norm=eval applies to a norm only if all of its parameters are frozen.
    assert find_frozen(network, parameters=["*.weight"], batch_norm="eval").norms == {}
    assert find_frozen(network, parameters=["body"]).norms == {}
    # Parameters that unfreeze in epoch 0 are never frozen.
    head = find_frozen(network, parameters=["*"], batch_norm="eval", unfreeze={0: ["head"]})
    assert sorted(head.norms) == ["body.0", "plain"]
    assert not head.changes
    assert "head.weight" not in head.until
    # A norm updates its statistics again after it is unfrozen.
    later = find_frozen(network, parameters=["body"], batch_norm="eval", unfreeze={3: ["BatchNorm1d"]})
    assert later.norms == {"body.0": 3}
    for epoch, learns in ((2, False), (3, True), (2, False)):
        later.begin_epoch(network, epoch)
        network.train()
        assert network.body[0].training == network.body[0].weight.requires_grad == learns
        assert not network.body[2].weight.requires_grad


def trained(*overrides: str, directory: str) -> dict:
    exp.fit(exp.compose([f"hydra.run.dir={directory}", *SHORT, *overrides]))
    return torch.load(f"{directory}/checkpoints/last.ckpt", weights_only=True)


def test_an_unfrozen_layer_trains_as_by_hand():
    """Weight decay and momentum of a parameter start when it is unfrozen."""
    run = [
        "precision=fp64", "data.batch_size=1258", "trainer.max_epochs=4", *LATER, "optimizer.momentum=0.9",
        "optimizer.weight_decay=0.1", "+optimizer.groups={slow: {parameters: 'stem.*', lr: 0.01}}",
    ]  # fmt: skip
    found = trained(*run, directory="run")["state_dict"]
    decided = checked(*run)
    network = build_network(decided.settings, decided.spec).double()
    (batch,) = decided.data.loader("train")
    x, y = named_values(batch.data).values()
    slow = list(network.stem.parameters())
    rest = [one for name, one in network.named_parameters() if not name.startswith("stem")]
    groups = [{"params": rest}, {"params": slow, "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)
    for epoch in range(4):
        network.train()
        for name, one in network.named_parameters():
            one.requires_grad = name.startswith("head") or epoch >= (1 if name.startswith("body.2") else 2)
        for norm in (network.body[0], network.plain):
            norm.train(epoch >= 2)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x.double()), y).backward()
        optimizer.step()
    for name, value in network.state_dict().items():
        torch.testing.assert_close(found[f"network.{name}"], value, rtol=1e-12, atol=1e-12)


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("step", "states"),
    [(6, 4), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(10, 8, marks=pytest.mark.slow)],
)
def test_a_run_resumes_exactly_around_an_unfreezing(step, states):
    """The run is resumed within the frozen epoch, within the epoch that unfreezes, and within a later epoch."""
    run = ["optimizer=adamw", "trainer.limit_train_batches=4", "trainer.max_epochs=4", *LATER]
    whole = trained(*run, directory="whole")
    first = trained(*run, f"trainer.max_steps={step}", directory="first")
    assert len(first["optimizer_states"][0]["state"]) == states
    again = trained(*run, "resume=first/checkpoints/last.ckpt", directory="again")
    assert all(torch.equal(again["state_dict"][name], value) for name, value in whole["state_dict"].items())


def test_a_resume_with_another_freeze_is_refused(caplog):
    short = ["trainer.limit_train_batches=2", "trainer.max_epochs=1"]
    trained(*short, *LATER, directory="first")
    assert "no gradient" not in caplog.text  # no warning about parameters that train later
    for other in (["freeze.parameters=[stem]"], ["lora.layers=[stem]"], []):
        message = refused(*other, "resume=first/checkpoints/last.ckpt", "trainer.max_epochs=2")
        assert "a checkpoint of another freeze: freeze.parameters was ['stem', 'Block', 'plain.*']" in message


@pytest.mark.any_processor
@pytest.mark.numeric
@pytest.mark.parametrize(
    ("strategy", "unfreezes"), [("ddp", True), pytest.param("fsdp", False, marks=pytest.mark.slow)]
)
def test_ranks_freeze_as_one_process_does(ranks, strategy, unfreezes):
    run = [*SHORT, "precision=fp64", "trainer.limit_train_batches=3", "trainer.max_epochs=3", *LATER[:2]]
    run += ["+freeze.unfreeze={1: [body.2, stem]}"] * unfreezes
    alone = ranks.train(*run).checkpoint()["state_dict"]
    found = ranks.train(*run, f"strategy={strategy}", "launch.devices=2", ranks=2).checkpoint()["state_dict"]
    torch.testing.assert_close(dict(found), dict(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "tensor_parallel", "deepspeed"])
def test_a_strategy_that_cannot_unfreeze_is_refused(strategy):
    message = refused(f"strategy={strategy}", "launch.devices=2", *LATER)
    assert f"freeze.unfreeze: unfreezing in the epochs 1, 2 with strategy={strategy}" in message
