"""Tables of numbers and words, encoded by what the training part tells, and the three that scikit-learn ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from exp.data.dataset_files import shipped_columns
from exp.data.entries import TARGET
from exp.data.faults import data_fault, fitted_entry
from exp.data.in_memory import Fitted, Tensors
from exp.data.value_names import SCALES, ValueNames

Impute = Literal["mean", "median", "most_frequent"]
Encoding = Literal["one_hot", "index"]
# What fit() calls its figures; of a column of words, the name of a word that is not there.
FITTED, MISSING = "table", ""


@dataclass(frozen=True, kw_only=True)
class Words:
    """A column of words, or of classes.

    codes: int64 `[N]`, which of the names each row has; -1 for a missing one. names: the words, in order.
    """

    codes: np.ndarray
    names: tuple[str, ...]


class Table(Tensors):
    """Rows of numbers and words, with one target or several.

    A sample is (input, target). `input` is float32 `[F]`: the numbers in their order, then an entry for each word of
    each column of words, 1 where the row has it. A target is a class, int64 `[]`, or K numbers to predict, float32
    `[K]`. With several targets, or with words as an index, a sample is a mapping of names.

    All is encoded by figures of the training part, so that nothing of the others is known to it, as scikit-learn's
    SimpleImputer, StandardScaler and OneHotEncoder(handle_unknown="ignore") do.

    numbers: float64 `[N]` by name; nan where one is missing. words: by name. targets: classes, or float64 `[N, K]`, by
        name; a single one is called `target`.
    standardise: whether numbers, and targets that are numbers, have the mean 0 and the deviation 1 in training.
    impute: what stands for a missing number: the mean, the median or the most frequent one of training. A missing word
        is a word of its own, or the most frequent one with "most_frequent".
    encoding: "one_hot", or "index" for an input of its own, `categories`, int64 `[C]`: each column's word by number, 0
        for one that training has not seen.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledTable"

    def __init__(
        self,
        *,
        numbers: Mapping[str, np.ndarray],
        words: Mapping[str, Words] | None = None,
        targets: Mapping[str, np.ndarray | Words],
        standardise: bool = True,
        impute: Impute | None = None,
        encoding: Encoding = "one_hot",
    ) -> None:
        self.columns, self.words = tuple(numbers), dict(words or {})
        self.classes = {name: target.names for name, target in targets.items() if isinstance(target, Words)}
        self.standardise, self.impute, self.encoding = standardise, impute, encoding
        entries = {f"target.{name}": _tensor(target) for name, target in targets.items()}
        if self.columns:
            entries["numbers"] = torch.stack([_tensor(column) for column in numbers.values()], 1)
        if self.words:
            entries["words"] = torch.stack([_tensor(column) for column in self.words.values()], 1)
        only = next(iter(targets)) if len(targets) == 1 else None
        classes = len(self.classes[only]) if only in self.classes else None
        super().__init__(entries=entries, num_classes=classes)

    def fit(self) -> Fitted:
        """Names of columns, means, deviations, fills, the words and the classes of this part.

        Raises: ConfigError for a column without a single number.
        """
        entries = self._raw
        found: dict[str, Any] = {
            "numbers": list(self.columns),
            "classes": {name: list(classes) for name, classes in self.classes.items()},
        }
        if self.columns:
            values = entries["numbers"].numpy()
            empty = np.isnan(values).all(0)
            if empty.any():
                name = self.columns[int(empty.argmax())]
                raise data_fault(
                    "dataset.ignore",
                    got=f"the column {name}, without a single number in the training part",
                    expected="columns with a number to fill the others with",
                    cure=f"Leave it out with data.dataset.ignore=[{name}]",
                )
            fills = np.array([_fill(column[~np.isnan(column)], self.impute) for column in values.T])
            found["fills"] = torch.from_numpy(fills)
            found["means"], found["deviations"] = moments(np.where(np.isnan(values), fills, values))
        if self.words:
            codes = dict(zip(self.words, entries["words"].numpy().T, strict=True))
            found["most_frequent"] = {
                name: _most_frequent(self.words[name].names, mine) for name, mine in codes.items()
            }
            found["words"] = {name: self._held(self.words[name].names, mine) for name, mine in codes.items()}
        scales = {name: moments(value.numpy()) for name, value in self._targets.items() if name not in self.classes}
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
        entries = {**self._inputs(told), **{name: self._target(name, told) for name in self._targets}}
        classes = [len(told["classes"][name]) if name in self.classes else None for name in self._targets]
        widths = [count or value.shape[1] for count, value in zip(classes, self._targets.values(), strict=True)]
        is_pair = list(entries) == ["input", TARGET]
        prepared = Tensors(
            entries=tuple(entries.values()) if is_pair else entries,
            num_classes=classes[0] if len(classes) == 1 else None,
            num_outputs=sum(widths) or None,  # rows without answers
        )
        prepared.indices = self.indices
        prepared.value_names = self._names(told)
        return prepared

    def encoded(self, fitted: Fitted) -> dict[str, Tensor]:
        """The inputs by name, numbers in float64: `input` `[N, F]` and, encoded as an index, `categories` `[N, C]`."""
        told = fitted_entry(fitted, FITTED, part=self)
        columns = []
        if self.columns:
            values = self._raw["numbers"]
            values = torch.where(values.isnan(), told["fills"], values)
            columns.append((values - told["means"]) / told["deviations"] if self.standardise else values)
        if not self.words:
            return {"input": columns[0]}
        codes = [self._coded(name, told) for name in self.words]
        if self.encoding == "index":
            inputs = {"input": columns[0]} if columns else {}
            return {**inputs, "categories": torch.stack(codes, 1)}
        for name, numbers in zip(self.words, codes, strict=True):
            size = len(told["words"][name])
            # A word that training has not seen is none of them.
            columns.append(torch.nn.functional.one_hot(numbers, size + 1)[:, 1:].double())
        return {"input": torch.cat(columns, 1)}

    def _inputs(self, told: Mapping[str, Any]) -> dict[str, Tensor]:
        encoded = self.encoded({FITTED: told})
        return {name: value.float() if value.is_floating_point() else value for name, value in encoded.items()}

    def _names(self, told: Mapping[str, Any]) -> ValueNames:
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
        place = {word: number for number, word in enumerate(told["words"][column], 1)}
        names = self.words[column].names
        missing = told["most_frequent"][column] if self.impute == "most_frequent" else MISSING
        numbers = [place.get(name, 0) for name in (*names, missing)]
        codes = self._raw["words"][:, list(self.words).index(column)]
        return torch.tensor(numbers)[codes]  # the last one is that of -1

    def _target(self, name: str, told: Mapping[str, Any]) -> Tensor:
        values = self._targets[name]
        if name not in self.classes:
            if self.standardise:
                values = (values - told["target_means"][name]) / told["target_deviations"][name]
            return values.float()
        mine, theirs = self.classes[name], list(told["classes"].get(name, ()))
        unknown = [number for number in values.unique().tolist() if mine[number] not in theirs]
        if unknown:
            row = int((values == unknown[0]).nonzero()[0])
            raise data_fault(
                "",
                got=f"the class {mine[unknown[0]]} of {name} in row {row}, which training does not know",
                expected=f"its classes, {', '.join(theirs)}",
            )
        order = {word: number for number, word in enumerate(theirs)}
        return torch.tensor([order.get(word, 0) for word in mine])[values]

    def _held(self, names: tuple[str, ...], codes: np.ndarray) -> list[str]:
        """The words that these rows have, in order; a missing one, where it is one of them, last."""
        there = np.unique(codes)
        has_missing = there[0] < 0 and self.impute != "most_frequent"
        return [names[code] for code in there if code >= 0] + [MISSING] * bool(has_missing)

    @property
    def _raw(self) -> dict[str, Tensor]:
        assert isinstance(self.entries, dict)
        return self.entries

    @property
    def _targets(self) -> dict[str, Tensor]:
        start = "target."
        return {name.removeprefix(start): value for name, value in self._raw.items() if name.startswith(start)}


