"""Data sets of tables with columns of numbers and words, including the tables in scikit-learn's package.

The values are encoded with statistics of the training split.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.cells import word_key
from exp.data.data_errors import data_error, fitted_entry
from exp.data.dataset_files import shipped_columns
from exp.data.entries import SCALES, TARGET, ValueNames
from exp.data.in_memory import Entries, Fitted, Tensors
from exp.spelling import among

Impute = Literal["mean", "median", "most_frequent"]
Encoding = Literal["one_hot", "index"]
# The statistics of the training split by name; see Table.fit.
Statistics = Mapping[str, Any]
# FITTED: the key of a table's statistics in the mapping Fitted. MISSING: the word that replaces a missing word.
FITTED, MISSING = "table", ""
# The number of rows that are encoded at once. Encoding uses float64, so that many rows would need much memory.
PIECE = 2**14


@dataclass(frozen=True, kw_only=True)
class Words:
    """Column of words or of classes.

    Args:
        codes: The code of the word in each row, `[N]`. The code -1 means a missing value.
        names: The words in the order of their codes.
    """

    codes: np.ndarray
    names: tuple[str, ...]

    def texts(self) -> list[str | None]:
        """Return the word in each row. Missing values are None."""
        names = (*self.names, None)
        return [names[code] for code in self.codes.tolist()]


class Table(Dataset[object]):
    """Data set of the rows of a table, with columns of numbers and words, and one or several targets.

    A sample is the pair (input, target). The input is float32 `[F]`: the numbers, followed by the one-hot encodings of
    the words. A target is a class number, int64 `[]`, or K numbers to predict, float32 `[K]`. A sample is a mapping
    from names to values if there are several targets, or if encoding="index".

    `fitted` and `statistics` are the statistics of the training split, which `fit` returns.

    All splits are encoded with the statistics of the training split. The encoding is the same as that of scikit-learn's
    SimpleImputer, StandardScaler and OneHotEncoder(handle_unknown="ignore"). Splits share the columns of the table in
    memory, and store only the indices of their rows.

    Args:
        columns: The names of the columns of numbers.
        numbers: The columns of numbers, float64 `[N, F]`. Missing values are nan.
        words: The columns of words by name. Default: no columns.
        targets: The targets by name: classes, or numbers float64 `[N, K]`. If there is one target, its name is
            `target`.
        standardise: Whether to scale numbers, and targets that are numbers, to mean 0 and standard deviation 1 in the
            training split. Default: True.
        impute: The value of the training split that replaces a missing number: "mean", "median" or "most_frequent".
            "most_frequent" also replaces missing words. The other options encode a missing word as a separate word.
            Default: None, which replaces missing numbers by the mean.
        encoding: The encoding of words: "one_hot", or "index" for a second input `categories`, int64 `[C]` for C
            columns. The words of the training split have the indices 1, 2, 3, ... All other words have the index 0.
            Default: "one_hot".

    Attributes:
        notes: Notes on the file, each of one line.
        dates: The formats of the columns of dates, which became numbers, by name of the column.
        rows: The indices of this split's rows in the table. None for all rows.
        indices: The indices of this split's rows in the data set from which `select` chose them. None for all rows.
        whole_length: The number of rows in the data set from which `select` chose the rows. None for all rows.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledTable"
    notes: tuple[str, ...] = ()
    dates: Mapping[str, str | None] = MappingProxyType({})
    indices: Tensor | None = None
    whole_length: int | None = None
    rows: np.ndarray | None = None

    def __init__(
        self,
        *,
        columns: Sequence[str],
        numbers: np.ndarray,
        words: Mapping[str, Words] | None = None,
        targets: Mapping[str, np.ndarray | Words],
        standardise: bool = True,
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
    ) -> None:
        self.columns, self.numbers, self.words, self.targets = tuple(columns), numbers, dict(words or {}), dict(targets)
        self.standardise, self.impute, self.encoding = standardise, impute, encoding
        self.classes = {name: target.names for name, target in targets.items() if isinstance(target, Words)}

    def __len__(self) -> int:
        return len(self.numbers) if self.rows is None else len(self.rows)

    def select(self, indices: Tensor) -> Self:
        """Return a table of the rows at some indices, int64 `[n]`."""
        part = copy.copy(self)
        part.rows = self._of_rows(np.arange(len(self.numbers)))[indices.numpy()]
        part.indices, part.whole_length = indices, len(self)
        return part

    def class_numbers(self, *, key: str) -> np.ndarray:
        """Return the class number of each row, `[N]`. `key` is the config key that needs the classes.

        Raises:
            ConfigError: The table has no target with classes, or several.
        """
        found = [self._of_rows(target.codes) for target in self.targets.values() if isinstance(target, Words)]
        if len(found) != 1:
            got = f"true, although the table has {len(found)} targets with classes"
            raise data_error(key, got=got, expected="one target with classes")
        return found[0]

    def column_texts(self, name: str, *, key: str) -> list[str | None]:
        """Raise ConfigError, because only tables in files have columns that are not inputs."""
        raise data_error(key, got=f"{name}, although this table is not from a file", expected="a table from a file")

    def fit(self) -> Fitted:
        """Return the statistics of this split: column names, means, deviations, imputed values, words and classes.

        Raises:
            ConfigError: A column of numbers has only missing values.
        """
        found: dict[str, object] = {
            "numbers": list(self.columns),
            "dates": dict(self.dates),
            "classes": {name: list(classes) for name, classes in self.classes.items()},
        }
        if self.columns:
            numbers = self.numbers.copy() if self.rows is None else self.numbers[self.rows]
            found["fills"] = fills = _fills(self.columns, numbers, self.impute)
            np.copyto(numbers, fills.numpy(), where=np.isnan(numbers))
            found["means"], found["deviations"] = moments(numbers, scratch=numbers)
        if self.words:
            counts = {name: self._counts(column) for name, column in self.words.items()}
            found["most_frequent"] = {
                name: self.words[name].names[int(own[1:].argmax())] if own[1:].any() else MISSING
                for name, own in counts.items()
            }
            found["words"] = {name: _words_of(self.words[name], own, self.impute) for name, own in counts.items()}
        scales = {
            name: moments(self._of_rows(target))
            for name, target in self.targets.items()
            if not isinstance(target, Words)
        }
        found["target_means"] = {name: mean for name, (mean, _) in scales.items()}
        found["target_deviations"] = {name: deviation for name, (_, deviation) in scales.items()}
        if self.standardise:
            found[SCALES] = {name: list(scale) for name, scale in scales.items()}
        return {FITTED: found}

    def prepare(self, fitted: Fitted) -> Tensors:
        """Return a data set of the encoded rows in memory.

        Raises:
            ConfigError: The columns differ from the columns of the training split, or a class is not in the training
                split.
        """
        statistics = fitted_entry(fitted, FITTED, part=self)
        mine, theirs = [*self.columns, *self.words], [*statistics["numbers"], *statistics.get("words", ())]
        if mine != theirs:
            expected = f"the columns of the training split, {theirs}"
            raise data_error("", got=f"a split with the columns {mine}", expected=expected)
        widths = [
            self._known_classes(name, target, statistics) if isinstance(target, Words) else target.shape[1]
            for name, target in self.targets.items()
        ]
        is_one = len(self.targets) == len(self.classes) == 1
        prepared = Tensors(
            entries=self._samples(statistics),
            num_classes=widths[0] if is_one else None,
            num_outputs=sum(widths) or None,  # The sum is 0 for rows without targets.
        )
        prepared.indices, prepared.whole_length = self.indices, self.whole_length
        prepared.value_names = self._names_of_values(statistics)
        return prepared

    def unknown_words(self, fitted: Fitted) -> dict[str, dict[str, int]]:
        """Return the words of this split that are not in the training split.

        Returns:
            A mapping for each column of words with such words: from the word to its number of rows. The empty text
            means a missing word.
        """
        known = fitted_entry(fitted, FITTED, part=self).get("words", {})
        found = {}
        for name, column in self.words.items():
            keys = set(map(word_key, [*known[name], *[MISSING] * (self.impute == "most_frequent")]))
            words = zip((MISSING, *column.names), self._counts(column).tolist(), strict=True)
            if unknown := {word: count for word, count in words if count and word_key(word) not in keys}:
                found[name] = unknown
        return found

    def notes_in(self, fitted: Fitted, *, stage: str) -> list[str]:
        """Return notes on the file, and on words of this split's columns that are not in the training split.

        `stage` is the name of this split.
        """
        lines = list(self.notes)
        for name, words in self.unknown_words(fitted).items():
            named = among([f"{word or 'a missing value'} ({count})" for word, count in words.items()])
            rows = f"{sum(words.values())} of {len(self)} rows of {stage}"
            lines.append(
                f"the {name} of {rows} is not in the training split, and is encoded as an unknown word: {named}"
            )
        return lines

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return some rows before standardization and imputation. Words are encoded as usual.

        Args:
            indices: The indices of b rows, int64 `[b]`.

        Returns:
            A mapping from the names of the inputs, and of the targets that are numbers, to tensors `[b, ...]`. Numbers
            are float64. Missing numbers are nan.
        """
        statistics = fitted_entry(fitted, FITTED, part=self)
        part = self.select(indices)
        part.standardise = False
        fills = torch.full_like(statistics["fills"], torch.nan) if self.columns else None
        figures = [name for name in self.targets if name not in self.classes]
        return {
            **part.encode({FITTED: {**statistics, "fills": fills}}),
            **{name: part.target_values(name, statistics) for name in figures},
        }

    def encode(self, fitted: Fitted) -> dict[str, Tensor]:
        """Return the encoded inputs of all rows in this split.

        Returns:
            A mapping with `input`, float64 `[N, F]`. If encoding="index", it also contains `categories`, int64
            `[N, C]`.
        """
        statistics = fitted_entry(fitted, FITTED, part=self)
        inputs: dict[str, Tensor] = {}
        if self.columns:
            values = torch.from_numpy(self._of_rows(self.numbers))
            values = torch.where(values.isnan(), statistics["fills"], values)
            inputs["input"] = (values - statistics["means"]) / statistics["deviations"] if self.standardise else values
        codes = {name: self._number_words(name, column, statistics) for name, column in self.words.items()}
        if codes and self.encoding == "index":
            inputs["categories"] = torch.stack(list(codes.values()), 1)
        elif codes:
            pieces = [inputs["input"]] if self.columns else []
            for name, numbers in codes.items():
                # The first column of the one-hot encoding means an unknown word. It is removed, so that an unknown word
                # is encoded as zeros.
                hot = torch.nn.functional.one_hot(numbers, len(statistics["words"][name]) + 1)
                pieces.append(hot[:, 1:].double())
            inputs["input"] = torch.cat(pieces, 1)
        return inputs

    def _of_rows(self, values: np.ndarray) -> np.ndarray:
        return values if self.rows is None else values[self.rows]

    def _counts(self, column: Words) -> np.ndarray:
        """Return the number of rows with each word of a column, int64 `[number of words + 1]`.

        Position 0 is the number of missing values, and position i + 1 is the number of rows with the code i.
        """
        return np.bincount(self._of_rows(column.codes) + 1, minlength=len(column.names) + 1)

    def _samples(self, statistics: Statistics) -> Entries:
        whole: dict[str, Tensor] = {}
        for start in range(0, len(self), PIECE):
            stop = min(start + PIECE, len(self))
            part = self.select(torch.arange(start, stop))
            values = {
                **part.encode({FITTED: statistics}),
                **{name: part.target_values(name, statistics) for name in self.targets},
            }
            for name, value in values.items():
                if name not in whole:
                    dtype = torch.float32 if value.is_floating_point() else value.dtype
                    whole[name] = torch.empty(len(self), *value.shape[1:], dtype=dtype)
                whole[name][start:stop] = value
        return tuple(whole.values()) if list(whole) == ["input", TARGET] else whole

    def _names_of_values(self, statistics: Statistics) -> ValueNames:
        columns, words = list(self.columns), statistics.get("words", {})
        is_index = bool(words) and self.encoding == "index"
        if not is_index:
            columns += [f"{name}={word or 'missing'}" for name, known in words.items() for word in known]
        named: dict[str, Sequence[str]] = {"input": columns} if columns else {}
        return ValueNames(
            columns={**named, "categories": list(words)} if is_index else named,
            classes=statistics["classes"],
            unknown={"categories": 0} if is_index else {},
        )

    def _number_words(self, name: str, column: Words, statistics: Statistics) -> Tensor:
        """Return the index of the word in each row, int64 `[N]`.

        The words of the training split have the indices 1, 2, 3, ... Words that are not in the training split have the
        index 0.

        Args:
            name: The name of the column.
            column: The column.
            statistics: The statistics of the training split.
        """
        place = {word_key(word): number for number, word in enumerate(statistics["words"][name], 1)}
        missing = statistics["most_frequent"][name] if self.impute == "most_frequent" else MISSING
        numbers = np.array([place.get(word_key(word), 0) for word in (*column.names, missing)])
        return torch.from_numpy(
            numbers[self._of_rows(column.codes)]
        )  # The code -1 of a missing value selects the last number, which is that of `missing`.

    def target_values(self, name: str, statistics: Statistics) -> Tensor:
        target = self.targets[name]
        if isinstance(target, Words):
            order = {word_key(word): number for number, word in enumerate(statistics["classes"].get(name, ()))}
            numbers = np.array([order.get(word_key(word), 0) for word in target.names])
            return torch.from_numpy(numbers[self._of_rows(target.codes)])
        values = torch.from_numpy(self._of_rows(target))
        scaled: Tensor = (values - statistics["target_means"][name]) / statistics["target_deviations"][name]
        return scaled if self.standardise else values

    def _known_classes(self, name: str, target: Words, statistics: Statistics) -> int:
        """Return the number of classes of a target in the training split.

        Raises:
            ConfigError: A row of this split has a class that is not in the training split.
        """
        theirs = list(statistics["classes"].get(name, ()))
        keys = set(map(word_key, theirs))
        for number in np.flatnonzero(self._counts(target)[1:]).tolist():
            if word_key(target.names[number]) not in keys:
                row = int((self._of_rows(target.codes) == number).argmax())
                got = f"the class {target.names[number]} of {name} in row {row}, which is not in the training split"
                raise data_error("", got=got, expected=f"one of the training split's classes, {', '.join(theirs)}")
        return len(theirs)


def _fills(columns: Sequence[str], numbers: np.ndarray, impute: Impute | None) -> Tensor:
    """Return the number that replaces missing values in each column, float64 `[F]`.

    Args:
        columns: The names of the columns.
        numbers: The columns of numbers in the training split, float64 `[N, F]`.
        impute: See Table.

    Raises:
        ConfigError: A column has only missing values.
    """
    fills = []
    for name, column in zip(columns, numbers.T, strict=True):
        known = column[~np.isnan(column)]
        if not len(known):
            raise data_error(
                "dataset.ignore",
                got=f"the column {name}, which has no number in the training split",
                expected="at least one number, from which missing values are filled in",
                fix=f"Leave the column out with data.dataset.ignore=[{name}]",
            )
        if impute == "most_frequent":
            values, counts = np.unique(known, return_counts=True)
            fills.append(float(values[counts.argmax()]))  # argmax selects the smallest of equally frequent values.
        else:
            fills.append(float(np.median(known) if impute == "median" else known.mean()))
    return torch.tensor(fills, dtype=torch.float64)


def _words_of(column: Words, counts: np.ndarray, impute: Impute | None) -> list[str]:
    """Return the words that occur in the rows of this split. MISSING is the last word if words are missing.

    Args:
        column: The column of words.
        counts: The number of rows with each word; see `Table._counts`.
        impute: See Table.
    """
    words = [name for name, count in zip(column.names, counts[1:].tolist(), strict=True) if count]
    has_missing = counts[0] > 0 and impute != "most_frequent"
    return [*words, MISSING] if has_missing else words


class ShippedTable(Table):
    """Base class of tables of numbers that are included in scikit-learn's package.

    Args:
        standardise: See Table.

    Attributes:
        files: The names of the files in scikit-learn's data folder.
        names: The names of the features.
        labels: The names of the classes. None for a regression.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    labels: tuple[str, ...] | None = None

    def __init__(self, *, standardise: bool = True) -> None:
        is_class = self.labels is not None
        # Files with classes are CSV files. Their first line contains the number of rows.
        features, targets = shipped_columns(*self.files, delimiter="," if is_class else None, skip_lines=int(is_class))
        target = Words(codes=targets.astype(np.int64), names=self.labels) if self.labels else targets[:, None]
        super().__init__(columns=self.names, numbers=features, targets={TARGET: target}, standardise=standardise)


