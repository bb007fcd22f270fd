"""What is logged is what an independent reader reads back."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from exp.errors import RunError
from exp.tensorboard.logger import TensorBoardLogger


def read(directory) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


def points(directory, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def files(directory) -> list[str]:
    return sorted(os.listdir(directory / "tensorboard"))


def test_scalars_come_back_at_their_steps(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path)
    for step in range(1, 1001):
        logger.log_metrics({"loss/train": 1 / step, "optimizer/lr/default": 0.5}, step)
    logger.log_metrics({"loss/val": math.nan}, 1000)
    logger.finalize("success")
    losses = points(tmp_path, "loss/train")
    assert [step for step, _ in losses] == list(range(1, 1001))
    assert [value for _, value in losses] == pytest.approx([1 / step for step in range(1, 1001)])
    assert read(tmp_path).Tags()["scalars"] == ["loss/train", "optimizer/lr/default", "loss/val"]
    assert math.isnan(points(tmp_path, "loss/val")[0][1])
    assert len(files(tmp_path)) == 1


def test_nothing_is_made_before_something_is_logged(tmp_path):
    TensorBoardLogger(directory=tmp_path).finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_it_may_be_closed_twice_and_goes_on_after_that_in_the_same_file(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    logger.finalize("success")
    logger.finalize("success")
    logger.log_metrics({"accuracy/test": 0.9}, 1)
    logger.finalize("success")
    assert points(tmp_path, "loss/train") == [(1, 1.0)]
    assert points(tmp_path, "accuracy/test") == [(1, pytest.approx(0.9))]
    assert len(files(tmp_path)) == 1


def test_values_can_be_seen_within_flush_seconds(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path, flush_seconds=0.05)
    logger.log_metrics({"loss/train": 1.0}, 1)
    time.sleep(0.06)
    logger.log_metrics({"loss/train": 2.0}, 2)
    assert len(points(tmp_path, "loss/train")) == 2
    logger.finalize("success")


def test_a_resumed_run_draws_its_curves_once(tmp_path):
    killed = TensorBoardLogger(directory=tmp_path)
    for step in range(1, 16):
        killed.log_metrics({"loss/train": float(step)}, step)
    killed.log_metrics({"loss/val": 10.0}, 10)
    killed.save()
    resumed = TensorBoardLogger(directory=tmp_path)
    resumed.purge(11)
    for step in range(11, 21):
        resumed.log_metrics({"loss/train": -float(step)}, step)
    resumed.finalize("success")
    killed.finalize("failed")
    assert points(tmp_path, "loss/train") == [(k, float(k) if k <= 10 else -float(k)) for k in range(1, 21)]
    assert points(tmp_path, "loss/val") == [(10, 10.0)]
    assert len(files(tmp_path)) == 2


def test_later_files_sort_behind_earlier_ones(tmp_path):
    for step in range(1, 5):
        logger = TensorBoardLogger(directory=tmp_path)
        logger.log_metrics({"loss/train": 1.0}, step)
        logger.finalize("success")
    assert [step for step, _ in points(tmp_path, "loss/train")] == [1, 2, 3, 4]
    assert len(files(tmp_path)) == 4


def test_a_text_comes_back(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_text("config", "```yaml\nseed: 0\n```")
    logger.finalize("success")
    (event,) = read(tmp_path).Tensors("config")
    assert event.tensor_proto.string_val == [b"```yaml\nseed: 0\n```"]
    assert read(tmp_path).SummaryMetadata("config").plugin_data.plugin_name == "text"


def hyperparameters(directory):
    content = {
        tag: read(directory).SummaryMetadata(tag).plugin_data.content
        for tag in (metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG)
        if tag in read(directory).Tags()["tensors"]
    }
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    ended = metadata.SESSION_END_INFO_TAG in content
    end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG]) if ended else None
    return experiment, start, end


def test_hyperparameters_keep_their_types_and_name_the_metrics(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path)
    params = {"optimizer.lr": 0.01, "seed": 3, "data.drop_last": True, "precision.word": "bf16", "tags": ["a"]}
    logger.log_hyperparams(params, metrics=["loss/val", "accuracy/val"])
    logger.finalize("success")
    experiment, start, end = hyperparameters(tmp_path)
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    assert values == {**params, "tags": "['a']"}
    assert values["data.drop_last"] is True
    assert {info.name: info.type for info in experiment.hparam_infos} == {
        "optimizer.lr": api_pb2.DATA_TYPE_FLOAT64,
        "seed": api_pb2.DATA_TYPE_FLOAT64,
        "data.drop_last": api_pb2.DATA_TYPE_BOOL,
        "precision.word": api_pb2.DATA_TYPE_STRING,
        "tags": api_pb2.DATA_TYPE_STRING,
    }
    assert [info.name.tag for info in experiment.metric_infos] == ["loss/val", "accuracy/val"]
    assert end is None  # a stage that ends well is not the run's end


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("completed", api_pb2.STATUS_SUCCESS),
        ("failed", api_pb2.STATUS_FAILURE),
        ("interrupted", api_pb2.STATUS_FAILURE),
    ],
)
def test_the_end_says_how_it_went(tmp_path, status, expected):
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_hyperparams({"seed": 0})
    logger.end(status)
    assert hyperparameters(tmp_path)[2].status == expected


def test_a_run_that_was_started_again_and_completed_is_no_failure(tmp_path):
    for status, expected in (("failed", api_pb2.STATUS_FAILURE), ("completed", api_pb2.STATUS_SUCCESS)):
        logger = TensorBoardLogger(directory=tmp_path)
        logger.log_hyperparams({"seed": 0})
        logger.log_metrics({"loss/train": 1.0}, 1 if status == "failed" else 2)
        logger.end(status)
        assert hyperparameters(tmp_path)[2].status == expected
    assert [event.step for event in read(tmp_path).Scalars("loss/train")] == [1, 2]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    logger.log_hyperparams({"seed": 0})
    logger.log_text("config", "")
    logger.purge(1)
    logger.end("completed")
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_error_and_not_a_hang(tmp_path):
    """In a process of its own, whose files the system limits to 4 kB, as a full disk would."""
    program = """
import resource, signal, sys
from exp.errors import RunError
from exp.tensorboard.logger import TensorBoardLogger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
logger = TensorBoardLogger(directory=sys.argv[1])
errors = []
for step in range(1, 2001):
    try:
        logger.log_metrics({"loss/train": 1.0}, step)
    except RunError as error:
        errors.append(error)
logger.finalize("failed")
logger.end("failed")
assert len(errors) == 1, errors
print(errors[0])
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"TensorBoard events cannot be written to {tmp_path}")
    assert line.endswith("File too large. Make room there, or turn it off: logger=[]")


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "tensorboard").write_text("a file stands here")
    logger = TensorBoardLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    with pytest.raises(RunError, match=r"cannot be written to .*tensorboard: File exists"):
        logger.save()
    logger.log_metrics({"loss/train": 1.0}, 2)
    logger.finalize("failed")


def test_a_step_is_needed(tmp_path):
    with pytest.raises(ValueError, match="needs the optimizer step"):
        TensorBoardLogger(directory=tmp_path).log_metrics({"loss/train": 1.0})
