"""Rules of the config's section data.split, which divide samples into splits.

The rules can stratify splits by class, assign all samples of a group to the same split, or divide samples into folds.
The splits can also be read from a column that contains the name of each sample's split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from exp.data.data_errors import data_error, name_error
from exp.data.in_memory import AnyDataset, samples_in
from exp.data.randomness import seed_for
from exp.data.sample_values import entry_of, targets_of, values_of
from exp.data.splits import PART_NAMES, Choose, lengths
from exp.shared_types import STAGES, Stage

# The maximum number of pieces into which groups are divided. Splits consist of whole pieces, so that the size of a
# split is accurate to one twentieth of the samples.
FINEST = 20


@runtime_checkable
class NamedColumns(Protocol):
    """Interface of data sets with named columns, some of which are not inputs."""

    def column_texts(self, name: str, *, key: str) -> Sequence[str | None]:
        """Return the texts in a column that is not an input. Missing values are None.

        Args:
            name: The name of the column.
            key: The config key that contains the name, for the error.

        Raises:
            ConfigError: The column does not exist, or is an input.
        """


@runtime_checkable
class ClassNumbers(Protocol):
    """Interface of data sets that can return the class of each sample before the data set is prepared."""

    def class_numbers(self, *, key: str) -> np.ndarray:
        """Return the class number of each sample, `[N]`.

        Args:
            key: The config key that needs the classes, for the error.

        Raises:
            ConfigError: The targets are not classes.
        """


@dataclass(frozen=True, kw_only=True)
class SplitRules:
    """Rules in the config's section data.split.

    Attributes:
        stratify: Whether each split has the same proportions of classes as the whole data set. Default: False.
        group: The name of a column, or of a value of each sample. Samples with the same value are in the same split.
            Default: None, which does not group samples.
        column: The name of a column, or of a value of each sample, that contains the name of the sample's split.
            Default: None, which divides the data set by the sizes in data.parts.
        folds: The number of folds, 2 or more, into which all samples outside the test split are divided. Default: None,
            which makes no folds.
        fold: The index of the fold that is the validation split, counted from 0. The other folds are the training
            split. Default: 0.
    """

    stratify: bool = False
    group: str | None = None
    column: str | None = None
    folds: int | None = None
    fold: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SplitRules:
        """Return the rules in data.split.

        Args:
            given: The value of data.split.

        Raises:
            ConfigError: A key is unknown, `fold` is too large, or `column` is combined with other rules.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise name_error(f"split.{name}", name, known, expected="a rule")
        rules = cls(**given)
        if rules.fold >= (rules.folds or 1):
            expected = "0 without data.split.folds" if rules.folds is None else f"0 to {rules.folds - 1}"
            raise data_error("split.fold", got=str(rules.fold), expected=expected)
        if rules.column is not None and rules != cls(column=rules.column):
            got = f"{rules.column}, although other rules are set"
            raise data_error("split.column", got=got, expected="null, or no other rules in data.split")
        return rules


def chooser(split: Mapping[str, object] | None, *, seed: int) -> Choose | None:
    """Return a function that chooses the samples of each split by the rules in data.split.

    Return None if there are no rules.

    Args:
        split: The value of data.split.
        seed: The seed that divides the data set.
    """
    rules = SplitRules.of(split or {})
    return None if rules == SplitRules() else partial(split_by_rules, rules=rules, seed=seed)


def split_by_rules(
    dataset: AnyDataset, sizes: Mapping[Stage, int | float], *, rules: SplitRules, seed: int
) -> dict[Stage, Tensor]:
    """Return the sorted indices of the samples in each split, int64. The splits are disjoint.

    The splitters of scikit-learn choose the samples.

    Args:
        dataset: The data set.
        sizes: The size of each split: a number of samples, or a fraction. If the rules contain groups, the splits have
            these sizes only approximately. If the rules contain folds, only the size of the test split is used.
        rules: The rules in data.split.
        seed: The seed that divides the data set.

    Raises:
        ConfigError: The rules cannot divide the samples, for example because a class has too few samples.
    """
    if rules.column is not None:
        return _by_column(_texts(dataset, rules.column, key="split.column"), rules.column)
    counts = lengths(sizes, samples_in(dataset))
    samples = _Samples.of(dataset, rules, seed=seed_for(seed, "parts") % 2**32)
    rest = np.arange(samples_in(dataset))
    found: dict[Stage, np.ndarray] = {}
    try:
        if "test" in counts:
            rest, found["test"] = samples.cut(rest, counts["test"])
        if rules.folds is not None:
            found["train"], found["val"] = samples.fold(rest, rules.folds, rules.fold)
        else:
            if "val" in counts:
                rest, found["val"] = samples.cut(rest, counts["val"])
            if "train" in counts:
                is_all = sum(counts.values()) == samples_in(dataset)
                found["train"] = rest if is_all else samples.cut(rest, counts["train"])[1]
    except ValueError as error:
        got = str(error)
        raise data_error("split", got=got, expected="classes and groups with enough samples for each split") from error
    return {stage: torch.from_numpy(np.sort(found[stage])) for stage in STAGES if stage in found}


