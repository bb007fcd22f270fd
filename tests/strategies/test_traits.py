"""Declared traits of strategies, which define the compatible hooks, losses and options."""

from pathlib import Path

import pytest
import yaml
from lightning.pytorch import strategies as lightning_strategies

import exp
from exp.config.settings import settings_of
from exp.construct import build_strategy
from exp.strategies.fsdp import FSDP
from exp.strategies.placement import Dimensions, Machine, placement
from exp.strategies.strategy import TRAITS, traits_of

DECLARED = yaml.safe_load(Path(__file__).with_name("declared.yaml").read_text())
LIGHTNINGS = {
    "DDPStrategy": {"splits_batch"},
    "FSDPStrategy": {"shards_parameters", "splits_batch"},
    "ModelParallelStrategy": {"shards_parameters", "splits_batch"},
}


@pytest.mark.parametrize("words", DECLARED)
def test_a_strategy_declares_traits_and_dimensions(words):
    strategy = build_strategy(settings_of(exp.compose(words.split())))
    traits, dimensions = DECLARED[words]
    assert traits_of(strategy) - {"steps_once"} == set(traits)
    assert ("steps_once" in traits_of(strategy)) == (words.split()[0] not in ("strategy=single", "strategy=ddp"))
    if dimensions is not None:
        placed = placement("mine", devices=8, demand=strategy.demand, machine=Machine(gpus=8))
        assert Dimensions(**{name: getattr(placed, name) for name in vars(Dimensions())}) == Dimensions(**dimensions)
        assert placed.world_size * placed.layers == 8


def test_a_subclass_has_the_traits_of_its_base():
    class Mine(FSDP):
        pass

    assert traits_of(Mine(name="mine")) == traits_of(FSDP())


@pytest.mark.parametrize("name", LIGHTNINGS)
def test_classes_of_lightning_have_their_bases_traits(name):
    kind = type("Mine", (getattr(lightning_strategies, name),), {})
    assert traits_of(kind()) == LIGHTNINGS[name] | {"steps_once"}
    assert traits_of(kind()) <= set(TRAITS)
    assert traits_of(lightning_strategies.SingleDeviceStrategy("cpu")) == set()
