"""docs/how-to.md to the letter: its files and commands, and beside each result another way on the same samples."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn import compose, impute, linear_model, pipeline, preprocessing
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score

from exp.data.data import Data
from exp.data.delimited import read_sheet
from exp.data.splits import random_splits
from exp.data.tokens import Tokens

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FILE = re.compile(r"^```(yaml|python) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^python -m exp\.train (.+)$", re.MULTILINE)
PARTS = {"train": 0.7, "val": 0.15, "test": 0.15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A newcomer's: the page's files, and what docs/how_to_data.py makes."""
    place = tmp_path_factory.mktemp("how_to")
    for _, path, text in FILE.findall(PAGE):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    spec = importlib.util.spec_from_file_location("how_to_data", ROOT / "docs" / "how_to_data.py")
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        data.main()
        yield place


@pytest.mark.parametrize("title", SECTIONS)
def test_a_task_takes_at_most_20_lines_of_yaml_and_20_of_python(title: str) -> None:
    lines = {"yaml": 0, "python": 0}
    for kind, _, text in FILE.findall(SECTIONS[title]):
        lines[kind] += sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines())
    assert lines["yaml"] <= 20
    assert lines["python"] <= 20
    assert COMMAND.findall(SECTIONS[title])


def run(commands: Any, folder: Path, title: str, *more: str) -> dict[str, float]:
    """The last values of the section's command, by tag."""
    (line,) = COMMAND.findall(SECTIONS[title])
    before = set(folder.glob("outputs/**/report.json"))
    done = commands.run(*shlex.split(line), "trainer.enable_progress_bar=false", *more, cwd=folder)
    assert done.returncode == 0, done.stderr
    (report,) = set(folder.glob("outputs/**/report.json")) - before
    found: dict[str, float] = json.loads(report.read_text())["metrics"]
    return found


def told(name: str, **figures: float) -> None:
    print(name, {key: round(value, 3) for key, value in figures.items()})


