"""Parts of the check: values compared with annotations, signatures of real classes, and spellings."""

import collections.abc
import datetime
import enum
import importlib
import inspect
import pathlib
import typing

import pytest
import torch
import torchmetrics
from annotated_types import Ge, Gt, Interval, Le, MinLen, MultipleOf, Predicate
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exp.check.foreign import BOUNDS as FOREIGN_BOUNDS
from exp.check.foreign import HIDDEN_NAMES
from exp.check.kinds import describe_type, fits, words_of
from exp.check.parameters import node_errors
from exp.check.signature import signature_of
from exp.config.reading import UNKNOWN
from exp.construct import construct
from exp.errors import ConfigError
from exp.spelling import among, did_you_mean, find_nearest, show


class Colour(enum.Enum):
    RED = "red"


NODE = {"_target_": "torch.nn.ReLU"}
FITS = [
    (1, int), (1, float), (1.5, float),
    (True, bool), ("a", str), (None, int | None), ("min", typing.Literal["min", "max"]),
    ([1, 2], tuple[int, int]), ([1, 2, 3], tuple[int, ...]),
    ([1, 2], list[float]), ([], list[int]), (["a"], collections.abc.Sequence[str]),
    ({"a": 1}, dict[str, int]), (NODE, nn.Module),
    ([NODE], list[nn.Module]), (NODE, collections.abc.Callable), ("RED", Colour),
    ("red", Colour), ("x/y", pathlib.Path), ("cpu", torch.device), (3, typing.Annotated[int, "x"]), (3, typing.Any),
    (UNKNOWN, int), ({"hours": 1}, str | datetime.timedelta | dict[str, int]), (1, "int"),
]  # fmt: skip
FITS_NOT = [
    (1.0, int), (True, int), ("1", int), (True, float),
    ("1e-3", float), (1, bool), ("true", bool), (1, str), (None, int),
    ("mn", typing.Literal["min", "max"]), ([1], tuple[int, int]), ([1.5], list[int]), (1, list[int]), ("ab", list[str]),
    ({"a": "b"}, dict[str, int]), ([1], dict[str, int]), ("relu", nn.Module), ("relu", collections.abc.Callable),
    ("BLUE", Colour), (1.5, torch.device), (3, datetime.timedelta),
]  # fmt: skip


@pytest.mark.parametrize(("value", "annotation"), FITS)
def test_a_value_that_fits(value, annotation):
    assert fits(value, annotation)


@pytest.mark.parametrize(("value", "annotation"), FITS_NOT)
def test_a_value_that_does_not(value, annotation):
    assert not fits(value, annotation)


@pytest.mark.parametrize(
    ("value", "default", "expected"),
    [
        (1, 0.5, True), (1.5, 0, True), ("a", 0.5, False), (True, 0.5, False), (1, True, False), (False, True, True),
        (3, "mean", False), ([1, 2], (0.9, 0.999), True),
        ("x", (0.9, 0.999), False), ("anything", None, True), (None, 0.5, True),
    ],
)  # fmt: skip
def test_without_an_annotation_the_default_says_what_fits(value, default, expected):
    empty = signature_of(lambda value: value).parameters["value"].annotation
    assert fits(value, empty, default) is expected


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(json_like, st.sampled_from([annotation for _, annotation in FITS + FITS_NOT]))
def test_any_value_fits_or_not_and_every_kind_has_words(value, annotation):
    assert fits(value, annotation) in (True, False)
    assert describe_type(annotation)
    assert all(isinstance(word, str) for word in words_of(annotation))


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (int | None, "an integer or null"),
        (int | float, "a number"),
        (float | torch.Tensor, "a number"),
        (tuple[float, float], "a list of 2 numbers"),
        (list[int], "a list of integers"),
        (typing.Literal["min", "max"], "one of min, max"),
        (nn.Module, "a node whose _target_ is a Module"),
        (collections.abc.Callable[[int], int], "a node with a _target_ and _partial_: true"),
    ],
)
def test_kinds_are_told_in_plain_words(annotation, words):
    assert describe_type(annotation) == words


