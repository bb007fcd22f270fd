"""Evaluation of a saved run on its data or on other data, with one or more ranks."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from omegaconf import DictConfig, OmegaConf, open_dict

from exp.check.stages import compose
from exp.check.starting_point import root_of
from exp.config.found_run import key_of, override_texts, override_value
from exp.config.frozen import ALLOWED, COMPOSITION, OWN_GROUPS, literal
from exp.config.grammar import packages_allowed_by
from exp.errors import RunError, command_line_error, config_error, raise_errors
from exp.run_report import Report
from exp.saved_runs.run_files import RunFiles
from exp.start import fit

Evaluated = Literal["test", "val", "all"]
STAGES: tuple[Evaluated, ...] = ("test", "val", "all")
# Split sizes that make the whole data set the test split.
WHOLE = {"train": 0, "val": 0, "test": 1.0}
# Keys of the config that enable tasks with trained weights.
Asked = Literal["test", "validate", "predict"]
WAYS: tuple[Asked, ...] = ("test", "validate", "predict")
PLACE = "evaluations"
# Keys that an evaluation sets itself, so that overrides must not contain them.
OWN = ("train", *WAYS, "resume", "weights", "monitor", "mode", "sweep", "from_run")


def evaluate(
    run: RunFiles, *, stage: Evaluated = "test", weights: str | Path | None = None, overrides: Sequence[str] = ()
) -> Report:
    """Evaluate a checkpoint of a run in a new run directory, outputs/<name>/evaluations/<date>/<time>.

    Args:
        run: The saved run.
        stage: Split to evaluate. `all` evaluates the whole data set as the test split, for example on new data.
            Default: test.
        weights: `best`, `last`, or the path of a checkpoint. Default: None, which selects the checkpoint as in
            RunFiles.network.
        overrides: Overrides that are added to those of the run, such as data.batch_size=7 strategy=ddp. Without
            overrides, the frozen config is used unchanged.

    Returns:
        A report with the metrics of the stage, such as `accuracy/test`.

    Raises:
        ConfigError: The config with the overrides has an error.
        RunError: The evaluation fails, or the data has no such split.
    """
    if stage not in STAGES:
        raise config_error("stage", got=repr(stage), expected=" or ".join(STAGES))
    asked: Asked = "validate" if stage == "val" else "test"
    config = evaluation_config(run, overrides, checkpoint=run.path_of(weights).absolute(), asked=asked)
    if stage == "all":
        if config.data.get("dataset") is None:
            expected = "test or val, because each split has its own data set"
            raise config_error("stage", got="all", expected=expected)
        with open_dict(config):
            config.data.parts, config.data.split = WHOLE, None
    report = fit(config)
    wanted = "val" if stage == "val" else "test"
    if report.status == "completed" and not any(wanted in re.split("[/_]", tag) for tag in report.metrics):
        raise RunError(f"nothing was evaluated: the run's data, or its module, has no {wanted} split")
    return report


def evaluation_config(
    run: RunFiles, overrides: Sequence[str], *, checkpoint: Path, asked: Asked, directory: str | Path | None = None
) -> DictConfig:
    """Return the config of a new run that uses the weights of a saved run without training.

    Args:
        run: The saved run.
        overrides: Overrides that are added to those of the saved run.
        checkpoint: Path of the weights.
        asked: Task of the new run.
        directory: Parent directory of the new run directory. None uses hydra.run.dir from the overrides. Without this
            override, outputs/<name>/evaluations next to the saved run is used. Default: None.

    Raises:
        ConfigError: An override sets a key that an evaluation sets itself, or is not valid.
    """
    config = _config(run, overrides)
    now, name = datetime.datetime.now(), str(config.name)
    root = Path("outputs") / name if run.directory is None else root_of(run.directory.absolute(), name)
    place = (root / PLACE / f"{now:%Y-%m-%d}" if directory is None else Path(directory)) / f"{now:%H-%M-%S}"
    if directory is None and any(key_of(text) == "hydra.run.dir" for text in overrides):
        place = Path(config[COMPOSITION].directory)
    # Overrides for exp.train that repeat this evaluation.
    again = [] if run.directory is None else [_from(run.directory)]
    again += ["train=false", *override_texts({key: key == asked for key in WAYS} | {"resume": str(checkpoint)})]
    with open_dict(config):
        config.train = False
        for key in WAYS:
            config[key] = key == asked
        config.resume, config.weights["from"] = literal(str(checkpoint)), None
        config.runtime.autoresume = False
        config.sweep.trial = None
        layers = list(config[COMPOSITION].layers) if COMPOSITION in config else []
        keys = [str(key) for key in config if key != COMPOSITION]
        record = {
            "directory": literal(str(place)),
            "overrides": [literal(text) for text in (*again, *overrides)],
            ALLOWED: packages_allowed_by(overrides),
        }
        config[COMPOSITION] = OmegaConf.create({**record, "of_sweep": [], "layers": layers, OWN_GROUPS: keys})
    return config


def _config(run: RunFiles, overrides: Sequence[str]) -> DictConfig:
    expected = "another key: data, metrics, strategy, precision, launch or runtime"
    raise_errors(command_line_error(_top(text), text, expected) for text in overrides if _top(text) in OWN)
    others = [text for text in overrides if key_of(text) != "security.allow"]
    if not others:
        return run.config.copy()
    if run.directory is None:
        got = f"{others[0]}, and the checkpoint {run.checkpoint} is not in a run directory"
        fix = "Or leave the override out, so that the config in the checkpoint is used"
        raise config_error(_top(others[0]), got=got, expected="a run directory in run=", fix=fix)
    return compose([_from(run.directory), *overrides])


def _from(directory: Path) -> str:
    return f"from_run={override_value(str(directory))}"


def _top(override: str) -> str:
    return key_of(override).partition(".")[0].partition("@")[0]
