"""Rules between the switches of `runtime`, and between them and the precision."""

from __future__ import annotations

from collections.abc import Iterator

from exp.config.values import Values
from exp.errors import Fault


def switches_agree(values: Values) -> Iterator[Fault]:
    """What one switch asks for, another may not take away in silence."""
    if values["runtime.deterministic"] is True and values["runtime.cudnn_benchmark"] is True:
        yield Fault(
            key="runtime.cudnn_benchmark",
            got="true with runtime.deterministic=true",
            expected="one of the two: the fastest algorithm of one run need not be that of the next",
            cure="Leave runtime.cudnn_benchmark out",
        )
    if values["runtime.matmul"] == "highest" and values["precision.word"] == "tf32":
        yield Fault(
            key="runtime.matmul",
            got="highest with precision=tf32",
            expected="high or medium, or null: tf32 is for matrix products that are less exact",
            cure="Leave runtime.matmul out, or choose precision=fp32",
        )
