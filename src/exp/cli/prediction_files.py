"""Write predictions to a file: arrays in .npz, or one row per sample in .csv and .jsonl."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exp.engine.predictions import archive_of
from exp.errors import RunError, config_error
from exp.files import write_atomic
from exp.saved_runs.answers import Reading
from exp.saved_runs.prediction import Predictions
from exp.saved_runs.run_files import is_same_file

FORMATS = (".npz", ".csv", ".jsonl")


def refuse_place(path: Path, *, given: Path) -> None:
    """Raise ConfigError if predictions cannot be written to a path. Called before the prediction starts.

    Args:
        path: Output file.
        given: Input file or folder, which must not be overwritten.
    """
    fix = None
    if path.suffix not in FORMATS:
        got, expected = str(path), f"a file name that ends in {', '.join(FORMATS)}"
    elif not path.absolute().parent.is_dir():
        got, expected = f"{path}, whose folder does not exist", "a file in an existing folder"
        fix = f"mkdir -p {path.parent}"
    elif path.is_dir():
        got, expected = f"{path}, a directory", "a file"
    elif is_same_file(path, given):
        got, expected = f"{path}, which is the input", "another file than input"
        fix = f"Write output={path.with_stem(f'{path.stem}_answers')}"
    else:
        return
    raise config_error("output", got=got, expected=expected, fix=fix)


def write_predictions(predictions: Predictions, path: Path) -> None:
    """Write predictions to a file. An existing file is replaced.

    A .npz file contains the outputs of the network by name. For outputs that are converted to classes or predictions,
    it also contains arrays such as `class`, `probability`, `probabilities`, `classes` and `prediction`.

    .csv and .jsonl files contain one row per sample with these columns:

    - `file` for pictures
    - for a classification: `class` with the name of the class, `probability`, and `probability_<class>` for each class
    - for a regression: `prediction`, or `prediction_0`, `prediction_1` and so on for several numbers
    - the numbers of outputs that are not converted to classes or predictions

    If several outputs are converted, each column name begins with the name of the output's target, as in
    `species.class`.

    Args:
        predictions: Predictions to write.
        path: Output file. Its suffix selects the format.

    Raises:
        RunError: The file cannot be written, or an array does not fit into a row.
    """
    try:
        if path.suffix == ".npz":
            _write_arrays(predictions, path)
        elif path.suffix == ".jsonl":
            lines = (json.dumps(row, ensure_ascii=False) for row in rows_of(predictions, is_flat=False))
            write_atomic(path, "\n".join(lines) + "\n")
        else:
            rows = list(rows_of(predictions, is_flat=True))
            text = io.StringIO()
            writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomic(path, text.getvalue())
    except OSError as error:
        raise RunError(f"{error.filename or path}: {error.strerror or error}") from error


def _write_arrays(predictions: Predictions, path: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, values in predictions.outputs.items():
        if isinstance(values, list):
            shapes = sorted({str(list(one.shape)) for one in values})
            raise RunError(f"samples of {name} have the shapes {' and '.join(shapes[:2])}. Write them to a .jsonl file")
        arrays[name] = values
    for name, reading in predictions.readings.items():
        start = _start(predictions.readings, name)
        arrays |= {f"{start}{word}": array for word, array in predictions.answers(name).items()}
        if reading.names is not None:
            arrays[f"{start}classes"] = np.array(reading.names)
    if predictions.files:
        arrays["file"] = np.array([str(file) for file in predictions.files])
    write_atomic(path, archive_of(arrays))


def rows_of(predictions: Predictions, *, is_flat: bool) -> Iterator[dict[str, object]]:
    """Yield one row per sample. A row contains values by column.

    Args:
        predictions: Predictions of all samples.
        is_flat: Whether arrays are split into one column per number, as CSV requires. If false, values may be lists.
    """
    columns: dict[str, Sequence[Any]] = {"file": list(map(str, predictions.files))} if predictions.files else {}
    for name, values in predictions.outputs.items():
        is_read = name in predictions.readings
        columns |= _columns(predictions, name, is_flat=is_flat) if is_read else _plain(name, values, is_flat)
    for place in range(len(predictions)):
        yield {name: values[place] for name, values in columns.items()}


def _columns(predictions: Predictions, name: str, *, is_flat: bool) -> Mapping[str, Sequence[Any]]:
    """Return the columns for an output that is converted to classes or predictions.

    Args:
        predictions: Predictions of all samples.
        name: Name of the output.
        is_flat: Whether arrays are split into one column per number.

    Returns:
        The values of all samples, by column.
    """
    reading, start = predictions.readings[name], _start(predictions.readings, name)
    values = predictions.outputs[name]
    if isinstance(values, list):
        each = [reading.answers(one[None]) for one in values]
        answers: Mapping[str, Any] = {word: [found[word][0] for found in each] for word in each[0]}
    else:
        answers = reading.answers(values)
    found: dict[str, Sequence[Any]] = {}
    for word, held in answers.items():
        if word == "class":
            found[f"{start}class"] = [_class_name(one, reading.names) for one in held]
        elif word == "probabilities":
            names = reading.names or [str(number) for number in range(np.shape(held[0])[-1])]
            split = _split(held, [f"{start}probability_{one}" for one in names]) if np.ndim(held[0]) == 1 else None
            found |= split or _plain(f"{start}{word}", held, is_flat)
        else:
            found |= _plain(f"{start}{word}", held, is_flat)
    return found


def _plain(name: str, values: Any, is_flat: bool) -> Mapping[str, Sequence[Any]]:
    """Return the columns for an output that is not converted.

    Args:
        name: Name of the column.
        values: Array of each sample.
        is_flat: Whether 1-dimensional arrays are split into one column per number. If false, values may be lists.

    Raises:
        RunError: `is_flat` is true, and the arrays have more dimensions or different lengths.
    """
    axes = np.ndim(values[0])
    if axes == 1 and len({len(one) for one in values}) == 1:
        width = len(values[0])
        if width == 1:
            return {name: [one[0].item() for one in values]}
        if is_flat:
            return _split(values, [f"{name}_{number}" for number in range(width)])
    if axes and is_flat:
        shape = list(np.shape(values[0]))
        raise RunError(f"{name} of a sample has shape {shape}, too large for a row. Write a .npz or .jsonl file")
    return {name: [np.asarray(one).tolist() for one in values]}


def _split(values: Any, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    return {name: [one[number].item() for one in values] for number, name in enumerate(names)}


def _class_name(numbers: np.ndarray, names: Sequence[str] | None) -> Any:
    if np.ndim(numbers):
        return [_class_name(one, names) for one in numbers]
    if numbers < 0:
        return None
    return int(numbers) if names is None else names[int(numbers)]


def _start(readings: Mapping[str, Reading], name: str) -> str:
    return "" if len(readings) == 1 else f"{readings[name].target}."
