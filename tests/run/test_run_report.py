"""report.json is valid JSON, and read_report returns what was written."""

import json
import math

import pytest

from exp.errors import RunError
from exp.run_report import Report, as_markdown, read_report, write_report


def a_report(directory, **changed):
    values = {"status": "completed", "directory": str(directory), "metrics": {"loss/val": 0.5}} | changed
    return Report(**values)


def test_a_written_report_is_read_back(tmp_path):
    report = a_report(tmp_path, best={"metric": "loss/val", "value": 0.25, "step": 3, "checkpoint": "best.ckpt"})
    write_report(report)
    assert read_report(tmp_path) == report


def test_nan_is_written_as_valid_json(tmp_path):
    write_report(a_report(tmp_path, metrics={"loss/val": math.nan, "loss/train": math.inf}))

    def refuse(word):
        raise AssertionError(word)

    plain = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert plain["metrics"] == {"loss/val": "nan", "loss/train": "inf"}
    assert math.isnan(read_report(tmp_path).metrics["loss/val"])


def test_the_monitored_value_is_best_or_last_or_nan(tmp_path):
    best = {"metric": "loss/val", "value": 0.25, "step": 3, "checkpoint": "best.ckpt"}
    assert a_report(tmp_path, best=best).monitored == 0.25
    assert a_report(tmp_path).monitored == 0.5
    assert math.isnan(a_report(tmp_path, metrics={}).monitored)


def test_markdown_names_the_error_and_the_metrics(tmp_path):
    text = as_markdown(a_report(tmp_path, status="failed", error={"type": "OSError", "message": "no space"}))
    assert text.startswith("# failed")
    assert "no space" in text
    assert "| loss/val | 0.5 |" in text
    assert "python -m exp.dashboard ." in text  # in the directory of the run


def test_a_directory_without_a_report_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"report\.json is not there"):
        read_report(tmp_path)
