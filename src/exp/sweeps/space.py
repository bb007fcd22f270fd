"""The swept keys of a sweep. A grid combines lists of values. A search draws values from lists and intervals.

    optimizer.lr=1e-3,1e-2   seed=range(0,10)   model=glob(m*)                             lists
    optimizer.lr=tag(log,interval(1e-5,1e-1))   data.batch_size=int(interval(16,256))      intervals

Combinations are generated one at a time, so a large grid needs no memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from exp.config.grammar import Numbers, parse_override
from exp.config.groups import Vocabulary
from exp.config.hydra_adapter import recorded_overrides, swept_texts
from exp.config.overrides import read_swept
from exp.config.plain_tree import are_same
from exp.errors import ConfigError, ErrorDetails, missing_value, raise_errors, unknown_word, unsuitable
from exp.spelling import among, show

MAX_JOBS = 10_000
Combination = Mapping[str, str]
Condition = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A swept key with its values.

    Attributes:
        key: Config key with the sign `+` or `~` of its override, if any: `+optimizer.lr`.
        texts: Values of a list, as written in an override.
        low: Lower end of an interval, included.
        high: Upper end of an interval, included.
        is_log: Whether the logarithm of the numbers is drawn uniformly.
        is_integer: Whether only integers are drawn from the interval.
        is_interval: Whether the values are an interval. Otherwise they are a list.
        when: Values of other keys for which this key is swept. None: the key is always swept.
        is_range: Whether `texts` are the numbers of a range in ascending or descending order.
    """

    key: str
    texts: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_integer: bool = False
    is_interval: bool = False
    when: Condition | None = None
    is_range: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """Config key without the sign `+` or `~`."""
        return self.key.lstrip("+~")

    def ends(self) -> tuple[str, ...]:
        """Return every value of a list, or both ends of an interval or a range, as text."""
        if self.is_range:
            return tuple(dict.fromkeys((self.texts[0], self.texts[-1])))
        if not self.is_interval:
            return self.texts
        return tuple(dict.fromkeys((self.text(self.low), self.text(self.high))))

    def domain(self) -> list[object] | tuple[float, float] | None:
        """Return the values for TensorBoard's HParams page. Return None if a value contains an interpolation."""
        if self.is_interval:
            return self.low, self.high
        parsed = [(text, parse_override(f"{self.name}={text}").value()) for text in self.texts]
        if any("${" in str(value) for _, value in parsed):
            return None
        return [text if value is None or isinstance(value, dict | list) else value for text, value in parsed]

    def texts_of(self, wanted: object) -> tuple[str, ...]:
        """Return the elements of `texts` that mean a given value. For example, `1e-3` means 0.001."""
        parsed = ((text, parse_override(f"{self.name}={text}").value()) for text in self.texts)
        return tuple(text for text, value in parsed if are_same(value, wanted) or text == wanted)

    def text(self, value: float) -> str:
        """Return a drawn number as text, with all digits."""
        return str(int(value)) if self.is_integer else repr(float(value))