class ShippedTable(Table):
    """A table of numbers that scikit-learn ships. columns: the features' names. classes: None for a regression."""

    def __init__(
        self,
        *,
        features: np.ndarray,
        targets: np.ndarray,
        columns: Sequence[str],
        classes: tuple[str, ...] | None,
        standardise: bool,
    ) -> None:
        is_regression = classes is None
        target = targets if classes is None else Words(codes=targets.astype(np.int64), names=classes)
        super().__init__(
            numbers=dict(zip(columns, features.T, strict=True)),
            targets={TARGET: targets.reshape(-1, 1) if is_regression else target},
            standardise=standardise,
        )


class BreastCancer(ShippedTable):
    """Breast cancer Wisconsin (diagnostic): 569 rows, 30 features, malignant (0) or benign (1)."""

    def __init__(self, *, standardise: bool = True) -> None:
        features, targets = shipped_columns("load_breast_cancer", "breast_cancer.csv", skip_lines=1)
        super().__init__(
            features=features,
            targets=targets,
            columns=BREAST_CANCER_COLUMNS,
            classes=("malignant", "benign"),
            standardise=standardise,
        )


class Wine(ShippedTable):
    """Wine recognition: 178 rows, 13 features of a chemical analysis, three growers."""

    def __init__(self, *, standardise: bool = True) -> None:
        features, targets = shipped_columns("load_wine", "wine_data.csv", skip_lines=1)
        super().__init__(
            features=features,
            targets=targets,
            columns=WINE_COLUMNS,
            classes=("class_0", "class_1", "class_2"),
            standardise=standardise,
        )


class Diabetes(ShippedTable):
    """Diabetes of Efron et al. (Least Angle Regression, 2004): 442 rows, 10 features, progression after a year."""

    def __init__(self, *, standardise: bool = True) -> None:
        files = ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz")
        features, targets = shipped_columns("load_diabetes", *files, delimiter=None, scaled=False)
        super().__init__(
            features=features, targets=targets, columns=DIABETES_COLUMNS, classes=None, standardise=standardise
        )


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
    """Mean and deviation of each column of float64 `[N, F]`, by which a column that never changes becomes 0.

    The deviation of such a column is 1: what rounding leaves of it is no spread (scikit-learn's StandardScaler has the
    same bound).
    """
    mean, spread = values.mean(0), values.var(0)
    roundings = len(values) * np.finfo(np.float64).eps
    is_constant = spread <= roundings * spread + (roundings * mean) ** 2
    return torch.from_numpy(mean), torch.from_numpy(np.where(is_constant, 1.0, np.sqrt(spread)))


def _tensor(column: np.ndarray | Words) -> Tensor:
    if isinstance(column, Words):
        return torch.from_numpy(np.array(column.codes, dtype=np.int64))
    # In double until they are standardised: a column such as 1e8 + small has nothing left in single.
    return torch.from_numpy(np.array(column, dtype=np.float64))


def _fill(known: np.ndarray, impute: Impute | None) -> float:
    """What stands for a missing number."""
    if impute == "most_frequent":
        values, counts = np.unique(known, return_counts=True)
        return float(values[counts.argmax()])  # of equally frequent ones the smallest
    return float(np.median(known) if impute == "median" else known.mean())


def _most_frequent(names: tuple[str, ...], codes: np.ndarray) -> str:
    known = codes[codes >= 0]
    return names[int(np.bincount(known).argmax())] if len(known) else MISSING
