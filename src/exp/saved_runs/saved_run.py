"""Saved runs: load a run to read its files, get its network, evaluate it, and predict with it.

    run = exp.load("outputs/train/2026-01-31/12-00-00")
    network = run.network(weights="best")
    classes = run.predict(pictures).answers()["class"]

Loading is as safe as a resume. The config is read as data, and its targets must be on the list of allowed targets. Only
tensors and plain values of a checkpoint are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from exp.config.frozen import from_text, read_frozen, refuse_untrusted
from exp.config.settings import Settings, settings_of
from exp.construct import plain_config
from exp.engine.checkpoint import read_checkpoint
from exp.engine.checkpointing import CONFIG, POSITION
from exp.errors import RunError
from exp.run_report import Report
from exp.saved_runs.evaluation import Evaluated, evaluate
from exp.saved_runs.prediction import Predictions, predict
from exp.saved_runs.run_files import RunFiles

WHERE = "a run directory, outputs/<name>/<date>/<time>, the directory of a job of a sweep, or a checkpoint of a run"


class SavedRun(RunFiles):
    """A run on disk, or one of its checkpoints. The base class RunFiles documents access to the files."""

    def evaluate(
        self, *, stage: Evaluated = "test", weights: str | Path | None = None, overrides: Sequence[str] = ()
    ) -> Report:
        """Evaluate a checkpoint of the run. The arguments are those of exp.saved_runs.evaluation.evaluate."""
        return evaluate(self, stage=stage, weights=weights, overrides=overrides)

    def predict(
        self, given: object, *, weights: str | Path | None = None, overrides: Sequence[str] = ()
    ) -> Predictions:
        """Run the network over samples without targets.

        The arguments are those of exp.saved_runs.prediction.predict.
        """
        return predict(self, given, weights=weights, overrides=overrides)


def load(path: str | Path, *, allow: Sequence[str] = ()) -> SavedRun:
    """Load a run directory, the directory of a job of a sweep, or a checkpoint.

    Args:
        path: The directory or the checkpoint.
        allow: Packages that targets may come from, as in security.allow. The run's security.allow is ignored. Default:
            none.

    Raises:
        RunError: No run exists at the path, or its config is damaged.
        ConfigError: The run needs packages that are not allowed.
    """
    path = Path(path)
    if path.is_dir():
        config = _config_of(path, allow=allow)
        return SavedRun(directory=path.absolute(), checkpoint=None, config=config, settings=_settings(config))
    if not path.is_file():
        raise RunError(f"{path} does not exist; expected {WHERE}")
    state = read_checkpoint(path, map_location="cpu")
    if not isinstance(state.get(CONFIG), str) or not isinstance(state.get(POSITION), dict):
        raise RunError(f"{path} has no config of a run: another program wrote it. Load it with weights.from={path}")
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
        raise RunError(f"{path} has no config.yaml; expected {WHERE}")
    source = str(path / "config.yaml")
    config = read_frozen(path)
    refuse_untrusted(config, allow=allow, source=source, is_override=True)
    return config
