"""The Custom Scalars tab: groups of charts that name tags by regular expressions, so that they hold for every run."""

from __future__ import annotations

import re
from collections.abc import Collection

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

# Nothing of a run's own config: TensorBoard joins the charts of all runs, and draws one that differs twice.
CHARTS: dict[str, dict[str, str]] = {
    "Overview": {
        "loss": r"^loss/(train|val|test)$",
        "terms": r"^loss/(train|val|test)/.+",
        "metrics, validation": r"^(?!(loss|optimizer|precision|confusion|pr_curve|samples)/)[^/]+/val$",
        "metrics, test": r"^(?!(loss|optimizer|precision|confusion|pr_curve|samples)/)[^/]+/test$",
        "learning rate": r"^optimizer/lr/",
    },
    "Gradients": {
        "norm, total": r"^gradients/norm(_clipped)?/total",
        "norm of each parameter": r"^gradients/norm/(?!total)",
        "norm of each parameter, clipped": r"^gradients/norm_clipped/(?!total)",
        "norm at what modules return": r"^gradients/output_norm/",
        "update to weight": r"^gradients/update_ratio/",
        "share of zeros": r"^gradients/zeros/",
        "share not finite": r"^gradients/non_finite/",
        "norm of single samples": r"^per_sample_gradients/norm",
        "noise scale": r"^per_sample_gradients/noise_scale",
        "noise scale, its parts": r"^per_sample_gradients/(covariance_trace|squared_norm)",
    },
    "Activations": {
        "mean": r"^activations/mean/",
        "standard deviation": r"^activations/std/",
        "share of zeros": r"^activations/zeros/",
        "share of dead units": r"^activations/dead_units/",
        "share saturated": r"^activations/saturated/",
    },
    "Memory": {
        "parts, MiB": r"^memory/(parameters|gradients|optimizer|activations)_mib$",
        "parts over ranks, MiB": r"^memory/(parameters|gradients|optimizer|activations)_mib/",
        "device, MiB": r"^memory/(allocated|reserved|peak)_mib$",
        "device, peak by phase, MiB": r"^memory/peak_[a-z]+_mib$",
        "device over ranks, MiB": r"^memory/(allocated|reserved|peak[a-z_]*)_mib/",
        "device, fragmentation": r"^memory/fragmentation",
        "host, MiB": r"^memory/host_[a-z_]+_mib$",
        "host over ranks, MiB": r"^memory/host_[a-z_]+_mib/",
    },
    "Precision": {
        "loss scale": r"^precision/loss_scale",
        "skipped steps": r"^precision/skipped_steps",
    },
    "Throughput": {
        "samples and tokens a second": r"^throughput/(samples|tokens)_per_second$",
        "step, ms": r"^throughput/[a-z_]+_ms$",
        "model FLOPs utilisation": r"^throughput/mfu$",
    },
}


class Layout:
    """The charts that a run has values for: none is empty, and TensorBoard shows those of all runs together."""

    def __init__(self) -> None:
        self._tags: set[str] = set()
        self._shown: set[tuple[str, str]] = set()

    def grown(self, tags: Collection[str]) -> Summary | None:
        """The whole layout where `tags` bring a chart that it did not have; TensorBoard takes the last one of a run."""
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
        content = TensorProto(dtype=DT_STRING, string_val=[layout_pb2.Layout(category=categories).SerializeToString()])
        content.tensor_shape.SetInParent()
        about = metadata.create_summary_metadata()
        return Summary(value=[Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, metadata=about, tensor=content)])
