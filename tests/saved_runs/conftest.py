"""Fixtures of saved runs: a working directory, short runs, and tables of pets."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exp

SHORT = ("trainer.enable_progress_bar=false", "trainer.max_steps=2", "hooks=[]", "logger=[]", "test=false")
KINDS = ("ant", "bee", "cow")


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules and a conf of a user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("kept", "exported"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        shutil.copy(Path(__file__).with_name(f"{name}.py"), tmp_path)
    shutil.copytree(Path(__file__).with_name("conf"), tmp_path / "conf")
    return tmp_path


@pytest.fixture
def trained() -> Callable[..., Any]:
    """A function that trains a short run and loads it; its argument `allow` has trusted packages."""

    def train(*overrides: str, allow: tuple[str, ...] = ()):
        return exp.load(exp.fit(exp.compose([*SHORT, *overrides])).directory, allow=allow)

    return train


@pytest.fixture(scope="session")
def digits_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on data=digits, which no test changes."""
    with contextlib.chdir(tmp_path_factory.mktemp("digits")):
        return Path(exp.fit(exp.compose([*SHORT, "trainer.max_steps=20"])).directory).absolute()


@pytest.fixture
def digits(digits_directory: Path):
    """The loaded run on data=digits, which no test changes."""
    return exp.load(digits_directory)


def invent_pets(count: int, *, seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    kinds = draws.integers(0, 3, count)
    return {
        "height": draws.normal(10 * kinds, 4.0),
        "colour": np.array(["red", "green", "blue"])[draws.integers(0, 3, count)],
        "weight": draws.normal(100.0 - kinds, 1.0),
        "kind": np.array(KINDS)[kinds],
        "price": 1000.0 + 50.0 * kinds + draws.normal(size=count),
    }


def write_table(path: str | Path, columns: dict[str, np.ndarray]) -> None:
    rows = zip(*columns.values(), strict=True)
    Path(path).write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")


@pytest.fixture(scope="session")
def pets() -> Callable[..., dict[str, np.ndarray]]:
    """A function that returns the columns of a table of pets."""
    return invent_pets


@pytest.fixture(scope="session")
def write_csv() -> Callable[..., None]:
    """A function that writes columns into a CSV file."""
    return write_table


@pytest.fixture(scope="session")
def pets_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that classifies pets, which no test changes."""
    with contextlib.chdir(tmp_path_factory.mktemp("pets")):
        write_table("pets.csv", invent_pets(120, seed=0))
        table = ("data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind", "data.dataset.ignore=[price]")
        words = ("data.dataset.categorical=[colour]", "trainer.max_steps=6", "trainer.max_epochs=3")
        return Path(exp.fit(exp.compose([*SHORT, *table, *words])).directory).absolute()