class Bounded:
    """Class with bounds in its annotations, which are strings as with `from __future__ import annotations`."""

    def __init__(
        self,
        *,
        decay: "typing.Annotated[float, Interval(ge=0, lt=1)]" = 0.9,
        share: "typing.Annotated[float, Interval(gt=0, le=1)]" = 1.0,
        between: "typing.Annotated[float, Interval(ge=0, le=1)]" = 1.0,
        above: "typing.Annotated[float, Gt(0)]" = 1.0,
        steps: "typing.Annotated[int, 'a whole number of steps', Ge(1)]" = 1,
        most: "typing.Annotated[int, Le(3)] | None" = None,
        odd: "typing.Annotated[int, 'an odd number', Predicate(lambda value: value % 2 == 1), Ge(3)]" = 3,
        eights: "typing.Annotated[int, MultipleOf(8)]" = 8,
        some: "typing.Annotated[list[int], MinLen(1)]" = (1,),
        each: "list[typing.Annotated[float, Gt(0)]]" = (1.0,),
        word: "typing.Literal['auto'] | typing.Annotated[int, Ge(2)]" = "auto",
        inner: "Bounded | None" = None,
    ) -> None:
        pass


class Mine:
    def __init__(self, *, first: int, last: int, words: str) -> None:
        raise ValueError(words)


PACKAGE = __name__.partition(".")[0]
BOUNDED = f"{__name__}.Bounded"


def subclasses(kind):
    return {kind}.union(*(subclasses(below) for below in kind.__subclasses__()))


@pytest.mark.parametrize("base", FOREIGN_BOUNDS)
def test_every_bound_of_a_library_is_of_a_parameter_that_it_has(base):
    module, _, name = base.rpartition(".")
    kinds = subclasses(getattr(importlib.import_module(module), name))
    theirs = [kind for kind in kinds if kind.__module__.partition(".")[0] in ("torch", "lightning", "torchmetrics")]
    assert set(FOREIGN_BOUNDS[base]) <= {name for kind in theirs for name in signature_of(kind).parameters}


BOUNDS = [
    ("decay", 1.5, "a number, 0 or more and below 1"), ("decay", -0.1, "a number, 0 or more and below 1"),
    ("decay", float("nan"), "a number, 0 or more and below 1"), ("decay", "x", "a number, 0 or more and below 1"),
    ("share", 0, "a number above 0 and at most 1"), ("between", 2, "a number between 0 and 1"),
    ("above", 0, "a number above 0"), ("above", float("inf"), "a number above 0"),
    ("steps", 0, "a whole number of steps, 1 or more"), ("steps", 1.5, "a whole number of steps, 1 or more"),
    ("most", 4, "an integer, at most 3, or null"), ("odd", 4, "an odd number, 3 or more"),
    ("eights", 12, "an integer, a multiple of 8"), ("some", [], "a list of integers with 1 or more entries"),
    ("each", [1, 0], "a list, each a number above 0"), ("word", 1, "auto, or an integer, 2 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), BOUNDS)
def test_a_value_out_of_bounds_is_reported_at_its_parameter(name, value, expected):
    [error] = node_errors("own.node", {"_target_": BOUNDED, name: value}, allow=[PACKAGE])
    assert str(error) == f"own.node.{name}: {show(value)}; expected {expected}"


def test_values_within_their_bounds_are_accepted():
    kept = {"decay": 0, "share": 1, "between": 0.5, "above": 1e-9, "steps": 1, "most": None, "odd": 3, "eights": 16}
    kept |= {"some": [0], "each": [], "word": "auto", "inner": {"_target_": BOUNDED}}
    assert not list(node_errors("own.node", {"_target_": BOUNDED, **kept, "_partial_": True}, allow=[PACKAGE]))


ACCEPTED = "expected values that the class accepts"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("last is 1; expected 4 or more. Swap", "hooks.mine.last: 1; expected 4 or more. Swap"),
        ("both are 3; expected two numbers", "hooks.mine: both are 3; expected two numbers"),
        ("no", f"hooks.mine: {__name__}.Mine refused its values (ValueError: no); {ACCEPTED}"),
    ],
)  # fmt: skip
def test_a_refusal_is_reported_at_the_parameter_it_names(words, error):
    node = {"_target_": f"{__name__}.Mine", "first": 3, "last": 1, "words": words}
    with pytest.raises(ConfigError) as caught:
        construct(node, key="hooks.mine", allow=[PACKAGE])
    assert [str(found) for found in caught.value.errors] == [error]


