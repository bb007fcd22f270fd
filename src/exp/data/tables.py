"""Tables of numbers, standardised by the training part, and the three that scikit-learn ships."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from exp.data.dataset_files import shipped_columns
from exp.data.faults import data_fault, unlike_training
from exp.data.in_memory import Tensors, tensors_of


class Table(Tensors):
    """Rows of F features, float32 `[F]`, with a class, int64 `[]`, or a number to predict, float32 `[1]`.

    Standardised with the mean and the standard deviation of the training part's rows, so that nothing of the others is
    known to it: each feature, and a regression's target, whose loss and errors are then in standard deviations.

    columns: the features' names, in order. classes: the labels' names, in order; None for a regression.
    """

    def __init__(
        self,
        *,
        features: np.ndarray,
        targets: np.ndarray,
        columns: tuple[str, ...],
        classes: tuple[str, ...] | None,
        standardise: bool = True,
    ) -> None:
        self.columns, self.classes, self.standardise = columns, classes, standardise
        if classes is None:
            wanted, count = _doubles(targets).reshape(-1, 1), None
        else:
            wanted, count = torch.as_tensor(targets, dtype=torch.int64), len(classes)
        super().__init__(entries=(_doubles(features), wanted), num_classes=count)

    def prepare(self, train: object) -> Tensors:
        """Standardises the rows by the training part.

        Raises: ConfigError where the training part is no table, or has other columns or classes.
        """
        if not isinstance(train, Table):
            raise unlike_training(self, train)
        for name, mine, theirs in (("columns", self.columns, train.columns), ("classes", self.classes, train.classes)):
            if mine != theirs:
                raise data_fault("", got=f"a part with the {name} {mine}", expected=f"those of training, {theirs}")

        def prepared(mine: Tensor, theirs: Tensor) -> Tensor:
            if not mine.is_floating_point():
                return mine  # classes
            return (_standardised(mine, theirs) if self.standardise else mine).float()

        pairs = zip(tensors_of(self.entries), tensors_of(train.entries), strict=True)
        return Tensors(entries=tuple(prepared(*pair) for pair in pairs), num_classes=self.num_classes)


class BreastCancer(Table):
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


class Wine(Table):
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


class Diabetes(Table):
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


def _doubles(values: np.ndarray) -> Tensor:
    # In double until they are standardised: a column such as 1e8 + small has nothing left in single.
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))


def _standardised(values: Tensor, by: Tensor) -> Tensor:
    spread = by.std(0, correction=0)
    # A column that never changes in training tells nothing; it becomes 0 there, not a division by 0.
    return (values - by.mean(0)) / torch.where(spread > 0, spread, 1.0)
