"""Parser of overrides. The grammar is Hydra's, except that `range` computes exact numbers."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from hydra import version
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

VERSION_BASE = "1.3"
# Maximum number of values in a range. A longer range could fill the memory before the sweep is refused as too large.
MAX_NUMBERS = 1_000_000


class Numbers(ChoiceSweep):
    """Swept values of an override with a range, such as `seed=range(3)`, in increasing or decreasing order."""


@contextlib.contextmanager
def hydra_base() -> Iterator[None]:
    """Set Hydra's `version_base` to VERSION_BASE within the context, and restore the previous value at the end.

    The value is restored because another Hydra program in this process may have set it.
    """
    kept = version.VersionBase.instance().version_base
    version.setbase(VERSION_BASE)
    try:
        yield
    finally:
        version.VersionBase.instance().version_base = kept


@functools.lru_cache(maxsize=4096)
def parse_override(text: str) -> Override:
    """Parse one override. The result is cached, so callers must not change it.

    Raises:
        HydraException: The text is not an override.
        RecursionError: The value is nested too deeply.
    """
    with hydra_base():
        return _parser().parse_overrides([text])[0]


@functools.cache
def _parser() -> OverridesParser:
    parser = OverridesParser.create()
    parser.functions.functions["range"] = _numbers
    return parser


def _numbers(start: float, stop: float | None = None, step: float = 1) -> Numbers:
    """Return the numbers start, start + step, start + 2 * step and so on before `stop`, computed in exact decimals.

    This function replaces Hydra's `range` for two reasons. Hydra adds binary floats, so its `range(0.01,0.05,0.01)`
    contains 0.05. Hydra's `sort(range(...), reverse=true)` returns numbers that are not in the range.

    Args:
        start: First number. If `stop` is None, the range begins at 0 and ends before `start`.
        stop: End of the range, which is not included.
        step: Difference of two consecutive numbers. Default: 1.

    Raises:
        ValueError: A number is infinite or nan, the step is 0, or the range is too long.
    """
    if stop is None:
        start, stop = 0, start
    if not all(map(math.isfinite, (start, stop, step))) or step == 0:
        raise ValueError("range(...) needs finite numbers and a step other than 0")
    first, end, distance = (Fraction(repr(number)) for number in (start, stop, step))
    count = max(0, math.ceil((end - first) / distance))
    if count > MAX_NUMBERS:
        raise ValueError(f"range(...) has {count:,} numbers, and the limit is {MAX_NUMBERS:,}")
    kind = int if all(isinstance(number, int) for number in (start, stop, step)) else float
    return Numbers(list=[kind(first + place * distance) for place in range(count)])


def packages_allowed_by(overrides: Sequence[str]) -> list[str]:
    """Return the packages that the command line allows by overrides of the key `security.allow`."""
    found: set[str] = set()
    for text in overrides:
        if "security" not in text:
            continue
        try:
            line = parse_override(text)
        except (HydraException, RecursionError):
            continue  # checked_lines reports the error
        is_value = line.key_or_group == "security.allow" and not line.is_sweep_override() and not line.is_delete()
        value = line.value() if is_value else None
        if isinstance(value, list):
            found |= set(map(str, value))
    return sorted(found)
