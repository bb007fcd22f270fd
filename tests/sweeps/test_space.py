"""What a sweep goes over: lists and intervals, conditions, sizes that are counted and never listed."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exp.errors import ConfigError
from exp.sweeps.space import Axis, Space, sizes, space_of
from exp.sweeps.sweep import compose_sweep


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def space(*overrides: str) -> Space:
    master = compose_sweep(overrides)
    return space_of(master.config, master.loader, seed=0)


def listed(*overrides: str) -> list[list[str]]:
    found = space(*overrides)
    return [found.overrides(values) for values in found.grid()]


def test_the_last_key_varies_fastest_and_fixed_ones_are_in_every_job():
    assert listed("optimizer.lr=0.1,0.2", "model=mlp", "seed=range(3)") == [
        ["model=mlp", f"optimizer.lr={lr}", f"seed={seed}"] for lr, seed in itertools.product((0.1, 0.2), range(3))
    ]


def test_the_last_of_two_equal_keys_counts():
    assert listed("seed=1,2,3", "seed=4,5") == [["seed=4"], ["seed=5"]]
    assert listed("seed=1,2,3", "seed=4") == [["seed=4"]]


def test_an_experiment_s_file_may_name_the_values_and_the_command_line_overrules_it():
    assert listed("+hydra.sweeper.params={seed:'1,2'}", "optimizer.lr=1,2")[0] == ["seed=1", "optimizer.lr=1"]
    assert listed("+hydra.sweeper.params={seed:'1,2'}", "seed=7") == [["seed=7"]]


def test_shuffled_values_have_one_order_a_seed():
    first = listed("seed=shuffle(range(10))")
    assert first == listed("seed=shuffle(range(10))")
    assert first != listed("seed=range(10)")
    assert sorted(first) == sorted(listed("seed=range(10)"))


def test_a_glob_and_a_choice_of_options_are_lists():
    assert listed("model=glob(ml*)") == [["model=mlp"]]
    assert listed("optimizer=choice(sgd,adamw)") == [["optimizer=sgd"], ["optimizer=adamw"]]


def test_intervals_have_ends_a_scale_and_a_kind():
    (lr, size) = space("optimizer.lr=tag(log,interval(1e-5,1e-1))", "data.batch_size=int(interval(16,256))").axes
    assert (lr.low, lr.high, lr.is_log, lr.is_integer) == (1e-5, 1e-1, True, False)
    assert (size.low, size.high, size.is_log, size.is_integer) == (16, 256, False, True)
    assert size.ends() == ("16", "256")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_drawn_number_is_the_same_when_it_is_read_again(number):
    assert float(Axis(key="optimizer.lr", is_interval=True).text(number)) == number


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=interval(2,1)", "an interval from a number to one that is not below it"),
        ("optimizer.lr=tag(log,interval(0,1))", "numbers above 0, of which there is a logarithm"),
        ("optimizer.lr=tag(logg,interval(1,2))", "the tag logg; expected log"),
    ],
)
def test_an_interval_that_cannot_be_drawn_from_is_a_fault(override, message):
    with pytest.raises(ConfigError, match=message):
        space(override)


def test_a_key_under_a_condition_is_combined_where_it_is_there():
    when = "+sweep.when={optimizer.momentum:{optimizer:sgd}}"
    assert listed("optimizer=sgd,adamw", "optimizer.momentum=0.5,0.9", when) == [
        [when, "optimizer=sgd", "optimizer.momentum=0.5"],
        [when, "optimizer=sgd", "optimizer.momentum=0.9"],
        [when, "optimizer=adamw"],
    ]


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("{optimizer.momentum:{model:mlp}}", "model, which is not swept; expected one of seed"),
        ("{optimizer.lr:{seed:1}}", "optimizer.lr, which is not swept"),
        ("{seed:{optimizer.momentum:0.5},optimizer.momentum:{seed:1}}", "wait for each other"),
    ],
)
def test_a_condition_on_nothing_or_in_a_circle_is_a_fault(when, message):
    with pytest.raises(ConfigError, match=message):
        space("seed=1,2", "optimizer=sgd", "optimizer.momentum=0.5,0.9", f"+sweep.when={when}")


@settings(max_examples=30)  # each parses an override anew
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9), st.booleans())
def test_a_range_is_counted_as_it_is_listed(start, stop, step, is_float):
    step = step / 4 if is_float else step
    text = f"optimizer.weight_decay=range({start},{stop},{step})"
    master = compose_master(text)
    count = sizes(master.config, master.loader)["optimizer.weight_decay"]
    assert count == len(space_of(master.config, master.loader, seed=0).axes[0].texts)
    assert count == max(0, math.ceil((stop - start) / step))


def compose_master(override: str):
    """Composed once: another override in the place of the first one."""
    found = MASTER.setdefault("master", compose_sweep(["optimizer.weight_decay=range(0,1)"]))
    found.config.hydra.overrides.task = [override]
    return found


MASTER = {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=0,1", "sweep.trials=3"], r"sweep\.trials: 3, of a grid; expected null"),
        (["seed=0,1", "sweep.pruner=median"], r"sweep\.pruner: median, of a grid; expected none"),
        (
            ["optimizer.lr=interval(0,1)", "sweep.sampler=grid"],
            r"sweep\.sampler: grid, where optimizer\.lr is an interval",
        ),
        (["optimizer.lr=0.1,0.2", "sweep.repeat_over=seed"], r"sweep\.repeat_over: seed, which is not swept"),
        (
            ["optimizer.lr=interval(0.1,1)", "sweep.monitor={loss/val:min,acuracy/val:max}"],
            r"sweep\.monitor: 'acuracy/val'.*Did you mean accuracy/val\?",
        ),
    ],
)
def test_what_a_sweep_would_pass_over_in_silence_is_refused(commands, overrides, message):
    done = commands.run("-m", *overrides, module="exp.check.__main__")
    assert done.returncode == 2, done.stdout
    assert re.search(message, done.stderr), done.stderr
