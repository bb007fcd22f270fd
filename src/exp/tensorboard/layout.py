"""The Custom Scalars tab: five groups of charts that hold for every run. Charts name tags by regular expressions."""

from __future__ import annotations

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

# Nothing of a run's own config: TensorBoard joins the layouts of all runs, and draws one that differs twice.
CHARTS: dict[str, dict[str, str]] = {
    "Overview": {
        "loss": r"^loss/(train|val|test)$",
        "terms": r"^loss/(train|val|test)/.+",
        "metrics, validation": r"^(?!loss/|optimizer/|precision/)[^/]+/val$",
        "metrics, test": r"^(?!loss/|optimizer/|precision/)[^/]+/test$",
        "learning rate": r"^optimizer/lr/",
    },
    "Gradients": {
        "norm, total": r"^gradients/norm(_clipped)?/total",
        "norm of each parameter": r"^gradients/norm/(?!total)",
        "update to weight": r"^gradients/update_ratio/",
        "share of zeros": r"^gradients/zeros/",
        "share not finite": r"^gradients/non_finite/",
    },
    "Memory": {
        "parts, MiB": r"^memory/(parameters|gradients|optimizer|activations)_mib$",
        "device, MiB": r"^memory/(allocated|reserved|peak)[a-z_]*_mib",
        "host, MiB": r"^memory/host_rss_mib",
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


def layout_summary() -> Summary:
    """The layout, which TensorBoard reads from a text of its own."""
    categories = [
        layout_pb2.Category(
            title=title,
            chart=[
                layout_pb2.Chart(title=name, multiline=layout_pb2.MultilineChartContent(tag=[pattern]))
                for name, pattern in charts.items()
            ],
            # Open at first: those that nearly every run fills.
            closed=title == "Precision",
        )
        for title, charts in CHARTS.items()
    ]
    content = TensorProto(dtype=DT_STRING, string_val=[layout_pb2.Layout(category=categories).SerializeToString()])
    content.tensor_shape.SetInParent()
    value = Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, metadata=metadata.create_summary_metadata(), tensor=content)
    return Summary(value=[value])
