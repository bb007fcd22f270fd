"""Which hyperparameters tell one run from another: those of the command line, and the three that everybody asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

ALWAYS = ("optimizer.lr", "data.batch_size", "seed")


def chosen_values(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Values by dotted key. A group is worth the option that was chosen, such as {"model": "lenet"}.

    overrides: as typed, with the swept ones of a job among them.
    """
    values = {key: value for key in ALWAYS if (value := OmegaConf.select(config, key)) is not None}
    for override in overrides:
        key, _, typed = override.lstrip("+").partition("=")
        if override.startswith("~") or key.startswith("hydra"):
            continue
        value = OmegaConf.select(config, key.partition("@")[0])
        values[key] = typed if value is None or OmegaConf.is_config(value) else value
    return values
