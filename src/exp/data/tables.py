"""Tables of numbers and words, encoded by what the training part tells, and the three that scikit-learn ships."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from exp.data.cells import word_key
from exp.data.dataset_files import shipped_columns
from exp.data.entries import TARGET
from exp.data.faults import data_fault, fitted_entry
from exp.data.in_memory import Entries, Fitted, Tensors
from exp.data.value_names import SCALES, ValueNames
from exp.nested import mapped
from exp.spelling import among

Impute = Literal["mean", "median", "most_frequent"]
Encoding = Literal["one_hot", "index"]
# What fit() calls its figures; of a column of words, the name of a word that is not there.
FITTED, MISSING = "table", ""
# Rows that are encoded together, so that what they are before they are float32 takes little memory.
PIECE = 2**14


@dataclass(frozen=True, kw_only=True)
class Words:
    """A column of words, or of classes.

    codes: whole numbers `[N]`, which of the names each row has; -1 for a missing one. names: the words, in order.
    """

    codes: np.ndarray
    names: tuple[str, ...]

    def texts(self) -> list[str | None]:
        """Return the word of each row; None for a missing one."""
        names = (*self.names, None)
        return [names[code] for code in self.codes.tolist()]


class TableRows(Tensors):
    """Rows of numbers, words and targets as a file has them. See Table for the parameters.

    The parts of a table share its columns, in the attribute `shared`, and hold the numbers of their rows.

    notes: an attribute, notes on the file, a line each. dates: an attribute, the forms of the dates that became
    numbers, by column.
    """

    notes: tuple[str, ...] = ()
    dates: Mapping[str, str | None] = MappingProxyType({})
    shared: dict[str, Tensor]
    _rows: Tensor | None = None

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
        self.columns, self.words = tuple(columns), dict(words or {})
        self.classes = {name: target.names for name, target in targets.items() if isinstance(target, Words)}
        self.standardise, self.impute, self.encoding = standardise, impute, encoding
        self.targets = tuple(targets)
        entries = {f"target.{name}": _tensor(target) for name, target in targets.items()}
        if self.columns:
            # In double until they are standardised: a column such as 1e8 + small has nothing left in single.
            entries["numbers"] = torch.from_numpy(numbers)
        if self.words:
            entries["words"] = torch.from_numpy(np.stack([column.codes for column in self.words.values()], 1))
        only = next(iter(targets)) if len(targets) == 1 else None
        classes = len(self.classes[only]) if only in self.classes else None
        super().__init__(entries=entries, num_classes=classes)

    @property
    def entries(self) -> Entries:
        """The columns of these rows."""
        return {name: self._values(name) for name in self.shared}

    @entries.setter
    def entries(self, entries: Entries) -> None:
        assert isinstance(entries, dict)
        self.shared = entries

    def __len__(self) -> int:
        return len(next(iter(self.shared.values()))) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> Entries:
        return mapped(self.gather(torch.tensor([index])), lambda tensor: tensor[0])

    def gather(self, indices: Tensor) -> Entries:
        rows = indices if self._rows is None else self._rows[indices]
        return mapped(self.shared, lambda tensor: tensor.index_select(0, rows))

    def select(self, indices: Tensor) -> Self:
        part = copy.copy(self)
        part._rows = indices if self._rows is None else self._rows[indices]
        part.indices, part.whole_length = indices, len(self)
        return part

    def each_column(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name of each input column and its values `[N]`: numbers float64, and codes of words."""
        for entry, names in (("numbers", self.columns), ("words", self.words)):
            for place, name in enumerate(names):
                yield name, self._values(entry, place).numpy()

    def each_target(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name of each target of one column and its values `[N]`: numbers float64, and codes of classes."""
        for name in self.targets:
            if self.shared[f"target.{name}"][:1].numel() == 1:
                yield name, self._values(f"target.{name}").flatten().numpy()

    def _values(self, entry: str, place: int | None = None) -> Tensor:
        """Return the values of an entry, or of one column of it."""
        values = self.shared[entry] if place is None else self.shared[entry][:, place]
        return values if self._rows is None else values[self._rows]

    def _counts(self, entry: str, size: int, place: int | None = None) -> np.ndarray:
        """Return how many rows have no word, and then each word, int64 `[size + 1]`."""
        return np.bincount(self._values(entry, place).numpy() + 1, minlength=size + 1)


class Table(TableRows):
    """Rows of numbers and words, with one target or several.

    A sample is (input, target). `input` is float32 `[F]`: the numbers in their order, then an entry for each word of
    each column of words, 1 where the row has it. A target is a class, int64 `[]`, or K numbers to predict, float32
    `[K]`. With several targets, or with words as an index, a sample is a mapping of names.

    All is encoded by figures of the training part, so that nothing of the others is known to it, as scikit-learn's
    SimpleImputer, StandardScaler and OneHotEncoder(handle_unknown="ignore") do.

    columns: the names of the numbers. numbers: float64 `[N, F]`; nan where one is missing.
    words: columns of words by name. targets: classes, or float64 `[N, K]`, by name; a single one is called `target`.
    standardise: whether numbers, and targets that are numbers, have the mean 0 and the deviation 1 in training.
    impute: what stands for a missing number: the mean, the median or the most frequent one of training. A missing word
        is a word of its own, or the most frequent one with "most_frequent".
    encoding: "one_hot", or "index" for an input of its own, `categories`, int64 `[C]`: each column's word by number, 0
        for one that training has not seen.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledTable"

    def fit(self) -> Fitted:
        """Names of columns, means, deviations, fills, the words and the classes of this part.

        Raises: ConfigError for a column without a single number.
        """
        found: dict[str, Any] = {
            "numbers": list(self.columns),
            "dates": dict(self.dates),
            "classes": {name: list(classes) for name, classes in self.classes.items()},
        }
        if self.columns:
            values = self._values("numbers")
            found["fills"] = self._fills(values.numpy())
            values = torch.where(values.isnan(), found["fills"], values) if values.isnan().any() else values
            found["means"], found["deviations"] = moments(values.numpy())
        if self.words:
            counts = {
                name: self._counts("words", len(column.names), place)
                for place, (name, column) in enumerate(self.words.items())
            }
            found["most_frequent"] = {
                name: _most_frequent(self.words[name].names, mine) for name, mine in counts.items()
            }
            found["words"] = {name: self._held(self.words[name].names, mine) for name, mine in counts.items()}
        figures = [name for name in self.targets if name not in self.classes]
        scales = {name: moments(self._values(f"target.{name}").numpy()) for name in figures}
        found["target_means"] = {name: mean for name, (mean, _) in scales.items()}
        found["target_deviations"] = {name: deviation for name, (_, deviation) in scales.items()}
        if self.standardise:
            found[SCALES] = {name: list(scale) for name, scale in scales.items()}
        return {FITTED: found}

    def prepare(self, fitted: Fitted) -> Tensors:
        """Encode the rows by what the training part told.

        Raises: ConfigError where that has other columns, and for a class that it does not know.
        """
        told = fitted_entry(fitted, FITTED, part=self)
        mine, theirs = [*self.columns, *self.words], [*told["numbers"], *told.get("words", ())]
        if mine != theirs:
            raise data_fault("", got=f"a part with the columns {mine}", expected=f"those of training, {theirs}")
        for name in self.classes:
            self._refuse_unknown(name, told)
        num_classes, num_outputs = self.sizes(told)
        prepared = Tensors(entries=self.samples(told), num_classes=num_classes, num_outputs=num_outputs)
        prepared.indices = self.indices
        prepared.value_names = self.names_of_values(told)
        return prepared

    def unknown_words(self, fitted: Fitted) -> dict[str, dict[str, int]]:
        """Return how many rows have each word that training does not know, by column; an empty one is a missing one."""
        known = fitted_entry(fitted, FITTED, part=self).get("words", {})
        found = {}
        for place, (name, column) in enumerate(self.words.items()):
            counts = self._counts("words", len(column.names), place).tolist()
            keys = set(map(word_key, known[name]))
            keys.update([MISSING] * (self.impute == "most_frequent"))
            words = zip((MISSING, *column.names), counts, strict=True)
            if unknown := {word: count for word, count in words if count and word_key(word) not in keys}:
                found[name] = unknown
        return found

    def notes_in(self, fitted: Fitted, *, stage: str) -> list[str]:
        """Return what to say of the file and of these rows, a line each. stage: the rows in words."""
        lines = list(self.notes)
        for name, words in self.unknown_words(fitted).items():
            told = among([f"{word or 'a missing value'} ({count})" for word, count in words.items()])
            rows = f"{sum(words.values())} of {len(self)} rows of {stage}"
            lines.append(f"training has not seen the {name} of {rows}, which count as none of its words: {told}")
        return lines

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return rows as the file has them: inputs and targets that are numbers, in float64, nan where one is missing.

        Words are encoded.
        """
        told = fitted_entry(fitted, FITTED, part=self)
        part = self.select(indices)
        part.standardise = False
        fills = torch.full_like(told["fills"], torch.nan) if self.columns else None
        targets = {name: part._values(f"target.{name}") for name in self.targets if name not in self.classes}
        return {**part.encoded({FITTED: {**told, "fills": fills}}), **targets}

    def sizes(self, told: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """The classes of a sample's one target, and how many numbers a model gives for all of them."""
        classes = [len(told["classes"][name]) if name in self.classes else None for name in self.targets]
        values = [self.shared[f"target.{name}"] for name in self.targets]
        widths = [count or value.shape[1] for count, value in zip(classes, values, strict=True)]
        return classes[0] if len(classes) == 1 else None, sum(widths) or None  # rows without answers

    def samples(self, told: Mapping[str, Any]) -> Entries:
        """Return the rows as a model sees them."""
        whole: dict[str, Tensor] = {}
        for start in range(0, len(self), PIECE):
            stop = min(start + PIECE, len(self))
            part = self.select(torch.arange(start, stop))
            values = {**part.encoded({FITTED: told}), **{name: part._target(name, told) for name in self.targets}}
            for name, value in values.items():
                if name not in whole:
                    dtype = torch.float32 if value.is_floating_point() else value.dtype
                    whole[name] = torch.empty(len(self), *value.shape[1:], dtype=dtype)
                whole[name][start:stop] = value
        return tuple(whole.values()) if list(whole) == ["input", TARGET] else whole

    def encoded(self, fitted: Fitted) -> dict[str, Tensor]:
        """Return the inputs by name, numbers in float64: `input` `[N, F]`, and with an index `categories` `[N, C]`."""
        told = fitted_entry(fitted, FITTED, part=self)
        inputs: dict[str, Tensor] = {}
        if self.columns:
            values = self._values("numbers")
            values = torch.where(values.isnan(), told["fills"], values)
            inputs["input"] = (values - told["means"]) / told["deviations"] if self.standardise else values
        if not self.words:
            return inputs
        codes = [self._coded(name, told) for name in self.words]
        if self.encoding == "index":
            return {**inputs, "categories": torch.stack(codes, 1)}
        start = len(self.columns)
        found = torch.zeros(
            len(self), start + sum(len(told["words"][name]) for name in self.words), dtype=torch.float64
        )
        if self.columns:
            found[:, :start] = inputs["input"]
        for name, numbers in zip(self.words, codes, strict=True):
            # A word that training has not seen is none of its words.
            (rows,) = numbers.nonzero(as_tuple=True)
            found[rows, start - 1 + numbers[rows]] = 1
            start += len(told["words"][name])
        return {"input": found}

    def names_of_values(self, told: Mapping[str, Any]) -> ValueNames:
        """What columns and classes are called."""
        columns, words = list(self.columns), told.get("words", {})
        named: dict[str, Sequence[str]] = {}
        if self.encoding == "index":
            named["categories"] = list(words)
        else:
            columns += [f"{name}={word or 'missing'}" for name, known in words.items() for word in known]
        if columns:
            named["input"] = columns
        return ValueNames(
            columns=named,
            classes=told["classes"],
            unknown={"categories": 0} if self.encoding == "index" and words else {},
        )

    def _coded(self, column: str, told: Mapping[str, Any]) -> Tensor:
        """Which of training's words each row has, int64 `[N]`, from 1; 0 for another one."""
        place = {word_key(word): number for number, word in enumerate(told["words"][column], 1)}
        names = self.words[column].names
        missing = told["most_frequent"][column] if self.impute == "most_frequent" else MISSING
        numbers = torch.tensor([place.get(word_key(name), 0) for name in (*names, missing)])
        return numbers[self._values("words", list(self.words).index(column)).long()]  # the last one is that of -1

    def _target(self, name: str, told: Mapping[str, Any]) -> Tensor:
        values = self._values(f"target.{name}")
        if name not in self.classes:
            is_plain = not self.standardise
            return values if is_plain else (values - told["target_means"][name]) / told["target_deviations"][name]
        order = {word_key(word): number for number, word in enumerate(told["classes"].get(name, ()))}
        return torch.tensor([order.get(word_key(word), 0) for word in self.classes[name]])[values]

    def _refuse_unknown(self, name: str, told: Mapping[str, Any]) -> None:
        mine, theirs = self.classes[name], list(told["classes"].get(name, ()))
        counts = self._counts(f"target.{name}", len(mine))[1:]
        keys = set(map(word_key, theirs))
        unknown = [number for number in np.flatnonzero(counts).tolist() if word_key(mine[number]) not in keys]
        if unknown:
            row = int((self._values(f"target.{name}") == unknown[0]).int().argmax())
            raise data_fault(
                "",
                got=f"the class {mine[unknown[0]]} of {name} in row {row}, which training does not know",
                expected=f"its classes, {', '.join(theirs)}",
            )

    def _fills(self, numbers: np.ndarray) -> Tensor:
        """What stands for a missing number, by column.

        Raises: ConfigError for a column without a single number.
        """
        is_known = ~np.isnan(numbers)
        fills, is_whole = [], is_known.all()
        for place, name in enumerate(self.columns):
            known = numbers[:, place] if is_whole else numbers[is_known[:, place], place]
            if not len(known):
                raise data_fault(
                    "dataset.ignore",
                    got=f"the column {name}, without a single number in the training part",
                    expected="columns with a number to fill the others with",
                    cure=f"Leave it out with data.dataset.ignore=[{name}]",
                )
            fills.append(_fill(known, self.impute))
        return torch.tensor(fills, dtype=torch.float64)

    def _held(self, names: tuple[str, ...], counts: np.ndarray) -> list[str]:
        """The words that these rows have, in order; a missing one, where it is one of them, last."""
        has_missing = counts[0] > 0 and self.impute != "most_frequent"
        held = [name for name, count in zip(names, counts[1:].tolist(), strict=True) if count]
        return held + [MISSING] * bool(has_missing)


class ShippedTable(Table):
    """A table of numbers that scikit-learn ships. columns: the features' names. classes: None for a regression."""

    def __init__(
        self,
        features: np.ndarray,
        targets: np.ndarray,
        columns: Sequence[str],
        classes: tuple[str, ...] | None,
        standardise: bool,
    ) -> None:
        target = targets[:, None] if classes is None else Words(codes=targets.astype(np.int64), names=classes)
        super().__init__(columns=columns, numbers=features, targets={TARGET: target}, standardise=standardise)


class BreastCancer(ShippedTable):
    """Breast cancer Wisconsin (diagnostic): 569 rows, 30 features, malignant (0) or benign (1)."""

    def __init__(self, *, standardise: bool = True) -> None:
        values = shipped_columns("load_breast_cancer", "breast_cancer.csv", skip_lines=1)
        super().__init__(*values, BREAST_CANCER_COLUMNS, ("malignant", "benign"), standardise)


class Wine(ShippedTable):
    """Wine recognition: 178 rows, 13 features of a chemical analysis, three growers."""

    def __init__(self, *, standardise: bool = True) -> None:
        values = shipped_columns("load_wine", "wine_data.csv", skip_lines=1)
        super().__init__(*values, WINE_COLUMNS, ("class_0", "class_1", "class_2"), standardise)


class Diabetes(ShippedTable):
    """Diabetes of Efron et al. (Least Angle Regression, 2004): 442 rows, 10 features, progression after a year."""

    def __init__(self, *, standardise: bool = True) -> None:
        files = ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz")
        values = shipped_columns("load_diabetes", *files, delimiter=None, scaled=False)
        super().__init__(*values, DIABETES_COLUMNS, None, standardise)


_MEASURED = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave_points", "symmetry",
    "fractal_dimension",
)  # fmt: skip
BREAST_CANCER_COLUMNS = tuple(f"{kind}_{name}" for kind in ("mean", "error", "worst") for name in _MEASURED)
WINE_COLUMNS = (
    "alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids",
    "nonflavanoid_phenols", "proanthocyanins", "color_intensity", "hue", "od280_od315", "proline",
)  # fmt: skip
DIABETES_COLUMNS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


