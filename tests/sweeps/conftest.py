"""Fixtures of sweeps: an empty working directory, jobs that end in different ways, and tables of finished sweeps."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from exp.tensorboard.event_file import encode_records


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ends(working_directory: Path) -> None:
    """Write a conf with callbacks=[ends] and model=ending, which end their process in the way `how`."""
    shutil.copy(Path(__file__).with_name("ends.py"), working_directory)
    shutil.copytree(Path(__file__).with_name("conf"), working_directory / "conf")


@pytest.fixture
def table() -> Callable[[], list[dict[str, str]]]:
    """A function that returns the rows of the only sweep in outputs/."""

    def read() -> list[dict[str, str]]:
        (path,) = Path("outputs").rglob("table.csv")
        return list(csv.DictReader(path.read_text().splitlines()))

    return read


@pytest.fixture
def started(commands) -> Callable[..., object]:
    """A function that starts a command and waits until a pattern matches `count` files."""

    def start(*words: str, pattern: str, count: int = 1, module: str = "exp.train", fresh_ranks: bool = False):
        command = commands.start(*words, module=module, fresh_ranks=fresh_ranks)
        limit = time.monotonic() + 300
        while len(list(Path().glob(pattern))) < count:
            assert command.process.is_alive(), command.end()
            assert time.monotonic() < limit, f"no file {pattern}"
            time.sleep(0.01)
        return command

    return start


CONFIG: dict[str, Any] = {
    "name": "train",
    "seed": 0,
    "monitor": "loss/val",
    "mode": "min",
    "optimizer": {"lr": 0.001, "betas": [0.9, 1]},
}


def write_events(directory: Path, curves: Mapping[str, list[float]]) -> None:
    events = [
        Event(step=10 * place, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
        for tag, values in curves.items()
        for place, value in enumerate(values, start=1)
    ]
    (directory / "tensorboard").mkdir()
    content = encode_records([event.SerializeToString() for event in events])
    (directory / "tensorboard" / "events.out.tfevents.1").write_bytes(content)


def write_run_directory(
    directory: Path,
    *typed: str,
    value: float = 0.5,
    curves: Mapping[str, list[float]] | None = None,
    config: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    **reported: Any,
) -> Path:
    plain = json.loads(json.dumps({**CONFIG, **(config or {})}))
    for text in typed:
        key, _, word = text.lstrip("+").partition("=")
        node = plain
        *above, last = key.split(".")
        for part in above:
            node = node.setdefault(part, {})
        if not isinstance(node.get(last), dict):
            node[last] = yaml.safe_load(word)
    report = {
        "status": "completed",
        "directory": str(directory),
        "metrics": {"loss/val": value, "accuracy/val": 1 - value / 10, "throughput/step_ms": 10 / (1 + value)},
        "best": {"metric": "loss/val", "value": value, "step": 20, "checkpoint": "best.ckpt"},
        "wall_seconds": 3.0,
        "tags": [],
        **reported,
    }
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(plain))
    (directory / "overrides.yaml").write_text(yaml.safe_dump(list(typed)))
    (directory / "provenance.json").write_text(json.dumps(provenance or {"overrides": list(typed)}))
    (directory / "report.json").write_text(json.dumps(report))
    write_events(directory, curves or {"loss/val": [value + 1, value], "accuracy/val": [0.1, 1 - value / 10]})
    return directory


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """A function that writes a run directory like that of a real run.

    Args:
        typed: overrides in the order of the command line.
        value: last loss/val.
        reported: further entries of report.json.
    """
    return write_run_directory
