"""The report of any runs: a real sweep, written run directories, torn ones, and the command from the outside."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from exp import report
from exp.check.__main__ import main as check
from exp.files import holding
from exp.run_report import read_report
from exp.sweeps import charts, run_comparison
from exp.sweeps.charts import draw
from exp.sweeps.ledger import held
from exp.sweeps.run_comparison import compare
from exp.sweeps.run_records import find_runs, read_run, signature
from exp.tensorboard.event_file import records

CONFIG: dict[str, Any] = {"name": "train", "seed": 0, "monitor": "loss/val", "mode": "min", "optimizer": {"lr": 0.001}}


def write_run(
    directory: Path,
    *typed: str,
    value: float = 0.5,
    status: str = "completed",
    curves: dict[str, list[float]] | None = None,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A run directory as a run leaves it; test_a_real_sweep_... holds that it is so."""
    plain = {**CONFIG, **(config or {})}
    for text in typed:
        key, _, word = text.lstrip("+").partition("=")
        node = plain
        *above, last = key.split(".")
        for part in above:
            node[part] = dict(node[part]) if part in node else {}
            node = node[part]
        node[last] = yaml.safe_load(word) if not isinstance(node.get(last), dict) else node[last]
    (directory / "tensorboard").mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(plain))
    (directory / "overrides.yaml").write_text(yaml.safe_dump(list(typed)))
    (directory / "provenance.json").write_text(json.dumps({"overrides": list(typed)}))
    write_events(directory, curves or {"loss/val": [value + 1, value], "accuracy/val": [0.1, 1 - value / 10]})
    found = {"loss/val": value, "accuracy/val": 1 - value / 10, "throughput/step_ms": 10 / (1 + value)}
    best = {"metric": "loss/val", "value": value, "step": 20, "checkpoint": "best.ckpt"}
    told = {
        "status": status,
        "directory": str(directory),
        "metrics": found,
        "best": best,
        "wall_seconds": 3.0,
        "tags": [],
        **more,
    }
    (directory / "report.json").write_text(json.dumps(told))
    return directory


