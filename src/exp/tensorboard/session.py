"""What a run tells TensorBoard of itself: its config and command as texts, its row in the HParams tab, and its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from exp.tensorboard.hyperparameters import Hyperparameter
from exp.tensorboard.logger import TensorBoardLogger


def begin(loggers: Iterable[Any], *, directory: Path, config: Mapping[str, Any]) -> None:
    """Writes what is known before the first step.

    directory: of the run, with config.yaml and overrides.yaml; config: the frozen config, as plain mappings.
    """
    overrides = yaml.safe_load((directory / "overrides.yaml").read_text()) or []
    tags = dict.fromkeys([config["monitor"], "loss/val", *(f"{name}/val" for name in config["metrics"])])
    for logger in _ours(loggers):
        logger.log_hyperparams(hyperparameters(overrides, config), metrics=list(tags))
        logger.log_text("config", _block("yaml", (directory / "config.yaml").read_text()))
        logger.log_text("command", _block("sh", " ".join(["python -m exp.train", *overrides])))
        logger.save()


def end(loggers: Iterable[Any], status: str) -> None:
    """Writes how the run ended. status: completed, failed or interrupted."""
    for logger in _ours(loggers):
        logger.end(status)


def hyperparameters(overrides: Sequence[str], config: Mapping[str, Any]) -> dict[str, Hyperparameter]:
    """The keys of the command line, swept ones among them, with the values and types that they have in the config.

    A choice of a group (`model=mlp`) keeps the option's name, and so does a value that is a mapping or a list.
    """
    found: dict[str, Hyperparameter] = {}
    for override in overrides:
        key, given, text = override.lstrip("+").partition("=")
        if not given or key.startswith(("~", "hydra.", "hydra/")):
            continue
        value = _at(config, key)
        found[key] = value if isinstance(value, bool | int | float | str) else text
    return found


def _at(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _ours(loggers: Iterable[Any]) -> list[TensorBoardLogger]:
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