@dataclass(frozen=True, kw_only=True)
class _Samples:
    classes: np.ndarray | None
    groups: np.ndarray | None
    seed: int

    @classmethod
    def of(cls, dataset: AnyDataset, rules: SplitRules, *, seed: int) -> _Samples:
        classes = np.array(_classes(dataset)) if rules.stratify else None
        groups = None if rules.group is None else np.array(_texts(dataset, rules.group, key="split.group"))
        return cls(classes=classes, groups=groups, seed=seed)

    def cut(self, indices: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide samples into two sets. The sizes are approximate if there are groups.

        Args:
            indices: The indices of the samples.
            count: The number of samples in the second set.

        Returns:
            The indices in the first set, and the indices in the second set.
        """
        if count >= len(indices):
            return indices[:0], indices
        if self.groups is not None:
            classes = np.zeros(len(indices)) if self.classes is None else self.classes[indices]
            smallest = np.unique(classes, return_counts=True)[1].min()
            parts = self._folds(indices, max(min(len(np.unique(self.groups[indices])), FINEST, smallest), 2))
            sizes = np.cumsum([len(part) for part in parts[:-1]])
            taken = int(np.abs(sizes - count).argmin()) + 1
            return np.concatenate(parts[taken:]), np.concatenate(parts[:taken])
        from sklearn.model_selection import train_test_split  # Takes half a second.

        of = None if self.classes is None else self.classes[indices]
        rest, part = train_test_split(indices, test_size=count, stratify=of, random_state=self.seed)
        return rest, part

    def fold(self, indices: np.ndarray, folds: int, fold: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the samples outside a fold, and the indices of the samples in the fold.

        Args:
            indices: The indices of the samples that are divided into folds.
            folds: The number of folds.
            fold: The index of the fold, counted from 0.
        """
        parts = self._folds(indices, folds)
        return np.concatenate(parts[:fold] + parts[fold + 1 :]), parts[fold]

    def _folds(self, indices: np.ndarray, folds: int) -> list[np.ndarray]:
        from sklearn.model_selection import KFold, StratifiedGroupKFold, StratifiedKFold

        kind = KFold if self.classes is None else StratifiedKFold
        splitter = (kind if self.groups is None else StratifiedGroupKFold)(folds, shuffle=True, random_state=self.seed)
        classes = np.zeros(len(indices)) if self.classes is None else self.classes[indices]
        pairs = splitter.split(indices, classes, None if self.groups is None else self.groups[indices])
        return [indices[part] for _, part in pairs]


def _classes(dataset: AnyDataset) -> Sequence[object]:
    if isinstance(dataset, ClassNumbers):
        return list(dataset.class_numbers(key="split.stratify"))
    targets = targets_of(dataset, stage="train", inputs=(), key="split.stratify")
    if any(isinstance(one, float) or (isinstance(one, Tensor) and one.is_floating_point()) for one in targets[:1]):
        got = "true, although targets are not class numbers"
        raise data_error("split.stratify", got=got, expected="false, or targets that are classes")
    return [int(one) for one in targets]


def _texts(dataset: AnyDataset, name: str, *, key: str) -> list[str]:
    """Return the values in a column as texts, one for each sample.

    Args:
        dataset: The data set.
        name: The name of the column. If the data set has no columns, it is the name of a value of each sample.
        key: The config key below `data.` that contains the name, for messages.

    Raises:
        ConfigError: A sample has no value, or the values are not single numbers or texts.
    """
    if isinstance(dataset, NamedColumns):
        found = list(dataset.column_texts(name, key=key))
    else:
        read = values_of(dataset, lambda sample: entry_of(sample, name, inputs=(), key=key))
        if isinstance(read[0], Tensor) and read[0].numel() != 1:
            got = f"{name}, which has the shape {list(read[0].shape)}"
            raise data_error(key, got=got, expected="one value for each sample")
        found = [str(one.item() if isinstance(one, Tensor) else one) for one in read]
    missing = [index for index, text in enumerate(found) if text is None]
    if missing:
        got = f"{name}, which has no value in {len(missing)} samples, the first of which is sample {missing[0]}"
        raise data_error(key, got=got, expected="a value for each sample")
    return [str(text) for text in found]


def _by_column(texts: Sequence[str], name: str) -> dict[Stage, Tensor]:
    stages = {word: stage for stage, words in PART_NAMES.items() for word in words}
    for index, text in enumerate(texts):
        if text.lower() not in stages:
            got = f"{name}, which is {text!r} in sample {index}"
            raise data_error("split.column", got=got, expected=f"one of {', '.join(stages)}")
    named = np.array([stages[text.lower()] for text in texts])
    return {stage: torch.from_numpy(np.flatnonzero(named == stage)) for stage in STAGES if (named == stage).any()}