def parts(length: int, sizes: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The indices of train and test, as a run draws them."""
    found = random_splits(sizes or PARTS, length=length, seed=0)
    return found["train"].numpy(), found["test"].numpy()


def column(path: Path, name: str) -> list[str]:
    sheet = read_sheet(path, delimiter=",", header=True)
    return list(sheet.texts(sheet.column(name, key="")))


def table(path: Path, names: list[str]) -> np.ndarray:
    rows = [column(path, name) for name in names]
    return np.array([[float(cell) if cell else np.nan for cell in row] for row in rows]).T


def logistic(**options: Any) -> Any:
    scaler = preprocessing.StandardScaler()
    return pipeline.make_pipeline(scaler, linear_model.LogisticRegression(max_iter=2000, **options))


def header(path: Path) -> list[str]:
    return path.read_text().partition("\n")[0].strip().split(",")


def test_a_table_with_holes(commands: Any, folder: Path) -> None:
    found = run(commands, folder, "A table with missing values and words")["accuracy/test"]
    file = folder / "data" / "patients.csv"
    names = header(file)[:8]
    x = np.array([*table(file, names).T, column(file, "laboratory")], dtype=object).T
    y, (train, test) = np.array(column(file, "diagnosis")), parts(569)
    numbers = pipeline.make_pipeline(impute.SimpleImputer(), preprocessing.StandardScaler())
    encode = compose.ColumnTransformer([("n", numbers, list(range(8))), ("w", preprocessing.OneHotEncoder(), [8])])
    model = pipeline.make_pipeline(encode, linear_model.LogisticRegression(max_iter=2000)).fit(x[train], y[train])
    told("holes", found=found, reference=model.score(x[test], y[test]))
    assert found > model.score(x[test], y[test]) - 0.04


def test_pictures_and_then_another_task_for_their_network(commands: Any, folder: Path) -> None:
    found = run(commands, folder, "Pictures in folders")["accuracy/test"]
    files = [file for kind in sorted((folder / "data" / "pictures").iterdir()) for file in sorted(kind.iterdir())]
    x = np.array([np.array(Image.open(file)).ravel() for file in files])
    y = np.array([file.parent.name for file in files])
    train, test = parts(600)
    score = logistic().fit(x[train], y[train]).score(x[test], y[test])
    told("pictures", found=found, reference=score)
    assert found > score - 0.06

    title = "Another task for a trained body"
    moved = run(commands, folder, title)["accuracy/test"]
    thawed = ("weights.from=null", "freeze.parameters=[]", "~freeze.unfreeze.0", "~freeze.unfreeze.30")
    fresh = run(commands, folder, title, *thawed)["accuracy/test"]
    pixels, digits = load_digits(return_X_y=True)
    x, y = pixels[600:], digits[600:] % 2
    train, test = parts(len(x), {"train": 40, "val": 157, "test": 1000})
    score = logistic().fit(x[train], y[train]).score(x[test], y[test])
    told("transfer", found=moved, fresh=fresh, reference=score)
    assert moved > max(score, fresh) + 0.01


def test_a_loss_and_a_metric_of_ones_own(commands: Any, folder: Path) -> None:
    found = run(commands, folder, "A loss and a metric of your own")["top_two/test"]
    x, y = load_digits(return_X_y=True)
    train, test = parts(len(x))
    best = np.argsort(logistic().fit(x[train], y[train]).predict_proba(x[test]))[:, -2:]
    told("focal", found=found, reference=float((best == y[test][:, None]).any(-1).mean()))
    assert found > (best == y[test][:, None]).any(-1).mean() - 0.02


def test_two_heads(commands: Any, folder: Path) -> None:
    found = run(commands, folder, "Two heads")
    file = folder / "data" / "wines.csv"
    x, kind, strength = (
        table(file, header(file)[:11]),
        np.array(column(file, "cultivar")),
        table(file, ["alcohol"])[:, 0],
    )
    train, test = parts(len(kind))
    score = logistic().fit(x[train], kind[train]).score(x[test], kind[test])
    scaled = (strength - strength[train].mean()) / strength[train].std()
    ridge = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.Ridge())
    error = np.abs(ridge.fit(x[train], scaled[train]).predict(x[test]) - scaled[test]).mean()
    told("heads", found=found["accuracy/test"], reference=score, mae=found["mae/test"], ridge=error)
    assert found["accuracy/test"] > score - 0.08
    assert found["mae/test"] < 1.3 * error


def test_text_in_tokens(commands: Any, folder: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
    found = run(commands, folder, "Text in tokens")["perplexity/test"]
    dataset = Tokens(files=str(folder / "data" / "documents.txt"), vocabulary_size=500, block_size=32)
    data = Data(dataset=dataset, parts={"train": 0.8, "val": 0.1, "test": 0.1})
    train, val, test = (data.part(name).tokens.numpy() for name in ("train", "val", "test"))
    pairs = np.zeros((500, 500))
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    alone = (pairs.sum(0) + 1) / (pairs.sum() + 500)
    after = pairs / np.maximum(pairs.sum(1, keepdims=True), 1)

    def perplexity(tokens: np.ndarray, share: float) -> float:
        first, second = tokens[:-1], tokens[1:]
        return float(np.exp(-np.log(share * after[first, second] + (1 - share) * alone[second]).mean()))

    share = min(np.linspace(0.05, 0.95, 19), key=lambda one: perplexity(val, one))
    told("words", found=found, reference=perplexity(test, share))
    assert found < perplexity(test, share)


def test_a_forecast(commands: Any, folder: Path) -> None:
    found = run(commands, folder, "A forecast")["mae/test"]
    rows = table(folder / "data" / "load.csv", ["load", "temperature"])
    ends = np.cumsum([round(2400 * share) for share in (0.7, 0.15, 0.15)])
    rows = (rows - rows[: ends[0]].mean(0)) / rows[: ends[0]].std(0)

    def windows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        starts = range(first, last - 48 - 6 + 1)
        return (
            np.array([rows[one : one + 48].ravel() for one in starts]),
            np.array([rows[one + 48 : one + 54, 0] for one in starts]),
        )

    (x, y), (far_x, far_y) = windows(0, ends[0]), windows(ends[1], ends[2])
    ridge = np.abs(linear_model.Ridge().fit(x, y).predict(far_x) - far_y).mean()
    again = np.abs(far_x[:, -2:-1] - far_y).mean()
    told("forecast", found=found, ridge=ridge, again=again)
    assert found < 1.3 * ridge
    assert found < 0.5 * again


def test_sequences_of_several_lengths(commands: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(commands, folder, "Sequences of several lengths")["accuracy/test"]
    monkeypatch.syspath_prepend(str(folder))
    chains = importlib.import_module("chains").Chains()
    counts = np.zeros((len(chains), 64))
    for place, (row, _) in enumerate(chains.rows):
        np.add.at(counts[place], (row[:-1] * 8 + row[1:]).numpy(), 1)
    y, (train, test) = np.array([int(kind) for _, kind in chains.rows]), parts(len(chains))
    score = linear_model.LogisticRegression(max_iter=2000).fit(counts[train], y[train]).score(counts[test], y[test])
    told("lengths", found=found, reference=score)
    assert found > score - 0.04


def test_a_rare_class(commands: Any, folder: Path) -> None:
    found = run(commands, folder, "A rare class")["accuracy/test"]
    file = folder / "data" / "payments.csv"
    x, y = table(file, header(file)[:6]), np.array(column(file, "kind"))
    train, test = parts(len(y))
    guesses = logistic(class_weight="balanced").fit(x[train], y[train]).predict(x[test])
    told("rare", found=found, reference=balanced_accuracy_score(y[test], guesses))
    assert found > balanced_accuracy_score(y[test], guesses) - 0.05


def test_how_sure_a_network_is(commands: Any, folder: Path) -> None:
    found = run(commands, folder, "How sure the network is")["loss/test"]
    x, y = table(folder / "data" / "noisy.csv", ["x", "y"]).T
    train, test = parts(len(y))
    scale = y[train].std()

    def likelihood(spread: Any, rows: np.ndarray) -> float:
        wrong = (y[rows] - np.sin(3 * x[rows])) / scale
        return float(np.mean(0.5 * (np.log((spread / scale) ** 2) + wrong**2 / (spread / scale) ** 2)))

    law = likelihood(0.1 + 0.2 * (x[test] + 2), test)
    constant = likelihood(np.sqrt(np.mean((y[train] - np.sin(3 * x[train])) ** 2)), test)
    told("uncertain", found=found, law=law, constant=constant)
    assert law - 0.02 < found < constant
