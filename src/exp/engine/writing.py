"""What goes to the loggers of a Trainer, on rank 0 alone: Lightning's own take numbers, ours take panels, too."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer

from exp.hooks.values import Panel
from exp.loggers.run_logger import RunLogger


def write(trainer: Trainer, values: Mapping[str, float], index: int, panels: Mapping[str, Panel] | None = None) -> None:
    """What optimizer step `index` gave, by tag."""
    if trainer.is_global_zero:
        shown = {tag: panel.drawn() for tag, panel in panels.items()} if panels else {}
        for logger in trainer.loggers:
            logger.log_metrics(values, index)
            if shown and isinstance(logger, RunLogger):
                logger.log_panels(shown, index)


def begin(trainer: Trainer, first: int) -> None:
    """Training starts, with optimizer step `first`: what an earlier process logged from there on is void."""
    for logger in trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.purge(first)


def save(trainer: Trainer) -> None:
    """What the loggers hold back goes to their files: a process that goes on from here begins behind it."""
    for logger in trainer.loggers:
        logger.save()
