"""Errors below the config's `data`, and the sizes of its parts. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from exp.errors import ConfigError, ErrorDetails, MissingExtraError, RunError, config_error, is_installed, raise_errors
from exp.shared_types import STAGES
from exp.spelling import among, did_you_mean, show


class SampleError(RunError):
    """A sample that cannot be used. error: at the key of the config where it is mended; the check tells it, too."""

    def __init__(self, error: ErrorDetails) -> None:
        self.error = error
        super().__init__(str(error))


def data_error(key: str, *, got: str, expected: str, fix: str | None = None, subject: str = "") -> ConfigError:
    """The error to raise for one error below `data`. key: dotted, below `data.`. subject: see ErrorDetails."""
    key = f"data.{key}" if key else "data"
    return config_error(key, got=got, expected=expected, fix=fix, subject=subject)


def refuse_unknown_columns(file: Path | str, names: Collection[str], wanted: Mapping[str, Iterable[str | int]]) -> None:
    """Raise ConfigError with an error for each column that a file does not have.

    names: of the file's columns. wanted: the names that each option of the data set gives.
    """
    errors = [
        ErrorDetails(
            key=f"data.dataset.{option}", got=name, expected=f"a column of {file}", fix=name_fix(name, names),
            subject=name,
        )
        for option, given in wanted.items()
        for name in map(str, given)
        if name not in names
    ]  # fmt: skip
    raise_errors(errors)


def name_fix(name: str, names: Collection[str]) -> str | None:
    """A fix that proposes the nearest spelling, or lists the names where none is near; None where there are none."""
    return did_you_mean(name, names) or (f"There is: {among(sorted(names), word=name)}" if names else None)


def fitted_entry(fitted: Mapping[str, Any], name: str, *, part: object) -> Any:
    """What the training part told by this name.

    Raises: ConfigError where it is of another kind, and told something else.
    """
    if name in fitted:
        return fitted[name]
    raise data_error(
        "train",
        got=f"a training part that tells {', '.join(fitted) or 'nothing'}, beside a part that is {type(part).__name__}",
        expected="one kind: what training has seen scales or encodes the other parts",
    )


def require_extra(package: str, *, feature: str, extra: str, key: str = "dataset._target_") -> None:
    """Raises: ConfigError where the package that a feature needs is not installed. key: of the config, that asks."""
    if not is_installed(package):
        got, _, fix = str(MissingExtraError(feature=feature, package=package, extra=extra)).partition(": ")
        raise data_error(key, got=got, expected="it", fix=f"Install it: {fix}")


def share_errors(sizes: Mapping[str, object]) -> list[ErrorDetails]:
    """The errors of data.parts, which holds the sizes of the parts train, val and test.

    A size is a fraction of the data set, of 1 at most together, or a number of samples.
    """
    errors = []
    fractions = 0.0
    for name, size in sizes.items():
        key = f"data.parts.{name}"
        if name not in STAGES:
            fix = did_you_mean(str(name), STAGES)
            errors.append(ErrorDetails(key=key, got="no part", expected="train, val or test", fix=fix))
        elif not is_share(size):
            expected = "a fraction from 0 to 1, or a whole number of samples"
            errors.append(ErrorDetails(key=key, got=show(size), expected=expected))
        elif isinstance(size, float) and size <= 1:
            fractions += size
    if fractions > 1 + 1e-9:
        got = f"fractions that add up to {fractions:g}"
        errors.append(ErrorDetails(key="data.parts", got=got, expected="1 at most", fix="Make one part smaller"))
    return errors


def is_share(size: object) -> bool:
    if not isinstance(size, int | float) or isinstance(size, bool):
        return False
    return math.isfinite(size) and size >= 0 and (size <= 1 or size == int(size))
