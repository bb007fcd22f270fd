"""What this room refuses: every fault of the data node carries its key, like a fault of the config."""

from __future__ import annotations

from collections.abc import Collection

from exp.errors import ConfigError, Fault
from exp.spelling import among, did_you_mean


def data_fault(key: str, *, got: str, expected: str, cure: str | None = None) -> ConfigError:
    """The error to raise for one fault below `data`. key: dotted, below `data.`."""
    return ConfigError([Fault(key=f"data.{key}" if key else "data", got=got, expected=expected, cure=cure)])


def name_cure(name: str, names: Collection[str]) -> str | None:
    """A cure that proposes the nearest spelling, or lists the names where none is near; None where there are none."""
    return did_you_mean(name, names) or (f"There is: {among(sorted(names), word=name)}" if names else None)


def unlike_training(part: object, train: object) -> ConfigError:
    """The error of a part that is scaled or encoded by a training part of another kind."""
    return data_fault(
        "train",
        got=f"{type(train).__name__}, beside a part that is {type(part).__name__}",
        expected="one kind: what training has seen scales or encodes the other parts",
    )
