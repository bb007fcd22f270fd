"""The table of a sweep as a file and on the screen."""

import csv
import io
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

from exp.config.found_run import WHOLE, named_run
from exp.sweeps.results import (
    Row,
    again_command,
    best_repeats,
    best_row,
    print_table,
    repeats_of,
    table_cells,
    write_table,
)


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
    read = read_csv(tmp_path)
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
    assert "python -m exp.report sweep" in shown


def test_the_command_that_starts_from_the_best_is_told_and_kept_quoted_for_hydra_and_a_shell(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "it's a sweep"
    (directory / "1").mkdir(parents=True)
    whole = dict.fromkeys(WHOLE)
    (directory / "1" / "config.yaml").write_text(json.dumps(whole))
    (directory / "1" / "overrides.yaml").write_text("[]")
    rows = [row(0, 0.5, swept={"seed": "1"}, directory="0"), row(1, 0.25, swept={"seed": "2"}, directory="1")]
    print_table(directory, rows)
    write_table(directory, rows)
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("again"))
    assert command.split(maxsplit=1)[1] in (directory / "table.md").read_text()
    *words, named = shlex.split(command)[1:]
    assert words == ["python", "-m", "exp.train"]
    assert named_run([named]) == (Path("it's a sweep/1"), [])
    assert again_command(tmp_path, rows[0]) == "python -m exp.train from_run=0"
    monkeypatch.chdir(directory)
    assert again_command(tmp_path, rows[0]) == f"python -m exp.train from_run={tmp_path / '0'}"


def test_a_job_without_a_result_has_empty_cells(tmp_path, capsys):
    rows = [row(0, 0.5), row(1, math.nan, status="interrupted", seconds=2.5), row(2, math.nan, status="not started")]
    write_table(tmp_path, rows)
    read = read_csv(tmp_path)
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


def read_csv(directory) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((directory / "table.csv").read_text())))


def repeated() -> list[Row]:
    """Two rates by three seeds; the second has the best single job, the first the better mean."""
    values = {"0.1": [0.4, 0.5, 0.45], "1": [0.1, 0.9, 1.3]}
    pairs = [(rate, str(seed), value) for rate, own in values.items() for seed, value in enumerate(own)]
    return [
        row(job, value, swept={"optimizer.lr": rate, "seed": seed, "name": "a"})
        for job, (rate, seed, value) in enumerate(pairs)
    ]


def test_repeats_are_a_mean_a_sample_deviation_and_a_number_and_the_best_is_of_the_best_mean(
    tmp_path, capsys, monkeypatch
):
    rows = repeated()
    first, second = repeats_of(rows, over="seed")
    assert first.swept == {"optimizer.lr": "0.1", "name": "a"}
    assert first.mean == pytest.approx(np.mean(first.values), rel=1e-12)
    assert first.deviation == pytest.approx(np.std(first.values, ddof=1), rel=1e-12)
    assert second.deviation == pytest.approx(np.std([0.1, 0.9, 1.3], ddof=1), rel=1e-12)
    assert best_row(rows).job == 3
    assert best_repeats(rows, over="seed").rows == rows[:3]
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path, rows, repeat_over="seed")
    print_table(tmp_path, rows, repeat_over="seed")
    shown = capsys.readouterr().out
    assert "best       job 0, job 1, job 2: loss/val 0.45 ± 0.05, the mean of 3 over seed  optimizer.lr=0.1" in shown
    page = (tmp_path / "table.md").read_text()
    assert "## Over seed\n\n| optimizer.lr | mean loss/val | deviation | n |\n" in page
    assert "| 0.1 | 0.45 | 0.05 | 3 |" in page
    read = read_csv(tmp_path)
    assert [(line["mean loss/val"], line["n"]) for line in read] == [("0.45", "3")] * 3 + [("0.766667", "3")] * 3
    assert float(read[5]["deviation"]) == pytest.approx(second.deviation, rel=1e-5)


