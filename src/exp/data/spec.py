"""Read the shape, dtype and classes of the data, and check them against the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor
from torch.utils.data import Subset

from exp.data.entries import by_name, inputs_in, target_in
from exp.data.faults import data_fault
from exp.data.in_memory import Tensors
from exp.data.labels import classes_in
from exp.shared_types import DataSpec, SampleDtype, Stage, TensorSpec, dtype_name, tensor_specs
from exp.spelling import among, did_you_mean


@dataclass(frozen=True, kw_only=True)
class DeclaredSpec:
    """The five keys of the data node; None where the data is to say."""

    inputs: Mapping[str, TensorSpec] | None
    input_shape: tuple[int, ...] | None
    input_dtype: str | None
    num_classes: int | None
    num_outputs: int | None

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, Any] | None,
        input_shape: Sequence[int] | None,
        input_dtype: str | None,
        num_classes: int | None,
        num_outputs: int | None,
    ) -> DeclaredSpec:
        """Reads them as a config has them."""
        return cls(
            inputs=None if inputs is None else tensor_specs(inputs),
            input_shape=None if input_shape is None else tuple(input_shape),
            input_dtype=input_dtype,
            num_classes=num_classes,
            num_outputs=num_outputs,
        )

    @property
    def whole(self) -> DataSpec | None:
        """The spec where nothing is left to the data."""
        is_known = self.inputs or (self.input_shape is not None and self.input_dtype is not None)
        if not is_known or self.num_outputs is None:
            return None
        return DataSpec(
            inputs=self.inputs or {},
            input_shape=self.input_shape,
            input_dtype=self.input_dtype,
            num_classes=self.num_classes,
            num_outputs=self.num_outputs,
        )


def read_spec(
    declared: DeclaredSpec, batch: object, *, num_classes: int | None, num_outputs: int | None = None
) -> DataSpec:
    """The spec of the data, checked against what is declared.

    batch: a batch of one sample, as a model would get it. num_classes, num_outputs: what the data set says of itself;
    None where it says nothing.
    Raises: ConfigError that names the key whose value is not what the data holds, or that the data cannot tell.
    """
    values = inputs_in(batch)
    shapes = {name: tuple(value.shape[1:]) for name, value in values.items()}
    found = {name: TensorSpec(shape=shapes[name], dtype=dtype_name(value.dtype)) for name, value in values.items()}
    target = target_in(batch)
    if declared.inputs is None and declared.input_shape is not None and "input" not in found:
        raise data_fault(
            "inputs",
            got=f"null, and samples with the entries {', '.join(found)}",
            expected="a shape and a dtype for each that the network takes, or an entry named input",
            cure="Leave them to the data with data.input_shape=null",
        )
    _refuse_other_inputs(declared.inputs, found)
    only = "input" if "input" in found else next(iter(found)) if len(found) == 1 else None
    shape, dtype = (shapes[only], found[only].dtype) if only else (None, None)
    _refuse_unlike("input_shape", declared.input_shape, shape)
    _refuse_unlike("input_dtype", declared.input_dtype, dtype)
    _refuse_unlike("num_classes", declared.num_classes, num_classes)
    classes = declared.num_classes if num_classes is None else num_classes
    # Declared outputs are taken as they are: two classes may need one output, a regression two.
    outputs = declared.num_outputs if declared.num_outputs is not None else num_outputs or classes
    if outputs is None and isinstance(target, Tensor) and target.is_floating_point():
        outputs = target.shape[-1] if target.dim() > 1 else 1
    # Data may have no target, or several by other names: each term and each metric says which is its own.
    if outputs is None and target is not None:
        raise data_fault(
            "num_classes",
            got="null, and the data set does not say it",
            expected="the number of classes, or data.num_outputs for a regression",
        )
    is_plain = list(found) == ["input"] or declared.input_shape is not None
    # What no network is fed, such as boxes of which the first sample has none, goes to terms and hooks alone.
    fed = {name: one for name, one in found.items() if one.dtype in get_args(SampleDtype) and 0 not in one.shape}
    return DataSpec(
        inputs=declared.inputs or ({} if is_plain else fed),
        input_shape=shape,
        input_dtype=dtype,
        num_classes=classes,
        num_outputs=outputs,
    )


def stated(part: object, name: str) -> int | None:
    """A number that a data set says of itself; of a part of one, what the whole says. None where neither does."""
    number: int | None = getattr(part, name, None)
    return stated(part.dataset, name) if number is None and isinstance(part, Subset) else number


def stated_classes(parts: Mapping[Stage, object], declared: DeclaredSpec) -> int | None:
    """How many classes the parts have: what they say in `num_classes`, else what the targets in memory hold."""
    if known := [classes for part in parts.values() if (classes := stated(part, "num_classes")) is not None]:
        return max(known)
    if declared.num_classes is not None:
        return declared.num_classes
    names = tuple(declared.inputs or ())
    found = [
        classes_in(target_in(by_name(part.entries, names))) for part in parts.values() if isinstance(part, Tensors)
    ]
    return max((classes for classes in found if classes is not None), default=None)


def _refuse_other_inputs(declared: Mapping[str, TensorSpec] | None, found: Mapping[str, TensorSpec]) -> None:
    """Raises: ConfigError where data.inputs names what samples do not have, or of another shape or dtype."""
    for name, one in (declared or {}).items():
        if name not in found:
            expected = f"an entry of the samples, which have {among(found, word=name)}"
            raise data_fault(f"inputs.{name}", got=name, expected=expected, cure=did_you_mean(name, found))
        held = found[name]
        fits = len(one.shape) == len(held.shape) and all(
            size is None or size == other for size, other in zip(one.shape, held.shape, strict=True)
        )
        if not fits:
            expected = f"{list(held.shape)}, which is what the data holds, with null for a length that differs"
            raise data_fault(f"inputs.{name}.shape", got=str(list(one.shape)), expected=expected)
        _refuse_unlike(f"inputs.{name}.dtype", one.dtype, held.dtype)


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