@dataclass(frozen=True, kw_only=True)
class Space:
    """The swept keys, and the overrides that all jobs share.

    Attributes:
        axes: Swept keys in the order in which they were typed. The last key varies fastest in a grid.
        fixed: Overrides of all jobs.
    """

    axes: tuple[Axis, ...]
    fixed: tuple[str, ...]

    @property
    def has_intervals(self) -> bool:
        return any(axis.is_interval for axis in self.axes)

    def axis(self, name: str) -> Axis | None:
        """Return the Axis object of a key. Return None if the key is not swept."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def overrides(self, values: Combination) -> list[str]:
        """Return the overrides of a job.

        Args:
            values: Values of the swept keys as text, by key.
        """
        return [*self.fixed, *(f"{axis.key}={values[axis.key]}" for axis in self.axes if axis.key in values)]

    def is_there(self, axis: Axis, values: Combination) -> bool:
        """Return whether the condition of an axis is fulfilled.

        Args:
            axis: Axis with the condition.
            values: Values of other swept keys as text, by key.
        """
        return axis.when is None or all(
            any(values.get(other.key) in wanted for other in self.axes if other.name == name)
            for name, wanted in axis.when.items()
        )

    def grid(self) -> Iterator[Combination]:
        """Yield every combination of values. A combination has no value for a key with an unfulfilled condition."""
        yield from self._combine(self.by_condition(), {})

    def _combine(self, axes: Sequence[Axis], values: Combination) -> Iterator[Combination]:
        if not axes:
            yield values
            return
        first, *rest = axes
        texts = first.texts if self.is_there(first, values) else (None,)
        for text in texts:
            yield from self._combine(rest, values if text is None else {**values, first.key: text})

    def corners(self) -> list[Combination]:
        """Return combinations that contain every value of each list, and both ends of each interval and range."""
        found: dict[tuple[tuple[str, str], ...], Combination] = {}
        ordered = self.by_condition()
        for varied in self.axes:
            for text in varied.ends():
                values: dict[str, str] = {}
                for axis in ordered:
                    if axis is varied:
                        values[axis.key] = text
                    elif self.is_there(axis, values):
                        # Prefer a value that fulfills the condition of the varied axis.
                        needed = (varied.when or {}).get(axis.name, ())
                        values[axis.key] = next((one for one in axis.ends() if one in needed), axis.ends()[0])
                found.setdefault(tuple(values.items()), values)
        return list(found.values())

    def by_condition(self) -> list[Axis]:
        """Return the axes sorted so that each axis comes after the axes on which its condition depends."""
        left, done = list(self.axes), dict[str, Axis]()
        while left:
            ready = [
                axis for axis in left if axis.when is None or axis.when.keys() <= {one.name for one in done.values()}
            ]
            if not ready:
                got = f"{' and '.join(axis.name for axis in left)}, whose conditions depend on each other"
                raise ConfigError([ErrorDetails("sweep.when", got, "conditions without a cycle")])
            done.update({axis.key: axis for axis in ready})
            left = [axis for axis in left if axis.key not in done]
        return list(done.values())


def space_of(config: DictConfig, vocabulary: Vocabulary) -> Space:
    """Return the swept keys and the shared overrides of the command line and of hydra.sweeper.params.

    Args:
        config: Config of the sweep.
        vocabulary: The config groups and their options.

    Raises:
        ConfigError: An interval is not valid, a list is empty or contains a value twice, a condition is never
            fulfilled, or the grid has too many jobs.
    """
    axes: list[Axis] = []
    fixed: list[str] = []
    errors: list[ErrorDetails] = []
    for line in _lines(config, vocabulary) or []:
        if not line.is_sweep_override():
            fixed.append(line.input_line or line.get_key_element())
            continue
        error, axis = _axis(line, vocabulary)
        errors += error
        axes.append(axis)
    if not errors:
        axes = [replace(axis, when=_condition(axis.name, config, axes, errors)) for axis in axes]
        names = [axis.name for axis in axes]
        errors += [
            _unswept_error(f"sweep.when.{key}", str(key), names) for key in config.sweep.when if key not in names
        ]
    errors += _size_errors(axes, is_sampled=config.sweep.sampler not in ("auto", "grid"))
    raise_errors(errors)
    space = Space(axes=tuple(axes), fixed=tuple(fixed))
    space.by_condition()
    return space


def _size_errors(axes: Sequence[Axis], *, is_sampled: bool) -> Iterator[ErrorDetails]:
    """Yield an error if a grid has too many jobs, or a sampled list has too many values.

    Args:
        axes: Swept keys.
        is_sampled: Whether a sampler draws from the lists.
    """
    counts = {axis.name: len(axis.texts) for axis in axes if not axis.is_interval}
    jobs, key = math.prod(counts.values()), max(counts, key=counts.__getitem__, default="")
    if jobs > MAX_JOBS and (not is_sampled or counts[key] > MAX_JOBS):
        got, expected = f"{counts[key]:,} values in {jobs:,} combinations", f"at most {MAX_JOBS:,} jobs"
        fix = "Use fewer values, or sample from an interval: sweep.sampler=random sweep.trials=100"
        yield ErrorDetails(key, got, expected, fix)


def _lines(config: DictConfig, vocabulary: Vocabulary) -> list[Override] | None:
    """Return the last override of each key. Return None if the sweeper is not from exp."""
    texts = swept_texts(config)
    if texts is None:
        return None
    last: dict[str, Override] = {}
    typed = recorded_overrides(config)
    for text in texts:
        try:
            line = read_swept(text)
        except ConfigError as error:
            source = error.errors[0].source if text in typed else "hydra.sweeper.params"
            raise ConfigError([replace(error.errors[0], source=source)]) from error
        is_group = vocabulary.group_exists(line.key_or_group)
        if not is_group:
            # A later override of the same key replaces a swept override, even if only one of them has the sign +.
            name = line.key_or_group
            last = {key: one for key, one in last.items() if one.key_or_group != name or not one.is_sweep_override()}
        # For a config group, `+` adds an option to the options that other overrides of the group chose.
        last[text if is_group and line.is_add() else line.get_key_element()] = line
    return list(last.values())


def _unswept_error(key: str, name: str, swept: Sequence[str]) -> ErrorDetails:
    return unsuitable(key, name, "which is not swept", f"one of {among(swept, word=name)}")


def _condition(key: str, config: DictConfig, axes: Sequence[Axis], errors: list[ErrorDetails]) -> Condition | None:
    """Return the condition of a swept key from `sweep.when`. Return None if the key has no condition.

    Args:
        key: The swept key.
        config: Config of the sweep.
        axes: All swept keys.
        errors: List to which errors are appended.
    """
    conditions = cast(dict[str, dict[str, object]], OmegaConf.to_container(config.sweep.when, resolve=True))
    if key not in conditions:
        return None
    known = {axis.name: axis for axis in axes}
    found: dict[str, tuple[str, ...]] = {}
    for name, wanted in conditions[key].items():
        if name not in known:
            errors.append(_unswept_error(f"sweep.when.{key}", name, [*known]))
            continue
        axis, values = known[name], wanted if isinstance(wanted, list) else [wanted]
        each = [axis.texts_of(value) for value in values]
        if not values or not all(each):
            value = "[]" if not values else show(values[each.index(())])
            errors.append(unknown_word(f"sweep.when.{key}.{name}", value, axis.texts or ["the values of a list"]))
        found[name] = tuple(text for texts in each for text in texts)
    return found


def no_job(key: str) -> ErrorDetails:
    """Return the error of a swept key without values."""
    return missing_value(key, "at least one value", got="no value, so the sweep has no job")


def _axis(line: Override, vocabulary: Vocabulary) -> tuple[list[ErrorDetails], Axis]:
    """Return the errors of a swept override, and its Axis object."""
    name, key, value = line.key_or_group, line.get_key_element(), line.value()
    if isinstance(value, IntervalSweep):
        # Keep the type int or float, because a resumed search compares the repr of the axis with the text in
        # sweep.json.
        low, high, got = cast(float, value.start), cast(float, value.end), str(line.get_value_string())
        is_log, is_integer = "log" in value.tags, isinstance(low, int) and isinstance(high, int)
        axis = Axis(key=key, low=low, high=high, is_log=is_log, is_integer=is_integer, is_interval=True)
        if tags := value.tags - {"log"}:
            return [unknown_word(name, min(tags), ["log"])], axis
        if not (math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not is_log)):
            expected = f"an interval from a {'positive ' if is_log else ''}number to a larger number"
            return [ErrorDetails(name, got, expected, f"Write {name}={low}" if low == high else None)], axis
        return [], axis
    texts = tuple(value.filter(vocabulary.options(name)) if isinstance(value, Glob) else line.sweep_string_iterator())
    axis = Axis(key=key, texts=texts, is_range=isinstance(value, Numbers))
    if not texts:
        return [no_job(name)], axis
    if isinstance(value, ChoiceSweep) and value.shuffle:
        expected = "values in a fixed order, because a resumed sweep lists its jobs again"
        return [unsuitable(name, line.get_value_string(), "which has a random order", expected)], axis
    twice = [text for text, count in Counter(texts).items() if count > 1]
    fix = f"Write {name}={','.join(dict.fromkeys(texts))}"
    return [unsuitable(name, text, "twice", "each value once", fix) for text in twice[:1]], axis