def test_a_lucky_repeat_of_which_the_others_failed_is_no_winner():
    rows = repeated()
    rows[4:] = [row(one.job, math.nan, swept=one.swept, status="failed") for one in rows[4:]]
    lucky = repeats_of(rows, over="seed")[1]
    assert (lucky.mean, lucky.values) == (0.1, [0.1])
    assert math.isnan(lucky.deviation)
    assert best_repeats(rows, over="seed").swept["optimizer.lr"] == "0.1"
    assert best_repeats([row(0, math.nan)], over="seed") is None


def test_a_repeat_without_a_value_is_none_of_the_best(tmp_path, capsys, monkeypatch):
    rows = repeated()
    rows[1] = row(1, math.nan, swept=rows[1].swept, status="no report")
    rows[5] = row(5, math.nan, swept=rows[5].swept, status="failed")
    monkeypatch.chdir(tmp_path)
    print_table(tmp_path, rows, repeat_over="seed")
    shown = capsys.readouterr().out
    assert "best       job 0, job 2: loss/val 0.425 ± 0.035, the mean of 2 over seed" in shown


@pytest.mark.parametrize("width", [200, 100, 80, 60])
def test_no_word_is_broken_on_a_narrow_screen_and_what_has_no_room_is_named(width, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    swept = {"optimizer.weight_decay": "0.01", "seed": "3"}
    metrics = {"accuracy/val": 0.98765, "f1/val": 0.5}
    rows = [
        row(
            job,
            0.123456,
            swept=swept | {"seed": str(job)},
            step=380,
            seconds=10.2,
            peak_memory_mib=823,
            metrics=metrics,
        )
        for job in range(2)
    ]
    rows[1].swept["optimizer.weight_decay"] = "0.1"
    monkeypatch.chdir(tmp_path)
    print_table(tmp_path, rows)
    title, _, rest = capsys.readouterr().out.partition("┏")
    table = rest.partition("└")[0].splitlines()
    words = {word for line in table for word in line.replace("┃", " ").replace("│", " ").split()}
    shown = {"job", "status", "completed", "seed", "0.123456", "0.01", "0.1"}
    left_out = " ".join(title.split()).partition("; columns that the screen has no room for: ")[2].split(", ")
    assert shown <= words
    assert words & {"optimizer.weight_decay", "weight_decay"}
    for name, word in {"peak_mib": "823", "seconds": "10.2", "step": "380", "accuracy/val": "0.98765"}.items():
        assert (name in left_out) == (word not in words)
    assert (left_out == [""]) == (width >= 100)


def test_what_is_swept_and_equal_everywhere_has_no_column(tmp_path):
    write_table(tmp_path, repeated())
    assert "name" not in read_csv(tmp_path)[0]
    write_table(tmp_path, repeated()[:1])  # of one job nothing differs, and all is told
    assert {"name", "seed"} <= read_csv(tmp_path)[0].keys()


def test_the_step_of_the_best_and_the_memory_are_columns_and_a_screen_has_no_empty_one(tmp_path, capsys):
    rows = [row(0, 0.5, step=120, peak_memory_mib=411.7), row(1, math.nan, status="pruned", step=3)]
    write_table(tmp_path, rows)
    read = read_csv(tmp_path)
    assert [(line["status"], line["step"], line["peak_mib"]) for line in read] == [
        ("completed", "120", "412"), ("pruned", "", ""),
    ]  # fmt: skip
    print_table(tmp_path, rows)
    assert "peak_mib" in capsys.readouterr().out
    print_table(tmp_path, [row(0, 0.5), row(1, 0.25)])
    shown = capsys.readouterr().out
    assert "peak_mib" not in shown
    assert "step" not in shown.partition("again")[0]


def test_a_drawn_number_is_short_on_the_screen_and_whole_in_the_file(tmp_path):
    drawn = "0.004430375245218269"
    rows = [
        row(0, 0.1, swept={"optimizer.lr": drawn, "seed": "1"}),
        row(1, 0.2, swept={"optimizer.lr": "1e-3", "seed": "two"}),
    ]
    header, cells = table_cells(rows, brief=True)
    place = header.index("optimizer.lr")
    assert [line[place] for line in cells] == ["0.00443038", "1e-3"]
    write_table(tmp_path, rows)
    assert drawn in (tmp_path / "table.csv").read_text()
