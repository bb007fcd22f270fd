"""Conversion of panels to TensorBoard's format, and the layout of TensorBoard's Custom Scalars tab."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import numpy as np
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.pr_curve.metadata import create_summary_metadata as curve_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.util.tensor_util import make_tensor_proto

from exp.hooks.panels import Histogram, Image, Panel, PrecisionRecallCurve, Text, png


def summary_value(tag: str, panel: Panel) -> Summary.Value:
    """Return a panel in TensorBoard's format. The panel's tensors must be on the CPU."""
    return _KINDS[type(panel)](tag, panel)


def text_value(tag: str, text: str) -> Summary.Value:
    """Return a Markdown text in TensorBoard's format."""
    metadata = text_metadata(display_name="", description="")
    return Summary.Value(tag=tag, metadata=metadata, tensor=_bytes(text.encode()))


def _bytes(content: bytes) -> TensorProto:
    """Return bytes as a 0-d string tensor of TensorBoard."""
    tensor = TensorProto(dtype=DT_STRING, string_val=[content])
    tensor.tensor_shape.SetInParent()
    return tensor


def _histogram(tag: str, panel: Histogram) -> Summary.Value:
    counts = panel.counts.double().numpy()
    low, high = float(panel.low), float(panel.high)
    if not counts.sum():
        low = high = 0.0  # without a finite value, the histogram is empty at 0, because its axis does not support nan
    elif low == high:
        # One bin around the value, as in tensorboard's summary.
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
    sheet = panel.sheet()
    height, width, channels = sheet.shape
    image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png(sheet))
    return Summary.Value(tag=tag, image=image)


def _text(tag: str, panel: Text) -> Summary.Value:
    return text_value(tag, panel.markdown)


def _curve(tag: str, panel: PrecisionRecallCurve) -> Summary.Value:
    counts = panel.counts.double().numpy()
    true_positives, false_positives, _, false_negatives = counts
    # As in tensorboard's summary: without predictions the precision is 1, and without positives the recall is 0.
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


# Charts of the Custom Scalars tab: the regular expression of the tags in a chart, by section and title. All runs use
# these charts, because TensorBoard shows the charts of all runs together and would show different charts twice.
CHARTS: dict[str, dict[str, str]] = {
    "Overview": {
        "loss": r"^loss/(train|train_epoch|val|test)$",
        "terms": r"^loss/(train|val|test)/.+",
        "metrics, validation": r"^(?!(loss|optimizer|precision|confusion|pr_curve|samples)/)[^/]+/val$",
        "metrics, test": r"^(?!(loss|optimizer|precision|confusion|pr_curve|samples)/)[^/]+/test$",
        "learning rate": r"^optimizer/lr/",
        "gradient norm": r"^gradients/norm(_clipped)?/total",
        "update to weight": r"^gradients/update_ratio/total",
        "samples and tokens a second": r"^throughput/(samples|tokens)_per_second$",
    },
    "Gradients": {
        "norm of each parameter": r"^gradients/norm(_clipped)?/(?!total)",
        "norm at what modules return": r"^gradients/output_norm/",
        "update to weight of each parameter": r"^gradients/update_ratio/(?!total)",
        "norm of single samples": r"^per_sample_gradients/norm",
        "noise scale": r"^per_sample_gradients/(noise_scale|covariance_trace|squared_norm)",
    },
    "Activations": {
        "mean": r"^activations/mean/",
        "standard deviation": r"^activations/std/",
        "share of zeros": r"^activations/zeros/",
        "share of dead units": r"^activations/dead_units/",
        "share saturated": r"^activations/saturated/",
    },
    "Memory": {
        "parts, MiB": r"^memory/(parameters|gradients|optimizer|activations)_mib",
        "device, MiB": r"^memory/(allocated|reserved|peak[a-z_]*)_mib",
        "device, fragmentation": r"^memory/fragmentation",
        "host, MiB": r"^memory/host_[a-z_]+_mib",
    },
    "Precision": {
        "loss scale": r"^precision/loss_scale",
        "skipped steps": r"^precision/skipped_steps",
    },
    "Throughput": {
        "step, ms": r"^throughput/(?!part_ms$)[a-z_]+_ms$",
        "model FLOPs utilisation": r"^throughput/mfu$",
    },
}


class Layout:
    """Layout of the Custom Scalars tab. It contains the charts of CHARTS for which the run has logged values."""

    def __init__(self) -> None:
        self._tags: set[str] = set()
        self._shown: set[tuple[str, str]] = set()

    def extend(self, tags: Collection[str]) -> Summary | None:
        """Add tags with values to the layout. Return the whole new layout if a chart was added, otherwise None.

        The layout must then be written again, because TensorBoard uses the last layout of a run.
        """
        new = set(tags) - self._tags
        if not new:
            return None
        self._tags |= new
        filled = {
            (title, name)
            for title, charts in CHARTS.items()
            for name, pattern in charts.items()
            if any(re.match(pattern, tag) for tag in new)
        }
        if filled <= self._shown:
            return None
        self._shown |= filled
        return self._summary()

    def _summary(self) -> Summary:
        categories = []
        for title, charts in CHARTS.items():
            shown = [
                layout_pb2.Chart(title=name, multiline=layout_pb2.MultilineChartContent(tag=[pattern]))
                for name, pattern in charts.items()
                if (title, name) in self._shown
            ]
            if shown:
                categories.append(layout_pb2.Category(title=title, chart=shown))
        content = _bytes(layout_pb2.Layout(category=categories).SerializeToString())
        about = layout_metadata.create_summary_metadata()
        return Summary(value=[Summary.Value(tag=layout_metadata.CONFIG_SUMMARY_TAG, metadata=about, tensor=content)])
