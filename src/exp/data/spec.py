"""Read the shape, dtype and classes of the data, and check them against the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from torch import Tensor
from torch.utils.data import Subset

from exp.data.data_errors import data_error
from exp.data.entries import by_name, inputs_in, target_in
from exp.data.in_memory import Tensors
from exp.data.labels import classes_in
from exp.shared_types import DataSpec, SampleDtype, Stage, TensorSpec, dtype_name
from exp.spelling import among, did_you_mean


def read_spec(
    declared: DataSpec,
    batch: object,
    *,
    names: Sequence[str] = (),
    num_classes: int | None,
    num_outputs: int | None = None,
) -> DataSpec:
    """Return the spec of the data, checked against the declared one.

    Args:
        declared: the spec of the config; None for a value, and no inputs, leave them to the data.
        batch: a batch of one sample, as a network gets it.
        names: the names in data.inputs; without one the declared inputs follow from data.input_shape.
        num_classes: the classes that the data set states; None if it states none.
        num_outputs: the outputs that the data set states; None if it states none.

    Raises:
        ConfigError: at the key whose value is not that of the data, or that the data do not show.
    """
    values = inputs_in(batch)
    shapes = {name: tuple(value.shape[1:]) for name, value in values.items()}
    found = {name: TensorSpec(shape=shapes[name], dtype=dtype_name(value.dtype)) for name, value in values.items()}
    target = target_in(batch)
    if not names and declared.input_shape is not None and "input" not in found:
        raise data_error(
            "inputs",
            got=f"null, and samples with the entries {', '.join(found)}",
            expected="a shape and a dtype for each that the network takes, or an entry named input",
            fix="Leave them to the data with data.input_shape=null",
        )
    _refuse_other_inputs(declared.inputs if names else {}, found)
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
        raise data_error(
            "num_classes",
            got="null, and the data set does not say it",
            expected="the number of classes, or data.num_outputs for a regression",
        )
    # What no network is fed, such as boxes of which the first sample has none, goes to terms and hooks alone.
    fed = {name: one for name, one in found.items() if one.dtype in get_args(SampleDtype) and 0 not in one.shape}
    is_alone = list(found) == ["input"] or declared.input_shape is not None
    return DataSpec(
        inputs=declared.inputs or ({} if is_alone else fed),
        input_shape=shape,
        input_dtype=dtype,
        num_classes=classes,
        num_outputs=outputs,
    )


def stated(part: object, name: str) -> int | None:
    """A number that a data set says of itself; of a part of one, what the whole says. None where neither does."""
    number: int | None = getattr(part, name, None)
    return stated(part.dataset, name) if number is None and isinstance(part, Subset) else number


def stated_classes(parts: Mapping[Stage, object], declared: DataSpec, names: Sequence[str]) -> int | None:
    """Return the classes that the splits state in `num_classes`, else those of the targets in memory.

    names: the names of the inputs.
    """
    if known := [classes for part in parts.values() if (classes := stated(part, "num_classes")) is not None]:
        return max(known)
    if declared.num_classes is not None:
        return declared.num_classes
    found = [
        classes_in(target_in(by_name(part.entries, names))) for part in parts.values() if isinstance(part, Tensors)
    ]
    return max((classes for classes in found if classes is not None), default=None)


def _refuse_other_inputs(declared: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]) -> None:
    """Raises: ConfigError where data.inputs names what samples do not have, or of another shape or dtype."""
    for name, one in declared.items():
        if name not in found:
            expected = f"an entry of the samples, which have {among(found, word=name)}"
            raise data_error(f"inputs.{name}", got=name, expected=expected, fix=did_you_mean(name, found))
        held = found[name]
        fits = len(one.shape) == len(held.shape) and all(
            size is None or size == other for size, other in zip(one.shape, held.shape, strict=True)
        )
        if not fits:
            expected = f"{list(held.shape)}, which is what the data holds, with null for a length that differs"
            raise data_error(f"inputs.{name}.shape", got=str(list(one.shape)), expected=expected)
        _refuse_unlike(f"inputs.{name}.dtype", one.dtype, held.dtype)


def _refuse_unlike(key: str, declared: object, found: object) -> None:
    """Raises: ConfigError where config and data both say it and differ."""
    if declared is not None and found is not None and declared != found:
        shown, held = (list(value) if isinstance(value, tuple) else value for value in (declared, found))
        raise data_error(
            key,
            got=str(shown),
            expected=f"{held}, which is what the data holds",
            fix=f"Correct it, or leave it to the data with data.{key}=null",
        )
