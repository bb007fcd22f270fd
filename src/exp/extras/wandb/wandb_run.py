"""The logger of `+logger=wandb`: Lightning's WandbLogger, offline by default.

A resumed run continues the same W&B run.
"""

from __future__ import annotations

import html
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from exp.errors import MissingExtraError, is_installed
from exp.hooks.panels import Histogram, Image, Panel, Text
from exp.loggers.run_logger import Description, Notes, RunLogger

if not is_installed("wandb"):
    raise MissingExtraError(feature="logger=wandb", package="wandb", extra="wandb")

GLOBAL_STEP = "trainer/global_step"
_NOTE_SECONDS = 5.0


class WandbLogger(RunLogger, LightningWandbLogger):
    """Logger that writes config, values, histograms, images and texts to a run of W&B.

    The tags are the same as in TensorBoard. The x axis is trainer/global_step, as in Lightning's logger, because W&B's
    step counts rows instead of optimizer steps. A resumed run continues the same W&B run. The logger skips steps that
    were already logged, because their values are equal.

    Args:
        directory: Run directory. exp sets this argument. W&B writes to the folder `wandb/` in this directory, and
            `wandb sync` uploads that folder.
        project: Name of the project in W&B. Default: exp.
        entity: User or team in W&B. None: the default of the account.
        offline: Whether data are written only to this machine and not uploaded. Default: True.
    """

    def __init__(
        self, *, directory: str | Path, project: str = "exp", entity: str | None = None, offline: bool = True
    ) -> None:
        import wandb

        self._notes = Notes(Path(directory) / "wandb.json")
        self._reached = self._notes.values.get("step", -1)
        self._last_step = self._reached
        self._noted = time.time()
        super().__init__(
            name=Path(directory).name,
            save_dir=str(directory),
            version=self._notes.values.get("id") or uuid.uuid4().hex[:12],
            project=project,
            entity=entity,
            # Lightning's argument `offline` would also change environment variables, which later runs of this process
            # read.
            mode="offline" if offline else "online",
            settings=wandb.Settings(silent=True, console="off"),
        )

    @rank_zero_only
    def describe(self, description: Description) -> None:
        self.experiment.config.update(dict(description.config), allow_val_change=True)
        self.experiment.tags = tuple(description.tags)
        # The id is saved after the start of the W&B run, so that a saved id always exists in W&B.
        self._notes.keep(id=self.experiment.id, step=self._reached)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Log values. Steps that were logged before the run was resumed are skipped.

        Args:
            metrics: Values by tag.
            step: Number of completed optimizer steps.
        """
        step = self._step_of(step)
        if step > self._reached:
            self.experiment.log({**metrics, GLOBAL_STEP: step})
            self._last_step = step
            if time.time() - self._noted >= _NOTE_SECONDS:
                self.save()

    @rank_zero_only
    def log_panels(self, panels: Mapping[str, Panel], step: int) -> None:
        shown = {tag: _media(panel) for tag, panel in panels.items() if isinstance(panel, Histogram | Image | Text)}
        if shown:
            self.log_metrics(shown, step)

    @rank_zero_only
    def purge(self, step: int) -> None:
        """Do nothing, because W&B cannot remove rows. `log_metrics` skips steps that W&B already contains."""

    @rank_zero_only
    def save(self) -> None:
        """Save the number of the last logged step. W&B writes the values in a separate process."""
        self._noted = time.time()
        self._notes.keep(step=self._last_step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Save the number of the last logged step. The W&B run stays open, because more stages may follow."""
        self.save()

    @rank_zero_only
    def end(self, status: str) -> None:
        self.save()
        # The W&B run is closed, because a later run of this process would otherwise log to it.
        self.experiment.finish(exit_code=0 if status in ("completed", "pruned") else 1)


def _media(panel: Panel) -> object:
    import wandb

    if isinstance(panel, Histogram):
        limits = np.linspace(float(panel.low), float(panel.high), len(panel.counts) + 1)
        return wandb.Histogram(np_histogram=(panel.counts.numpy(), np.nan_to_num(limits)))
    if isinstance(panel, Image):
        return wandb.Image(panel.sheet())
    assert isinstance(panel, Text)
    return wandb.Html(f"<pre>{html.escape(panel.markdown)}</pre>")
