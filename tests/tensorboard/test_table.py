"""The table of a run: what csv and the event file of the same run hold is the same, over a kill and a resume too."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest
import torch

from exp.errors import RunError
from exp.hooks.panels import Histogram, Text
from exp.loggers.metrics_csv import CsvLogger


def rows(directory) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_a_step_and_a_column_a_tag(tmp_path):
    logger = CsvLogger(directory=tmp_path, flush_seconds=0.0)
    for step in range(1, 4):
        logger.log_metrics({"loss/train": 1 / step}, step)
    logger.log_metrics({"loss/val": float("nan"), "accuracy/val": 0.1 + 0.2}, 3)
    logger.log_metrics({"loss/train": 0.25, "with, comma": 1.0}, 4)
    logger.finalize("success")
    assert rows(tmp_path) == [
        {"step": "1", "loss/train": "1.0", "loss/val": "", "accuracy/val": "", "with, comma": ""},
        {"step": "2", "loss/train": "0.5", "loss/val": "", "accuracy/val": "", "with, comma": ""},
        {"step": "3", "loss/train": repr(1 / 3), "loss/val": "nan", "accuracy/val": repr(0.1 + 0.2), "with, comma": ""},
        {"step": "4", "loss/train": "0.25", "loss/val": "", "accuracy/val": "", "with, comma": "1.0"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resume_keeps_the_rows_before_it_and_writes_the_others_anew(tmp_path):
    killed = CsvLogger(directory=tmp_path)
    for step in range(1, 9):
        killed.log_metrics({"loss/train": float(step)}, step)
    killed.save()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("9,0.1")  # the kill came in the middle of a row
    resumed = CsvLogger(directory=tmp_path)
    resumed.purge(6)
    for step in range(6, 11):
        resumed.log_metrics({"loss/train": -float(step), "loss/val": 0.5}, step)
    resumed.end("completed")
    assert [(int(row["step"]), float(row["loss/train"])) for row in rows(tmp_path)] == [
        (step, float(step) if step < 6 else -float(step)) for step in range(1, 11)
    ]
    assert [row["loss/val"] for row in rows(tmp_path)] == [""] * 5 + ["0.5"] * 5


def test_a_test_that_is_made_again_has_one_row(tmp_path):
    for loss in (0.5, 0.25):
        logger = CsvLogger(directory=tmp_path)
        if loss == 0.5:
            logger.log_metrics({"loss/train": 1.0}, 6)
            logger.save()
            logger.log_metrics({"loss/train": 1.0, "loss/val": 2.0}, 7)
        logger.save()  # before the test
        logger.log_metrics({"loss/test": loss}, 7)
        logger.end("completed")
    assert [list(row.values()) for row in rows(tmp_path)] == [["6", "1.0", "", ""], ["7", "1.0", "2.0", "0.25"]]


def test_a_validation_that_a_resumed_run_makes_again_has_one_row(tmp_path):
    for step in (1, 3):
        logger = CsvLogger(directory=tmp_path)
        logger.purge(step)
        logger.log_metrics({"loss/val": 0.5}, 2)
        logger.log_metrics({"loss/train": 1.0}, 3)
        logger.end("completed")
    assert [row["step"] for row in rows(tmp_path)] == ["2", "3"]


def test_what_a_table_cannot_hold_is_said_once(tmp_path, caplog):
    logger = CsvLogger(directory=tmp_path)
    with caplog.at_level(logging.INFO):
        for step in (1, 2):
            logger.log_panels({"gradients/histogram/a": Histogram.of(torch.ones(3)), "note": Text("a")}, step)
    assert [record.message for record in caplog.records] == [
        "logger csv cannot show a Histogram: gradients/histogram/a and its like are left out",
        "logger csv cannot show a Text: note and its like are left out",
    ]


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    logger = CsvLogger(directory=tmp_path / "file")
    logger.log_metrics({"loss/train": 1.0}, 1)
    with pytest.raises(RunError, match=r"cannot be written to .*metrics\.csv: .*take out csv from the loggers"):
        logger.save()
    logger.log_metrics({"loss/train": 1.0}, 2)
    logger.end("failed")


def test_a_row_that_gets_more_values_is_replaced_in_one(tmp_path, monkeypatch):
    """Taken away first and written again behind it, a kill between the two would lose it."""
    logger = CsvLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    logger.end("completed")
    opened = Path.open

    def refused(path, mode="r", *rest, **named):
        assert mode != "a", f"{path} is written to behind its replacement"
        return opened(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", refused)
    logger.log_metrics({"loss/val": 2.0}, 1)
    logger.end("completed")
    (row,) = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert (row["loss/train"], row["loss/val"]) == ("1.0", "2.0")
