"""Completion of a config with values from the data, and the errors that need no network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, open_dict

from exp.check.plan import Resolved
from exp.check.rules import weights_of_run
from exp.check.stages import concern_keys, first_stage, second_stage
from exp.config.frozen import ALLOWED, COMPOSITION
from exp.config.module_key import brings_data
from exp.config.reading import Values, copy_config, is_open, raw_values, read
from exp.config.resolvers import use_resolvers
from exp.config.settings import Settings, settings_of
from exp.data.data_errors import SampleError
from exp.errors import ConfigError, ErrorDetails

if TYPE_CHECKING:
    from exp.data.data import Data

DATA_KEYS = ("data", "seed", "security")
START_KEYS = ("resume", "runtime", "name", "train")


def resolve(config: DictConfig) -> Resolved:
    """Return a copy of a config with the values that depend on the data, and the errors that need no network.

    The config may leave the input shape and the number of classes null. The data set then determines these values.
    """
    config = copy_config(config)
    use_resolvers(config, allow=_allowed_packages(config))
    reading = read(config)
    first = first_stage(reading)
    asked = _beginnings(config, first)
    errors: list[ErrorDetails] = []
    built = None
    start_errors, notes = _find_start(config) if not concern_keys(first, START_KEYS) else ([], ())
    if not concern_keys(first, ("weights",)):
        _find_weights(config)
    held = not concern_keys(first, ("data", "trainer")) and _hold_batches(config)
    if held or _beginnings(config, first) != asked:
        reading = read(config)
        first = first_stage(reading)
    if not concern_keys(first, DATA_KEYS):  # errors in DATA_KEYS are already in `first`
        errors = second_stage(reading, only="data")
        if not errors:
            try:
                built = _fill_in(config)
                if built is not None:
                    # Read the config again, because other nodes interpolate the shape and the classes.
                    reading = read(config, is_data_read=True)
                    first = first_stage(reading)
            except ConfigError as error:
                errors += error.errors
            except SampleError as error:
                errors.append(error.error)
    errors += [*first, *start_errors, *second_stage(reading)]
    plain = {name: value for name, value in reading[0].items() if name != COMPOSITION}
    resolved = Resolved(config=config, plain=plain, errors=tuple(errors), notes=notes)
    return resolved if built is None or errors else _with_data(resolved, *built)


def _allowed_packages(config: DictConfig) -> list[str]:
    """Return the packages that the command line allows. The list is empty if exp.compose did not make the config."""
    return [str(name) for name in config[COMPOSITION][ALLOWED]] if COMPOSITION in config else []


def _beginnings(config: DictConfig, known: Iterable[ErrorDetails]) -> tuple[object, object]:
    """Return the values of `resume` and `weights.from`. None replaces a value with an error.

    Args:
        config: The config.
        known: Errors of the config.
    """
    resume = None if concern_keys(known, ("resume",)) else config.resume
    return resume, None if concern_keys(known, ("weights",)) else config.weights["from"]


def _find_start(config: DictConfig) -> tuple[list[ErrorDetails], tuple[str, ...]]:
    """Set `resume` to the checkpoint that `resume=auto` or `runtime.autoresume` finds. Return the errors and notes."""
    if config.resume != "auto" and config.runtime.autoresume is not True:
        return [], ()  # return before the import below, which imports torch
    from exp.check.starting_point import find_start

    try:
        found = find_start(config)
    except ConfigError as error:
        return list(error.errors), ()
    config.resume = None if found.path is None else str(found.path)
    return [], found.notes


def _find_weights(config: DictConfig) -> None:
    """Replace a run directory in `weights.from` by its checkpoint file.

    All ranks and restarts then read the same file.
    """
    source = config.weights["from"]
    if source is not None and Path(source).is_dir():
        found = weights_of_run(Path(source))
        config.weights["from"] = None if found is None else str(found)


def _hold_batches(config: DictConfig) -> bool:
    """Set `data.shuffle` to false in a run with trainer.overfit_batches, unless the config sets `data.shuffle`.

    Shuffled batches would differ in each epoch. Lightning disables shuffling for the same reason.

    Returns:
        True if the config was changed.
    """
    if not config.trainer.overfit_batches or brings_data(raw_values(config)) or "shuffle" in config.data:
        return False
    with open_dict(config.data):
        config.data.shuffle = False
    return True


def _fill_in(config: DictConfig) -> tuple[Settings, Data] | None:
    """Set the shape and dtype of the inputs and the numbers of outputs and classes to those of the data set.

    The config is not changed if all these values are already set.

    Returns:
        The settings of the data set, and the data set. None if the config was not changed.

    Raises:
        ConfigError, RunError: The data set cannot be built.
    """
    from exp.construct import build_data, plain_config

    raw = raw_values(config)
    if brings_data(raw) or not is_open(config.data):
        return None
    # Resolve these nodes separately, because other nodes may interpolate values that are set below.
    given = {"seed": config.seed, **{name: plain_config(config[name]) for name in ("data", "security")}}
    # Read these nodes unresolved, because they may have errors. A missing key gives UNKNOWN.
    values = Values(raw)
    others = {name: values[name] for name in ("objective", "metrics", "resume")}
    precision = {"word": values["precision.word"]}
    settings = settings_of({**given, **others, "precision": precision})
    data = build_data(settings)
    spec = data.spec
    if list(spec.inputs) != ["input"]:
        config.data.inputs = {name: {"shape": list(one.shape), "dtype": one.dtype} for name, one in spec.inputs.items()}
    config.data.input_shape = None if spec.input_shape is None else list(spec.input_shape)
    config.data.input_dtype = spec.input_dtype
    config.data.num_outputs = spec.num_outputs
    config.data.num_classes = spec.num_classes
    return settings, data


def _with_data(resolved: Resolved, settings: Settings, data: Data) -> Resolved:
    """Return a config together with its data set, so that the plan does not read large files again.

    The data set is left out if the settings of the run build another data set. It is also left out if a split is a
    stream, because a stream may be readable only once.

    Args:
        resolved: The config.
        settings: Settings from which the data set was built.
        data: The data set.
    """
    from torch.utils.data import IterableDataset

    from exp.construct import has_equal_data

    has_stream = any(isinstance(data.part(stage), IterableDataset) for stage in data.stages)
    if has_stream or not has_equal_data(settings, resolved.settings):
        return resolved
    return replace(resolved, data=data)
