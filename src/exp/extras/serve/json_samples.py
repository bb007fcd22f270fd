"""Read samples from JSON into the arrays that an ONNX file takes, strictly, and write its answers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NoReturn

import numpy as np

from exp.errors import ConfigError, ExpError
from exp.extras.export.onnx_file import Description, OnnxModel, Port
from exp.extras.export.served_tables import ServedTable
from exp.saved_runs.answers import Reading
from exp.saved_runs.prediction import Predictions
from exp.saved_runs.prediction_files import rows_of
from exp.spelling import among, did_you_mean, show

# The axes that an array of NumPy may have.
MOST_AXES = 64


class BadRequest(ExpError):
    """A request that no model could answer; the message says what is there and what must be."""


def read_samples(body: bytes, model: OnnxModel, *, most: int) -> dict[str, np.ndarray]:
    """The arrays of a request, `{"inputs": {NAME: [SAMPLE, ...], ...}}`. most: samples of one request.

    Raises: BadRequest.
    """
    given = _inputs(body)
    known = {port.name: port for port in model.inputs}
    for name in given:
        if name not in known:
            raise BadRequest(
                f"{name} is no input; expected {among(known)}. {did_you_mean(name, known) or ''}".rstrip(". ")
            )
    _require(list(known), given)
    try:
        found = {name: _array(port, given[name]) for name, port in known.items()}
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    _refuse_sizes(found, most=most)
    _refuse_unlike(found, model.inputs)
    return found


def read_rows(
    body: bytes, table: ServedTable, model: OnnxModel, *, most: int
) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    """Return the arrays of a request with the columns of a table, `{"inputs": {COLUMN: [VALUE, ...], ...}}`.

    Returns: the arrays by input, and by column how many rows have each word that training does not know.
    Raises: BadRequest.
    """
    given = _inputs(body)
    _require(table.columns, given)
    columns = {name: given[name] for name in table.columns}
    for name, values in columns.items():
        if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
            raise BadRequest(f"{name} is a {_kind(values)}; expected a list, a number, a text or null for each row")
    _refuse_sizes(columns, most=most)
    try:
        entries, unknown = table.encode(columns)
    except ConfigError as error:
        raise BadRequest("; ".join(f"{fault.got}; expected {fault.expected}" for fault in error.faults)) from error
    only = next(iter(entries.values()))  # a network's only input goes by any name
    return {port.name: entries.get(port.name, only).astype(port.dtype) for port in model.inputs}, unknown


def answer_of(outputs: Mapping[str, np.ndarray], description: Description) -> dict[str, Any]:
    """An answer: `{"outputs": {NAME: [...]}, "classes": {NAME: [...]}, "predictions": [{...}, ...]}`.

    classes: of outputs whose last axis has a number for each class, the name of the largest one of each sample; null
    where one is nan, or none is finite. Numbers that are not finite are null, for JSON has none.
    predictions: of each sample what exp.predict says of it, of a network whose file says how its outputs are read.
    """
    classes = {name: _largest(one, description.classes) for name, one in outputs.items()}
    made: dict[str, Any] = {"outputs": {name: _plain(one) for name, one in outputs.items()}}
    if named := {name: one for name, one in classes.items() if one is not None}:
        made["classes"] = named
    if description.readings:
        readings = {name: Reading.of(one) for name, one in description.readings.items()}
        size = len(outputs[next(iter(readings))])
        each = {name: one for name, one in outputs.items() if one.shape[:1] == (size,)}
        rows = rows_of(Predictions(outputs=each, readings=readings), is_flat=False)
        made["predictions"] = [{name: _known(value) for name, value in row.items()} for row in rows]
    return made


def described(port: Port, description: Description) -> dict[str, Any]:
    """An input or output as JSON: its name, shape and dtype, and of a raw input what its numbers are."""
    found: dict[str, Any] = {"name": port.name, "shape": list(port.shape), "dtype": np.dtype(port.dtype).name}
    if port.name in description.units:
        found["unit"] = description.units[port.name]
    if port.name in description.columns:
        found["columns"] = list(description.columns[port.name])
    return found


def _known(value: Any) -> Any:
    """Return a value of JSON with null for what is not finite."""
    if isinstance(value, list):
        return [_known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _inputs(body: bytes) -> Mapping[str, Any]:
    content = _parsed(body)
    if not isinstance(content, dict) or set(content) != {"inputs"} or not isinstance(content["inputs"], dict):
        got = f"an object with {among(content)}" if isinstance(content, dict) else f"a {_kind(content)}"
        raise BadRequest(f'the body is {got}; expected {{"inputs": {{NAME: [SAMPLE, ...]}}}}')
    inputs: Mapping[str, Any] = content["inputs"]
    return inputs


def _require(names: Sequence[str], given: Mapping[str, Any]) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        raise BadRequest(f"the input {missing[0]} is missing; expected {among(names, count=len(names))}")


def _refuse_sizes(found: Mapping[str, Sized], *, most: int) -> None:
    sizes = {name: len(one) for name, one in found.items()}
    if len(set(sizes.values())) > 1:
        raise BadRequest(f"the inputs have {', '.join(f'{size} ({name})' for name, size in sizes.items())} samples")
    size = next(iter(sizes.values()))
    if not 1 <= size <= most:
        raise BadRequest(f"{size} samples; expected 1 to {most} in a request")


def _parsed(body: bytes) -> Any:
    def refuse(word: str) -> NoReturn:
        raise BadRequest(f"{word} is no number in JSON; expected finite numbers, and null for a missing one")

    try:
        return json.loads(body.decode(), parse_constant=refuse)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise BadRequest("the body is not UTF-8") from error
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _array(port: Port, given: object) -> np.ndarray:
    """Raises: BadRequest for another shape, values that are no numbers, and those that the dtype does not hold."""
    wanted = f"{_shape(port)} of {np.dtype(port.dtype).name}"
    shape = _shape_of(given, port.name)
    is_wrong = len(shape) != len(port.shape) or any(
        isinstance(size, int) and size != there for size, there in zip(port.shape, shape, strict=False)
    )
    if is_wrong:
        raise BadRequest(f"{port.name} is of shape {list(shape)}; expected {wanted}, the first axis for the samples")
    values = _flat(given)
    kind = np.dtype(port.dtype).kind
    for value in values:
        if not _fits(value, kind):
            expected = {"b": "true or false", "f": "numbers, or null for a missing one"}.get(kind, "whole numbers")
            raise BadRequest(f"{port.name} holds {show(value)}; expected {expected}")
    if kind in "iu":
        bounds = np.iinfo(np.dtype(port.dtype))
        beyond = next((value for value in values if not bounds.min <= value <= bounds.max), None)
        if beyond is not None:
            raise BadRequest(f"{port.name} holds {show(beyond)}; expected {bounds.min} to {bounds.max}")
        values = [int(value) for value in values]
    try:
        with np.errstate(over="ignore"):
            made = np.array([math.nan if value is None else value for value in values], dtype=port.dtype)
    except OverflowError:  # of a whole number that no float holds
        made = np.array([math.inf])
    if kind == "f" and np.isinf(made).any():
        raise BadRequest(f"{port.name} holds a number that {np.dtype(port.dtype).name} does not; expected smaller ones")
    return made.reshape(shape)


def _fits(value: object, kind: str) -> bool:
    if kind == "b":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == "f":
        return value is None or isinstance(value, int | float)
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _shape_of(given: object, name: str, depth: int = 0) -> tuple[int, ...]:
    """Return the lengths of nested lists. Raises: BadRequest for unequal lengths and for more than MOST_AXES levels."""
    if not isinstance(given, list):
        return ()
    if depth == MOST_AXES:
        raise BadRequest(f"{name} is nested too deeply; expected at most {MOST_AXES} levels of lists")
    inner = {_shape_of(one, name, depth + 1) for one in given}
    if len(inner) > 1:
        lengths = ", ".join(sorted(str(list(one)) for one in inner)[:3])
        raise BadRequest(f"{name} has parts of different shapes, {lengths}; expected lists of one length")
    return (len(given), *next(iter(inner), ()))


def _flat(given: Any) -> list[Any]:
    if not isinstance(given, list):
        return [given]
    if given and isinstance(given[0], list):
        return [value for part in given for value in _flat(part)]
    return list(given)


def _refuse_unlike(found: Mapping[str, np.ndarray], ports: Sequence[Port]) -> None:
    """Raises: BadRequest where a named dimension has two sizes."""
    sizes: dict[str, tuple[str, int]] = {}
    for port in ports:
        for axis, name in enumerate(port.shape):
            if isinstance(name, str):
                size = found[port.name].shape[axis]
                other, before = sizes.setdefault(name, (port.name, size))
                if size != before:
                    raise BadRequest(f"{name} is {size} in {port.name} and {before} in {other}; expected one size")
                if not size:
                    raise BadRequest(f"{name} of {port.name} is 0; expected at least 1")


def _largest(values: np.ndarray, classes: Sequence[str]) -> list[Any] | None:
    if len(classes) < 2 or values.ndim < 2 or values.shape[-1] != len(classes) or values.dtype.kind != "f":
        return None
    names = np.array(classes, dtype=object)[values.argmax(-1)]
    is_answered = ~np.isnan(values).any(-1) & np.isfinite(values).any(-1)
    names[~is_answered] = None
    return list(names.tolist())


def _plain(values: np.ndarray) -> Any:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        made = values.astype(object)
        made[~np.isfinite(values)] = None
        return made.tolist()
    return values.tolist()


def _shape(port: Port) -> str:
    return f"[{', '.join(str(size if size is not None else '?') for size in port.shape)}]"


def _kind(value: object) -> str:
    return {list: "list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)
