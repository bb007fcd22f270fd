"""The logger of `+logger=mlflow`: Lightning's MLFlowLogger, which writes many values in one call.

The default store is a local database. A resumed run continues the same MLflow run.
"""

from __future__ import annotations

import fcntl
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from lightning.pytorch.loggers import MLFlowLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from exp.errors import MissingExtraError, is_installed
from exp.hooks.panels import Image, Panel, Text
from exp.loggers.run_logger import Description, Notes, RunLogger

if not is_installed("mlflow"):
    raise MissingExtraError(feature="logger=mlflow", package="mlflow", extra="mlflow")

_SQLITE = "sqlite:///"
# Largest number of values in one call of MLflow's log_batch.
_METRICS_A_BATCH = 1000
_ROWS_A_WRITE = 200
_STATUS = {"completed": "FINISHED", "pruned": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_REFUSED_IN_NAMES = re.compile(r"[^\w.\- :/]")


class MlflowLogger(RunLogger, MLFlowLogger):
    """Logger that writes values, images and texts to a run of MLflow, under the same tags as in TensorBoard.

    Hyperparameters become params of MLflow. Values are collected and written every `flush_seconds`, because each call
    of MLflow takes milliseconds. A resumed run continues the same MLflow run. The logger skips steps that the MLflow
    run already contains, because MLflow cannot remove values. The skipped values equal the stored values. The logger
    replaces characters that MLflow does not allow in tags by `_`.

    Args:
        directory: Run directory. exp sets this argument. The file mlflow.json in it contains the id of the MLflow run.
        tracking_uri: Database file such as `sqlite:///outputs/mlflow.db`, or the address of a server.
        experiment: Name of the experiment in MLflow.
        artifacts: Folder for images and texts. It is used only if tracking_uri is a database file.
        flush_seconds: Seconds between two writes. Default: 5.
    """

    def __init__(
        self,
        *,
        directory: str | Path,
        tracking_uri: str = "sqlite:///outputs/mlflow.db",
        experiment: str = "exp",
        artifacts: str = "outputs/mlflow",
        flush_seconds: Annotated[float, Ge(0)] = 5.0,
    ) -> None:
        self._directory = Path(directory)
        self._notes = Notes(self._directory / "mlflow.json")
        self._is_continued = "run_id" in self._notes.values
        is_file = tracking_uri.startswith(_SQLITE)
        self._database = Path(tracking_uri.removeprefix(_SQLITE)).absolute() if is_file else None
        if self._database is not None:
            tracking_uri = f"{_SQLITE}{self._database}"
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        with self._alone():
            super().__init__(
                experiment_name=experiment,
                run_name=str(self._directory.name),
                tracking_uri=tracking_uri,
                artifact_location=Path(artifacts).absolute().as_uri() if is_file else None,
                run_id=self._notes.values.get("run_id"),
            )
        self.flush_seconds = flush_seconds
        self._waiting: list[tuple[str, float, int, int]] = []
        self._rows = 0
        self._last_write = time.time()
        self._reached: dict[str, int] = {}

    @rank_zero_only
    def describe(self, description: Description) -> None:
        with self._alone():
            run_id = self.run_id
        self._notes.keep(run_id=run_id, tracking_uri=self._tracking_uri)
        if self._is_continued:
            self.experiment.update_run(run_id, status="RUNNING")
            return
        self.log_hyperparams(dict(description.hyperparameters))
        self.experiment.set_tag(run_id, "directory", str(self._directory))
        if description.tags:
            self.experiment.set_tag(run_id, "tags", ", ".join(description.tags))
        for name, text in description.texts.items():
            self.experiment.log_text(run_id, text, f"{name}.md")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Collect values, which `save` writes to MLflow.

        Args:
            metrics: Values by tag.
            step: Number of completed optimizer steps.
        """
        step, now = self._step_of(step), int(1000 * time.time())
        self._waiting += [(_name_of(tag), value, now, step) for tag, value in metrics.items()]
        self._rows += 1
        if self._rows >= _ROWS_A_WRITE or time.time() - self._last_write >= self.flush_seconds:
            self.save()

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        for tag, panel in panels.items():
            if isinstance(panel, Text):
                self.experiment.log_text(self.run_id, panel.markdown, f"{tag}/{step}.md")
            elif isinstance(panel, Image):
                self.experiment.log_image(self.run_id, panel.sheet(), key=_name_of(tag), step=step)

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Do nothing, because MLflow cannot remove values. `save` skips steps that MLflow already contains."""

    @rank_zero_only
    def save(self) -> None:
        """Write the collected values to MLflow."""
        from mlflow.entities import Metric

        waiting, self._waiting, self._rows = self._waiting, [], 0
        self._last_write = time.time()
        new = [
            Metric(key=key, value=value, timestamp=now, step=step)
            for key, value, now, step in waiting
            if step > self._last_step(key)
        ]
        for start in range(0, len(new), _METRICS_A_BATCH):
            self.experiment.log_batch(self.run_id, metrics=new[start : start + _METRICS_A_BATCH])

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Write the collected values. The MLflow run stays open, because more stages may follow."""
        self.save()

    @rank_zero_only
    def end(self, status: str) -> None:
        self.save()
        self.experiment.set_terminated(self.run_id, _STATUS[status])

    def _last_step(self, key: str) -> int:
        """Return the last step at which MLflow has a value of a tag; -1 if MLflow has no value."""
        if not self._is_continued:
            return -1
        if key not in self._reached:
            history = self.experiment.get_metric_history(self.run_id, key)
            self._reached[key] = max((metric.step for metric in history), default=-1)
        return self._reached[key]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the database file within the block, because jobs of a sweep may create the file at the same time."""
        if self._database is None:
            yield
            return
        self._database.parent.mkdir(parents=True, exist_ok=True)
        with self._database.with_name(f".{self._database.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The file is created here, because MLflow would retry for two minutes to open a missing file.
            self._database.open("ab").close()
            yield


def _name_of(tag: str) -> str:
    return _REFUSED_IN_NAMES.sub("_", tag)
