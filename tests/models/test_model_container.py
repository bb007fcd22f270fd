"""`model.container` puts the same layers into a Sequential, a ModuleList or a ModuleDict, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import exp
from exp.models.containers import ModuleDictModel, ModuleListModel, SequentialModel

CONTAINERS = {"sequential": SequentialModel, "module_list": ModuleListModel, "module_dict": ModuleDictModel}
OPTIONS = {
    path.stem: OmegaConf.load(path) for path in sorted((Path(exp.__file__).parent / "conf/model").glob("*.yaml"))
}
FOLDED = [name for name, node in OPTIONS.items() if "forward" not in node]
WIRED = [name for name in OPTIONS if name not in FOLDED]

Build = Callable[..., nn.Module]


def test_these_models_fold() -> None:
    assert FOLDED == ["lenet", "mlp", "module_dict", "module_list", "sequential"]


@pytest.mark.parametrize("name", FOLDED)
def test_the_same_layers_give_the_same_bits_in_each_container(name: str, build_model: Build) -> None:
    found = []
    x = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for word, container in CONTAINERS.items():
        torch.manual_seed(0)
        network = build_model(name, f"model.container={word}")
        assert type(network) is container
        torch.manual_seed(2)  # seed of the dropout
        output = network(x)
        output.square().sum().backward()
        found.append((network.state_dict(), output, [parameter.grad for parameter in network.parameters()]))
    (weights, output, gradients), *others = found
    for other_weights, other_output, other_gradients in others:
        # Weights and names are equal, so a checkpoint of one container fits the others.
        assert list(other_weights) == list(weights)
        assert all(torch.equal(other_weights[key], weights[key]) for key in weights)
        assert torch.equal(other_output, output)
        assert all(map(torch.equal, other_gradients, gradients))


def test_three_words_are_one_network(build_model: Build) -> None:
    counts = {word: sum(p.numel() for p in build_model(word).parameters()) for word in CONTAINERS}
    assert counts == dict.fromkeys(CONTAINERS, 50_826)
    assert {word: type(build_model(word)) for word in CONTAINERS} == CONTAINERS


@pytest.mark.parametrize("name", WIRED)
@pytest.mark.parametrize("word", CONTAINERS)
def test_a_model_that_is_wired_by_hand_is_refused(name: str, word: str) -> None:
    data = {"gpt": ["data=text"], "domain_adversarial": [], "gan": []}.get(name, [])
    config = exp.compose([*data, f"model={name}", f"model.container={word}"])
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(config)
    error = next(error for error in caught.value.errors if error.key == "model.container")
    assert error.got.startswith(f"{word} for a ")
    assert error.fix == "Remove `container`"


def test_a_model_of_ones_own_is_refused() -> None:
    own = ["model._target_=torch.nn.Linear", "~model.layers", "+model.in_features=4", "+model.out_features=3"]
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose([*own, "model.container=module_list"]))
    (error,) = caught.value.errors
    assert error.key == "model.container"
    assert "no parameter of torch.nn.Linear" in str(error)


def test_another_word_is_refused() -> None:
    with pytest.raises(exp.ConfigError, match=r"model\.container: 'module_dct'.*expected one of .*module_dict"):
        exp.validate(exp.compose(["model.container=module_dct"]))
