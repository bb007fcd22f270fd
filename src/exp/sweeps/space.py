"""What a sweep goes over: a list of values a key, or an interval; which combinations, none of them listed before it is
asked for.

    optimizer.lr=1e-3,1e-2   seed=range(0,10)   model=glob(m*)       lists: a grid combines them
    optimizer.lr=tag(log,interval(1e-5,1e-1))   data.batch_size=int(interval(16,256))      intervals: a search draws
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from exp.config.grammar import Numbers, parse_override
from exp.config.groups import Vocabulary
from exp.config.hydra_adapter import recorded_overrides, swept_texts
from exp.config.overrides import read_swept
from exp.config.plain_tree import are_same
from exp.errors import ConfigError, Fault
from exp.spelling import among, show
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
        parsed = [(text, parse_override(f"{self.name}={text}").value()) for text in self.texts]
        if any("${" in str(value) for _, value in parsed):
            return None
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

    def axis(self, name: str) -> Axis | None:
        """Return the axis of a key. Return None if the key is not swept."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def overrides(self, values: Combination) -> list[str]:
        """Return the overrides of a job. values: The values of its axes by key."""
        return [*self.fixed, *(f"{axis.key}={values[axis.key]}" for axis in self.axes if axis.key in values)]

    def is_there(self, axis: Axis, values: Combination) -> bool:
        """Whether an axis is there beside the values of others."""
        return axis.when is None or all(
            any(values.get(other.key) in wanted for other in self.axes if other.name == name)
            for name, wanted in axis.when.items()
        )

    def grid(self) -> Iterator[Combination]:
        """Yield every combination of lists. An axis whose condition does not hold is left out of a combination."""
        yield from self._combined(self.by_condition(), {})

    def _combined(self, axes: Sequence[Axis], values: Combination) -> Iterator[Combination]:
        if not axes:
            yield values
            return
        first, *rest = axes
        texts = first.texts if self.is_there(first, values) else (None,)
        for text in texts:
            yield from self._combined(rest, values if text is None else {**values, first.key: text})

    def corners(self) -> list[Combination]:
        """Return combinations that have every value of each list, and both ends of each interval and range."""
        found: dict[tuple[tuple[str, str], ...], Combination] = {}
        ordered = self.by_condition()
        for varied in self.axes:
            for text in varied.ends():
                values: dict[str, str] = {}
                for axis in ordered:
                    if axis is varied:
                        values[axis.key] = text
                    elif self.is_there(axis, values):
                        # A value that the condition of the varied axis needs.
                        needed = (varied.when or {}).get(axis.name, ())
                        values[axis.key] = next((one for one in axis.ends() if one in needed), axis.ends()[0])
                found.setdefault(tuple(values.items()), values)
        return list(found.values())

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


def sizes(config: DictConfig, vocabulary: Vocabulary) -> dict[str, int] | None:
    """How many values each key takes, none of them made, in a grid; None of a sweeper that exp does not know."""
    lines = _lines(config, vocabulary)
    if lines is None:
        return None
    return {line.get_key_element(): _size(line, vocabulary) for line in lines if line.is_sweep_override()}


def space_of(config: DictConfig, vocabulary: Vocabulary, *, seed: int) -> Space:
    """What the command line, and hydra.sweeper.params, ask for.

    seed: of the order that shuffle gives.
    Raises: ConfigError with a fault for each interval that cannot be drawn from, and each condition on nothing.
    """
    lines = _lines(config, vocabulary) or []
    axes: list[Axis] = []
    fixed: list[str] = []
    faults: list[Fault] = []
    for line in lines:
        if not line.is_sweep_override():
            fixed.append(line.input_line or line.get_key_element())
            continue
        try:
            axes.append(_axis(line, vocabulary, seed=seed))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    conditions = _conditions(config, axes)
    axes = [replace(axis, when=conditions.get(axis.name)) for axis in axes]
    space = Space(axes=tuple(axes), fixed=tuple(fixed))
    space.by_condition()
    return space


def _lines(config: DictConfig, vocabulary: Vocabulary) -> list[Override] | None:
    """The overrides, the last of each key; None of a sweeper that exp does not know."""
    texts = swept_texts(config)
    if texts is None:
        return None
    last: dict[str, Override] = {}
    typed = recorded_overrides(config)
    for text in texts:
        try:
            line = read_swept(text)
        except ConfigError as error:
            source = error.faults[0].source if text in typed else "hydra.sweeper.params"
            raise ConfigError([replace(error.faults[0], source=source)]) from error
        is_group = vocabulary.group_exists(line.key_or_group)
        if not line.is_delete() and not is_group:
            line = _behind_others(line, last)
        # Of a group, a `+` adds to what `=`, and another `+`, chooses.
        last[text if is_group and line.is_add() else line.get_key_element()] = line
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


def _conditions(config: DictConfig, axes: Sequence[Axis]) -> dict[str, dict[str, tuple[str, ...]]]:
    """By the names of axes, what `sweep.when` asks of others.

    Raises: ConfigError with a fault for each condition on nothing.
    """
    said = OmegaConf.to_container(config.sweep.when, resolve=True)
    assert isinstance(said, dict)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    faults: list[Fault] = []
    for key, condition in said.items():
        try:
            found[str(key)] = _condition(str(key), condition, axes)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return found


