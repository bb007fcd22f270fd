"""Parameter groups: each trained parameter is in one group with the right options, or an error has the reason."""

# ruff: noqa: E501   a message is compared whole

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exp.errors import ConfigError
from exp.optim.optimizer import Optimization, has_fused
from exp.optim.parameter_groups import parameter_groups

AdamW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


class RootMeanSquareNorm(nn.Module):
    """Norm layer of a user."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.LSTM(4, 4)
        self.norm = RootMeanSquareNorm(4)
        self.position = nn.Parameter(torch.zeros(3, 4))
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def named(network: nn.Module, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}


def errors(network: nn.Module, groups: dict[str, Any], exempt: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parameter_groups(network, groups=groups, exempt_from_decay=exempt)
    return [str(error) for error in caught.value.errors]


def test_the_default_group_has_tied_parameters_once() -> None:
    network = Net()
    groups = parameter_groups(network, groups={}, exempt_from_decay=())
    assert [group["name"] for group in groups] == ["default"]
    assert [id(parameter) for parameter in groups[0]["params"]] == [id(parameter) for parameter in network.parameters()]


def test_norms_and_biases_are_found_by_name() -> None:
    network = Net()
    found = named(network, parameter_groups(network, groups={}, exempt_from_decay=("norms", "biases")))
    assert found == {
        "default": [
            "position",
            "encoder.0.weight",
            "encoder.2.weight",
            "attention.in_proj_weight",
            "attention.out_proj.weight",
            "recurrent.weight_ih_l0",
            "recurrent.weight_hh_l0",
            "embedding.weight",
        ],
        "default_exempt": [
            "encoder.0.bias",
            "encoder.1.weight",
            "encoder.1.bias",
            "encoder.2.bias",
            "attention.in_proj_bias",
            "attention.out_proj.bias",
            "recurrent.bias_ih_l0",
            "recurrent.bias_hh_l0",
            "norm.scale",
        ],
    }


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.InstanceNorm1d(4, affine=True), nn.SyncBatchNorm(4)]
)
def test_every_norm_of_torch_is_known(norm: nn.Module) -> None:
    groups = parameter_groups(nn.Sequential(norm), groups={}, exempt_from_decay=("norms",))
    assert [group["name"] for group in groups] == ["default_exempt"]
    assert groups[0]["weight_decay"] == 0.0


def test_patterns_options_and_exemption_reach_the_optimizer() -> None:
    network = Net()
    optimization = Optimization(
        optimizer_factory=AdamW,
        groups={
            "slow": {"parameters": "encoder.*", "lr": 1e-4},
            "head": {"parameters": ["head.*"], "betas": [0.5, 0.9]},
        },
        exempt_from_decay=("biases", "position"),
    )
    optimizer = optimization.make_optimizer(network)
    options = {
        group["name"]: (group["lr"], group["weight_decay"], tuple(group["betas"])) for group in optimizer.param_groups
    }
    assert options == {
        "default": (0.01, 0.1, (0.9, 0.999)),
        "default_exempt": (0.01, 0.0, (0.9, 0.999)),
        "slow": (1e-4, 0.1, (0.9, 0.999)),
        "slow_exempt": (1e-4, 0.0, (0.9, 0.999)),
        "head": (0.01, 0.1, (0.5, 0.9)),
    }
    found = named(network, optimizer.param_groups)
    assert found["head"] == ["embedding.weight"]  # a tied weight, which matches by both names
    assert "position" in found["default_exempt"]


def test_groups_train_as_torchs_own_groups_do() -> None:
    def fit(make: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
        optimizer = make(network)
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            optimizer.zero_grad()
            network(torch.randn(8, 3, generator=generator)).pow(2).mean().backward()
            optimizer.step()
        return list(network.parameters())

    def by_hand(network: nn.Sequential) -> torch.optim.Optimizer:
        first, norm, last = network
        plain = {"weight_decay": 0.0}
        groups = [
            {"params": [first.weight]},
            {"params": [first.bias, norm.weight, norm.bias], **plain},
            {"params": [last.weight], "lr": 0.1},
            {"params": [last.bias], "lr": 0.1, **plain},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)

    ours = fit(
        Optimization(
            optimizer_factory=AdamW,
            groups={"head": {"parameters": "2.*", "lr": 0.1}},
            exempt_from_decay=("norms", "biases"),
        ).make_optimizer
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, fit(by_hand), strict=True))


LAYERS = {
    "linear": lambda: nn.Linear(2, 2),
    "norm": lambda: nn.LayerNorm(2),
    "plain": lambda: nn.Linear(2, 2, bias=False),
    "block": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
}


@given(data=st.data(), kinds=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6))
def test_groups_partition_the_trained_parameters(data: st.DataObject, kinds: list[str]) -> None:
    layers = {f"{kind}{index}": LAYERS[kind]() for index, kind in enumerate(kinds)}
    network = nn.ModuleDict(layers)
    for parameter in network.parameters():
        parameter.requires_grad_(data.draw(st.booleans()))
    # Draw a group or none for each layer.
    owner = {name: data.draw(st.sampled_from(["a", "b", None])) for name in layers}
    groups = {
        group: {"parameters": [f"{name}.*" for name in layers if owner[name] == group], "lr": 0.5}
        for group in ("a", "b")
        if any(owner[name] == group and any(p.requires_grad for p in layers[name].parameters()) for name in layers)
    }
    alive = {name for name in layers if any(p.requires_grad for p in layers[name].parameters())}
    for node in groups.values():
        node["parameters"] = [pattern for pattern in node["parameters"] if pattern[:-2] in alive]
    exempt = data.draw(st.lists(st.sampled_from(["norms", "biases"]), unique=True))
    if not alive:
        assert errors(network, groups, tuple(exempt))
        return
    built = parameter_groups(network, groups=groups, exempt_from_decay=exempt)
    split = named(network, built)
    assert sorted(name for names in split.values() for name in names) == sorted(
        name for name, parameter in network.named_parameters() if parameter.requires_grad
    )
    modules = dict(network.named_modules())
    for group, names in split.items():
        assert names
        for name in names:
            module, _, leaf = name.rpartition(".")
            is_norm = isinstance(modules[module], nn.LayerNorm | nn.BatchNorm1d)
            free = ("norms" in exempt and is_norm) or ("biases" in exempt and leaf == "bias")
            expected = (owner[name.split(".")[0]] or "default") + ("_exempt" if free else "")
            assert group == expected


def test_errors_of_patterns_are_reported_together() -> None:
    network = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    found = errors(
        network, {"a": {"parameters": ["body.*", "haed.*"]}, "b": {"parameters": "*.bias"}, "c": {"lr": 1.0}}, ("norm",)
    )
    assert found == [
        "optimizer.groups.a.parameters: 'haed.*' matches no parameter; expected a pattern of a parameter's name: "
        "body.weight, body.bias, head.weight, head.bias. The pattern of a whole layer is its name with a star: encoder.*",
        "optimizer.groups: the groups a and b both match body.bias; expected each parameter in one group. Narrow the patterns of b",
        "optimizer.groups.c.parameters: missing; expected a pattern of parameter names, or a list of them",
        "optimizer.exempt_from_decay: 'norm' matches no parameter; expected norms, biases, or a pattern of a "
        "parameter's name: body.weight, body.bias, head.weight, head.bias. The pattern of a whole layer is its name with a star: "
        "encoder.*",
    ]


def test_frozen_parameters_are_in_no_group() -> None:
    network = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    network["body"].requires_grad_(False)
    assert named(network, parameter_groups(network, groups={}, exempt_from_decay=())) == {
        "default": ["head.weight", "head.bias"]
    }
    assert "'body.*' matches only frozen parameters" in errors(network, {"slow": {"parameters": "body.*"}})[0]
    network.requires_grad_(False)
    assert errors(network, {}) == [
        "model: all 4 parameters are frozen; expected at least one parameter to train, or train=false"
    ]
    assert "a model without parameters" in errors(nn.Flatten(), {})[0]


def test_a_group_cannot_be_named_default() -> None:
    assert (
        "optimizer.groups.default: a group with the name default" in errors(Net(), {"default": {"parameters": "*"}})[0]
    )


def test_unknown_and_wrong_options_are_errors() -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(ConfigError) as unknown:
        Optimization(optimizer_factory=AdamW, groups={"a": {"parameters": "bias", "momentun": 0.1}}).make_optimizer(
            network
        )
    assert str(unknown.value.errors[0]).startswith(
        "optimizer.groups.a.momentun: no key of AdamW; expected one of lr, betas"
    )
    rprop = functools.partial(torch.optim.Rprop)
    with pytest.raises(ConfigError, match="Rprop has no weight_decay"):
        Optimization(optimizer_factory=rprop, exempt_from_decay=["biases"]).make_optimizer(network)
    with pytest.raises(ConfigError, match="AdamW refused its values \\(Invalid learning rate: -1"):
        Optimization(optimizer_factory=functools.partial(torch.optim.AdamW, lr=-1.0)).make_optimizer(network)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_is_the_default_if_torch_has_it(name: str) -> None:
    """exp uses the private torch.utils._foreach_utils._get_fused_kernels_supported_devices of torch 2.13."""
    factory = functools.partial(getattr(torch.optim, name), lr=0.1)
    network = nn.Linear(2, 2)

    def fused(factory: Any, network: nn.Module) -> Any:
        return Optimization(optimizer_factory=factory).make_optimizer(network).defaults["fused"]

    assert fused(factory, network) is True
    assert fused(functools.partial(factory, fused=None), network) is True
    assert fused(functools.partial(factory, fused=False), network) is False
    assert not fused(functools.partial(factory, foreach=True), network)
    assert not fused(factory, nn.Linear(2, 2, device="meta"))
    assert has_fused(list(network.parameters()))
    without = Optimization(optimizer_factory=functools.partial(torch.optim.RMSprop)).make_optimizer(network)
    assert "fused" not in without.defaults
