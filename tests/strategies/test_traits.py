"""What strategies declare of themselves, which is what everything that goes with them is judged by."""

import pytest
from lightning.pytorch import strategies as lightning_strategies

import exp
from exp.construct import build_strategy
from exp.strategies.fsdp import FSDP
from exp.strategies.strategy import TRAITS, traits_of

DECLARED = {
    "strategy=single": set(),
    "strategy=ddp": {"splits_batch"},
    "strategy=ddp strategy.inner=layer_split": {"splits_batch", "splits_devices"},
    "strategy=data_parallel": {"splits_batch", "replicates_in_threads"},
    "strategy=layer_split": {"splits_devices"},
    "strategy=fsdp": {"shards_parameters", "splits_batch"},
    "strategy=fsdp strategy.name=mine": {"shards_parameters", "splits_batch"},
    "strategy=deepspeed": {"splits_batch", "owns_step"},
    "strategy=deepspeed strategy.stage=3": {"shards_parameters", "splits_batch", "owns_step"},
    "strategy=tensor_parallel": {"splits_tensors"},
    "strategy=pipeline": {"splits_layers", "schedules_step"},
    "strategy=pipeline strategy.stages=2": {"splits_layers", "schedules_step", "splits_batch"},
    "strategy=hybrid": {"splits_tensors", "splits_batch"},
    "strategy=hybrid strategy.data=shard": {"splits_tensors", "shards_parameters", "splits_batch"},
    "strategy=hybrid strategy.tensor=1 strategy.pipeline=2": {"splits_layers", "schedules_step", "splits_batch"},
}
LIGHTNINGS = {
    "DDPStrategy": {"splits_batch"},
    "FSDPStrategy": {"shards_parameters", "splits_batch"},
    "ModelParallelStrategy": {"shards_parameters", "splits_batch"},
}


@pytest.mark.parametrize("words", DECLARED)
def test_what_each_strategy_declares(words):
    strategy = build_strategy(exp.compose(words.split()))
    assert traits_of(strategy) - {"steps_once"} == DECLARED[words]
    assert ("steps_once" in traits_of(strategy)) == (words.split()[0] not in ("strategy=single", "strategy=ddp"))


def test_a_subclass_is_what_its_base_is():
    class Mine(FSDP):
        pass

    assert traits_of(Mine(name="mine")) == traits_of(FSDP())


@pytest.mark.parametrize("name", LIGHTNINGS)
def test_lightnings_own_classes_are_judged_by_their_bases(name):
    kind = type("Mine", (getattr(lightning_strategies, name),), {})
    assert traits_of(kind()) == LIGHTNINGS[name] | {"steps_once"}
    assert traits_of(kind()) <= set(TRAITS)
    assert traits_of(lightning_strategies.SingleDeviceStrategy("cpu")) == set()
