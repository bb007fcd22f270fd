"""The table of a sweep in files and on the screen."""

import csv
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from exp.config.found_run import find_run
from exp.sweeps.results import (
    Row,
    again_command,
    best_repeats,
    best_row,
    print_table,
    repeats_of,
    rich_tables,
    write_table,
)


def row(job: int, value: float, *, monitor: str = "loss/val", mode: str = "min", **more) -> Row:
    fields = {"swept": {}, "status": "completed", **more}
    return Row(job=job, monitor=monitor, mode=mode, value=value, **fields)


def repeated() -> list[Row]:
    """Return rows of two rates with three seeds: the second rate has the best job, the first one the better mean."""
    values = {"0.1": [0.4, 0.5, 0.45], "1": [0.1, 0.9, 1.3]}
    pairs = [(rate, str(seed), value) for rate, own in values.items() for seed, value in enumerate(own)]
    return [
        row(job, value, swept={"optimizer.lr": rate, "seed": seed, "name": "a"})
        for job, (rate, seed, value) in enumerate(pairs)
    ]


def written(directory: Path, rows: list[Row], **options) -> list[dict[str, str]]:
    """Write the table and read table.csv."""
    write_table(directory, rows, **options)
    with (directory / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def printed(tmp_path, capsys):
    """A function that prints the table and returns what the screen shows."""

    def show(rows: list[Row], **options) -> str:
        capsys.readouterr()
        print_table(tmp_path, rows, **options)
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 0)])
def test_the_best_job_is_a_completed_one(mode, best):
    rows = [
        row(0, 3.0, mode=mode), row(1, math.nan, mode=mode), row(2, 1.0, mode=mode),
        row(3, 0.5 if mode == "min" else 9.0, mode=mode, status="failed"),
    ]  # fmt: skip
    assert best_row(rows).job == best
    assert best_row([row(0, math.nan)]) is None
    assert best_row([]) is None
    assert best_row([row(0, 1.0), row(1, 2.0, monitor="accuracy/val")]) is None


def test_cells_are_quoted_in_every_format(tmp_path):
    rows = [
        row(0, 0.5, swept={"hooks": "[a,b]", "name": 'x|y "z"'}, metrics={"loss/val": 0.5}, error="line\nline"),
        row(1, 0.25, swept={"seed": "3"}, metrics={"accuracy/val": 1.0}),
    ]
    read = written(tmp_path, rows)
    assert read[0]["hooks"] == "[a,b]"
    assert read[0]["name"] == 'x|y "z"'
    assert read[0]["error"] == "line\nline"
    assert (read[1]["seed"], read[1]["hooks"], read[1]["accuracy/val"]) == ("3", "", "1")
    page = (tmp_path / "table.md").read_text().splitlines()
    table = [line for line in page if line.startswith("|")]
    assert len(table) == 4
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.md"]


def test_the_command_for_the_best_job_is_quoted(tmp_path, capsys, monkeypatch):
    directory = tmp_path / "it's a sweep"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "config.yaml").write_text("seed: 0\n")
    (directory / "1" / "overrides.yaml").write_text("[]")
    rows = [row(0, 0.5, swept={"seed": "1"}, directory="0"), row(1, 0.25, swept={"seed": "2"}, directory="1")]
    print_table(directory, rows)
    write_table(directory, rows)
    shown = capsys.readouterr().out
    assert "best       job 1, loss/val 0.25  seed=2" in shown
    assert "python -m exp.dashboard" in shown
    assert "python -m exp.report" in shown
    command = next(line for line in shown.splitlines() if line.startswith("again"))
    assert command.split(maxsplit=1)[1] in (directory / "table.md").read_text()
    *words, named = shlex.split(command)[1:]
    assert words == ["python", "-m", "exp.train"]
    assert find_run([named]) == (Path("it's a sweep/1"), [])
    assert again_command(tmp_path, rows[0]) == "python -m exp.train from_run=0"
    monkeypatch.chdir(directory)
    assert again_command(tmp_path, rows[0]) == f"python -m exp.train from_run={tmp_path / '0'}"


