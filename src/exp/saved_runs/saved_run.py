"""Open a saved run, to look at it, to take its network, to evaluate it and to predict with it.

    run = exp.load("outputs/train/2026-01-31/12-00-00")
    network = run.network(weights="best")
    classes = run.predict(pictures).answers()["class"]

The same wall stands before it as before a resume: the config is read as data, its targets pass the allow list, and of a
checkpoint tensors and plain values alone are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from exp.config.found_run import lost_keys
from exp.config.frozen import from_text, read_frozen, refuse_untrusted
from exp.config.settings import Settings, settings_of
from exp.construct import plain_config
from exp.engine.checkpoint import read_checkpoint
from exp.engine.checkpointing import CONFIG, POSITION
from exp.errors import RunError
from exp.files import natural_order
from exp.run_report import Report
from exp.saved_runs.evaluation import Evaluated, evaluate
from exp.saved_runs.prediction import Predictions, predict
from exp.saved_runs.run_files import RunFiles
from exp.spelling import among
from exp.sweeps.ledger import is_sweep

WHERE = "a run directory, outputs/<name>/<date>/<time>, a job's in a sweep's directory, or a checkpoint of a run"


class SavedRun(RunFiles):
    """A run that is on disk, or one checkpoint of it; see RunFiles for what it holds."""

    def evaluate(
        self, *, stage: Evaluated = "test", weights: str | Path | None = None, overrides: Sequence[str] = ()
    ) -> Report:
        """Evaluate a checkpoint of the run; see exp.saved_runs.evaluation.evaluate for what is given and raised."""
        return evaluate(self, stage=stage, weights=weights, overrides=overrides)

    def predict(
        self,
        given: str | Path | Mapping[str, Any] | Any,
        *,
        weights: str | Path | None = None,
        overrides: Sequence[str] = (),
        keep: Sequence[str] = (),
    ) -> Predictions:
        """Run the network over samples without answers; see exp.saved_runs.prediction.predict.

        given: arrays `[N, ...]`, one or by the name of the input, or a file or folder of them.
        """
        return predict(self, given, weights=weights, overrides=overrides, keep=keep)


def load(path: str | Path, *, allow: Sequence[str] = ()) -> SavedRun:
    """Open a run directory, a job's in a sweep's directory, or a checkpoint.

    allow: the packages that its targets may name, as security.allow; what the run says of that is not believed.
    Raises: RunError where there is no run, or its config is damaged; ConfigError where it trusts other packages.
    """
    path = Path(path)
    if path.is_dir():
        config = _config_of(path, allow=allow)
        return SavedRun(directory=path.absolute(), checkpoint=None, config=config, settings=_settings(config))
    if not path.is_file():
        raise RunError(f"{path} is not there; expected {WHERE}")
    state = read_checkpoint(path, map_location="cpu")
    if not isinstance(state.get(CONFIG), str) or not isinstance(state.get(POSITION), dict):
        raise RunError(f"{path} says nothing of its run: another program wrote it. Its weights: weights.from={path}")
    config = from_text(state[CONFIG], name=str(path))
    refuse_untrusted(config, allow=allow, source=str(path), is_override=True)
    holder = path.absolute().parent.parent
    return SavedRun(
        directory=holder if (holder / "config.yaml").is_file() else None,
        checkpoint=path.absolute(),
        config=config,
        settings=_settings(config),
    )


def _settings(config: DictConfig) -> Settings:
    return settings_of(plain_config(config))


def _config_of(path: Path, *, allow: Sequence[str]) -> DictConfig:
    if not (path / "config.yaml").is_file():
        jobs = sorted((found.parent for found in path.glob("*/config.yaml")), key=natural_order)
        if not jobs:
            raise RunError(f"{path} holds no config.yaml; expected {WHERE}")
        what = f"a directory of {len(jobs)} runs" + (f", in {path / 'table.md'}" if is_sweep(path) else "")
        raise RunError(f"{path} is {what}; expected one of them, such as {jobs[0]}")
    source = str(path / "config.yaml")
    config = read_frozen(path)
    refuse_untrusted(config, allow=allow, source=source, is_override=True)
    lost = lost_keys(config)
    if lost:
        raise RunError(f"{source} has no {among(lost)}: a part of it is lost. Take the file as exp wrote it")
    return config
