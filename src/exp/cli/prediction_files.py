"""Write predictions to a file: arrays in .npz, or one row per sample in .csv and .jsonl."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from exp.engine.predictions import archive_of
from exp.errors import ConfigError, ErrorDetails, RunError, command_line_error, config_error, raise_errors
from exp.files import write_atomic
from exp.saved_runs.answers import Reading
from exp.saved_runs.prediction import Predictions
from exp.saved_runs.run_files import is_same_file

Column = TypeVar("Column")
FORMATS = (".npz", ".csv", ".jsonl")
# Names of answers, which columns that are kept may not have.
ANSWERS = re.compile(r"(.+\.)?(file|class|classes|prediction(_\d+)?|probability(_.+)?|probabilities)")


def refuse_place(path: Path, *, given: Path) -> None:
    """Raise ConfigError, before the work, if predictions cannot be written to a file.

    Args:
        path: The file.
        given: The file or folder of samples.
    """
    fix = None
    if path.suffix not in FORMATS:
        got, expected = str(path), f"a file in {', '.join(FORMATS)}"
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


def refuse_names(keep: Sequence[str]) -> None:
    """Raise ConfigError, before the work, for columns to keep that have the name of an answer."""
    raise_errors(_taken_name_error(name) for name in keep if ANSWERS.fullmatch(name))


def write_predictions(predictions: Predictions, path: Path) -> None:
    """Write predictions, and replace an older file.

    .npz has the network's outputs by name, and the answers `class`, `probability`, `probabilities`, `prediction` and
    `classes`. The others have one row per sample: the columns that are kept, the `file` of a picture, `class` by name,
    `probability`, one column `probability_<class>` each; `prediction`, or `prediction_0` and so on; and the numbers of
    other outputs. If several outputs are read, each of these names begins with its target, `species.class`.

    Raises:
        RunError: The file cannot be written, or an array does not fit into a row.
        ConfigError: A column that is kept has the name of an answer.
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
            raise RunError(f"samples of {name} are of shapes {' and '.join(shapes[:2])}; write them to a .jsonl file")
        arrays[name] = values
    for name, reading in predictions.readings.items():
        start = _start(predictions.readings, name)
        arrays |= {f"{start}{word}": array for word, array in predictions.answers(name).items()}
        if reading.names is not None:
            arrays[f"{start}classes"] = np.array(reading.names)
    if predictions.files:
        arrays["file"] = np.array([str(file) for file in predictions.files])
    kept = {name: np.array(["" if one is None else one for one in held]) for name, held in predictions.kept.items()}
    write_atomic(path, archive_of(_join(kept, arrays)))


def _join(kept: Mapping[str, Column], answers: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns that are kept and the answers, or raise ConfigError for a name that both have."""
    if both := [name for name in kept if name in answers]:
        raise ConfigError([_taken_name_error(both[0])])
    return {**kept, **answers}


def _taken_name_error(name: str) -> ErrorDetails:
    got, expected = f"{name}, which is the name of an answer", "columns with other names"
    return command_line_error("keep", got, expected, "Rename the column of the input")


def rows_of(predictions: Predictions, *, is_flat: bool) -> Iterator[dict[str, object]]:
    """Yield a row for each sample. is_flat: each value is a number or a text."""
    columns: dict[str, Sequence[Any]] = {"file": list(map(str, predictions.files))} if predictions.files else {}
    for name, values in predictions.outputs.items():
        is_read = name in predictions.readings
        columns |= _columns(predictions, name, is_flat=is_flat) if is_read else _plain(name, values, is_flat)
    columns = _join(predictions.kept, columns)
    for place in range(len(predictions)):
        yield {name: values[place] for name, values in columns.items()}


def _columns(predictions: Predictions, name: str, *, is_flat: bool) -> Mapping[str, Sequence[Any]]:
    """Return the answers of an output by column."""
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
    """Return an array as one column, or as one column for each number. is_flat: whether lists are not allowed."""
    axes = np.ndim(values[0])
    if axes == 1 and len({len(one) for one in values}) == 1:
        width = len(values[0])
        if width == 1:
            return {name: [one[0].item() for one in values]}
        if is_flat:
            return _split(values, [f"{name}_{number}" for number in range(width)])
    if axes and is_flat:
        shape = list(np.shape(values[0]))
        raise RunError(f"{name} is {shape} of each sample, which has no place in a row; write a .npz or a .jsonl file")
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
