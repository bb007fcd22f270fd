"""metrics.csv has a row per step and a column per tag, also after a kill and a resume."""

from __future__ import annotations

import csv

import pytest

from exp.loggers.metrics_csv import CsvLogger


def rows(directory) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_step_is_a_row_and_a_tag_a_column(tmp_path):
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


def test_a_resume_keeps_earlier_rows(tmp_path):
    killed = CsvLogger(directory=tmp_path)
    for step in range(1, 9):
        killed.log_metrics({"loss/train": float(step)}, step)
    killed.save()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("9,0.1")  # as after a kill during a write
    resumed = CsvLogger(directory=tmp_path)
    resumed.purge(6)
    for step in range(6, 11):
        resumed.log_metrics({"loss/train": -float(step), "loss/val": 0.5}, step)
    resumed.end("completed")
    assert [(int(row["step"]), float(row["loss/train"])) for row in rows(tmp_path)] == [
        (step, float(step) if step < 6 else -float(step)) for step in range(1, 11)
    ]
    assert [row["loss/val"] for row in rows(tmp_path)] == [""] * 5 + ["0.5"] * 5


def test_a_repeated_test_has_one_row(tmp_path):
    for loss in (0.5, 0.25):
        logger = CsvLogger(directory=tmp_path)
        if loss == 0.5:
            logger.log_metrics({"loss/train": 1.0}, 6)
            logger.save()
            logger.log_metrics({"loss/train": 1.0, "loss/val": 2.0}, 7)
        logger.save()  # as before the test stage
        logger.log_metrics({"loss/test": loss}, 7)
        logger.end("completed")
    assert [list(row.values()) for row in rows(tmp_path)] == [["6", "1.0", "", ""], ["7", "1.0", "2.0", "0.25"]]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    logger = CsvLogger(directory=tmp_path / "file")
    logger.log_metrics({"loss/train": 1.0}, 1)
    with pytest.raises(FileExistsError):
        logger.save()


def test_a_row_with_more_values_replaces_the_file(tmp_path):
    """A kill while a row is rewritten in place would lose the row."""
    logger = CsvLogger(directory=tmp_path)
    logger.log_metrics({"loss/train": 1.0}, 1)
    logger.end("completed")
    with (tmp_path / "metrics.csv").open() as before:
        logger.log_metrics({"loss/val": 2.0}, 1)
        logger.end("completed")
        assert before.read() == "step,loss/train\n1,1.0\n"
    (row,) = rows(tmp_path)
    assert (row["loss/train"], row["loss/val"]) == ("1.0", "2.0")
