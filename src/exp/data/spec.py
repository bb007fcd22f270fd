"""Detection of the shape, dtype and classes of the data, and comparison with the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from torch import Tensor
from torch.utils.data import Subset

from exp.data.data_errors import data_error, name_error
from exp.data.entries import by_name, inputs_in, target_in
from exp.data.in_memory import Tensors
from exp.data.labels import classes_in
from exp.shared_types import DataSpec, SampleDtype, Stage, TensorSpec, dtype_name, tensor_specs


def declared_spec(
    inputs: Mapping[str, Mapping[str, object]] | None,
    input_shape: Sequence[int] | None,
    input_dtype: SampleDtype | None,
    num_classes: int | None,
    num_outputs: int | None,
) -> DataSpec:
    """Return the spec that the config declares."""
    return DataSpec(
        inputs=tensor_specs(inputs or {}),
        input_shape=None if input_shape is None else tuple(input_shape),
        input_dtype=input_dtype,
        num_classes=num_classes,
        num_outputs=num_outputs,
    )


def read_spec(
    declared: DataSpec,
    batch: object,
    *,
    names: Sequence[str] = (),
    num_classes: int | None,
    num_outputs: int | None = None,
) -> DataSpec:
    """Return the spec of the data. Values in the config are compared with the data.

    Args:
        declared: The spec of the config. Values that are None, and empty inputs, are read from the data.
        batch: A batch of one sample, converted for the network.
        names: The names in data.inputs. If they are empty, data.input_shape and input_dtype describe the single input.
        num_classes: The number of classes that the data set states; None if it states none.
        num_outputs: The number of outputs that the data set states; None if it states none.

    Raises:
        ConfigError: A value in the config differs from the data, or a required value is in neither.
    """
    values = inputs_in(batch)
    shapes = {name: tuple(value.shape[1:]) for name, value in values.items()}
    found = {name: TensorSpec(shape=shapes[name], dtype=dtype_name(value.dtype)) for name, value in values.items()}
    target = target_in(batch)
    if not names and declared.input_shape is not None and "input" not in found:
        got = f"null, and samples with the entries {', '.join(found)}"
        expected = "a shape and a dtype for each input of the network, or an entry named input"
        raise data_error("inputs", got=got, expected=expected, fix="Read them from the data with data.input_shape=null")
    _refuse_other_inputs(declared.inputs if names else {}, found)
    only = "input" if "input" in found else next(iter(found)) if len(found) == 1 else None
    shape, dtype = (shapes[only], found[only].dtype) if only else (None, None)
    _refuse_unlike("input_shape", declared.input_shape, shape)
    _refuse_unlike("input_dtype", declared.input_dtype, dtype)
    _refuse_unlike("num_classes", declared.num_classes, num_classes)
    classes = declared.num_classes if num_classes is None else num_classes
    # data.num_outputs takes precedence over the data: a model of two classes may have one output.
    outputs = declared.num_outputs if declared.num_outputs is not None else num_outputs or classes
    if outputs is None and isinstance(target, Tensor) and target.is_floating_point():
        outputs = target.shape[-1] if target.dim() > 1 else 1
    # Without an entry named `target`, no error is raised: terms and metrics may select targets with other names.
    if outputs is None and target is not None:
        got = "null, and the data set does not state it"
        raise data_error("num_classes", got=got, expected="the number of classes, or data.num_outputs for a regression")
    # Entries of other dtypes, and entries that are empty in the first sample, such as boxes, are not inputs of the
    # network. Terms and hooks receive them.
    fed = {name: one for name, one in found.items() if one.dtype in get_args(SampleDtype) and 0 not in one.shape}
    is_alone = list(found) == ["input"] or declared.input_shape is not None
    return DataSpec(
        inputs=declared.inputs or ({} if is_alone else fed),
        input_shape=shape,
        input_dtype=dtype,
        num_classes=classes,
        num_outputs=outputs,
    )


def attribute(part: object, name: str) -> int | None:
    """Return a number that a data set, or the data set of a Subset, has as an attribute; None if there is no such
    attribute.
    """
    number: int | None = getattr(part, name, None)
    return attribute(part.dataset, name) if number is None and isinstance(part, Subset) else number


def classes_of(parts: Mapping[Stage, object], declared: DataSpec, names: Sequence[str]) -> int | None:
    """Return the number of classes.

    Sources in order: the splits' attribute `num_classes`, the config, targets in memory.

    Args:
        parts: The splits by stage.
        declared: The spec of the config.
        names: The names of the inputs.
    """
    if known := [classes for part in parts.values() if (classes := attribute(part, "num_classes")) is not None]:
        return max(known)
    if declared.num_classes is not None:
        return declared.num_classes
    found = [
        classes_in(target_in(by_name(part.entries, names))) for part in parts.values() if isinstance(part, Tensors)
    ]
    return max((classes for classes in found if classes is not None), default=None)


def _refuse_other_inputs(declared: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]) -> None:
    """Raise ConfigError if samples do not have an input of data.inputs, or if its shape or dtype differs."""
    for name, one in declared.items():
        if name not in found:
            raise name_error(f"inputs.{name}", name, found, expected="an entry of the samples")
        held = found[name]
        fits = len(one.shape) == len(held.shape) and all(
            size is None or size == other for size, other in zip(one.shape, held.shape, strict=True)
        )
        if not fits:
            expected = f"{list(held.shape)}, the shape of the data, with null for a length that varies"
            raise data_error(f"inputs.{name}.shape", got=str(list(one.shape)), expected=expected)
        _refuse_unlike(f"inputs.{name}.dtype", one.dtype, held.dtype)


def _refuse_unlike(key: str, declared: object, found: object) -> None:
    """Raise ConfigError if the values of the config and of the data differ. None matches any value."""
    if declared is not None and found is not None and declared != found:
        shown, held = (list(value) if isinstance(value, tuple) else value for value in (declared, found))
        fix = f"Correct it, or read it from the data with data.{key}=null"
        raise data_error(key, got=str(shown), expected=f"{held}, the value of the data", fix=fix)