def write_events(directory: Path, curves: dict[str, list[float]]) -> None:
    events = [
        Event(step=10 * place, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
        for tag, values in curves.items()
        for place, value in enumerate(values, start=1)
    ]
    (directory / "tensorboard" / "events.out.tfevents.1").write_bytes(
        records([event.SerializeToString() for event in events])
    )


def write_sweep(directory: Path, *, seeds: int = 2) -> Path:
    """Rates by models by seeds: 0.01 with a is the best."""
    pairs = itertools.product((0.0001, 0.01, 1.0), ("a", "b"), range(seeds))
    for job, (rate, model, seed) in enumerate(pairs):
        value = abs(math.log10(rate) + 2) + 0.1 + 0.5 * (model == "b") + 0.01 * seed
        write_run(directory / str(job), f"optimizer.lr={rate}", f"model={model}", f"seed={seed}", value=value,
                  config={"model": {"_target_": "m"}})  # fmt: skip
    (directory / "sweep.json").write_text(json.dumps({"overrides": [], "search": None}))
    return directory


class Parsed(HTMLParser):
    """What a browser makes of a page: its tags, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data


def told(*arguments: str | Path) -> tuple[int, str]:
    """The status of the command, and what it printed."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        status = report.main(list(map(str, arguments)))
    return status, shown.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_a_real_sweep_is_read_as_it_was_written_and_the_command_for_the_best_runs(folder, commands, capsys):
    values = ("trainer.max_steps=3", "trainer.val_check_interval=1", "optimizer.lr=1e-3,1e-1", "seed=0,1")
    done = commands.run("-m", "sweep.jobs=1", "sweep.stack=false", *values, cwd=folder)
    assert done.returncode == 0, done.stderr
    (sweep,) = folder.glob("outputs/train/sweeps/*/*")
    again = re.search(r"^again +(python -m exp\.train from_run=\S+)$", done.stdout, re.MULTILINE)[1]
    assert again in (sweep / "table.md").read_text()
    for directory in find_runs([sweep]).runs:
        found, own = read_run(directory), read_report(directory)
        assert (found.status, found.value, found.seconds) == (own.status, own.monitored, own.wall_seconds)
        assert (found.monitor, found.mode, found.problems) == ("loss/val", "min", ())
        assert found.curves["loss/val"].steps.tolist() == [1, 2, 3]
        assert found.curves["loss/val"].values.min() == pytest.approx(own.monitored, rel=1e-6)
    status, shown = told(sweep)
    assert status == 0
    assert again.rpartition("/")[0] in shown
    command = re.search(r"^again +python -m exp\.train (\S+)$", shown, re.MULTILINE)[1]
    assert check([command, "seed=7", "launch.accelerator=cpu"]) == 0
    capsys.readouterr()
    assert (sweep / "report" / "report.html").is_file()


def test_the_page_has_a_row_a_run_and_nothing_from_elsewhere(folder):
    sweep = write_sweep(folder / "sweep")
    hostile = '步</script><script>alert(1)</script>"&$x^{'
    write_run(sweep / "12", f"tag={hostile}", "optimizer.lr=0.5", value=9.0, error={"type": "E", "message": hostile})
    status, _ = told(sweep)
    assert status == 0
    text = (sweep / "report" / "report.html").read_text()
    page = Parsed(text)
    header, *rows = page.rows[: 1 + 13]
    assert [row[0] for row in rows] == [str(job) for job in range(13)]
    assert rows[0][header.index("optimizer.lr")] == "0.0001"
    assert rows[12][header.index("tag")] == hostile
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "of the pictures: Glyph 27493" in page.text  # the PNGs' font has no such letter, and it is said
    assert not re.search(r"https?:|@import|\ssrc=|<link|<iframe|<object", text)
    assert all(name not in ("onclick", "onload") for _, own in page.tags for name in own)
    links = [own["href"] for tag, own in page.tags if own.get("href")]
    assert all(link.startswith("#") for link in links)
    names = [own["id"] for _, own in page.tags if own.get("id")]
    assert len(names) == len(set(names))
    assert {link[1:] for link in links} | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(names)
    pictures = [own for tag, own in page.tags if tag == "svg"]
    assert len(pictures) == len(list((sweep / "report").glob("*.png"))) >= 7
    assert all(own["role"] == "img" and own["aria-label"] for own in pictures)
    assert {own["scope"] for tag, own in page.tags if tag == "th"} == {"col", "row"}
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_the_pictures_are_files_that_are_not_blank(folder):
    sweep = write_sweep(folder / "sweep")
    told(sweep)
    names = sorted(path.name for path in (sweep / "report").iterdir())
    assert names == [
        "curve-accuracy-val.png", "curve-loss-val.png", "importance.png", "parallel.png", "pareto.png", "report.html",
        "value-model.png", "value-optimizer.lr.png", "value-seed.png",
    ]  # fmt: skip
    for path in (sweep / "report").glob("*.png"):
        with Image.open(path) as image:
            found = np.asarray(image.convert("L"))
        assert min(found.shape) > 100
        assert (found < 128).mean() > 0.002
        assert len(np.unique(found)) > 10


def test_what_a_killed_report_left_half_written_goes_with_the_next_one(folder):
    sweep = write_sweep(folder / "sweep")
    left, mine = sweep / "report" / ".report.html.1.2.partial", sweep / "report" / ".mine.partial"
    left.parent.mkdir()
    for path in (left, mine):
        path.touch()
    status, _ = told(sweep)
    assert status == 0
    assert not left.exists()
    assert mine.exists()


def test_what_differs_is_swept_and_the_seed_is_repeated(folder):
    sweep = write_sweep(folder / "sweep")
    found = compare([read_run(run) for run in find_runs([sweep]).runs])
    assert (found.keys, found.repeat_over, found.tag) == (["optimizer.lr", "model", "seed"], "seed", "loss/val")
    assert found.names == [str(job) for job in range(12)]
    assert [row.job for row in found.best_group] == [4, 5]
    assert found.best.job == 4
    assert found.is_log("optimizer.lr")
    assert not found.is_log("seed")
    assert found.label(found.rows[4].swept) == "lr=0.01 model=a"
    alone = compare(found.records, repeat_over="none")
    assert (alone.repeat_over, alone.best.job) == (None, 4)
    assert compare(found.records, repeat_over="model").repeat_over == "model"


def test_a_sweep_s_own_repeats_hold_and_a_logarithm_that_it_drew_in(folder):
    for job, rate in enumerate((0.01, 0.02, 0.01, 0.02)):
        write_run(folder / "a" / str(job), f"optimizer.lr={rate}", f"data.fold={job // 2}", f"seed={job}",
                  config={"sweep": {"repeat_over": "data.fold"}})  # fmt: skip
    settings = {"overrides": ["optimizer.lr=tag(log, interval(1e-3, 1))"], "search": {}}
    (folder / "a" / "sweep.json").write_text(json.dumps(settings))
    found = compare([read_run(run) for run in find_runs([folder / "a"]).runs])
    assert found.repeat_over == "data.fold"
    assert found.is_log("optimizer.lr")


def test_a_default_that_another_run_changes_is_a_value_and_equal_numbers_are_one(folder):
    write_run(folder / "a", value=1.0)
    write_run(folder / "b", "optimizer.lr=1e-3", value=2.0)
    write_run(folder / "c", "+optimizer.lr=5e-3", "precision=bf16", value=3.0)
    found = compare([read_run(run) for run in find_runs([folder]).runs])
    assert found.keys == ["optimizer.lr", "precision"]
    assert [row.swept["optimizer.lr"] for row in found.rows] == ["0.001", "0.001", "0.005"]
    assert [row.swept["precision"] for row in found.rows] == ["(default)", "(default)", "bf16"]


def test_several_folders_are_one_report_and_each_run_is_counted_once(folder):
    sweep = write_sweep(folder / "outputs" / "train" / "sweeps" / "day" / "time")
    write_run(folder / "outputs" / "other" / "day" / "time", "seed=9", value=0.01)
    (folder / "link").symlink_to(sweep / "3")
    for place, mark in (("find_lr", "lr.json"), ("data", "data.md")):  # a test and a look, which are no runs
        write_run(folder / "outputs" / "train" / place / "day" / "time", "optimizer.lr=1e-8", value=0.0)
        (folder / "outputs" / "train" / place / "day" / "time" / mark).touch()
    found = find_runs([folder / "outputs", sweep, sweep / "3", folder / "outputs" / ".." / "outputs", folder / "link"])
    assert len(found.runs) == 13
    jobs = [run.name for run in find_runs([sweep]).runs]
    assert jobs == [str(job) for job in range(12)]
    status, shown = told("outputs", sweep, "--repeat-over", "none")
    assert status == 0
    assert "13 runs" in shown
    (page,) = folder.glob("outputs/reports/*/*/report.html")
    assert str(page.relative_to(folder)) in shown
    assert "python -m exp.train from_run=outputs/other/day/time" in shown
    told("outputs", "--output", "here")
    assert (folder / "here" / "report.html").is_file()


def test_a_run_that_is_no_whole_one_is_a_row_that_says_so(folder):
    sweep = write_sweep(folder / "sweep")
    (sweep / "0" / "report.json").unlink()
    (sweep / "1" / "report.json").write_text('{"status": "compl')
    (sweep / "2" / "config.yaml").unlink()
    (sweep / "3" / "overrides.yaml").write_text("- a\n b: [")
    shutil.rmtree(sweep / "5" / "tensorboard")
    (sweep / "6" / "tensorboard" / "events.out.tfevents.1").write_bytes(b"")
    (sweep / "7" / "report.json").write_text('{"status": "completed", "directory": "x", "metrics": []}')
    (sweep / "8" / "report.json").unlink()
    with holding(sweep / "8" / "config.yaml"):
        status, shown = told(sweep)
    assert status == 0
    first = shown.partition("over seed")[0]
    words = dict(line.strip("│ ").split("│")[:2] for line in first.splitlines() if re.match(r"│ \d+ +│ ", line))
    words = {job.strip(): word.strip() for job, word in words.items()}
    assert words["0"] == "no report"
    assert words["1"] == words["7"] == "unreadable"
    assert words["8"] == "running"
    assert [words[job] for job in "23569"] == ["completed"] * 5
    text = (sweep / "report" / "report.html").read_text()
    for line in (
        "0: report.json is not there: the run has not begun, or was killed",
        "1: report.json is not as exp wrote it: ",
        "2: config.yaml is not there",
        "3: overrides.yaml is not as exp wrote it: ",
        "no curves of 5, 6: no TensorBoard events of a loss or of a metric of the validation",
        "6: events.out.tfevents.1 is empty",
        "7: report.json is not as exp wrote it: ",
    ):
        assert f"<li>{line}" in text
    assert "<li>8: " not in text
    assert "python -m exp.train from_run=sweep/4" in shown


def test_the_best_is_sought_once_however_many_runs_are_drawn(folder, monkeypatch):
    """Once a line, it took a quarter of a minute a picture for 2,000 runs, and 25 times that for 10,000."""
    sweep = write_sweep(folder / "sweep")
    sought, best_of = [], run_comparison.best_of
    monkeypatch.setattr(run_comparison, "best_of", lambda *rows, **over: (sought.append(1), best_of(*rows, **over))[1])
    draw(compare([read_run(run) for run in find_runs([sweep]).runs]))
    assert len(sought) == 1


def test_a_job_of_a_sweep_that_goes_on_is_not_taken_for_a_killed_one(folder):
    """Such as one that has not begun to train: nothing holds its own directory yet, and the sweep holds its."""
    sweep = write_sweep(folder / "sweep", seeds=1)
    (sweep / "0" / "report.json").unlink()
    with held(sweep):
        assert read_run(sweep / "0").status == "running"
        ongoing = signature(sweep / "0")
    assert read_run(sweep / "0").status == "no report"
    assert signature(sweep / "0") != ongoing  # by which --watch sees that it was killed


@pytest.mark.parametrize("seed", range(6))
def test_files_cut_off_anywhere_never_fail_it(folder, seed, monkeypatch):
    monkeypatch.setattr(report, "_drawn", lambda comparison, tags: (draw(comparison).drawn[:1], ()))  # the others alike
    drawn = random.Random(seed)
    sweep = write_sweep(folder / "sweep", seeds=1)
    files = [path for path in sweep.rglob("*") if path.is_file()]
    for path in drawn.sample(files, drawn.randint(1, len(files))):
        content = path.read_bytes()
        if drawn.random() < 0.15:
            path.unlink()
        elif drawn.random() < 0.15:
            path.write_bytes(bytes(drawn.randrange(256) for _ in range(50)))
        else:
            path.write_bytes(content[: drawn.randrange(len(content))])
    runs = [run.name for run in find_runs([sweep]).runs]
    status, shown = told(sweep, "--output", "report")
    assert status == 0
    rows = Parsed((folder / "report" / "report.html").read_text()).rows
    assert [row[0] for row in rows[1 : 1 + len(runs)]] == runs
    assert "report  report/report.html" in shown


def test_runs_whose_configs_are_lost_are_no_repeats_of_each_other_and_none_is_the_best(folder):
    sweep = write_sweep(folder / "sweep")
    for job in (0, 2, 3):
        (sweep / str(job) / "config.yaml").unlink()
        (sweep / str(job) / "overrides.yaml").write_text("")
        told_by = json.loads((sweep / str(job) / "report.json").read_text())
        told_by["best"]["value"] = 0.0
        (sweep / str(job) / "report.json").write_text(json.dumps(told_by))
    found = compare([read_run(run) for run in find_runs([sweep]).runs])
    assert found.best.job == 4
    assert compare(found.records, repeat_over="none").best.job == 4


def test_directories_that_go_away_while_they_are_read_are_rows(folder, monkeypatch):
    sweep = write_sweep(folder / "sweep")
    found = find_runs([sweep])
    shutil.rmtree(sweep / "3")
    assert read_run(found.runs[3]).status == "no report"
    assert "report.json is not there: the directory has gone" in read_run(found.runs[3]).problems
    monkeypatch.setattr(report, "find_runs", lambda places: found)
    assert told(sweep)[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_said(folder):
    sweep = write_sweep(folder / "sweep")
    closed = {sweep / "1" / "config.yaml": 0, sweep / "2": 0, sweep / "3": 0o444, sweep / "6" / "tensorboard": 0}
    for path, mode in closed.items():
        path.chmod(mode)
    status, shown = told(sweep)
    for path in closed:
        path.chmod(0o700)
    assert status == 0
    for line in (
        "2: Permission denied",
        "1: config.yaml cannot be read: Permission denied",
        "3: overrides.yaml cannot be read: Permission denied",
        "6: tensorboard cannot be read: Permission denied",
    ):
        assert line in shown


def test_a_value_of_a_secret_is_its_name_everywhere(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    write_run(folder / "runs" / "a", "token=hf_0123456789", value=1.0)
    write_run(folder / "runs" / "b", "token=other", value=2.0, error={"type": "E", "message": "no hf_0123456789"})
    status, shown = told("runs", "--output", "here")
    assert status == 0
    assert "hf_0123456789" not in shown + (folder / "here" / "report.html").read_text()
    assert "${oc.env:HF_TOKEN}" in (folder / "here" / "report.html").read_text()


def test_other_tags_are_compared_by_what_is_better_of_them(folder):
    sweep = write_sweep(folder / "sweep")
    runs = [read_run(run) for run in find_runs([sweep]).runs]
    found = compare(runs, metrics=["accuracy/val"])
    assert (found.tag, found.mode, found.best.job) == ("accuracy/val", "max", 4)
    assert found.best.value == pytest.approx(1 - runs[4].value / 10)
    assert "--metric accuracy/val: the largest is taken for the best" in found.notes[0]
    assert compare(runs, metrics=["throughput/step_ms"]).best.job in (2, 3, 10, 11)
    both = compare(runs, metrics=["loss/val", "throughput/step_ms:min"])
    assert [one.name for one in both.objectives] == ["loss/val (best)", "throughput/step_ms (last)"]
    assert [one.name for one in found.objectives] == ["wall seconds", "accuracy/val (best)"]
    for run in runs:
        plain = yaml.safe_load((run.directory / "config.yaml").read_text())
        plain["sweep"] = {"monitor": {"accuracy/val": "max", "throughput/step_ms": "min"}}
        (run.directory / "config.yaml").write_text(yaml.safe_dump(plain))
    several = compare([read_run(run.directory) for run in runs])
    assert [(one.name, one.mode) for one in several.objectives] == [
        ("accuracy/val (last)", "max"), ("throughput/step_ms (last)", "min"),
    ]  # fmt: skip


def test_runs_that_watch_different_tags_have_no_best_and_say_how_to_compare_them(folder):
    write_run(folder / "runs" / "a")
    write_run(folder / "runs" / "b", config={"monitor": "accuracy/val", "mode": "max"})
    status, shown = told("runs", "--output", "here")
    assert status == 0
    assert "so none is the best: accuracy/val (max), loss/val (min). Compare them by --metric TAG" in shown
    assert "\nbest " not in shown
    shown = told("runs", "--output", "here", "--metric", "accuracy/val:max")[1]
    assert "best    a, accuracy/val 0.95" in shown


def test_without_matplotlib_the_page_is_there_without_pictures_and_says_so(folder, monkeypatch):
    monkeypatch.setattr(charts, "is_installed", lambda package: False)
    sweep = write_sweep(folder / "sweep")
    status, shown = told(sweep)
    assert status == 0
    assert "no pictures: a report with pictures needs the package matplotlib, which is not installed: pip" in shown
    page = Parsed((sweep / "report" / "report.html").read_text())
    assert not any(tag == "svg" for tag, _ in page.tags)
    assert len(page.rows) > 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swep"], r"swep is not there; expected a run directory, .*\. Did you mean sweep\?"),
        (["file"], r"file is a file; expected a run directory"),
        (["empty"], r"empty: no run is there; expected a run directory"),
        (["sweep/0/tensorboard"], r"sweep/0/tensorboard: no run is there; .*\. Did you mean sweep/0\?"),
        (
            ["sweep", "--metric", "accuracy/vl"],
            r"--metric accuracy/vl: no run has this tag\. Did you mean accuracy/val\?",
        ),
        (
            ["sweep", "empty", "--repeat-over", "sed"],
            r"--repeat-over sed: the runs do not differ in it\. Did you mean seed\?",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(folder, capsys, arguments, message):
    write_sweep(folder / "sweep")
    (folder / "empty").mkdir()
    (folder / "file").touch()
    assert report.main(arguments) == 2
    assert re.match(message, capsys.readouterr().err)
    assert not (folder / "outputs").exists()


def test_a_place_that_cannot_be_written_is_one_clear_line(folder, capsys):
    write_sweep(folder / "sweep")
    (folder / "file").touch()
    assert report.main(["sweep", "--output", "file/below"]) == 1
    assert re.match(r"the report cannot be written to file/below: .* --output\n", capsys.readouterr().err)


def test_sixty_four_runs_are_compared_without_torch_lightning_or_tensorboard(folder):
    for job, (rate, seed) in enumerate(itertools.product(range(16), range(4))):
        curves = {"loss/train": [1 / (1 + step + rate) for step in range(500)], "loss/val": [1.0, 0.5 + rate / 100]}
        write_run(folder / "runs" / str(job), f"optimizer.lr={rate / 10}", f"seed={seed}", curves=curves)
    program = """
import sys
from exp.report import main
status = main(["runs", "--output", "here"])
heavy = {"torch", "lightning", "tensorboard", "sklearn", "torchmetrics", "matplotlib.pyplot"} & {*sys.modules}
sys.exit(status or (str(heavy) if heavy else 0))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 runs" in done.stdout


def test_a_watched_sweep_is_written_anew_when_something_changed_until_a_signal(folder):
    (folder / "sweep").mkdir()
    command = [sys.executable, "-u", "-m", "exp.report", "sweep", "--output", "here", "--watch", "0.2"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "no runs yet in sweep\n"
            write_run(folder / "new", "seed=0", value=0.5)
            (folder / "new").rename(folder / "sweep" / "0")
            lines = list(iter(process.stdout.readline, "report  here/report.html\n"))
            assert any("1 run" in line for line in lines)
            write_run(folder / "new", "seed=1", value=0.25)
            (folder / "new").rename(folder / "sweep" / "1")
            line = process.stdout.readline()
            assert re.fullmatch(r"\d\d:\d\d:\d\d  2 completed; best .*loss/val 0\.375 .*\n", line)
            assert ">1</th>" in (folder / "here" / "report.html").read_text()
            with holding(folder / "sweep" / "0" / "config.yaml"):
                (folder / "sweep" / "0" / "report.json").unlink()
                assert "  1 running, 1 completed; " in process.stdout.readline()
            assert "  1 no report, 1 completed; " in process.stdout.readline()  # it ended, and wrote nothing
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_watch_that_is_terminated_says_so_by_its_status(folder):
    write_run(folder / "runs" / "0")
    command = [sys.executable, "-u", "-m", "exp.report", "runs", "--output", "here", "--watch"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in iter(process.stdout.readline, ""):
                if line.startswith("report"):
                    break
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143
            assert time.monotonic() - begun < 4
        finally:
            process.kill()


def test_curves_of_repeats_are_a_mean_with_a_band_and_what_was_not_completed_is_beside_it(folder):
    for seed, values in enumerate(([1.0, 2.0], [3.0, 6.0], [100.0])):
        write_run(folder / str(seed), f"seed={seed}", curves={"loss/val": values}, status="completed")
    write_run(folder / "3", "seed=3", curves={"loss/val": [7.0, 7.0]}, status="interrupted")
    found = compare([read_run(run) for run in find_runs([folder]).runs[:2]] + [read_run(folder / "3")])
    (group,) = found.groups
    drawn: list[tuple[list[float], list[float], str]] = []
    bands: list[tuple[list[float], list[float]]] = []

    class Axes:
        def plot(self, xs, ys, *, marker, markersize, label, linestyle="-", **style):
            drawn.append((list(xs), list(ys), linestyle))

        def fill_between(self, xs, low, high, **style):
            bands.append((list(low), list(high)))

    charts._draw_group(Axes(), found, group, "loss/val", {"color": "red", "label": "a"}, alpha=1.0, has_band=True)
    assert drawn == [([10, 20], [2.0, 4.0], "-"), ([10, 20], [7.0, 7.0], "--")]
    deviation = [np.std([1, 3], ddof=1), np.std([2, 6], ddof=1)]
    np.testing.assert_allclose(bands[0], [np.subtract([2, 4], deviation), np.add([2, 4], deviation)], rtol=1e-6)


def test_the_command_for_the_best_is_one_that_a_shell_and_hydra_read(folder):
    write_run(folder / "my runs" / "it's 1", "seed=1", value=0.1)
    write_run(folder / "my runs" / "2", "seed=2", value=0.2)
    _, shown = told("my runs", "--output", "here", "--repeat-over", "none")
    command = next(line for line in shown.splitlines() if line.startswith("again"))
    assert shlex.split(command.removeprefix("again "))[-1] == r"from_run='my runs/it\'s 1'"
