"""What a sweep goes over: a list of values a key, or an interval; which combinations, none of them listed before it is
asked for.

    optimizer.lr=1e-3,1e-2   seed=range(0,10)   model=glob(m*)       lists: a grid combines them
    optimizer.lr=tag(log,interval(1e-5,1e-1))   data.batch_size=int(interval(16,256))      intervals: a search draws
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, OverrideType, RangeSweep
from omegaconf import DictConfig, OmegaConf

from exp.config.hydra_adapter import Loader, parse_override, swept_texts
from exp.errors import ConfigError, Fault
from exp.spelling import among
from exp.tensorboard.hparams import Domain

Combination = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key and the values it takes.

    key: with its sign, as an override begins. texts: its values, as an override ends; none of an interval.
    low, high: of an interval, both within; is_log: drawn evenly in its logarithm; is_integer. is_range: the values are
        the numbers of a range, in their order.
    when: this axis is there alone where another key has one of these values; else the key keeps its own.
    """

    key: str
    texts: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_integer: bool = False
    is_interval: bool = False
    when: Mapping[str, tuple[str, ...]] | None = None
    is_range: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """The key alone."""
        return self.key.lstrip("+~")

    def ends(self) -> tuple[str, ...]:
        """Every value of a list; the two ends of an interval, and of a range."""
        if self.is_range:
            return tuple(dict.fromkeys((self.texts[0], self.texts[-1])))
        if not self.is_interval:
            return self.texts
        return tuple(dict.fromkeys((self.text(self.low), self.text(self.high))))

    def domain(self) -> Domain | None:
        """What it goes over, as TensorBoard shows it; None where that is another in each job's config."""
        if self.is_interval:
            return Domain(low=self.low, high=self.high)
        if any("${" in text for text in self.texts):
            return None
        parsed = ((text, parse_override(f"{self.name}={text}").value()) for text in self.texts)
        return Domain(
            values=[text if value is None or isinstance(value, dict | list) else value for text, value in parsed]
        )

    def text(self, value: float) -> str:
        """A drawn number as an override ends: read again, it is the same number."""
        return str(int(value)) if self.is_integer else repr(float(value))


@dataclass(frozen=True, kw_only=True)
class Space:
    """axes: in the order in which they were typed, the last one varies fastest. fixed: overrides of every job."""

    axes: tuple[Axis, ...]
    fixed: tuple[str, ...]

    @property
    def has_intervals(self) -> bool:
        return any(axis.is_interval for axis in self.axes)

    def overrides(self, values: Combination) -> list[str]:
        """The overrides of a job; values: by key, of the axes that are there."""
        return [*self.fixed, *(f"{axis.key}={values[axis.key]}" for axis in self.axes if axis.key in values)]

    def is_there(self, axis: Axis, values: Combination) -> bool:
        """Whether an axis is there beside the values of others."""
        return axis.when is None or all(
            any(values.get(other.key) in wanted for other in self.axes if other.name == name)
            for name, wanted in axis.when.items()
        )

    def grid(self) -> Iterator[Combination]:
        """Every combination of lists, one after another: what is not there is not combined."""
        ordered = self.by_condition()
        ranks = {axis.key: place for place, axis in enumerate(self.axes)}
        if all(axis.when is None for axis in self.axes):
            for texts in itertools.product(*(axis.texts for axis in self.axes)):
                yield dict(zip(ranks, texts, strict=True))
            return
        yield from self._combined(ordered, {})

    def _combined(self, axes: Sequence[Axis], values: Combination) -> Iterator[Combination]:
        if not axes:
            yield values
            return
        first, *rest = axes
        texts = first.texts if self.is_there(first, values) else (None,)
        for text in texts:
            yield from self._combined(rest, values if text is None else {**values, first.key: text})

    def by_condition(self) -> list[Axis]:
        """The axes, each behind those that it depends on."""
        left, done = list(self.axes), dict[str, Axis]()
        while left:
            ready = [
                axis for axis in left if axis.when is None or axis.when.keys() <= {one.name for one in done.values()}
            ]
            if not ready:
                names = [axis.name for axis in left]
                got, expected = f"{' and '.join(names)} wait for each other", "conditions that come to an end"
                raise ConfigError([Fault(key="sweep.when", got=got, expected=expected)])
            done.update({axis.key: axis for axis in ready})
            left = [axis for axis in left if axis.key not in done]
        return list(done.values())


def sizes(config: DictConfig, loader: Loader) -> dict[str, int] | None:
    """How many values each key takes, none of them made, in a grid; None of a sweeper that exp does not know."""
    lines = _lines(config, loader)
    if lines is None:
        return None
    return {line.get_key_element(): _size(line, loader) for line in lines if line.is_sweep_override()}


