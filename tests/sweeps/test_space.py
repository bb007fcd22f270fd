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
    assert listed("seed=4", "seed=1,2") == [["seed=1"], ["seed=2"]]
    # Whatever their signs.
    assert listed("seed=1,2", "++seed=4") == [["++seed=4"]]
    assert listed("++seed=4", "seed=1,2") == [["++seed=4", "seed=1"], ["++seed=4", "seed=2"]]
    assert listed("+precision.keep.a=fp32,fp64", "precision.keep.a=fp64,fp32") == [
        ["+precision.keep.a=fp64"], ["+precision.keep.a=fp32"],
    ]  # fmt: skip
    assert listed("hooks=[memory],[]", "+hooks=throughput") == [
        ["+hooks=[throughput]", "hooks=[memory]"],
        ["+hooks=[throughput]", "hooks=[]"],
    ]


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
        ("data.batch_size=int(interval(64.5,16))", "an interval from a number to one that is not below it"),
        ("optimizer.lr=interval(2,1)", "an interval from a number to one that is not below it"),
        ("optimizer.lr=tag(log,interval(0,1))", "numbers above 0, of which there is a logarithm"),
        ("optimizer.lr=tag(logg,interval(1,2))", "the tag logg; expected log"),
        ("optimizer.lr=interval(0.01,0.01)", r"in which 0\.01 is alone; .* Write optimizer\.lr=0\.01"),
        ("data.batch_size=int(interval(2.5,3.5))", r"in which 3 is alone; .* Write data\.batch_size=3"),
        ("seed=0,0", "seed: 0, twice; expected each value once. Write seed=0"),
        ("optimizer.lr=1e-3,0.1,0.001", r"0\.001, twice; .* Write optimizer\.lr=0\.001,0\.1"),
        ("model=mlp,lenet,mlp", "model: mlp, twice; .* Write model=mlp,lenet"),
    ],
)
def test_an_interval_that_cannot_be_drawn_from_is_a_fault(override, message):
    with pytest.raises(ConfigError, match=message):
        space(override)


@pytest.mark.parametrize(
    ("value", "ends"),
    [
        ("int(interval(16.5,64.2))", (17, 64)),
        ("int(interval(-2.5,-0.5))", (-2, -1)),
        ("int(tag(log,interval(0.5,8.9)))", (1, 8)),
        ("tag(log,int(interval(0.5,8.9)))", (1, 8)),
        ("int(interval(2.5,4.5))", (3, 4)),
        ("int(interval(16,64))", (16, 64)),
    ],
)
def test_an_interval_of_whole_numbers_has_those_inside_it(value, ends):
    (axis,) = space(f"data.batch_size={value}").axes
    assert (axis.low, axis.high) == ends
    assert (axis.is_integer, axis.is_log) == (True, "log" in value)


READ = "cannot be read: "
WRONG_VALUES = {
    "int(interval(0.2,0.9))": f"{READ}there is no whole number from 0.2 to 0.9",
    "int(tag(log,interval(1e-4,1e-2)))": f"{READ}there is no whole number from 0.0001 to 0.01",
    "int(interval(0,1e999))": f"{READ}an interval of whole numbers has two ends",
    "int(16.5)": f"{READ}16.5 is no whole number",
    "int(1.5,2)": f"{READ}1.5 is no whole number",
    "[int(1.5)]": f"{READ}1.5 is no whole number",
    "int(range(0,3,0.5))": f"{READ}0.5 is no whole number",
    "interval(1,)": "expected interval(LOW,HIGH)",
    "interval(1)": "expected interval(LOW,HIGH)",
    "interval(0,1": "expected interval(LOW,HIGH)",
    "interval(a,b)": "expected interval(LOW,HIGH)",
    "tag(log,1e-3,1e-2)": "expected tag(log,interval(LOW,HIGH))",
    "log(interval(1,2))": "there is no log(...); .* Write tag(log,interval(LOW,HIGH))",
    "intervall(1,2)": "there is no intervall(...); .* Write interval(LOW,HIGH)",
    "choice()": "expected choice(A,B)",
    "range(a,b)": "expected range(START,STOP)",
    "1,": "has a comma without a value; .* Write optimizer.lr=1  ",
    "1,,2": "has a comma without a value; .* Write optimizer.lr=1,2  ",
    "interval(1e-3,1e-2),0.5": "an interval among other values, .*; expected an interval alone, or single values",
    "0.5,range(1,3)": "a range among other values",
    "glob(a*),b": "a glob among other values",
    "[interval(0.1,0.9),0.99]": "an interval inside a list, .* Name whole lists: optimizer.lr=[A,B],[C,D]",
    "[0.1,interval(0.1,0.9)],[1,2]": "an interval among other values",
    "{a:[range(0,3)]}": "a range inside a mapping",
    "range(0,1,0)": "range(0,1,0); expected a range of finite numbers, with a step that is not 0",
    "range(0,nan)": "expected a range of finite numbers",
}


@pytest.mark.parametrize(("value", "message"), WRONG_VALUES.items())
def test_values_that_no_sweep_can_say_are_told_with_the_form_that_is_right(value, message):
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ConfigError, match=pattern) as typed:
        listed(f"optimizer.lr={value}")
    assert [fault.key for fault in typed.value.faults] == ["optimizer.lr"]
    with pytest.raises(ConfigError, match=pattern) as told:
        listed(f"+hydra.sweeper.params={{optimizer.lr:'{value}'}}")
    assert [fault.source for fault in told.value.faults] == ["hydra.sweeper.params"]


def test_an_interval_with_fractions_of_a_whole_number_is_told_as_what_is_wrong_with_the_interval(commands):
    for drawn in ("interval(16,64)", "tag(log,interval(16,64))"):
        done = commands.run("-m", f"data.batch_size={drawn}", "sweep.dry_run=true")
        assert done.returncode == 2
        assert f"data.batch_size: {drawn}, whose numbers have fractions; expected an integer" in done.stderr
        assert f"Write 'data.batch_size=int({drawn})'" in done.stderr


def test_a_key_under_a_condition_is_combined_where_it_is_there():
    when = "+sweep.when={optimizer.momentum:{optimizer:sgd}}"
    assert listed("optimizer=sgd,adamw", "optimizer.momentum=0.5,0.9", when) == [
        [when, "optimizer=sgd", "optimizer.momentum=0.5"],
        [when, "optimizer=sgd", "optimizer.momentum=0.9"],
        [when, "optimizer=adamw"],
    ]


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
def test_a_condition_is_a_value_however_it_is_written(swept, wanted):
    key = swept.partition("=")[0]
    found = listed("optimizer=sgd", swept, "seed=1,2", f"sweep.when={{seed:{{{key}:{wanted}}}}}")
    assert [len(overrides) for overrides in found] == [4, 4, 3]


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (
            "{optimizer.momentum:{seed:3}}",
            r"momentum\.seed: 3, which seed never is; expected one of 1, 2",
        ),
        ("{optimizer.momentum:{seed:[1,3]}}", "3, which seed never is"),
        ("{optimizer.momentum:{seed:null}}", "null, which seed never is"),
        ("{optimizer.momentum:{seed:[]}}", r"\[\]; expected one of 1, 2"),
        ("{optimizer.momentum:{seed:true}}", "true, which seed never is"),
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