def _condition(key: str, condition: Mapping[str, Any], axes: Sequence[Axis]) -> dict[str, tuple[str, ...]]:
    """The values of other axes, as overrides end, beside which a key is there.

    Raises: ConfigError where one of them is not swept, or never has such a value.
    """
    known = {axis.name: axis for axis in axes}
    unknown = [name for name in (key, *condition) if name not in known]
    if unknown:
        got, expected = f"{unknown[0]}, which is not swept", f"one of {among(known, word=unknown[0])}"
        raise ConfigError([Fault(key=f"sweep.when.{key}", got=got, expected=expected)])
    found = {}
    for name, wanted in condition.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        each = [_texts_with(known[name], value) for value in values]
        if not values or not all(each):
            got = "[]" if not values else f"{_shown(values[each.index(())])}, which {name} never is"
            raise ConfigError([Fault(key=f"sweep.when.{key}.{name}", got=got, expected=_domain_in_words(known[name]))])
        found[str(name)] = tuple(text for texts in each for text in texts)
    return found


def _texts_with(axis: Axis, wanted: Any) -> tuple[str, ...]:
    """The values of an axis, as overrides end, that are this one however it is written: 1e-3 is 0.001."""
    if axis.is_interval:
        is_there = axis.is_integer and type(wanted) is int and axis.low <= wanted <= axis.high
        return (axis.text(wanted),) if is_there else ()
    parsed = ((text, parse_override(f"{axis.name}={text}").value()) for text in axis.texts)
    return tuple(text for text, value in parsed if are_same(value, wanted) or text == wanted)


def _domain_in_words(axis: Axis) -> str:
    if axis.is_interval:
        whole = "a whole number of the interval" if axis.is_integer else "a key that is swept by a list"
        return f"{whole}: a search draws {axis.name} from {axis.text(axis.low)} to {axis.text(axis.high)}"
    return f"one of {among(axis.texts)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def _axis(line: Override, vocabulary: Vocabulary, *, seed: int) -> Axis:
    key, value = line.get_key_element(), line.value()
    if not isinstance(value, IntervalSweep):
        is_range = isinstance(value, Numbers) and not value.shuffle
        texts = _texts(line, vocabulary, seed=seed)
        _refuse_twice(line, texts)
        return Axis(key=key, texts=texts, is_range=is_range)
    low, high = value.start, value.end
    assert low is not None
    assert high is not None
    is_log = "log" in value.tags
    refused = _interval_fault(line, low, high, is_log=is_log, tags=value.tags - {"log"})
    if refused is not None:
        raise ConfigError([refused])
    is_integer = isinstance(low, int) and isinstance(high, int)
    if low == high:
        cure = f"Write {line.key_or_group}={low}"
        got, expected = f"{line.get_value_string()}, in which {low} is alone", "an interval of several numbers"
        raise ConfigError([Fault(key=line.key_or_group, got=got, expected=expected, cure=cure)])
    return Axis(key=key, low=low, high=high, is_log=is_log, is_integer=is_integer, is_interval=True)


def _refuse_twice(line: Override, texts: Sequence[str]) -> None:
    """Raise ConfigError if a list has a value twice, however it is written: the same job would run twice."""
    first: dict[object, str] = {}
    for text in texts:
        value: object = text
        for number in (int, float):
            with contextlib.suppress(ValueError):
                value = (number, number(text))
                break
        if value in first:
            both = text if first[value] == text else f"{first[value]} and {text}"
            rest = ",".join(first.values())
            cure = f"Write {line.key_or_group}={rest}" if len(rest) < 60 and len(first) == len(texts) - 1 else None
            raise ConfigError([
                Fault(key=line.key_or_group, got=f"{both}, twice", expected="each value once", cure=cure)
            ])  # fmt: skip
        first[value] = text


def _interval_fault(line: Override, low: float, high: float, *, is_log: bool, tags: set[str]) -> Fault | None:
    key, got = line.key_or_group, line.get_value_string()
    if tags:
        return Fault(key=key, got=f"the tag {min(tags)}", expected="log, the one tag that a search reads")
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        return Fault(key=key, got=got, expected="an interval from a number to one that is not below it")
    if is_log and low <= 0:
        return Fault(key=key, got=got, expected="numbers above 0, of which there is a logarithm")
    return None


def _texts(line: Override, vocabulary: Vocabulary, *, seed: int) -> tuple[str, ...]:
    value = line.value()
    if isinstance(value, Glob):
        return tuple(value.filter(vocabulary.options(line.key_or_group)))
    if isinstance(value, ChoiceSweep) and value.shuffle:
        # Hydra draws another order each time, and a sweep that is gone on with has to find its jobs again.
        value.shuffle = False
        texts = list(line.sweep_string_iterator())
        value.shuffle = True  # whoever parses the same text has the same object
        random.Random(f"{seed} {line.key_or_group}").shuffle(texts)
        return tuple(texts)
    return tuple(line.sweep_string_iterator())


def _size(line: Override, vocabulary: Vocabulary) -> int:
    value = line.value()
    if isinstance(value, Glob):
        return len(value.filter(vocabulary.options(line.key_or_group)))
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    return 1  # an interval
