"""Data of docs/how-to.md. `python docs/how_to_data.py` writes the files to ./data.

They are made from data sets of scikit-learn, or from random numbers with a fixed seed.
"""

from __future__ import annotations

import csv
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn import datasets, linear_model


def write(path: Path, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([names, *rows])


def patients(folder: Path) -> None:
    """Write measurements of cells of 569 patients and the laboratory; a tenth of the values are missing."""
    data, draw = datasets.load_breast_cancer(), np.random.default_rng(0)
    laboratory = np.where(draw.random(569) < 0.5 + 0.3 * data.target, "north", "south")
    names = [name.replace(" ", "_") for name in data.feature_names[:8]]
    rows = [
        [*("" if draw.random() < 0.1 else f"{value:.6g}" for value in values), place, data.target_names[kind]]
        for values, place, kind in zip(data.data[:, :8], laboratory, data.target, strict=True)
    ]
    write(folder / "patients.csv", [*names, "laboratory", "diagnosis"], rows)


def pictures(folder: Path) -> None:
    """Write 600 handwritten digits as PNG files, with one folder per class."""
    data = datasets.load_digits()
    for number, (pixels, kind) in enumerate(zip(data.images[:600], data.target[:600], strict=True)):
        path = folder / "pictures" / str(kind) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.uint8(pixels / 16 * 255)).save(path)


def load(folder: Path) -> None:
    """Write the hourly load and temperature of 100 days: a daily and a weekly wave with autocorrelated noise."""
    draw, hours = np.random.default_rng(1), np.arange(2400)
    noise = np.zeros(2400)
    for hour in range(1, 2400):
        noise[hour] = 0.8 * noise[hour - 1] + 0.2 * draw.standard_normal()
    temperature = 10 + 5 * np.sin(2 * np.pi * hours / 24 - 2) + draw.standard_normal(2400)
    wave = 3 * np.sin(2 * np.pi * hours / 24) + 2 * np.sin(2 * np.pi * hours / 168)
    rows = zip(hours, np.round(50 + wave - 0.2 * temperature + noise, 4), np.round(temperature, 4), strict=True)
    write(folder / "load.csv", ["hour", "load", "temperature"], rows)


def wines(folder: Path) -> None:
    """Write eleven measurements, cultivar and alcohol in percent of 178 wines."""
    data = datasets.load_wine()
    rows = [[*values[1:12], f"cultivar_{kind}", values[0]] for values, kind in zip(data.data, data.target, strict=True)]
    names = [name.replace("/", "_") for name in data.feature_names[1:12]]
    write(folder / "wines.csv", [*names, "cultivar", "alcohol"], rows)


def rare(folder: Path) -> None:
    """Write 2,000 rows of six numbers, of which 5 percent have the class fraud."""
    x, y = datasets.make_classification(
        2000, 6, n_informative=4, n_clusters_per_class=1, weights=[0.95], flip_y=0.01, class_sep=1.0, random_state=2
    )
    kinds = np.array(["plain", "fraud"])[y]
    rows = [[*np.round(row, 5), kind] for row, kind in zip(x, kinds, strict=True)]
    write(folder / "payments.csv", [f"x{index}" for index in range(6)] + ["kind"], rows)


def noisy(folder: Path) -> None:
    """Write 1,500 points of a sine with noise that grows with x."""
    draw = np.random.default_rng(3)
    x = draw.uniform(-2, 2, 1500)
    y = np.sin(3 * x) + (0.1 + 0.2 * (x + 2)) * draw.standard_normal(1500)
    write(folder / "noisy.csv", ["x", "y"], zip(np.round(x, 5), np.round(y, 5), strict=True))


def documents(folder: Path) -> None:
    """Write the docstrings of scikit-learn's linear models as one text of about 200,000 characters."""
    said = [inspect.getdoc(getattr(linear_model, name)) for name in linear_model.__all__]
    (folder / "documents.txt").write_text("\n\n".join(filter(None, said)), encoding="utf-8")


def main() -> None:
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    for make in (patients, pictures, documents, load, wines, rare, noisy):
        make(folder)


if __name__ == "__main__":
    main()