def test_the_overload_of_lstm_is_read():
    signature = signature_of(nn.LSTM)
    assert {"input_size", "hidden_size", "num_layers", "batch_first", "bidirectional"} <= set(signature.parameters)
    assert signature.parameters["hidden_size"].required
    assert not signature.open


def test_sequential_takes_layers_by_position_and_nothing_by_name():
    signature = signature_of(nn.Sequential)
    assert signature.rest
    assert not any(parameter.required for parameter in signature.parameters.values())


def test_the_task_of_accuracy_is_read_from_new():
    parameters = signature_of(torchmetrics.Accuracy).parameters
    assert words_of(parameters["task"].annotation) == ["binary", "multiclass", "multilabel"]
    assert parameters["task"].required


def test_kwargs_are_read_on_in_the_bases():
    class Base(nn.Module):
        def __init__(self, *, depth: int, width: int = 3) -> None:
            super().__init__()

    class Middle(Base):
        def __init__(self, **kwargs) -> None:
            super().__init__(depth=2, **kwargs)

    class Top(Middle):
        def __init__(self, *, name: str, **kwargs) -> None:
            super().__init__(**kwargs)

    signature = signature_of(Top)
    assert list(signature.parameters) == ["name", "depth", "width"]
    assert [name for name, parameter in signature.parameters.items() if parameter.required] == ["name"]
    assert signature.open  # a constructor may read further names from its kwargs
    assert not signature_of(type("Plain", (Base,), {})).open


def test_kwargs_of_a_module_end_at_torch():
    class Loose(nn.Module):
        def __init__(self, *, width: int, **kwargs) -> None:
            super().__init__()

    class Free:
        def __init__(self, **kwargs) -> None: ...

    assert signature_of(Free).open
    assert signature_of(Loose).open


def test_annotations_as_text_are_looked_up_where_they_were_written():
    parameters = signature_of(torch.optim.lr_scheduler.OneCycleLR).parameters
    assert words_of(parameters["anneal_strategy"].annotation) == ["cos", "linear"]
    assert not fits("0.3", parameters["pct_start"].annotation)


def test_the_hidden_names_of_a_metric_are_those_it_takes():
    """Metric of torchmetrics 1.9 reads these names from **kwargs and refuses all others."""
    names = HIDDEN_NAMES["torchmetrics.metric.Metric"]
    given_by_hand = {name: False for name in names if names[name] is bool} | {"dist_sync_on_step": True}
    torchmetrics.MeanMetric(**given_by_hand)
    for name in names:
        if names[name] is not bool:
            torchmetrics.MeanMetric(**{name: print if "_fn" in name else None})
    with pytest.raises(ValueError, match="Unexpected keyword arguments"):
        torchmetrics.MeanMetric(compute_on_gpu=True)


def test_the_hidden_names_of_ddp_are_those_of_torch():
    taken = inspect.signature(DistributedDataParallel.__init__).parameters
    names = HIDDEN_NAMES["lightning.pytorch.strategies.ddp.DDPStrategy"]
    assert set(names) <= set(taken)
    found = signature_of(DDPStrategy)
    assert not found.open
    assert {*names, "process_group_backend"} <= set(found.parameters)


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("precison", ["precision", "profiler"], "precision"), ("lrr", ["lr", "eps"], "lr"),
        ("weightdecay", ["weight_decay", "lr"], "weight_decay"), ("Adam-W", ["adam", "adamw"], "adamw"),
        ("epochs", ["max_epochs", "max_steps"], "max_epochs"), ("fp61", ["fp32", "fp16"], "fp16"),
        ("xyzzy", ["lr", "eps"], None), ("", ["lr"], None),
    ],
)  # fmt: skip
def test_the_nearest_spelling(word, known, found):
    assert find_nearest(word, known) == ([found] if found else [])
    assert did_you_mean(word, known) == (f"Did you mean {found}?" if found else None)


def test_a_long_list_is_cut_to_the_nearest():
    names = [f"name_{index}" for index in range(40)] + ["learning_rate"]
    shown = among(names, word="learnin_rate")
    assert shown.startswith("learning_rate, ")
    assert shown.endswith("... (41 in all)")
    assert len(shown) < 100
    assert among(["a", "b"]) == "a, b"
    assert among([]) == "(nothing)"
