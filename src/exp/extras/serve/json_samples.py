"""Reads samples from JSON into the arrays that an ONNX file takes, and writes its answers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NoReturn

import numpy as np

from exp.cli.prediction_files import rows_of
from exp.errors import ConfigError, ExpError
from exp.extras.export.onnx_file import Description, OnnxModel, Port
from exp.extras.export.served_tables import ServedTable
from exp.saved_runs.answers import Reading
from exp.saved_runs.prediction import Predictions
from exp.spelling import among, did_you_mean, show

# Kinds of NumPy's dtypes that an input of a kind takes, and their name in messages.
TAKEN = {
    "b": ("b", "true or false"),
    "f": ("iuf", "numbers, or null for a missing one"),
    "i": ("iuf", "whole numbers"),
    "u": ("iuf", "whole numbers"),
}


class BadRequest(ExpError):
    """The content of a request is not what the model takes."""


def read_samples(body: bytes, model: OnnxModel, *, most: int) -> dict[str, np.ndarray]:
    """Return the arrays of a request, `{"inputs": {NAME: [SAMPLE, ...], ...}}`.

    Args:
        body: The body of the request.
        model: The model.
        most: The samples that a request may have.

    Raises:
        BadRequest: The body is not valid, or not what the model takes.
    """
    given = _inputs(body)
    known = {port.name: port for port in model.inputs}
    for name in given:
        if name not in known:
            meant = did_you_mean(name, known) or ""
            raise BadRequest(f"{name} is no input; expected {among(known)}. {meant}".rstrip(". "))
    _require(list(known), given)
    found = {name: _array(port, given[name]) for name, port in known.items()}
    _refuse_sizes(found, most=most)
    return found


def read_rows(
    body: bytes, table: ServedTable, model: OnnxModel, *, most: int
) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    """Return the arrays of a request with the columns of a table, `{"inputs": {COLUMN: [VALUE, ...], ...}}`.

    Returns:
        The arrays by input, and by column how many rows have each word that training does not know.

    Raises:
        BadRequest: The body is not valid, or not what the table takes.
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
    only = next(iter(entries.values()))  # the only input of a network may have any name
    return {port.name: entries.get(port.name, only).astype(port.dtype) for port in model.inputs}, unknown


def answer_of(outputs: Mapping[str, np.ndarray], description: Description) -> dict[str, Any]:
    """Return an answer, `{"outputs": {NAME: [...]}, "classes": {NAME: [...]}, "predictions": [{...}, ...]}`.

    `classes` holds the name of the largest score of each sample, for outputs with a score for each class; null if a
    score is nan or all are infinite. `predictions` is what exp.predict says of each sample. JSON has no nan and no
    infinity: null stands for them.
    """
    classes = {name: _largest(one, description.classes) for name, one in outputs.items()}
    made: dict[str, Any] = {"outputs": {name: _finite(one.tolist()) for name, one in outputs.items()}}
    if named := {name: one for name, one in classes.items() if one is not None}:
        made["classes"] = named
    if description.readings:
        readings = {name: Reading.of(one) for name, one in description.readings.items()}
        size = len(outputs[next(iter(readings))])
        each = {name: one for name, one in outputs.items() if one.shape[:1] == (size,)}
        rows = rows_of(Predictions(outputs=each, readings=readings), is_flat=False)
        made["predictions"] = [{name: _finite(value) for name, value in row.items()} for row in rows]
    return made


def described(port: Port, description: Description) -> dict[str, Any]:
    """Return the name, shape and dtype of an input or output, and the unit and columns of a raw input."""
    found: dict[str, Any] = {"name": port.name, "shape": list(port.shape), "dtype": np.dtype(port.dtype).name}
    if port.name in description.units:
        found["unit"] = description.units[port.name]
    if port.name in description.columns:
        found["columns"] = list(description.columns[port.name])
    return found


def _inputs(body: bytes) -> Mapping[str, Any]:
    def refuse(word: str) -> NoReturn:
        raise BadRequest(f"{word} is no number in JSON; expected finite numbers, and null for a missing one")

    try:
        content = json.loads(body.decode(), parse_constant=refuse)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise BadRequest("the body is not UTF-8") from error
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
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


def _array(port: Port, given: object) -> np.ndarray:
    """Return the values of an input.

    Raises:
        BadRequest: The shape or the values are not those of the input.
    """
    name, dtype = port.name, np.dtype(port.dtype)
    kinds, expected = TAKEN[dtype.kind]
    try:
        made = np.array(given)
        if (
            made.dtype.kind == "O"
            and dtype.kind == "f"
            and all(isinstance(one, float | int | None) for one in made.flat)
        ):
            made = np.array(given, np.float64)  # null becomes nan
    except ValueError as error:
        raise BadRequest(f"{name} has parts of different shapes, or is nested too deeply") from error
    except OverflowError as error:
        raise BadRequest(f"{name} holds a number that {dtype.name} does not; expected smaller ones") from error
    sizes = zip(port.shape, made.shape, strict=False)
    if made.ndim != len(port.shape) or any(isinstance(size, int) and size != there for size, there in sizes):
        shape = ", ".join(str("?" if size is None else size) for size in port.shape)
        wanted = f"[{shape}] of {dtype.name}, the first axis for the samples"
        raise BadRequest(f"{name} is of shape {list(made.shape)}; expected {wanted}")
    if made.size and made.dtype.kind not in kinds:
        raise BadRequest(f"{name} holds {show(made.ravel().tolist()[0])}; expected {expected}")
    bounds = np.iinfo(dtype) if dtype.kind in "iu" else None
    if bounds is not None and (broken := made[made != np.trunc(made)]).size:
        raise BadRequest(f"{name} holds {show(broken[0].item())}; expected {expected}")
    if bounds is not None and (beyond := made[(made < bounds.min) | (made > bounds.max)]).size:
        raise BadRequest(f"{name} holds {show(beyond[0].item())}; expected {bounds.min} to {bounds.max}")
    with np.errstate(over="ignore"):
        found = made.astype(dtype)
    if dtype.kind == "f" and np.isinf(found).any():
        raise BadRequest(f"{name} holds a number that {dtype.name} does not; expected smaller ones")
    return found


def _largest(values: np.ndarray, classes: Sequence[str]) -> list[Any] | None:
    """Return the name of the largest score of each sample; None for outputs that are not scores of the classes."""
    if len(classes) < 2 or values.ndim < 2 or values.shape[-1] != len(classes) or values.dtype.kind != "f":
        return None
    names = np.array(classes, dtype=object)[values.argmax(-1)]
    is_answered = ~np.isnan(values).any(-1) & np.isfinite(values).any(-1)
    names[~is_answered] = None
    return list(names.tolist())


def _finite(value: Any) -> Any:
    """Return a value for JSON with null for what is not finite."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kind(value: object) -> str:
    return {list: "list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)
