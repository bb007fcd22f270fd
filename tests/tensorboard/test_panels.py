"""Histograms, images, texts and curves in event files equal references."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from sklearn.metrics import precision_recall_curve
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from exp.hooks.panels import Histogram, Image, Panel, PrecisionRecallCurve, Text, deterministic_counts, on_host
from exp.tensorboard.logger import TensorBoardLogger


def written(directory, panels: dict[str, Panel], step: int = 7) -> EventAccumulator:
    logger = TensorBoardLogger(directory=directory)
    logger.log_panels(panels, step)
    logger.finalize("success")
    return EventAccumulator(str(directory / "tensorboard")).Reload()


def picture(read: EventAccumulator, tag: str) -> np.ndarray:
    (event,) = read.Images(tag)
    opened = np.asarray(Pillow.open(io.BytesIO(event.encoded_image_string)))
    assert opened.shape[:2] == (event.height, event.width)
    return opened


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_a_histogram_counts_as_numpy_does(tmp_path, dtype):
    values = (100 * torch.randn(1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    (event,) = written(tmp_path, {"gradients/histogram/a": Histogram.of(values)}).Histograms("gradients/histogram/a")
    exact = values.double().numpy()
    counts, limits = np.histogram(exact, 64)
    found = event.histogram_value
    assert event.step == 7
    assert found.num == 1000
    assert (found.min, found.max) == (exact.min(), exact.max())
    assert found.bucket_limit == pytest.approx(limits[1:].tolist(), rel=1e-5, abs=1e-4)
    # A value on the limit of two bins may count in either bin.
    assert np.abs(np.cumsum(found.bucket) - np.cumsum(counts)).max() <= 2


@pytest.mark.parametrize(
    ("values", "low", "high", "count"),
    [
        ([1.0, 2.0, float("inf"), float("nan"), float("-inf")], 1.0, 2.0, 2),
        ([-3e38, 0.0, 3e38], -3e38, 3e38, 3),
        ([3.0, 3.0], 2.5, 3.5, 2),
        ([float("nan")], 0.0, 0.0, 0),
        ([], 0.0, 0.0, 0),
    ],
)
def test_a_histogram_counts_finite_values(tmp_path, values, low, high, count):
    (event,) = written(tmp_path, {"a": Histogram.of(torch.tensor(values))}).Histograms("a")
    found = event.histogram_value
    assert (found.min, found.max, found.num) == (pytest.approx(low), pytest.approx(high), count)
    assert sum(found.bucket) == count


def test_pictures_are_read_back_exactly(tmp_path):
    one = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
    several = torch.randint(0, 256, (3, 1, 2, 2), dtype=torch.uint8)
    read = written(tmp_path, {"one": Image.of(one), "several": Image.of(several)})
    assert (picture(read, "one") == one.permute(1, 2, 0).numpy()).all()
    sheet = picture(read, "several")
    assert sheet.shape == (5, 5)  # two by two pictures with a line between them
    for place, (top, left) in enumerate([(0, 0), (0, 3), (3, 0)]):
        assert (sheet[top : top + 2, left : left + 2] == several[place, 0].numpy()).all()
    assert not sheet[3:, 3:].any()
    assert not sheet[2].any()


def test_floats_are_gray_and_may_be_stretched(tmp_path):
    maps = torch.tensor([[[[0.0, 0.5], [1.0, 2.0]]], [[[-4.0, -3.0], [-2.0, float("nan")]]]])
    read = written(tmp_path, {"plain": Image.of(maps[:1]), "stretched": Image.of(maps[:1] * 1000, stretched=True)})
    assert picture(read, "plain").tolist() == [[0, 128], [255, 255]]
    assert picture(read, "stretched").tolist() == [[0, 64], [128, 255]]


def test_a_curve_equals_that_of_scikit_learn(tmp_path):
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 2, 300)
    scores = np.clip(0.3 * targets + 0.7 * draw.random(300), 0, 1).astype(np.float32)
    read = written(tmp_path, {"pr_curve/val": PrecisionRecallCurve.of(torch.tensor(scores), torch.tensor(targets))})
    (event,) = read.Tensors("pr_curve/val")
    assert read.SummaryMetadata("pr_curve/val").plugin_data.plugin_name == "pr_curves"
    *_, precision, recall = make_ndarray(event.tensor_proto)
    all_precision, all_recall, limits = precision_recall_curve(targets, scores)
    for threshold, here, there in zip(np.linspace(0, 1, 127), precision, recall, strict=True):
        place = np.searchsorted(limits, threshold)
        assert (here, there) == (pytest.approx(all_precision[place]), pytest.approx(all_recall[place]))


def test_deterministic_counts_equal_those_of_histc():
    shares = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    shares[:6] = torch.tensor([0.0, 1.0, -0.1, 1.1, float("inf"), float("nan")])
    assert torch.equal(deterministic_counts(shares, 64), torch.histc(shares, 64, 0.0, 1.0))


@pytest.mark.gpu
def test_panels_of_a_gpu_do_not_wait(without_waiting):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values[7] = float("inf")
    on_gpu, maps = values.cuda(), torch.rand(4, 1, 8, 8, device="cuda")
    scores, targets = torch.rand(100, device="cuda"), torch.ones(100, device="cuda")
    with without_waiting():
        found = [Histogram.of(on_gpu), Image.of(maps, stretched=True), PrecisionRecallCurve.of(scores, targets)]
    histogram, image, curve = on_host(found)
    expected = Histogram.of(values)
    assert (histogram.low, histogram.high) == (expected.low, expected.high)
    assert (histogram.counts.cumsum(0) - expected.counts.cumsum(0)).abs().max() <= 2
    assert {panel.device.type for panel in (histogram.counts, image.pixels, curve.counts)} == {"cpu"}


def test_panels_reach_the_host_unchanged():
    panels = [
        Histogram.of(torch.arange(10.0)),
        Image.of(torch.arange(12, dtype=torch.uint8).reshape(1, 3, 2, 2), columns=1),
        Text("a"),
        Histogram.of(torch.arange(10.0).double()),
    ]
    first, image, text, second = on_host(panels)
    assert (first.counts.dtype, second.counts.dtype) == (torch.float32, torch.float64)
    assert torch.equal(first.counts, panels[0].counts)
    assert (first.low, first.high, second.high) == (0, 9, 9)
    assert torch.equal(image.pixels, panels[1].pixels)
    assert (image.columns, text.markdown) == (1, "a")
