"""The Custom Scalars tab has a chart for every documented tag that is a curve, and no empty chart."""

from __future__ import annotations

import re
from pathlib import Path

from tensorboard.plugins.custom_scalar import layout_pb2

from exp.tensorboard.summaries import CHARTS, Layout

TAGS = Path(__file__).with_name("tags.txt").read_text().split()
# Tags that exist only on a GPU; tests/tensorboard/test_tags.py tests them.
ONLY_ON_CUDA = [
    f"memory/{name}"
    for name in ("allocated_mib", "reserved_mib", "peak_mib", "peak_forward_mib", "peak_step_mib", "fragmentation")
]


def titles(summary) -> dict[str, list[str]]:
    (value,) = summary.value
    layout = layout_pb2.Layout.FromString(value.tensor.string_val[0])
    return {category.title: [chart.title for chart in category.chart] for category in layout.category}


def test_a_chart_appears_with_its_first_tag():
    layout = Layout()
    assert titles(layout.extend(["memory/parameters_mib", "unknown"])) == {"Memory": ["parts, MiB"]}
    assert layout.extend(["memory/parameters_mib", "memory/gradients_mib"]) is None
    assert titles(layout.extend(["loss/train", "precision/loss_scale"])) == {
        "Overview": ["loss"],
        "Memory": ["parts, MiB"],
        "Precision": ["loss scale"],
    }
    assert layout.extend(["loss/val"]) is None


def test_each_tag_is_in_one_chart():
    patterns = [pattern for charts in CHARTS.values() for pattern in charts.values()]
    for tag in [*TAGS, *ONLY_ON_CUDA, "f1/val", "memory/peak_forward_mib/max", "memory/fragmentation/mean"]:
        if not tag.startswith(NOT_CURVES) and tag not in HEAT_MAPS:
            assert sum(re.match(pattern, tag) is not None for pattern in patterns) == 1, tag


HEAT_MAPS = {
    *(f"gradients/{figure}" for figure in ("norm", "update_ratio", "zeros", "non_finite", "output_norm")),
    *(f"activations/{figure}" for figure in ("mean", "std", "zeros", "dead_units", "saturated")),
    "throughput/part_ms",
}
# Tags without a chart, because other tabs or the Scalars tab show them.
NOT_CURVES = (
    "config", "command", "git", "custom_scalars__config__", "_hparams_/", "operators", "dtypes", "profile/",
    "throughput/flops", "gradients/histogram/", "activations/histogram/", "confusion/",
    "features/", "samples/", "pr_curve/",
    "monitor/",
)  # fmt: skip


def test_tags_of_other_tabs_have_no_chart():
    assert Layout().extend([tag for tag in TAGS if tag.startswith(NOT_CURVES) or tag in HEAT_MAPS]) is None
