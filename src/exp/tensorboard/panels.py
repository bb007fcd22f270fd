"""What is not a number, as TensorBoard's own tabs read it: histograms, images, texts, precision-recall curves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.pr_curve.metadata import create_summary_metadata as curve_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.util.tensor_util import make_tensor_proto

from exp.hooks.values import Histogram, Image, Panel, PrecisionRecallCurve, Text
from exp.loggers.png import grid, png


def summary_value(tag: str, panel: Panel) -> Summary.Value:
    """panel: one whose tensors are on the host."""
    return _KINDS[type(panel)](tag, panel)


def text_value(tag: str, text: str) -> Summary.Value:
    content = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    content.tensor_shape.SetInParent()
    return Summary.Value(tag=tag, metadata=text_metadata(display_name="", description=""), tensor=content)


def _histogram(tag: str, panel: Histogram) -> Summary.Value:
    counts = panel.counts.double().numpy()
    low, high = float(panel.low), float(panel.high)
    if not counts.sum():
        low = high = 0.0  # no value was finite: an empty histogram, for nan has no place on the axis
    elif low == high:
        # As tensorboard's own summary does: one bin around the value.
        counts, low, high = counts.sum(keepdims=True), low - 0.5, high + 0.5
    limits = np.linspace(low, high, len(counts) + 1)
    middles = (limits[:-1] + limits[1:]) / 2
    return Summary.Value(
        tag=tag,
        histo=HistogramProto(
            min=low,
            max=high,
            num=counts.sum(),
            sum=counts @ middles,
            sum_squares=counts @ middles**2,
            bucket_limit=limits[1:],
            bucket=counts,
        ),
    )


def _image(tag: str, panel: Image) -> Summary.Value:
    sheet = grid(panel.pixels, columns=panel.columns)
    height, width, channels = sheet.shape
    image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png(sheet))
    return Summary.Value(tag=tag, image=image)


def _text(tag: str, panel: Text) -> Summary.Value:
    return text_value(tag, panel.markdown)


def _curve(tag: str, panel: PrecisionRecallCurve) -> Summary.Value:
    counts = panel.counts.double().numpy()
    true_positives, false_positives, _, false_negatives = counts
    # Where nothing is predicted, or nothing is positive: 1 and 0, as tensorboard's own summary has them.
    predicted, positive = true_positives + false_positives, true_positives + false_negatives
    precision = np.where(predicted > 0, true_positives / np.maximum(predicted, 1), 1.0)
    recall = true_positives / np.maximum(positive, 1)
    rows = np.stack([*counts, precision, recall])
    metadata = curve_metadata(display_name="", description="", num_thresholds=rows.shape[1])
    return Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(rows.astype(np.float32)))


_KINDS: dict[type[Panel], Callable[..., Summary.Value]] = {
    Histogram: _histogram,
    Image: _image,
    Text: _text,
    PrecisionRecallCurve: _curve,
}