def space_of(config: DictConfig, loader: Loader, *, seed: int) -> Space:
    """What the command line, and hydra.sweeper.params, ask for.

    seed: of the order that shuffle gives.
    Raises: ConfigError with a fault for each interval that cannot be drawn from, and each condition on nothing.
    """
    lines = _lines(config, loader) or []
    axes: list[Axis] = []
    fixed: dict[str, str] = {}
    faults: list[Fault] = []
    conditions = OmegaConf.to_container(config.sweep.when, resolve=True)
    assert isinstance(conditions, dict)
    for line in lines:
        key = line.get_key_element()
        if not line.is_sweep_override():
            fixed[key] = line.input_line or key
            continue
        try:
            axes.append(_axis(line, loader, seed=seed, when=conditions.get(line.key_or_group)))
        except ConfigError as error:
            faults += error.faults
    names = [axis.name for axis in axes]
    for key, condition in ((str(key), condition) for key, condition in conditions.items()):
        unknown = [name for name in (key, *condition) if name not in names]
        if unknown:
            got, expected = f"{unknown[0]}, which is not swept", f"one of {among(names, word=unknown[0])}"
            faults.append(Fault(key=f"sweep.when.{key}", got=got, expected=expected))
    if faults:
        raise ConfigError(faults)
    space = Space(axes=tuple(axes), fixed=tuple(fixed.values()))
    space.by_condition()
    return space


def _lines(config: DictConfig, loader: Loader) -> list[Override] | None:
    """The overrides, the last of each key; None of a sweeper that exp does not know."""
    texts = swept_texts(config)
    if texts is None:
        return None
    last: dict[str, Override] = {}
    for line in map(parse_override, texts):
        # Of a group, a `+` adds to what `=` chooses.
        if not line.is_delete() and not loader.group_exists(line.key_or_group):
            line = _behind_others(line, last)
        last[line.get_key_element()] = line
    return list(last.values())


def _behind_others(line: Override, last: dict[str, Override]) -> Override:
    """An override with the sign that it needs where it takes the place of a swept one of another sign."""
    key = line.get_key_element().lstrip("+")
    for sign in ("", "+", "++"):
        before = last.get(f"{sign}{key}")
        if before is None or before.type is line.type or not before.is_sweep_override():
            continue
        del last[f"{sign}{key}"]
        if before.is_add() and line.type is OverrideType.CHANGE:
            return parse_override(f"+{line.input_line}")
    return line


def _axis(line: Override, loader: Loader, *, seed: int, when: Mapping[str, Any] | None) -> Axis:
    key, value = line.get_key_element(), line.value()
    conditions = None if when is None else {name: _texts_of(wanted) for name, wanted in when.items()}
    if not isinstance(value, IntervalSweep):
        is_range = isinstance(value, RangeSweep) and not value.shuffle
        return Axis(key=key, texts=_texts(line, loader, seed=seed), when=conditions, is_range=is_range)
    low, high = value.start, value.end
    assert low is not None
    assert high is not None
    is_log = "log" in value.tags
    refused = _interval_fault(line, low, high, is_log=is_log, tags=value.tags - {"log"})
    if refused is not None:
        raise ConfigError([refused])
    is_integer = isinstance(low, int) and isinstance(high, int)
    return Axis(
        key=key, low=low, high=high, is_log=is_log, is_integer=is_integer, is_interval=True, when=conditions
    )  # fmt: skip


def _interval_fault(line: Override, low: float, high: float, *, is_log: bool, tags: set[str]) -> Fault | None:
    key, got = line.key_or_group, line.get_value_string()
    if tags:
        return Fault(key=key, got=f"the tag {min(tags)}", expected="log, the one tag that a search reads")
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        return Fault(key=key, got=got, expected="an interval from a number to one that is not below it")
    if is_log and low <= 0:
        return Fault(key=key, got=got, expected="numbers above 0, of which there is a logarithm")
    return None


def _texts_of(wanted: Any) -> tuple[str, ...]:
    return tuple(map(str, wanted)) if isinstance(wanted, list) else (str(wanted),)


def _texts(line: Override, loader: Loader, *, seed: int) -> tuple[str, ...]:
    value = line.value()
    if isinstance(value, Glob):
        return tuple(value.filter(loader.options(line.key_or_group)))
    if isinstance(value, ChoiceSweep | RangeSweep) and value.shuffle:
        # Hydra draws another order each time, and a sweep that is gone on with has to find its jobs again.
        value.shuffle = False
        texts = list(line.sweep_string_iterator())
        value.shuffle = True  # whoever parses the same text has the same object
        random.Random(f"{seed} {line.key_or_group}").shuffle(texts)
        return tuple(texts)
    return tuple(line.sweep_string_iterator())


def _size(line: Override, loader: Loader) -> int:
    value = line.value()
    if isinstance(value, RangeSweep):
        numbers = copy.copy(value).range()
        if isinstance(numbers, range):
            return len(numbers)
        return max(0, math.ceil((float(numbers.stop) - float(numbers.start)) / float(numbers.step)))
    if isinstance(value, Glob):
        return len(value.filter(loader.options(line.key_or_group)))
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    return 1  # an interval
