"""Read the shape, dtype and classes of the data, and check them against the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from exp.data.faults import data_fault
from exp.data.in_memory import Tensors
from exp.data.labels import classes_in, input_and_target
from exp.types import DataSpec, Stage, dtype_name


@dataclass(frozen=True, kw_only=True)
class DeclaredSpec:
    """The four keys of the data node; None where the data is to say."""

    input_shape: tuple[int, ...] | None
    input_dtype: str | None
    num_classes: int | None
    num_outputs: int | None

    @property
    def whole(self) -> DataSpec | None:
        """The spec where nothing is left to the data."""
        if self.input_shape is None or self.input_dtype is None or self.num_outputs is None:
            return None
        return DataSpec(
            input_shape=self.input_shape,
            input_dtype=self.input_dtype,
            num_classes=self.num_classes,
            num_outputs=self.num_outputs,
        )


def read_spec(declared: DeclaredSpec, batch: object, *, num_classes: int | None) -> DataSpec:
    """The spec of the data, checked against what is declared.

    batch: a batch of one sample, as a model would get it. num_classes: what the data set says of itself; None where
    it says nothing.
    Raises: ConfigError that names the key whose value is not what the data holds, or that the data cannot tell.
    """
    values, target = input_and_target(batch)
    if not isinstance(values, Tensor):
        raise data_fault(
            "transforms",
            got=f"samples whose input is {type(values).__name__}",
            expected="a tensor, an array or a number",
            cure="Turn it into one in data.transforms or in the data set",
        )
    shape, dtype = tuple(values.shape[1:]), dtype_name(values.dtype)
    _refuse_unlike("input_shape", declared.input_shape, shape)
    _refuse_unlike("input_dtype", declared.input_dtype, dtype)
    _refuse_unlike("num_classes", declared.num_classes, num_classes)
    classes = declared.num_classes if num_classes is None else num_classes
    # Declared outputs are taken as they are: two classes may need one output, a regression two.
    outputs = declared.num_outputs if declared.num_outputs is not None else classes
    if outputs is None and isinstance(target, Tensor) and target.is_floating_point():
        outputs = target.shape[-1] if target.dim() > 1 else 1
    if outputs is None:
        raise data_fault(
            "num_classes",
            got="null, and the data set does not say it",
            expected="the number of classes, or data.num_outputs for a regression",
        )
    return DataSpec(input_shape=shape, input_dtype=dtype, num_classes=classes, num_outputs=outputs)


def stated_classes(parts: Mapping[Stage, object], declared: int | None) -> int | None:
    """How many classes the parts have: what they say in `num_classes`, else what the targets in memory hold."""
    stated: list[int | None] = [getattr(part, "num_classes", None) for part in parts.values()]
    if known := [classes for classes in stated if classes is not None]:
        return max(known)
    if declared is not None:
        return declared
    found = [classes_in(input_and_target(part.entries)[1]) for part in parts.values() if isinstance(part, Tensors)]
    return max((classes for classes in found if classes is not None), default=None)


def _refuse_unlike(key: str, declared: object, found: object) -> None:
    """Raises: ConfigError where config and data both say it and differ."""
    if declared is not None and found is not None and declared != found:
        shown, held = (list(value) if isinstance(value, tuple) else value for value in (declared, found))
        raise data_fault(
            key,
            got=str(shown),
            expected=f"{held}, which is what the data holds",
            cure=f"Correct it, or leave it to the data with data.{key}=null",
        )
