"""TensorBoard's reader returns the values that the logger logs."""

from __future__ import annotations

import math
import os
import resource
import time

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger as LightningTensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils.tensorboard import SummaryWriter

from exp.hooks.panels import Text
from exp.tensorboard.logger import TensorBoardLogger


def read(directory) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


def points(directory, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def files(directory) -> list[str]:
    return sorted(os.listdir(directory / "tensorboard"))


def test_scalars_are_read_at_their_steps(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path)
    for step in range(1, 101):
        logger.log_metrics({"loss/train": 1 / step, "optimizer/lr/default": 0.5}, step)
    logger.log_metrics({"loss/val": math.nan}, 100)
    logger.log_panels({"config": Text("```yaml\nseed: 0\n```")}, 0)
    logger.finalize("success")
    losses = points(tmp_path, "loss/train")
    assert [step for step, _ in losses] == list(range(1, 101))
    assert [value for _, value in losses] == pytest.approx([1 / step for step in range(1, 101)])
    assert read(tmp_path).Tags()["scalars"] == ["loss/train", "optimizer/lr/default", "loss/val"]
    assert math.isnan(points(tmp_path, "loss/val")[0][1])
    (event,) = read(tmp_path).Tensors("config")
    assert event.tensor_proto.string_val == [b"```yaml\nseed: 0\n```"]
    assert read(tmp_path).SummaryMetadata("config").plugin_data.plugin_name == "text"
    assert len(files(tmp_path)) == 1


def test_a_logger_without_values_creates_nothing(tmp_path):
    TensorBoardLogger(directory=tmp_path).finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_logger_continues_in_its_file(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    logger.finalize("success")
    logger.finalize("success")
    logger.log_metrics({"accuracy/test": 0.9}, 1)
    logger.finalize("success")
    assert points(tmp_path, "loss/train") == [(1, 1.0)]
    assert points(tmp_path, "accuracy/test") == [(1, pytest.approx(0.9))]
    assert len(files(tmp_path)) == 1


def test_values_are_written_within_flush_seconds(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path, flush_seconds=0.05)
    logger.log_metrics({"loss/train": 1.0}, 1)
    time.sleep(0.06)
    logger.log_metrics({"loss/train": 2.0}, 2)
    assert len(points(tmp_path, "loss/train")) == 2
    logger.finalize("success")


def test_a_resumed_run_has_its_curves_once(tmp_path):
    killed = TensorBoardLogger(directory=tmp_path)
    for step in range(1, 16):
        killed.log_metrics({"loss/train": float(step)}, step)
        killed.experiment.add_scalar("mine", float(step), step)
    killed.log_metrics({"loss/val": 10.0}, 10)
    killed.experiment.add_text("note", "first")
    killed.save()
    resumed = TensorBoardLogger(directory=tmp_path)
    resumed.purge(11)
    for step in range(11, 21):
        resumed.log_metrics({"loss/train": -float(step)}, step)
        resumed.experiment.add_scalar("mine", -float(step), step)
    resumed.experiment.add_text("note", "again")
    resumed.finalize("success")
    killed.finalize("failed")
    once = [(k, float(k) if k <= 10 else -float(k)) for k in range(1, 21)]
    assert points(tmp_path, "loss/train") == points(tmp_path, "mine") == once
    assert len(read(tmp_path).Tensors("note/text_summary")) == 1
    assert points(tmp_path, "loss/val") == [(10, 10.0)]
    assert len(files(tmp_path)) == 2


def test_only_rank_zero_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    logger.log_hyperparams({"seed": 0})
    logger.experiment.add_text("note", "")
    logger.purge(1)
    logger.end("completed")
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def log_steps(logger, count: int) -> None:
    for step in range(1, count + 1):
        logger.log_metrics({"loss/train": 1.0}, step)


def test_a_full_disk_is_an_error(tmp_path):
    """A limit of 4 kB per file simulates a full disk."""
    logger = TensorBoardLogger(directory=tmp_path, flush_seconds=0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            log_steps(logger, 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logger.finalize("failed")


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "tensorboard").write_text("a file stands here")
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    with pytest.raises(FileExistsError, match=r"tensorboard"):
        logger.save()


def written(directory) -> set[tuple[str, int, bytes]]:
    """Return tag, step and content of each value in the event files of a directory and its subfolders."""
    events = [event for path in sorted(directory.rglob("events*")) for event in LegacyEventFileLoader(str(path)).Load()]
    found = [(one.tag, event.step, one.SerializeToString()) for event in events for one in event.summary.value]
    return {*found, *(("graph", 0, event.graph_def) for event in events if event.graph_def)}


@pytest.mark.filterwarnings("ignore")  # warnings of torch.jit, which add_graph uses
def test_the_experiment_writes_what_a_summary_writer_writes(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
    logger, plain = TensorBoardLogger(directory=tmp_path), SummaryWriter(str(tmp_path / "torch"))
    assert isinstance(logger, LightningTensorBoardLogger)
    pixels = torch.linspace(0, 1, 48).reshape(3, 4, 4)
    logger.log_metrics({"loss/train": 1.0}, 3)
    for writer in (logger.experiment, plain):
        writer.add_scalar("mine/value", torch.tensor(0.5), 3)
        writer.add_scalars("mine/both", {"a": 1.0, "b": 2.0}, 3)
        writer.add_figure("figure", figure, 3, close=False)
        writer.add_image("image", pixels, 3)
        writer.add_histogram("weights", torch.arange(10.0), 3)
        writer.add_text("text", "**note**")
        writer.add_graph(torch.nn.Linear(4, 2), pixels)
    logger.log_metrics({"mine/stepless": torch.tensor(2.0)})
    logger.end("completed")
    plain.close()
    assert written(tmp_path / "tensorboard") >= written(tmp_path / "torch")
    assert points(tmp_path, "mine/stepless") == [(3, 2.0)]
    assert len([*tmp_path.glob("tensorboard/events*")]) == 1
