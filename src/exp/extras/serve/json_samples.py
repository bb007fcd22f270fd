"""Conversion of JSON requests to the inputs of an ONNX model, and of the outputs of the model to JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from exp.cli.prediction_files import rows_of
from exp.errors import ConfigError, ExpError
from exp.extras.export.onnx_file import Description, OnnxModel, Port
from exp.extras.export.served_tables import ServedTable
from exp.saved_runs.answers import Reading
from exp.saved_runs.prediction import Predictions
from exp.spelling import among, did_you_mean, show

# Maximum number of samples in a request.
MOST_SAMPLES = 256
# Values that an input accepts, by the kind of its NumPy dtype: the kinds of the values, and their description for
# messages.
TAKEN = {
    "b": ("b", "true and false"),
    "f": ("iuf", "numbers within the range, or null for a missing number,"),
    "i": ("iuf", "whole numbers within the range"),
    "u": ("iuf", "whole numbers within the range"),
}


class BadRequest(ExpError):
    """Error that reports a request with content that is invalid for the model."""


def read_samples(body: bytes, model: OnnxModel) -> dict[str, np.ndarray]:
    """Return a mapping from the names of the model's inputs to the arrays in a request.

    Args:
        body: JSON text of the request, `{"inputs": {NAME: [SAMPLE, ...], ...}}`.
        model: The model.

    Raises:
        BadRequest: The body is not valid JSON, or its inputs do not match the inputs of the model.
    """
    known = {port.name: port for port in model.inputs}
    given = _inputs(body, list(known))
    for name in given:
        if name not in known:
            meant = did_you_mean(name, known) or ""
            raise BadRequest(f"{name}: unknown input; expected {among(known)}. {meant}".rstrip(". "))
    return {name: _array(port, given[name]) for name, port in known.items()}


def read_rows(body: bytes, table: ServedTable, model: OnnxModel) -> tuple[dict[str, np.ndarray], Mapping[str, object]]:
    """Return the inputs of the model for a request that contains columns of a table.

    Args:
        body: JSON text of the request, `{"inputs": {COLUMN: [VALUE, ...], ...}}`.
        table: Encoder of the columns.
        model: The model.

    Returns:
        Two mappings. The first maps the names of the model's inputs to arrays. The second maps columns to the number of
        rows with each word that is not in the training split.

    Raises:
        BadRequest: The body is not valid JSON, or its columns do not match the columns of the training data.
    """
    columns = _inputs(body, table.columns)
    for name in table.columns:
        if any(isinstance(value, list | dict) for value in columns[name]):
            raise BadRequest(f"{name} holds a list or an object; expected a number, a text or null for each row")
    try:
        entries, unknown = table.encode(columns)
    except ConfigError as error:
        raise BadRequest("; ".join(f"{one.got}; expected {one.expected}" for one in error.errors)) from error
    only = next(iter(entries.values()))  # If the model has a single input, its name may differ from the table's name.
    return {port.name: entries.get(port.name, only).astype(port.dtype) for port in model.inputs}, unknown


def answer_of(outputs: Mapping[str, np.ndarray], description: Description) -> dict[str, object]:
    """Return the content of a response, `{"outputs": {NAME: [...]}, "predictions": [{...}, ...]}`.

    The list `predictions` contains an object for each sample, with the same columns as a file of exp.predict, such as
    the name of the class. nan and infinity become null, because JSON does not support them.

    Args:
        outputs: Outputs of the model by name.
        description: Metadata of the model. If it does not contain the meaning of outputs, there is no `predictions`.
    """
    made: dict[str, object] = {"outputs": {name: _finite(one.tolist()) for name, one in outputs.items()}}
    readings = {name: Reading(**one) for name, one in description.readings.items()}
    if readings:
        size = len(outputs[next(iter(readings))])
        each = {name: one for name, one in outputs.items() if one.shape[:1] == (size,)}
        rows = rows_of(Predictions(outputs=each, readings=readings), is_flat=False)
        made["predictions"] = [{name: _finite(value) for name, value in row.items()} for row in rows]
    return made


def _inputs(body: bytes, names: Sequence[str]) -> Mapping[str, Any]:
    """Return a mapping from the names of the inputs in a request to lists of values.

    Args:
        body: JSON text of the request.
        names: Names of the required inputs.

    Raises:
        BadRequest: The body is not valid JSON, an input is missing, the inputs are not lists of equal length, or there
            are too many samples.
    """

    def refuse(word: str) -> NoReturn:
        raise BadRequest(f"{word} is no number in JSON; expected finite numbers, or null for a missing number")

    try:
        content = json.loads(body.decode(), parse_constant=refuse)
    except (RecursionError, ValueError) as error:
        raise BadRequest(f"the body is not JSON, or is nested too deeply: {error}") from error
    if not isinstance(content, dict) or set(content) != {"inputs"} or not isinstance(content["inputs"], dict):
        raise BadRequest('the body is no valid request; expected {"inputs": {NAME: [SAMPLE, ...]}}')
    inputs: Mapping[str, Any] = content["inputs"]
    missing = [name for name in names if name not in inputs]
    if missing:
        raise BadRequest(f"the input {missing[0]} is missing; expected {among(names, count=len(names))}")
    for name in names:
        if not isinstance(inputs[name], list):
            raise BadRequest(f"the input {name} is a {type(inputs[name]).__name__}; expected a list of samples")
    sizes = {name: len(inputs[name]) for name in names}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} ({name})" for name, size in sizes.items())
        raise BadRequest(f"the inputs have {listed} samples; expected equal numbers of samples")
    size = next(iter(sizes.values()))
    if not 1 <= size <= MOST_SAMPLES:
        raise BadRequest(f"the request has {size} samples; expected 1 to {MOST_SAMPLES} samples")
    return inputs


def _array(port: Port, given: object) -> np.ndarray:
    """Return the values of an input as an array with the dtype of the input. ONNX Runtime checks the shape later.

    Args:
        port: Description of the input.
        given: Nested lists of values from the request.

    Raises:
        BadRequest: A value cannot be converted to the dtype, or nested lists differ in length.
    """
    name, dtype = port.name, np.dtype(port.dtype)
    kinds, words = TAKEN[dtype.kind]
    expected = f"expected {words} of {dtype.name}"
    try:
        made = np.array(given)
        if made.dtype.kind == "O" and dtype.kind == "f" and all(isinstance(x, float | int | None) for x in made.flat):
            made = np.array(given, np.float64)  # Converts null to nan.
    except ValueError as error:
        raise BadRequest(f"{name} has parts of different shapes, or is nested too deeply") from error
    except OverflowError as error:
        raise BadRequest(f"{name} has a number outside the range of float64; {expected}") from error
    if made.size and made.dtype.kind not in kinds:
        raise BadRequest(f"{name} holds {show(made.ravel().tolist()[0])}; {expected}")
    with np.errstate(over="ignore", invalid="ignore"):
        found = made.astype(dtype)
    wrong = made[np.isinf(found) if dtype.kind == "f" else found != made]
    if wrong.size:
        raise BadRequest(f"{name} holds {show(wrong[0].item())}; {expected}")
    return found


def _finite(value: object) -> object:
    """Return a value that can be written as JSON. Numbers that are not finite are replaced by None."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
