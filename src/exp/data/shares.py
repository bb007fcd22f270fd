"""How large each part of a data set may be: the rule that the check and the data set itself keep. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from exp.errors import Fault
from exp.spelling import did_you_mean, show
from exp.types import STAGES

KEY = "data.parts"


def share_faults(sizes: Mapping[Any, Any]) -> list[Fault]:
    """Parts are train, val and test; a size is a fraction of the data set or a number of samples, and fractions leave
    nothing over, or something."""
    faults = []
    fractions = 0.0
    for name, size in sizes.items():
        key = f"{KEY}.{name}"
        if name not in STAGES:
            cure = did_you_mean(str(name), STAGES)
            faults.append(Fault(key=key, got="no part", expected="train, val or test", cure=cure))
        elif not is_share(size):
            expected = "a fraction from 0 to 1, or a whole number of samples"
            faults.append(Fault(key=key, got=show(size), expected=expected))
        elif isinstance(size, float) and size <= 1:
            fractions += size
    if fractions > 1 + 1e-9:
        got = f"fractions that add up to {fractions:g}"
        faults.append(Fault(key=KEY, got=got, expected="1 at most", cure="Make one part smaller"))
    return faults


def is_share(size: Any) -> bool:
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    return is_number and math.isfinite(size) and size >= 0 and (size <= 1 or size == int(size))
