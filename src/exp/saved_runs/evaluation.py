"""Evaluate the weights of a saved run, on its own data or on other data, in as many ranks as it is asked for."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from omegaconf import DictConfig, OmegaConf, open_dict

from exp.check.stages import compose
from exp.check.starting_point import root_of
from exp.config.freeze import COMPOSITION, literal
from exp.errors import ConfigError, Fault, RunError
from exp.run import fit
from exp.run_report import Report
from exp.saved_runs.saved_run import SavedRun

Evaluated = Literal["val", "test"]
STAGES: tuple[Evaluated, ...] = ("val", "test")
PLACE = "evaluations"
# What an evaluation decides itself, and what acts on training alone.
OWN = ("train", "test", "validate", "resume", "weights", "callbacks", "monitor", "mode", "sweep", "from_run")


def evaluate(
    run: SavedRun, *, stage: Evaluated = "test", weights: str | Path | None = None, overrides: Sequence[str] = ()
) -> Report:
    """Evaluate a checkpoint of a run in a run directory of its own, outputs/<name>/evaluations/<date>/<time>.

    stage: the part of the data. weights: as of SavedRun.network.
    overrides: of the run's command, such as data.batch_size=7 data=digits strategy=ddp. Without any, the frozen config
        alone is read, and no YAML.
    Returns: a report whose metrics are those of the stage, `accuracy/test`.
    Raises: ConfigError, RunError as exp.fit does; RunError where the data has no such part.
    """
    path = run.path_of(weights).absolute()
    config = _evaluating(_config(run, overrides), run, path=path, stage=stage, overrides=overrides)
    report = fit(config)
    if not any(tag.split("/")[1:2] == [stage] for tag in report.metrics) and report.status == "completed":
        raise RunError(f"nothing was evaluated: the run's data, or its module, has no {stage} part")
    return report


def _config(run: SavedRun, overrides: Sequence[str]) -> DictConfig:
    wrong = [text for text in overrides if _top(text) in OWN]
    if wrong:
        expected = "what the run is evaluated with: data, metrics, strategy, precision, launch, runtime"
        raise ConfigError([Fault(key=_top(one), got=one, expected=expected, source="command line") for one in wrong])
    if not overrides:
        return run.config.copy()
    if run.directory is None:
        got = f"{overrides[0]}, for {run.checkpoint}, which lies outside of its run directory"
        cure = "Leave it out: the checkpoint's own config is read then"
        raise ConfigError([Fault(key=_top(overrides[0]), got=got, expected="a run directory", cure=cure)])
    return compose([f"from_run='{run.directory}'", *overrides])


def _evaluating(
    config: DictConfig, run: SavedRun, *, path: Path, stage: Evaluated, overrides: Sequence[str]
) -> DictConfig:
    now, name = datetime.datetime.now(), str(config.name)
    root = Path("outputs") / name if run.directory is None else root_of(run.directory.absolute(), name)
    with open_dict(config):
        config.train, config.test, config.validate = False, stage == "test", stage == "val"
        config.resume, config.weights["from"] = literal(str(path)), None
        config.callbacks, config.runtime.autoresume = {}, False
        config.sweep.trial = None
        directory = root / PLACE / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}"
        # By which exp.train does the same again.
        again = [] if run.directory is None else [f"from_run='{run.directory}'"]
        again += ["train=false", f"test={stage == 'test'}".lower(), f"validate={stage == 'val'}".lower()]
        again += [f"resume='{path}'", *overrides]
        record = {"directory": literal(str(directory)), "overrides": [literal(text) for text in again]}
        config[COMPOSITION] = OmegaConf.create({**record, "layers": _layers(config)})
    return config


def _layers(config: DictConfig) -> list[object]:
    """Which files its values came from, where it was composed."""
    return list(config[COMPOSITION].layers) if COMPOSITION in config else []


def _top(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]
