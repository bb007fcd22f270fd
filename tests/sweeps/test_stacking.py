"""Which jobs can be trained together, how large a stack is, and the products of stacked matrices."""

import functools
from pathlib import Path

import pytest
import torch
import yaml
from torch.func import grad, vmap
from torch.nn import functional

from exp import compose
from exp.check.plan import plan, resolve
from exp.sweeps import forecast
from exp.sweeps.stacked_products import exact_products
from exp.sweeps.stacking import groups, obstacle, signature

TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text())


def plain(*overrides):
    return resolve(compose(overrides=list(overrides))).plain


def test_jobs_that_differ_in_values_of_their_own_are_stacked():
    jobs = [
        plain(),
        plain("seed=5", "optimizer.lr=0.1", "name=other", "tags=[x]"),
        plain("optimizer=sgd", "scheduler=cosine", "trainer.gradient_clip_val=1.0"),
        plain("objective.cross_entropy.weight=2.0", "objective.cross_entropy.loss.label_smoothing=0.1"),
        plain("+initialisation={Linear.weight: {name: normal, std: 0.02}}"),
        plain("model.layers.hidden.out_features=128"),
        plain("data.batch_size=32"),
        plain("data.batch_size=32", "seed=1"),
        plain("callbacks=[early_stopping]"),
    ]
    found = groups(jobs)
    assert found.stacked == ((0, 1, 2, 3, 4), (6, 7))
    assert found.reasons == {
        5: "no other job has the same model, data, objective and length",
        8: "callbacks.early_stopping cannot be stacked: it acts on one run",
    }
    assert groups([jobs[0]] * 10, most=4).stacked == ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert groups([jobs[0]] * 4, most=4).stacked == ((0, 1, 2, 3),)
    assert signature(plain("model=mlp")) == signature(plain("model=mlp", "model.constants.dropout=0.4"))
    assert signature(plain("model=mlp")) != signature(plain("model=mlp", "model.constants.width=128"))


@pytest.mark.parametrize(("overrides", "key"), TABLES["stacks"])
def test_the_key_that_prevents_a_stack_is_named(overrides, key):
    found = obstacle(resolve(compose(overrides=overrides.split())).plain)
    assert found.startswith(f"{key} cannot be stacked: "), found
    assert "\n" not in found


@functools.cache
def planned(*overrides):
    return plan(resolve(compose(overrides=list(overrides))))


def test_a_stack_fits_into_the_free_memory():
    one = forecast.member_bytes(planned())
    assert forecast.most_members(planned(), free=20 * one) == 10
    assert forecast.most_members(planned(), free=20 * one, stacks=2) == 5
    assert forecast.most_members(planned(), free=0) == 1


def test_a_forecast_leaves_no_trace():
    assert not forecast.is_faster(planned("model.layers.hidden.out_features=200000"), members=32)
    assert forecast.is_faster(planned("runtime.compile=true"), members=4)
    small = planned()
    threads, state = torch.get_num_threads(), torch.default_generator.get_state()
    assert forecast.is_faster(small, members=32) in (True, False)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.default_generator.get_state(), state)


@pytest.mark.numeric
@pytest.mark.parametrize("is_shared", [True, False])
def test_stacked_products_have_the_bits_of_single_ones(is_shared):
    draws = torch.Generator().manual_seed(0)
    weight, bias, data = (torch.randn(5, *size, generator=draws) for size in ((10, 64), (10,), (42, 64)))
    data = data[0] if is_shared else data

    def loss(weight, bias, inputs):
        return functional.linear(inputs, weight, bias).square().sum()

    with exact_products():
        gradients = vmap(grad(loss, argnums=(0, 1, 2)), (0, 0, None if is_shared else 0))(weight, bias, data)
    for place in range(5):
        own = (weight[place], bias[place], data if is_shared else data[place])
        for stacked, one in zip(gradients, grad(loss, argnums=(0, 1, 2))(*own), strict=True):
            assert torch.equal(stacked[place], one)
