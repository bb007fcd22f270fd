"""Values that a sweep combines or draws: lists, intervals and conditions."""

import itertools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exp.cli.check import main as check
from exp.errors import ConfigError
from exp.sweeps.space import Axis, Space, space_of
from exp.sweeps.sweep import compose_sweep

TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text())


def space(*overrides: str) -> Space:
    master = compose_sweep(overrides)
    return space_of(master.config, master.vocabulary)


def listed(*overrides: str) -> list[list[str]]:
    found = space(*overrides)
    return [found.overrides(values) for values in found.grid()]


def test_the_last_key_varies_fastest():
    assert listed("optimizer.lr=0.1,0.2", "model=mlp", "seed=range(3)") == [
        ["model=mlp", f"optimizer.lr={lr}", f"seed={seed}"] for lr, seed in itertools.product((0.1, 0.2), range(3))
    ]


@pytest.mark.parametrize(("overrides", "jobs"), TABLES["listed"])
def test_overrides_list_these_jobs(overrides, jobs):
    assert [" ".join(job) for job in listed(*overrides.split())] == jobs


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_drawn_number_reads_as_itself(number):
    assert float(Axis(key="optimizer.lr", is_interval=True).text(number)) == number


@pytest.mark.parametrize(
    ("value", "ends", "kind"),
    [
        ("tag(log,interval(1e-5,1e-1))", (1e-5, 1e-1), (False, True)),
        ("int(interval(16,256))", (16, 256), (True, False)),
        ("int(tag(log,interval(1,8)))", (1, 8), (True, True)),
        ("tag(log,int(interval(1,8)))", (1, 8), (True, True)),
    ],
)
def test_an_interval_has_ends_a_kind_and_a_scale(value, ends, kind):
    (axis,) = space(f"data.batch_size={value}").axes
    assert (axis.low, axis.high) == ends
    assert (axis.is_integer, axis.is_log) == kind
    assert [*map(float, axis.ends())] == [*ends]


@pytest.mark.parametrize(("value", "message"), TABLES["values"])
def test_values_that_cannot_be_swept_are_refused(value, message):
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ConfigError, match=pattern) as refused:
        space(f"optimizer.lr={value}")
    assert [error.key for error in refused.value.errors] == ["optimizer.lr"]


def test_wrong_values_of_a_file_name_their_key():
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        listed("+hydra.sweeper.params={optimizer.lr:'int(a)'}")
    assert [error.source for error in refused.value.errors] == ["hydra.sweeper.params"]


@pytest.mark.parametrize(
    ("swept", "wanted"),
    [
        ("data.batch_size=16,32", "16"),
        ("optimizer.weight_decay=1e-3,1e-2", "0.001"),
        ("optimizer.weight_decay=0.001,0.01", "1e-3"),
        ("optimizer.nesterov=true,false", "true"),
        ("trainer.gradient_clip_val=null,1.0", "null"),
        ("hooks=[],[memory]", "[[]]"),
        ("name=a,b", "[a,a]"),
    ],
)
def test_a_condition_compares_values_not_spellings(swept, wanted):
    key = swept.partition("=")[0]
    found = listed("optimizer=sgd", swept, "seed=1,2", f"sweep.when={{seed:{{{key}:{wanted}}}}}")
    assert [len(overrides) for overrides in found] == [4, 4, 3]


@pytest.mark.parametrize(("when", "message"), TABLES["conditions"])
def test_a_condition_that_never_holds_is_refused(when, message):
    with pytest.raises(ConfigError, match=message):
        space("seed=1,2", "optimizer=sgd", "optimizer.momentum=0.5,0.9", f"+sweep.when={when}")


@pytest.fixture(scope="module")
def master():
    """A composed sweep. Tests replace its overrides."""
    return compose_sweep(["optimizer.weight_decay=range(0,1)"])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("range(0.01,0.05,0.01)", ["0.01", "0.02", "0.03", "0.04"]),
        ("range(start=1e-3,stop=4e-3,step=1e-3)", ["0.001", "0.002", "0.003"]),
        ("range(0.7,0,-0.3)", ["0.7", "0.4", "0.1"]),
        ("range(-0.2,0.2,0.1)", ["-0.2", "-0.1", "0.0", "0.1"]),
        ("sort(range(0.1,0.4,0.1),reverse=true)", ["0.3", "0.2", "0.1"]),
        ("sort(range(0,5,2),reverse=true)", ["4", "2", "0"]),
        ("sort(range(5,0,-2))", ["1", "3", "5"]),
        ("float(range(1,4))", ["1.0", "2.0", "3.0"]),
        ("int(range(1.0,4.0,1.0))", ["1", "2", "3"]),
        ("tag(narrow,range(0.1,0.4,0.1))", ["0.1", "0.2", "0.3"]),
    ],
)
def test_ranges_are_exact_in_every_function(master, text, values):
    master.config.hydra.overrides.task = [f"optimizer.weight_decay={text}"]
    assert list(space_of(master.config, master.vocabulary).axes[0].texts) == values


@pytest.mark.parametrize("text", ["1,1.0", "1.0,1", "0.5,1,1.0"])
def test_numbers_of_different_types_are_different_jobs(master, text):
    master.config.hydra.overrides.task = [f"optimizer.weight_decay={text}"]
    assert list(space_of(master.config, master.vocabulary).axes[0].texts) == text.split(",")


@pytest.mark.parametrize(("overrides", "message"), TABLES["settings"])
def test_contradictory_settings_are_refused(overrides, message, capfd):
    assert check(["-m", *overrides.split()]) == 2
    assert re.search(message, capfd.readouterr().err)
