"""Curves read from complete, cut and damaged event files equal those of TensorBoard's reader."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.util.tensor_util import make_tensor_proto

from exp.hooks.panels import Histogram, Text
from exp.tensorboard.event_file import encode_records, read_curves
from exp.tensorboard.logger import TensorBoardLogger, written_at


def everything(tag: str) -> bool:
    return True


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    curve = read_curves(directory, wants=everything).by_tag[tag]
    return list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def logged(run: Path, *, steps=range(1, 21), sign: float = 1.0, purge: int | None = None) -> Path:
    """Log a run or resume it, and return the directory of its event files."""
    logger = TensorBoardLogger(directory=run)
    if purge is not None:
        logger.purge(purge)
    for step in steps:
        logger.log_metrics({"loss/train": sign / step, "loss/val": step * math.pi, "é/val": float("inf")}, step)
        logger.log_panels({"weights": Histogram.of(torch.randn(9)), "note": Text("loss/train")}, step)
    logger.finalize("success")
    return run / "tensorboard"


def test_curves_equal_those_of_tensorboards_reader(tmp_path):
    logged(tmp_path)
    directory = logged(tmp_path, steps=range(11, 31), sign=-1.0, purge=11)
    theirs = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    theirs.Reload()
    found = read_curves(directory, wants=everything)
    assert found.problems == []
    assert sorted(found.by_tag) == ["loss/train", "loss/val", "é/val"] == sorted(theirs.Tags()["scalars"])
    for tag in found.by_tag:
        assert points(directory, tag) == [(event.step, event.value) for event in theirs.Scalars(tag)]
    assert [value < 0 for _, value in points(directory, "loss/train")] == [False] * 10 + [True] * 20


def test_only_requested_curves_are_read(tmp_path):
    directory = logged(tmp_path)
    assert list(read_curves(directory, wants="loss/val".__eq__).by_tag) == ["loss/val"]
    assert read_curves(tmp_path / "nowhere", wants=everything).by_tag == {}


@pytest.mark.parametrize("value", [np.float64(-3), np.int32(-3)])
def test_tensors_of_one_number_are_scalars(tmp_path, value):
    listed = make_tensor_proto(value)  # the number in the field of its type; TensorBoard's logger writes bytes
    raw = TensorProto(dtype=listed.dtype, tensor_content=value.tobytes())
    others = make_tensor_proto(np.full(2, value)), make_tensor_proto("text")
    tensors = enumerate((listed, raw, *others), start=4)
    summaries = [(step, Summary(value=[Summary.Value(tag="a", tensor=one)])) for step, one in tensors]
    events = [Event(step=step, summary=summary).SerializeToString() for step, summary in summaries]
    (tmp_path / "events.out.tfevents.1").write_bytes(encode_records(events))
    assert points(tmp_path, "a") == [(4, -3.0), (5, -3.0)]


def test_a_cut_off_file_gives_earlier_points(tmp_path):
    directory = logged(tmp_path)
    (path,) = directory.iterdir()
    content, whole = path.read_bytes(), points(directory, "loss/train")
    for length in random.Random(0).sample(range(len(content)), 50):
        path.write_bytes(content[:length])
        found = read_curves(directory, wants=everything)
        before = found.by_tag["loss/train"].steps.tolist() if found.by_tag else []
        assert before == [step for step, _ in whole][: len(before)]
        assert len(found.problems) <= 1
    path.write_bytes(b"")
    assert read_curves(directory, wants=everything).problems == [f"{path.name} is empty"]


def test_a_resume_reads_tags_before_a_damaged_event(tmp_path):
    event = Event(step=4, summary=Summary(value=[Summary.Value(tag="loss/test", simple_value=1.0)]))
    (tmp_path / "events.out.tfevents.1").write_bytes(encode_records([event.SerializeToString(), b"\xff" * 4]))
    assert written_at(tmp_path, 4) == {"loss/test"}


@given(place=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_damaged_byte_raises_nothing(tmp_path_factory, place, byte):
    directory = tmp_path_factory.mktemp("damaged")
    events = [Event(step=step, summary=Summary(value=[Summary.Value(tag="a", simple_value=1)])) for step in range(99)]
    content = bytearray(encode_records([event.SerializeToString() for event in events]))
    content[place % len(content)] = byte
    (directory / "events.out.tfevents.1").write_bytes(content)
    read_curves(directory, wants=everything)


@given(st.binary(min_size=4, max_size=60))
def test_any_bytes_of_an_event_raise_nothing(tmp_path_factory, event):
    directory = tmp_path_factory.mktemp("any")
    (directory / "events.out.tfevents.1").write_bytes(encode_records([event]))
    assert len(read_curves(directory, wants=everything).problems) <= 1
