"""Can a run go on from this checkpoint? Its model must be the same, and its optimizer's values must not change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from exp.config.freeze import read_overrides
from exp.engine.checkpoint import read_checkpoint
from exp.engine.checkpointing import CONFIG, POSITION
from exp.errors import Fault

# Which of several kernels computes the same step is not part of the state.
INCIDENTAL = ("fused", "foreach", "monitor")
SHOWN = 3


def resume_faults(config: Mapping[str, Any]) -> list[Fault]:
    """The faults of `resume`, for a plain and resolved config whose `resume` names a file.

    A checkpoint that says nothing of its config is not judged: it can be evaluated only, and the engine says so.

    Raises: RunError where the file is damaged.
    """
    path = Path(config["resume"])
    checkpoint = read_checkpoint(path)
    if CONFIG not in checkpoint or POSITION not in checkpoint:
        return []
    before = yaml.safe_load(checkpoint[CONFIG])
    faults = _other_values(before, config, "model", path)
    if config["train"]:
        faults += _other_values(before, config, "optimizer", path)
        faults += _other_values(before, config, "scheduler", path)
        # A checkpoint of before there were phases had none.
        faults += _other_values({"phases": {}, **before}, config, "phases", path)
        faults += _epochs(config["trainer"], done=checkpoint[POSITION]["epoch"])
    return faults


def _other_values(before: Mapping[str, Any], config: Mapping[str, Any], node: str, path: Path) -> list[Fault]:
    saved, now = dict(_leaves(before[node], node)), dict(_leaves(config[node], node))
    keys = [key for key in {**saved, **now} if key.rpartition(".")[2] not in INCIDENTAL]
    other = [key for key in keys if saved.get(key) != now.get(key)]
    if not other:
        return []
    told = [f"{key} was {saved.get(key, 'not there')} and is {now.get(key, 'not there')}" for key in other[:SHOWN]]
    more = f", and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
    return [
        Fault(
            key="resume",
            got=f"a checkpoint of another {node}: {'; '.join(told)}{more}",
            expected=f"the {node} that it was trained with, whose state it holds",
            cure=_cure(path),
        )
    ]


def _cure(path: Path) -> str:
    directory = path.absolute().parent.parent
    if not (directory / "overrides.yaml").is_file():
        return "Repeat the overrides of that run"
    overrides = " ".join(read_overrides(directory))
    return f"That run was started with: {overrides}" if overrides else "That run was started without overrides"


def _epochs(trainer: Mapping[str, Any], *, done: int) -> list[Fault]:
    most = trainer["max_epochs"]
    if most is None or most < 0 or most >= done:
        return []
    return [
        Fault(
            key="trainer.max_epochs",
            got=str(most),
            expected=f"at least the {done} epochs that the checkpoint has done",
            cure=f"It counts the whole run: trainer.max_epochs={done + most} does {most} more",
        )
    ]


def _leaves(node: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        return [leaf for name, value in node.items() for leaf in _leaves(value, f"{key}.{name}")]
    return [(key, node)]