_MEASURED = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave_points", "symmetry",
    "fractal_dimension",
)  # fmt: skip


class BreastCancer(ShippedTable):
    """Data set Breast Cancer Wisconsin (Diagnostic): 569 rows, 30 features.

    The classes are malignant (0) and benign (1).
    """

    files = ("breast_cancer.csv",)
    names = tuple(f"{kind}_{name}" for kind in ("mean", "error", "worst") for name in _MEASURED)
    labels = ("malignant", "benign")


class Wine(ShippedTable):
    """Data set Wine Recognition: 178 rows, 13 features of a chemical analysis. The class is one of three growers."""

    files = ("wine_data.csv",)
    names = (
        "alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids",
        "nonflavanoid_phenols", "proanthocyanins", "color_intensity", "hue", "od280_od315", "proline",
    )  # fmt: skip
    labels = ("class_0", "class_1", "class_2")


class Diabetes(ShippedTable):
    """Data set on diabetes of Efron et al. (Least Angle Regression, 2004): 442 rows, 10 features.

    The target is a number: the progression of the disease after a year.
    """

    files = ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz")
    names = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


def moments(values: np.ndarray, *, scratch: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each column, float64 `[F]`.

    The standard deviation of a constant column is 1, so that it can be a divisor. A column counts as constant if its
    standard deviation is within rounding errors. The rule is the same as in scikit-learn's StandardScaler.

    Args:
        values: The F columns, float64 `[N, F]`.
        scratch: An array for intermediate results with the shape of `values`. It may be `values`, which is overwritten.
            Default: None, which allocates an array.
    """
    count, mean = len(values), values.mean(0)
    squares = np.subtract(values, mean, out=scratch)
    spread = np.square(squares, out=squares).sum(0) / count
    roundings = count * np.finfo(np.float64).eps
    is_constant = spread <= roundings * spread + (roundings * mean) ** 2
    return torch.from_numpy(mean), torch.from_numpy(np.where(is_constant, 1.0, np.sqrt(spread)))
