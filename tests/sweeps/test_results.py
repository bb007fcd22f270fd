"""The table of a sweep as a file and on the screen."""

import csv
import io
import math

import pytest

from exp.sweeps.results import Row, best_row, print_table, write_table


def row(
    job: int, value: float, *, status: str = "completed", monitor: str = "loss/val", mode: str = "min", **more
) -> Row:
    return Row(job=job, swept=more.pop("swept", {}), status=status, monitor=monitor, mode=mode, value=value, **more)


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 0)])
def test_the_best_is_the_smallest_or_largest_of_the_completed(mode, best):
    rows = [
        row(0, 3.0, mode=mode), row(1, math.nan, mode=mode), row(2, 1.0, mode=mode),
        row(3, 0.5 if mode == "min" else 9.0, mode=mode, status="failed"),
    ]  # fmt: skip
    assert best_row(rows).job == best


def test_there_is_no_best_without_a_value_or_between_different_tags():
    assert best_row([row(0, math.nan)]) is None
    assert best_row([]) is None
    assert best_row([row(0, 1.0), row(1, 2.0, monitor="accuracy/val")]) is None


def test_cells_with_signs_of_the_formats_survive(tmp_path):
    rows = [
        row(0, 0.5, swept={"hooks": "[a,b]", "name": 'x|y "z"'}, metrics={"loss/val": 0.5}, error="line\nline"),
        row(1, 0.25, swept={"seed": "3"}, metrics={"accuracy/val": 1.0}),
    ]
    write_table(tmp_path, rows)
    read = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert read[0]["hooks"] == "[a,b]"
    assert read[0]["name"] == 'x|y "z"'
    assert read[0]["error"] == "line\nline"
    assert (read[1]["seed"], read[1]["hooks"], read[1]["accuracy/val"]) == ("3", "", "1")
    page = (tmp_path / "table.md").read_text().splitlines()
    table = [line for line in page if line.startswith("|")]
    assert len(table) == 4
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.md"]


def test_the_screen_shows_the_best_and_where_the_rest_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    print_table(tmp_path / "sweep", [row(0, 0.5, swept={"seed": "1"}), row(1, 0.25, swept={"seed": "2"})])
    shown = capsys.readouterr().out
    assert "best       job 1, loss/val 0.25  seed=2" in shown
    assert "python -m exp.dashboard sweep" in shown


def test_a_job_without_a_result_has_empty_cells(tmp_path, capsys):
    rows = [row(0, 0.5), row(1, math.nan, status="interrupted", seconds=2.5), row(2, math.nan, status="not started")]
    write_table(tmp_path, rows)
    read = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [(line["best loss/val"], line["seconds"]) for line in read] == [("0.5", "0.0"), ("", "2.5"), ("", "")]
    print_table(tmp_path, rows)
    shown = capsys.readouterr().out
    assert "nan" not in shown
    assert "not started: job 2" in shown


def test_the_page_has_losses_and_metrics_and_the_csv_what_hooks_logged_too(tmp_path):
    seen = {"loss/val": 0.5, "loss/val/penalty": 0.1, "accuracy/test": 0.9, "gradients/norm/total": 3.0}
    write_table(tmp_path, [row(0, 0.5, metrics=seen)])
    with (tmp_path / "table.csv").open() as file:
        assert seen.keys() <= next(csv.DictReader(file)).keys()
    page = (tmp_path / "table.md").read_text()
    assert "| loss/val | loss/val/penalty |" in page
    assert "accuracy/test" in page
    assert "gradients" not in page
