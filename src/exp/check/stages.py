"""The errors of a composed config that are found without building any part of the run.

The first stage does not import torch. It checks values and interpolations (exp.config.reading), keys, types and bounds
(structure.py), and combinations of values (rules.py). The second stage imports the targets and checks their parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from exp.check.rules import allow_is_from_the_command_line, rule_errors
from exp.check.structure import node_errors, own_groups, structure_errors
from exp.config.compose import composition_of, job_config
from exp.config.frozen import COMPOSITION
from exp.config.groups import PRIMARY
from exp.config.module_key import has_module
from exp.config.plain_tree import leaves
from exp.config.reading import UNKNOWN, Reading, Values, raw_values, read
from exp.config.resolvers import resolver_errors
from exp.config.sources import is_set, position_of, source_of
from exp.errors import ConfigError, ErrorDetails, raise_errors

NOTE = "Checks that need torch did not run: python -m exp.check runs all checks."


def compose(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    config_name: str = PRIMARY,
) -> DictConfig:
    """Return the config that `python -m exp.train OVERRIDES` composes for a single job.

    The reserved node `_composition_` stores the origin of the config: overrides, directory and files.

    Args:
        overrides: Overrides of the command line. Default: no overrides.
        config_dir: Additional directory of configs, searched after ./conf and before exp's configs. Default: None.
        config_name: Name of the primary config. Default: PRIMARY.

    Raises:
        ConfigError: An override has an error. The exception also lists errors of other keys.
    """
    return job_config(composition_of(overrides, config_dir=config_dir, config_name=config_name, check=early_errors))


def early_errors(config: DictConfig, *, reading: Reading | None = None) -> list[ErrorDetails]:
    """Return the errors that do not depend on the data, without importing torch.

    Args:
        config: The composed config.
        reading: Result of `read` for the config. None (default) reads the config.
    """
    found = first_stage(read(config) if reading is None else reading)
    # Skip values that refer to the data, because they are unknown until the data is read.
    return [error for error in locate_errors(config, found) if not _follows_the_data(config, error.key)]


def refuse_early(config: DictConfig, *, reading: Reading | None = None) -> None:
    """Raise ConfigError if a check that does not import torch finds errors.

    A typo is therefore reported within a second.
    """
    errors = early_errors(config, reading=reading)
    raise_errors(errors, note=NOTE)


def _follows_the_data(config: DictConfig, key: str) -> bool:
    raw = _unresolved_value(config, key)
    return isinstance(raw, str) and "${data." in raw


def _unresolved_value(config: DictConfig, key: str) -> object:
    """Return the value of a key with interpolations unresolved."""
    return Values(raw_values(config))[key]


def refuse_nodes(config: DictConfig, names: Sequence[str]) -> None:
    """Raise ConfigError if top-level nodes have wrong keys or values, or use a resolver that is not allowed.

    Args:
        config: The composed config.
        names: Keys of the nodes.
    """
    plain, unread = read(config)
    errors = [error for error in unread if error.key.partition(".")[0] in names]
    errors += [error for name in names for error in node_errors(name, plain)]
    if any(value is UNKNOWN for name in names for _, value in leaves({name: plain.get(name)})):
        errors += resolver_errors(plain, allow=allowed_packages(plain))
    if found := unique_errors(errors):
        raise ConfigError(locate_errors(config, found))


def first_stage(reading: Reading) -> list[ErrorDetails]:
    """Return the errors that are found without importing torch."""
    plain, errors = reading
    resolvers = resolver_errors(plain, allow=allowed_packages(plain))
    return unique_errors([*errors, *structure_errors(plain), *rule_errors(plain), *resolvers])


def second_stage(reading: Reading, *, only: str | None = None) -> list[ErrorDetails]:
    """Return the errors of targets and their parameters.

    Args:
        reading: Result of `read` for the config.
        only: Top-level key to check, such as `data`. None (default) checks all keys.
    """
    # Import late, because the import is slow and the first stage does not need the module.
    from exp.check.parameters import target_errors

    plain, _ = reading
    allow, is_own = allowed_packages(plain), has_module(plain)
    # Values in `vars` and in the user's groups are checked at the keys that interpolate them.
    left = {COMPOSITION, "vars", *own_groups(plain)}
    names = (name for name in plain if name not in left and only in (None, name))
    plain = {name: plain[name] for name in names}
    return unique_errors(target_errors(plain, allow=allow, has_module=is_own))


def allowed_packages(plain: dict[str, Any]) -> list[str]:
    """Return the packages in `security.allow`.

    If the key has an error, the list is empty, so that the check imports none of the packages.
    """
    if list(allow_is_from_the_command_line(Values(plain))):
        return []
    security = plain.get("security")
    allow = security.get("allow") if isinstance(security, dict) else None
    return [package for package in allow if isinstance(package, str)] if isinstance(allow, list) else []


def unique_errors(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without duplicates.

    Errors with the same key, position and subject are duplicates, because a later stage may find a problem again. The
    first of them is kept.
    """
    first: dict[object, ErrorDetails] = {}
    for error in errors:
        first.setdefault((error.key, error.at, error.subject), error)
    return list(first.values())


def locate_errors(config: DictConfig, errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors, each with the file and line of the wrong value.

    If an interpolation has the value null, the error also shows the interpolation.
    """
    if not errors or COMPOSITION not in config:
        return list(errors)
    return [error if error.source else _locate(config, _with_interpolation(config, error)) for error in errors]


def _with_interpolation(config: DictConfig, error: ErrorDetails) -> ErrorDetails:
    written = _unresolved_value(config, error.key) if error.got == "null" else None
    if isinstance(written, str) and written.startswith("${"):
        return replace(error, got=f"{written}, which is null")
    return error


def _locate(config: DictConfig, error: ErrorDetails) -> ErrorDetails:
    position = None if error.at is None else position_of(config, error.key)
    if error.at is not None and position is not None:
        line, column = position.line + error.at[0] - 1, position.column + error.at[1] - 1
        return replace(error, source=f"{position.file}, line {line}, column {column}", at=None)
    key = next((origin for origin in error.origins if is_set(config, origin)), error.key)
    return replace(error, source=source_of(config, key))


def concern_keys(errors: Iterable[ErrorDetails], keys: Iterable[str]) -> bool:
    """Return whether any error belongs to one of these top-level keys or to the config as a whole."""
    return any(error.key.partition(".")[0] in (*keys, "config") for error in errors)