def test_jobs_without_a_value_have_empty_cells(tmp_path, printed):
    rows = [
        row(0, 0.5, step=120, peak_memory_mib=411.7),
        row(1, math.nan, status="interrupted", step=3, seconds=2.5),
        row(2, math.nan, status="not started"),
    ]
    names = ("best loss/val", "step", "peak_mib", "seconds")
    assert [tuple(line[name] for name in names) for line in written(tmp_path, rows)] == [
        ("0.5", "120", "412", "0.0"), ("", "", "", "2.5"), ("", "", "", ""),
    ]  # fmt: skip
    shown = printed(rows)
    assert "nan" not in shown


def test_the_page_has_fewer_columns_than_the_csv(tmp_path):
    metrics = {"loss/val": 0.5, "loss/val/penalty": 0.1, "accuracy/test": 0.9, "gradients/norm/total": 3.0}
    (read,) = written(tmp_path, [row(0, 0.5, metrics=metrics)])
    assert metrics.keys() <= read.keys()
    page = (tmp_path / "table.md").read_text()
    assert "| loss/val | loss/val/penalty |" in page
    assert "accuracy/test" in page
    assert "gradients" not in page
    # Keys with equal values in all jobs have no column, except in a sweep of one job.
    assert "name" not in written(tmp_path, repeated())[0]
    assert {"name", "seed"} <= written(tmp_path, repeated()[:1])[0].keys()


def test_repeats_are_summarized(tmp_path, printed):
    rows = repeated()
    first, second = repeats_of(rows, over="seed")
    assert first.swept == {"optimizer.lr": "0.1", "name": "a"}
    assert first.mean == pytest.approx(np.mean(first.values), rel=1e-12)
    assert first.deviation == pytest.approx(np.std(first.values, ddof=1), rel=1e-12)
    assert second.deviation == pytest.approx(np.std([0.1, 0.9, 1.3], ddof=1), rel=1e-12)
    assert best_row(rows).job == 3
    assert best_repeats(rows, over="seed").rows == rows[:3]
    write_table(tmp_path, rows, repeat_over="seed")
    shown = printed(rows, repeat_over="seed")
    assert "best       job 0, job 1, job 2: loss/val 0.45 ± 0.05, the mean of 3 over seed  optimizer.lr=0.1" in shown
    page = (tmp_path / "table.md").read_text()
    assert "## Over seed\n\n| optimizer.lr | mean loss/val | deviation | n |\n" in page
    assert "| 0.1          | 0.45          | 0.05      | 3 |" in page
    assert "│ 0.766667" in shown


def test_repeats_without_a_value_do_not_count(printed):
    rows = repeated()
    lucky = [*rows[:4], *(row(one.job, math.nan, swept=one.swept, status="failed") for one in rows[4:])]
    single = repeats_of(lucky, over="seed")[1]
    assert (single.mean, single.values) == (0.1, [0.1])
    assert math.isnan(single.deviation)
    assert best_repeats(lucky, over="seed").swept["optimizer.lr"] == "0.1"
    assert best_repeats([row(0, math.nan)], over="seed") is None
    rows[1] = row(1, math.nan, swept=rows[1].swept, status="no report")
    rows[5] = row(5, math.nan, swept=rows[5].swept, status="failed")
    shown = printed(rows, repeat_over="seed")
    assert "best       job 0, job 2: loss/val 0.425 ± 0.035, the mean of 2 over seed" in shown


def test_forty_runs_take_a_line_each(capsys):
    rows = []
    for place in range(40):
        swept = {f"layer{other}.out_features": "8" if other == place else "(default)" for other in range(40)}
        swept |= {"optimizer.lr": f"{1 / (place + 3)}", "data.dataset.path": f"/data/{place}.csv" * 4}
        named = {"directory": f"train/2026-01-31/12-00-{place:02}", "is_job": False, "swept": swept}
        rows.append(row(place, (place % 7) / 8, mode="max", **named))
    (table,) = rich_tables(rows)
    Console(width=80).print(table)
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert len(cells) == 40
    assert max(map(len, lines)) <= 80
    assert [line[0][-2:] for line in cells[:5]] == ["06", "13", "20", "27", "34"]
