"""Errors in the config's `data` section, and the check of split sizes.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from exp.errors import ConfigError, ErrorDetails, MissingExtraError, RunError, is_installed, raise_errors
from exp.shared_types import STAGES
from exp.spelling import among, did_you_mean, show


class SampleError(RunError):
    """Error in a sample of the data. The check before a run reports it as an error of the config.

    Args:
        error: The details of the error, including the config key that the user can change.
    """

    def __init__(self, error: ErrorDetails) -> None:
        self.error = error
        super().__init__(str(error))


def data_detail(key: str, *, got: str, expected: str, fix: str | None = None, subject: str = "") -> ErrorDetails:
    """Return the details of an error in the config's `data` section.

    Args:
        key: The config key below `data.`. An empty text means the key `data`.
        got: See ErrorDetails.
        expected: See ErrorDetails.
        fix: See ErrorDetails.
        subject: See ErrorDetails.
    """
    return ErrorDetails(f"data.{key}" if key else "data", got, expected, fix, subject=subject)


def data_error(key: str, *, got: str, expected: str, fix: str | None = None, subject: str = "") -> ConfigError:
    """Return a ConfigError with a single error; see data_detail for the arguments."""
    return ConfigError([data_detail(key, got=got, expected=expected, fix=fix, subject=subject)])


def sample_error(key: str, *, got: str, expected: str, fix: str | None = None) -> SampleError:
    """Return a SampleError; see data_detail for the arguments."""
    return SampleError(data_detail(key, got=got, expected=expected, fix=fix))


def name_error(key: str, name: str, names: Collection[str], *, expected: str) -> ConfigError:
    """Return a ConfigError for an unknown name in the config. The message proposes the most similar known name.

    Args:
        key: The config key below `data.`.
        name: The unknown name.
        names: The known names.
        expected: See ErrorDetails.
    """
    return data_error(key, got=name, expected=expected, fix=name_fix(name, names), subject=name)


def file_error(file: Path | str, reason: object, expected: str, *, key: str = "dataset.path") -> ConfigError:
    """Return a ConfigError for a file that cannot be read.

    Args:
        file: The file.
        reason: The error of the reader. The message contains the first line of its text.
        expected: See ErrorDetails.
        key: The config key below `data.`. Default: `dataset.path`.
    """
    line = next(iter(str(reason).splitlines()), type(reason).__name__)
    return data_error(key, got=f"{file} ({line})", expected=expected)


def require_sample(count: int, file: Path | str, *, key: str = "dataset.path") -> None:
    """Raise ConfigError if the number of samples in a file is 0."""
    if count < 1:
        raise data_error(key, got=f"{file} without a sample", expected="at least one sample")


def require_equal_lengths(lengths: Mapping[str, int | None], file: Path | str, *, key: str = "dataset.path") -> None:
    """Raise ConfigError if the arrays of a file differ in length.

    Args:
        lengths: The length of each array by name. None means a scalar, which is always an error.
        file: The file, for the message.
        key: The config key below `data.`. Default: `dataset.path`.
    """
    if len(set(lengths.values())) > 1 or None in lengths.values():
        got = ", ".join(f"{name} has {length or 'no'} samples" for name, length in lengths.items())
        raise data_error(key, got=f"{file}, where {got}", expected="the same number of samples in each array")


def refuse_unknown_columns(file: Path | str, names: Collection[str], wanted: Mapping[str, Iterable[str | int]]) -> None:
    """Raise ConfigError if the config names columns that are not in a file. The error lists all of them.

    Args:
        file: The file, for messages.
        names: The names of the columns in the file.
        wanted: The names of the columns in the config, by option of the data set, such as `target`.
    """
    expected = f"a column of {file}"
    raise_errors(
        data_detail(f"dataset.{option}", got=name, expected=expected, fix=name_fix(name, names), subject=name)
        for option, given in wanted.items()
        for name in map(str, given)
        if name not in names
    )


def name_fix(name: str, names: Collection[str]) -> str | None:
    """Return a sentence that proposes the known name that is most similar to an unknown name.

    If no known name is similar, the sentence lists the known names. Return None if there are no known names.

    Args:
        name: The unknown name.
        names: The known names.
    """
    return did_you_mean(name, names) or (f"Available: {among(sorted(names), word=name)}" if names else None)


def fitted_entry(fitted: Mapping[str, Any], name: str, *, part: object) -> Any:
    """Return an entry of the training split's statistics.

    Args:
        fitted: The statistics of the training split, by name.
        name: The name of the entry.
        part: The split that needs the entry, for the message.

    Raises:
        ConfigError: The statistics do not contain the entry, because the training split and `part` are data sets of
            different classes.
    """
    if name in fitted:
        return fitted[name]
    statistics = ", ".join(fitted) or "no statistics"
    got = f"a training split with {statistics}, and another split of the class {type(part).__name__}"
    expected = "the same class for all splits, because statistics of the training split encode the other splits"
    raise data_error("train", got=got, expected=expected)


def require_extra(package: str, *, feature: str, extra: str, key: str = "dataset._target_") -> None:
    """Raise ConfigError if an optional package is not installed.

    Args:
        package: The import name of the package.
        feature: The feature that needs the package, for the message.
        extra: The pip extra of exp that installs the package.
        key: The config key below `data.` that requests the feature. Default: the `_target_` of `dataset`.
    """
    if not is_installed(package):
        got, _, fix = str(MissingExtraError(feature=feature, package=package, extra=extra)).partition(": ")
        raise data_error(key, got=got, expected="an installed package", fix=f"Install the package: {fix}")


def share_errors(sizes: Mapping[str, object]) -> list[ErrorDetails]:
    """Return the errors in data.parts.

    Args:
        sizes: The size of each split by name: a number of samples, or a fraction. The sum of the fractions must be at
            most 1.
    """
    errors = []
    fractions = 0.0
    for name, size in sizes.items():
        if name not in STAGES:
            fix = did_you_mean(str(name), STAGES)
            errors.append(data_detail(f"parts.{name}", got=str(name), expected="train, val or test", fix=fix))
        elif not is_share(size):
            expected = "a fraction from 0 to 1, or a whole number of samples"
            errors.append(data_detail(f"parts.{name}", got=show(size), expected=expected))
        elif isinstance(size, float) and size <= 1:
            fractions += size
    if fractions > 1 + 1e-9:
        got = f"fractions that add up to {fractions:g}"
        errors.append(data_detail("parts", got=got, expected="a sum of at most 1", fix="Reduce the size of a split"))
    return errors


def is_share(size: object) -> bool:
    """Return whether a value is a fraction from 0 to 1 or a whole number of samples."""
    if not isinstance(size, int | float) or isinstance(size, bool):
        return False
    return math.isfinite(size) and size >= 0 and (size <= 1 or size == int(size))
