"""Errors in the config's `data` section, and the check of split sizes. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from exp.errors import ConfigError, ErrorDetails, MissingExtraError, RunError, is_installed, raise_errors
from exp.shared_types import STAGES
from exp.spelling import among, did_you_mean, show


class SampleError(RunError):
    """A sample that cannot be used. The check before a run reports it as an error of the config.

    Args:
        error: The error at the config key that fixes it.
    """

    def __init__(self, error: ErrorDetails) -> None:
        self.error = error
        super().__init__(str(error))


def data_detail(key: str, *, got: str, expected: str, fix: str | None = None, subject: str = "") -> ErrorDetails:
    """Return an error at a key.

    Args:
        key: The key below `data.`; empty for `data` itself.
        got: As in ErrorDetails.
        expected: As in ErrorDetails.
        fix: As in ErrorDetails.
        subject: As in ErrorDetails.
    """
    return ErrorDetails(f"data.{key}" if key else "data", got, expected, fix, subject=subject)


def data_error(key: str, *, got: str, expected: str, fix: str | None = None, subject: str = "") -> ConfigError:
    """Return the ConfigError of a single error; see data_detail."""
    return ConfigError([data_detail(key, got=got, expected=expected, fix=fix, subject=subject)])


def sample_error(key: str, *, got: str, expected: str, fix: str | None = None) -> SampleError:
    """Return the error of a sample; see data_detail."""
    return SampleError(data_detail(key, got=got, expected=expected, fix=fix))


def name_error(key: str, name: str, names: Collection[str], *, expected: str) -> ConfigError:
    """Return the error of a name that is not one of `names`."""
    return data_error(key, got=name, expected=expected, fix=name_fix(name, names), subject=name)


def file_error(file: Path | str, reason: object, expected: str, *, key: str = "dataset.path") -> ConfigError:
    """Return the error of a file that cannot be read, with the first line of the reason."""
    line = next(iter(str(reason).splitlines()), type(reason).__name__)
    return data_error(key, got=f"{file} ({line})", expected=expected)


def require_sample(count: int, file: Path | str, *, key: str = "dataset.path") -> None:
    """Raise ConfigError if a file has no samples."""
    if count < 1:
        raise data_error(key, got=f"{file} without a sample", expected="at least one")


def require_equal_lengths(lengths: Mapping[str, int | None], file: Path | str, *, key: str = "dataset.path") -> None:
    """Raise ConfigError if the arrays of a file differ in length. The length of a single number is None."""
    if len(set(lengths.values())) > 1 or None in lengths.values():
        got = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise data_error(key, got=f"{file}, where {got}", expected="as many samples in each array")


def refuse_unknown_columns(file: Path | str, names: Collection[str], wanted: Mapping[str, Iterable[str | int]]) -> None:
    """Raise ConfigError with an error for each column that a file does not have.

    Args:
        file: The file, for messages.
        names: The columns of the file.
        wanted: The columns that each option of the data set names.
    """
    pairs = [(option, str(name)) for option, given in wanted.items() for name in given]
    errors = (
        name_error(f"dataset.{option}", name, names, expected=f"a column of {file}").errors
        for option, name in pairs
        if name not in names
    )
    raise_errors(detail for several in errors for detail in several)


def name_fix(name: str, names: Collection[str]) -> str | None:
    """Return a fix that proposes the closest name, or lists the names; None without names."""
    return did_you_mean(name, names) or (f"There is: {among(sorted(names), word=name)}" if names else None)


def fitted_entry(fitted: Mapping[str, Any], name: str, *, part: object) -> Any:
    """Return an entry of the training split's statistics.

    Raises:
        ConfigError: The training split is of another kind than this one.
    """
    if name in fitted:
        return fitted[name]
    got = f"a training split with {', '.join(fitted) or 'no statistics'}, and a split that is {type(part).__name__}"
    expected = "one kind of data: the training split scales or encodes the other splits"
    raise data_error("train", got=got, expected=expected)


def require_extra(package: str, *, feature: str, extra: str, key: str = "dataset._target_") -> None:
    """Raise ConfigError if the package that a feature needs is not installed.

    Args:
        package: The package.
        feature: The feature, for the message.
        extra: The extra of exp that installs the package.
        key: The key that requests the feature.
    """
    if not is_installed(package):
        got, _, fix = str(MissingExtraError(feature=feature, package=package, extra=extra)).partition(": ")
        raise data_error(key, got=got, expected="it", fix=f"Install it: {fix}")


def share_errors(sizes: Mapping[str, object]) -> list[ErrorDetails]:
    """Return the errors of data.parts.

    Args:
        sizes: The size of each split: a number of samples, or a fraction. Fractions add up to 1 at most.
    """
    errors = []
    fractions = 0.0
    for name, size in sizes.items():
        if name not in STAGES:
            fix = did_you_mean(str(name), STAGES)
            errors.append(data_detail(f"parts.{name}", got="no split", expected="train, val or test", fix=fix))
        elif not is_share(size):
            expected = "a fraction from 0 to 1, or a whole number of samples"
            errors.append(data_detail(f"parts.{name}", got=show(size), expected=expected))
        elif isinstance(size, float) and size <= 1:
            fractions += size
    if fractions > 1 + 1e-9:
        got = f"fractions that add up to {fractions:g}"
        errors.append(data_detail("parts", got=got, expected="1 at most", fix="Make one split smaller"))
    return errors


def is_share(size: object) -> bool:
    """Return whether a value is a fraction from 0 to 1 or a whole number of samples."""
    if not isinstance(size, int | float) or isinstance(size, bool):
        return False
    return math.isfinite(size) and size >= 0 and (size <= 1 or size == int(size))