def moments(values: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each column of float64 `[N, F]`, by which a constant column becomes 0.

    The deviation of such a column is 1: what rounding leaves of it is no spread (scikit-learn's StandardScaler has the
    same bound).
    """
    count, mean = len(values), values.mean(0)
    squares = values - mean
    spread = np.square(squares, out=squares).sum(0) / count
    roundings = count * np.finfo(np.float64).eps
    is_constant = spread <= roundings * spread + (roundings * mean) ** 2
    return torch.from_numpy(mean), torch.from_numpy(np.where(is_constant, 1.0, np.sqrt(spread)))


def _tensor(column: np.ndarray | Words) -> Tensor:
    if isinstance(column, Words):
        return torch.from_numpy(np.array(column.codes, dtype=np.int64))
    # In double until they are standardised: a column such as 1e8 + small has nothing left in single.
    return torch.from_numpy(np.asarray(column, dtype=np.float64))


def _fill(known: np.ndarray, impute: Impute | None) -> float:
    """What stands for a missing number."""
    if impute == "most_frequent":
        values, counts = np.unique(known, return_counts=True)
        return float(values[counts.argmax()])  # of equally frequent ones the smallest
    return float(np.median(known) if impute == "median" else known.mean())


def _most_frequent(names: tuple[str, ...], counts: np.ndarray) -> str:
    """counts: how often none of them is there, and each."""
    return names[int(counts[1:].argmax())] if counts[1:].any() else MISSING
