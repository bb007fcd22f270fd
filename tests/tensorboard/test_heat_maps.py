"""The colors of heat maps show the numbers of table.csv, also after a resume; a run has at most 20 scalars."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp
from exp.hooks.figures import DARK, HIGH, LIGHT, LOST, LOW, MOST_ROWS, heat_map
from exp.hooks.gradients import HEALTHY_NORM, HEALTHY_RATIO
from exp.hooks.hook import Hook
from exp.hooks.panels import Column, Healthy
from exp.loggers.heat_maps import MOST_COLUMNS, HeatMaps, kept_heat_map

WHITE = (255, 255, 255)
FAST = (*("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1"), "test=false")


def cells(picture: np.ndarray, rows: int, columns: int) -> list[list[tuple[int, ...]]]:
    """Return the colors of all cells in a picture with an empty name in its first row and a colored first cell."""
    top = 23
    left = int(np.flatnonzero((picture[top] != 255).any(1))[0])
    key = tuple(picture[top, left])
    wide = 1 + next(n for n in range(1, 99) if tuple(picture[top, left + n + 1]) != key)
    high = 1 + next(n for n in range(1, 99) if tuple(picture[top + n + 1, left]) != key)
    return [
        [tuple(picture[top + row * high + high // 2, left + column * wide + wide // 2]) for column in range(columns)]
        for row in range(rows)
    ]


def test_healthy_numbers_are_gray_and_others_colored():
    numbers = np.array([
        [1e-3, 1e-1, 1e1],
        [1e-9, 0.0, 1e3],
        [np.inf, np.nan, 1e-2],
    ])  # fmt: skip
    healthy = Healthy(low=1e-6, high=100.0)
    picture = heat_map(numbers, names=["", "b", "c"], steps=[1, 10, 20], healthy=healthy, title="norms")
    grey = {power: (round(LIGHT + (DARK - LIGHT) * (power + 3) / 4),) * 3 for power in (-3, -2, -1, 1)}
    assert cells(picture, 3, 3) == [
        [grey[-3], grey[-1], grey[1]],
        [LOW, LOW, HIGH],
        [LOST, WHITE, grey[-2]],
    ]  # fmt: skip


def test_the_least_healthy_of_many_rows_is_shown():
    rows = 3 * MOST_ROWS
    numbers = np.ones((rows, 2))
    numbers[300 * 3 + 1, 0], numbers[0, 1] = 1e-9, 2.0
    picture = heat_map(numbers, names=[""] * rows, steps=[1, 2], healthy=HEALTHY_NORM, title="")
    assert (picture == LOW).all(2).sum() > 0
    assert picture.shape[0] < MOST_ROWS + 200


def columns(maps: HeatMaps, steps: range, *, first: float = 1.0) -> None:
    for step in steps:
        values = torch.tensor([first * step, 0.5])
        maps.replace_columns({"gradients/norm": Column(("a.weight", "b"), values, HEALTHY_NORM)}, step)


def test_a_resume_continues_table_and_picture(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for directory, parts in ((unbroken, [(1, range(1, 9))]), (broken, [(1, range(1, 7)), (5, range(5, 9))])):
        directory.mkdir()
        for first, steps in parts:
            maps = HeatMaps(directory)
            maps.begin(first)
            columns(maps, steps)
            (shown,) = maps.end().values()
        if directory == unbroken:
            expected = shown["gradients/norm"].draw().sheet()
    assert (broken / "table.csv").read_text() == (unbroken / "table.csv").read_text()
    assert (shown["gradients/norm"].draw().sheet() == expected).all()


def test_a_picture_of_a_long_run_is_thinned(tmp_path):
    maps = HeatMaps(tmp_path)
    columns(maps, range(1, 2 * MOST_COLUMNS), first=1e-4)
    ((step, _),) = maps.end().items()
    steps = kept_heat_map(tmp_path, "gradients/norm").steps
    # The last column belongs to the step of the picture.
    assert step == steps[-1]
    assert {*np.diff(steps[:-1])} == {2}
    assert MOST_COLUMNS / 2 <= len(steps) <= MOST_COLUMNS
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 2 * MOST_COLUMNS


def test_a_table_that_cannot_be_written_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    maps = HeatMaps(tmp_path / "file")
    for first in (1, 5):
        columns(maps, range(first, first + 4))
        maps.save()
    assert len([one for one in caplog.records if "table.csv" in one.getMessage()]) == 1
    assert maps.end() == {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("run"))
        report = exp.fit(exp.compose([*FAST, "hooks=[gradients,activations]", "trainer.max_epochs=5"]))
        yield Path(report.directory)


@pytest.mark.parametrize(
    ("tag", "healthy"), [("gradients/norm", HEALTHY_NORM), ("gradients/update_ratio", HEALTHY_RATIO)]
)
def test_a_picture_shows_the_numbers_of_the_table(run, tag, healthy):
    with (run / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [name.removeprefix(f"{tag}/") for name in rows[0] if name.startswith(f"{tag}/")]
    assert len(names) == 6
    numbers = np.array([[float(row[f"{tag}/{name}"]) for row in rows] for name in names])
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(1, 21))
    expected = heat_map(numbers, names=names, steps=steps, healthy=healthy, title=tag)
    read = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {"activations/std", "activations/dead_units"} <= {*read.Tags()["images"]}
    assert not [tag for tag in read.Tags()["scalars"] if tag.startswith("activations/")]
    image = read.Images(tag)[-1]
    shown = np.array(Pillow.open(io.BytesIO(image.encoded_image_string)).convert("RGB"))
    assert image.step == 20
    # Numbers in the table have seven digits, so a gray value may differ by one.
    assert np.abs(shown.astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=lenet", "+hooks=activations", "precision=fp16", "trainer.gradient_clip_val=1.0"],
        pytest.param(
            ["model=gpt", "data=text", "data.dataset.block_size=8", "precision=fp16", "data.dataset.files=text.txt"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_has_at_most_twenty_scalars(tmp_path, monkeypatch, overrides):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 60)
    report = exp.fit(exp.compose([*FAST[:-1], "trainer.limit_test_batches=1", *overrides]))
    scalars = EventAccumulator(str(Path(report.directory) / "tensorboard")).Reload().Tags()["scalars"]
    assert len([tag for tag in scalars if not tag.startswith("_hparams_/")]) <= 20
    assert {"loss/train", "loss/val", "loss/test", "gradients/norm/total", "precision/loss_scale"} <= {*scalars}


def test_a_period_follows_the_length_of_the_run():
    class Mine(Hook):
        longest = {"every_n_steps": 50}

    found = []
    for total in (None, 7, 100, 10**6):
        hook = Mine(every_n_steps="auto")
        hook.fit_periods(total)
        found.append(hook.every_n_steps)
    assert found == [50, 1, 5, 50]
    with pytest.raises(ValueError, match="every_n_steps is auto; expected a whole number of steps, 1 or more"):
        Hook(every_n_steps="auto")


def test_missing_and_infinite_gradients_differ(tmp_path):
    maps = HeatMaps(tmp_path)
    maps.replace_columns({"g": Column(("a", "b"), torch.tensor([1.0, math.nan]), HEALTHY_NORM)}, 1)
    maps.replace_columns({"g": Column(("b", "c"), torch.tensor([math.inf, 2.0]), HEALTHY_NORM)}, 2)
    maps.save()
    numbers = kept_heat_map(tmp_path, "g").numbers
    np.testing.assert_array_equal(numbers, [[1.0, np.nan], [np.inf, np.inf], [np.nan, 2.0]])
    assert (tmp_path / "table.csv").read_text().splitlines() == ["step,g/a,g/b,g/c", "1,1.0,nan,", "2,,inf,2.0"]


def test_a_resume_without_a_whole_table_draws_nothing(tmp_path, caplog):
    (tmp_path / "table.csv").write_text("step,gradients/norm/b\nnot a step,,\n")
    maps = HeatMaps(tmp_path)
    maps.begin(3)
    columns(maps, range(3, 5))
    assert maps.end() == {}
    assert "table.csv" in caplog.text


def test_columns_of_a_test_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "perclass.py").write_text(PER_CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["+hooks.mine={_target_: perclass.PerClass}", "security.allow=[perclass]", "trainer.limit_test_batches=1"]
    report = exp.fit(exp.compose([*FAST[:-1], *words]))
    header = (Path(report.directory) / "table.csv").read_text().splitlines()[0]
    assert {"share/val/a", "share/test/a"} <= {*header.split(",")}
    images = EventAccumulator(str(Path(report.directory) / "tensorboard")).Reload().Tags()["images"]
    assert {"share/val", "share/test"} <= {*images}


PER_CLASS = """
from exp.hooks.hook import Hook
from exp.hooks.panels import Column, Healthy


class PerClass(Hook):
    def after_evaluation(self, stage, gather):
        return {f"share/{stage}": Column.of({"a": 0.1, "b": 0.9}, healthy=Healthy())}
"""
