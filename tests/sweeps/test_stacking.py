"""Jobs that can be trained together, size of a stack, and jobs that are faster in a stack."""

import functools
from pathlib import Path

import pytest
import yaml

from exp import compose
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.construct import build_network
from exp.sweeps.stack import is_faster
from exp.sweeps.stacking import groups, obstacle, signature

TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text())


def plain(*overrides):
    return resolve(compose(overrides=list(overrides))).plain


def test_jobs_that_differ_in_values_of_their_own_are_stacked():
    jobs = [
        plain(),
        plain("seed=5", "optimizer.lr=0.1", "name=other", "tags=[x]"),
        plain("optimizer=sgd", "scheduler=cosine", "trainer.gradient_clip_val=1.0"),
        plain("monitor=accuracy/val", "mode=max"),
        plain("+initialisation={Linear.weight: {name: normal, std: 0.02}}"),
        plain("model.layers.hidden.out_features=128"),
        plain("data.batch_size=32"),
        plain("data.batch_size=32", "seed=1"),
        plain("callbacks=[early_stopping]"),
    ]
    stacked, reasons = groups(jobs)
    assert stacked == [(0, 1, 2, 3, 4), (6, 7)]
    assert reasons == {
        5: "no other job has the same model, data, objective and length",
        8: "callbacks.early_stopping cannot be stacked: a callback acts on a single run",
    }
    assert groups([jobs[0]] * 10, most=4)[0] == [(0, 3, 6, 9), (1, 4, 7), (2, 5, 8)]
    assert groups([jobs[0]] * 4, most=4)[0] == [(0, 1, 2, 3)]
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), True),
        (("model.layers.hidden.out_features=200000",), False),
        (("model.layers.hidden.out_features=20000",), False),
        (("model=lenet",), True),
        (("experiment=lstm",), False),
    ],
)
def test_auto_stacks_small_networks_without_recurrent_layers(overrides, expected):
    decided = planned(*overrides)
    assert is_faster(decided, build_network(decided.settings, decided.spec)) is expected
