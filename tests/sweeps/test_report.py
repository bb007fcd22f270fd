"""python -m exp.report: a real sweep, generated and damaged run directories, and the command."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from exp.cli.check import main as check
from exp.extras.report import report
from exp.extras.report.charts import band, draw
from exp.extras.report.report_page import page
from exp.extras.report.run_comparison import compare
from exp.extras.report.run_records import find_runs, read_run
from exp.files import hold_lock
from exp.run_report import read_report
from exp.sweeps.ledger import lock_sweep
from exp.tensorboard.event_file import Curve


class Parsed(HTMLParser):
    """Parser that collects tags, text and table cells of a page."""

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


def run(*arguments: str | Path) -> tuple[int, str]:
    """Return the exit status of the command, and what it printed."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        status = report.main(list(map(str, arguments)))
    return status, shown.getvalue()


def records_of(*places: Path):
    return [read_run(directory) for directory in find_runs(places).runs]


def curve(steps, values) -> Curve:
    return Curve(steps=np.array(steps, np.int64), values=np.array(values, np.float64))


def change_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def write_sweep(write_run):
    """A function that writes a sweep over rates, models and seeds, where jobs 4 and 5 (rate 0.01, model a) are best."""

    def write(directory: Path, *, seeds: int = 2) -> Path:
        pairs = itertools.product((0.0001, 0.01, 1.0), ("a", "b"), range(seeds))
        for job, (rate, model, seed) in enumerate(pairs):
            value = abs(math.log10(rate) + 2) + 0.1 + 0.5 * (model == "b") + 0.01 * seed
            typed = (f"optimizer.lr={rate}", f"model={model}", f"seed={seed}")
            write_run(directory / str(job), *typed, value=value, config={"model": {"_target_": "m"}})
        (directory / "sweep.json").write_text(json.dumps({"overrides": [], "search": None}))
        return directory

    return write


@pytest.fixture
def sweep(folder, write_sweep) -> Path:
    return write_sweep(folder / "sweep")


def test_a_real_sweep_is_read_as_written(folder, commands, capsys):
    values = ("trainer.max_steps=3", "trainer.val_check_interval=1", "seed=0,1")
    done = commands.run("-m", "sweep.jobs=1", "sweep.stack=false", *values, cwd=folder)
    assert done.returncode == 0, done.stderr
    (directory,) = folder.glob("outputs/train/sweeps/*/*")
    again = re.search(r"^again +(python -m exp\.train from_run=\S+)$", done.stdout, re.MULTILINE)[1]
    assert again in (directory / "table.md").read_text()
    for found in records_of(directory):
        own = read_report(found.directory)
        assert (found.status, found.value, found.seconds) == (own.status, own.monitored, own.wall_seconds)
        assert (found.monitor, found.mode, found.problems) == ("loss/val", "min", ())
        assert found.curves["loss/val"].steps.tolist() == [1, 2, 3]
        assert found.curves["loss/val"].values.min() == pytest.approx(own.monitored, rel=1e-6)
    status, shown = run(directory)
    assert status == 0
    command = re.search(r"^again +python -m exp\.train (\S+)$", shown, re.MULTILINE)[1]
    assert command in again
    assert check([command, "seed=7", "launch.accelerator=cpu"]) == 0
    capsys.readouterr()
    assert (directory / "report" / "report.html").is_file()


def test_the_page_is_complete_and_self_contained(sweep, write_run):
    hostile = '步</script><script>alert(1)</script>"&$x^{'
    write_run(sweep / "12", f"tag={hostile}", "optimizer.lr=0.5", value=9.0, error={"type": "E", "message": hostile})
    left, mine = sweep / "report" / ".report.html.1.2.partial", sweep / "report" / ".mine.partial"
    left.parent.mkdir()
    for path in (left, mine):
        path.touch()
    status, _ = run(sweep)
    assert status == 0
    assert (left.exists(), mine.exists()) == (False, True), (
        "files of a killed report must be removed, and other files must stay"
    )
    text = (sweep / "report" / "report.html").read_text()
    page = Parsed(text)
    header, *rows = page.rows[: 1 + 13]
    assert [row[0] for row in rows] == [str(job) for job in range(13)]
    assert rows[0][header.index("optimizer.lr")] == "0.0001"
    assert rows[12][header.index("tag")] == hostile
    assert "script" not in [tag for tag, _ in page.tags]
    assert "of the pictures: Glyph 27493" in page.text  # the font of the pictures lacks this letter
    assert not re.search(r"https?:|@import|<link|<iframe|<object", text)
    assert all(name not in ("onclick", "onload") for _, own in page.tags for name in own)
    links = [own["href"] for tag, own in page.tags if own.get("href")]
    assert links == []
    pictures = [own for tag, own in page.tags if "src" in own]
    assert len(pictures) == len(list((sweep / "report").glob("*.png"))) >= 2
    assert all(own["src"].startswith("data:image/png;base64,") and own["alt"] for own in pictures)
    assert {own["scope"] for tag, own in page.tags if tag == "th"} == {"col", "row"}
    assert {path.name for path in (sweep / "report").glob("*.png")} >= {"curve-accuracy-val.png", "curve-loss-val.png"}
    for path in (sweep / "report").glob("*.png"):
        with Image.open(path) as image:
            found = np.asarray(image.convert("L"))
        assert min(found.shape) > 100
        assert (found < 128).mean() > 0.002
        assert len(np.unique(found)) > 10


def test_swept_keys_and_repeats_are_found(sweep):
    found = compare(records_of(sweep))
    assert (found.keys, found.repeat_over, found.tag) == (["optimizer.lr", "model", "seed"], "seed", "loss/val")
    assert [row.name for row in found.rows] == [str(job) for job in range(12)]
    assert [row.job for row in found.best_group] == [4, 5]
    assert found.best.job == 4
    assert found.label(found.rows[4].swept) == "lr=0.01 model=a"
    alone = compare(found.records, repeat_over="none")
    assert (alone.repeat_over, alone.best.job) == (None, 4)
    assert compare(found.records, repeat_over="model").repeat_over == "model"


def test_settings_of_the_sweep_decide_repeats(folder, write_run):
    for job, rate in enumerate((0.01, 0.02, 0.01, 0.02)):
        typed = (f"optimizer.lr={rate}", f"data.fold={job // 2}", f"seed={job}")
        write_run(folder / str(job), *typed, config={"sweep": {"repeat_over": "data.fold"}})
    assert compare(records_of(folder)).repeat_over == "data.fold"


def test_defaults_and_equal_numbers_are_values(folder, write_run):
    write_run(folder / "a", value=1.0)
    write_run(folder / "b", "optimizer.lr=1e-3", value=2.0)
    write_run(folder / "c", "+optimizer.lr=5e-3", "precision=bf16", value=3.0)
    found = compare(records_of(folder))
    assert found.keys == ["optimizer.lr", "precision"]
    assert [row.swept["optimizer.lr"] for row in found.rows] == ["0.001", "0.001", "0.005"]
    assert [row.swept["precision"] for row in found.rows] == ["(default)", "(default)", "bf16"]
    write_run(folder / "d", "train=false", value=0.0)  # a run directory of exp.evaluate
    shown = run(folder, "--output", folder / "page")[1]
    assert "evaluations are left out: 1" in shown
    assert "best    a, loss/val 1  optimizer.lr=0.001\n" in shown


def test_each_run_of_several_folders_counts_once(folder, write_run, write_sweep):
    sweep = write_sweep(folder / "outputs" / "train" / "sweeps" / "day" / "time")
    write_run(folder / "outputs" / "it's 1" / "day" / "time", "seed=9", value=0.01)
    (folder / "link").symlink_to(sweep / "3")
    for place, mark in (("find_lr", "lr.json"), ("data", "data.md")):  # not runs
        write_run(folder / "outputs" / "train" / place / "day" / "time", "optimizer.lr=1e-8", value=0.0)
        (folder / "outputs" / "train" / place / "day" / "time" / mark).touch()
    found = find_runs([folder / "outputs", sweep, sweep / "3", folder / "outputs" / ".." / "outputs", folder / "link"])
    assert len(found.runs) == 13
    assert [path.name for path in find_runs([sweep]).runs] == [str(job) for job in range(12)]
    status, shown = run("outputs", sweep, "--repeat-over", "none")
    assert status == 0
    assert "13 runs" in shown
    (page,) = folder.glob("outputs/reports/*/*/report.html")
    assert str(page.relative_to(folder)) in shown
    command = next(line for line in shown.splitlines() if line.startswith("again"))
    assert shlex.split(command.removeprefix("again "))[-1] == r"from_run='outputs/it\'s 1/day/time'"


def test_incomplete_runs_are_rows_with_their_problems(sweep):
    (sweep / "0" / "report.json").unlink()
    (sweep / "1" / "report.json").write_text('{"status": "compl')
    (sweep / "2" / "config.yaml").unlink()
    (sweep / "3" / "overrides.yaml").write_text("- a\n b: [")
    shutil.rmtree(sweep / "5" / "tensorboard")
    (sweep / "6" / "tensorboard" / "events.out.tfevents.1").write_bytes(b"")
    (sweep / "7" / "report.json").write_text('{"status": "completed", "directory": "x", "metrics": []}')
    (sweep / "8" / "report.json").unlink()
    with hold_lock(sweep / "8" / "config.yaml"):
        status, shown = run(sweep)
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
        "0: report.json is missing: the run did not begin, or was killed",
        "1: report.json is damaged: ",
        "2: config.yaml is missing",
        "3: overrides.yaml is damaged: ",
        "no curves of 5, 6: no TensorBoard events of a loss or of a metric of the validation",
        "6: events.out.tfevents.1 is empty",
        "7: report.json is damaged: ",
    ):
        assert f"<li>{line}" in text
    assert "<li>8: " not in text
    assert "python -m exp.train from_run=sweep/4" in shown


def test_a_job_of_a_running_sweep_is_running(folder, write_sweep):
    """A job locks its directory when its training begins, so the lock of the sweep's directory is also checked."""
    sweep = write_sweep(folder / "sweep", seeds=1)
    (sweep / "0" / "report.json").unlink()
    with lock_sweep(sweep):
        assert read_run(sweep / "0").status == "running"
    assert read_run(sweep / "0").status == "no report"


# Damages do not depend on the files, because Hypothesis reports a test as flaky if lengths of files differ.
damages = st.tuples(
    st.integers(0, 999), st.sampled_from(["remove", "overwrite", "cut", "cut"]), st.floats(0, 1), st.binary(max_size=50)
)


@given(st.lists(damages, min_size=1, max_size=30))
def test_damaged_files_never_fail_the_report(tmp_path_factory, write_sweep, damages):
    sweep = write_sweep(tmp_path_factory.mktemp("damaged") / "sweep", seeds=1)
    files = sorted(path for path in sweep.rglob("*") if path.is_file())
    for index, action, share, content in damages:
        path = files[index % len(files)]
        if action == "remove":
            path.unlink(missing_ok=True)
        elif action == "overwrite":
            path.write_bytes(content)
        elif path.is_file():
            written = path.read_bytes()
            path.write_bytes(written[: int(share * len(written))])
    found = find_runs([sweep])
    assume(found.runs)  # without runs, exp.report ends with an error before this code
    comparison = compare(records_of(sweep), problems=found.problems)
    rows = Parsed(page(comparison, (), notes=comparison.notes, about="")).rows
    assert [row[0] for row in rows[1 : 1 + len(found.runs)]] == [path.name for path in found.runs]


def test_runs_without_a_config_are_neither_repeats_nor_best(sweep):
    for job in (0, 2, 3):
        (sweep / str(job) / "config.yaml").unlink()
        (sweep / str(job) / "overrides.yaml").write_text("")
        change_json(sweep / str(job) / "report.json", lambda content: content["best"].update(value=0.0))
    found = compare(records_of(sweep))
    assert found.best.job == 4
    assert compare(found.records, repeat_over="none").best.job == 4


def test_a_directory_that_disappears_is_a_row(sweep):
    found = find_runs([sweep])
    shutil.rmtree(sweep / "3")
    record = read_run(found.runs[3])
    assert record.status == "no report"
    assert "report.json is missing: the directory was removed" in record.problems
    assert len(report.comparison_of(found, report.parser().parse_args([str(sweep)])).rows) == 12


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_files_without_permission_are_named(sweep):
    closed = {sweep / "1" / "config.yaml": 0, sweep / "2": 0, sweep / "6" / "tensorboard": 0}
    for path, mode in closed.items():
        path.chmod(mode)
    status, shown = run(sweep)
    for path in closed:
        path.chmod(0o700)
    assert status == 0
    assert "2: Permission denied" in shown
    assert "1: config.yaml cannot be read: Permission denied" in shown
    assert "6: tensorboard cannot be read: Permission denied" in shown


def test_secrets_are_shown_by_their_names(folder, write_run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    write_run(folder / "runs" / "a", "token=hf_0123456789", value=1.0)
    write_run(folder / "runs" / "b", "token=other", value=2.0, error={"type": "E", "message": "no hf_0123456789"})
    status, shown = run("runs", "--output", "here")
    assert status == 0
    assert "hf_0123456789" not in shown + (folder / "here" / "report.html").read_text()
    assert "${oc.env:HF_TOKEN}" in (folder / "here" / "report.html").read_text()


def test_runs_are_compared_by_other_tags(sweep):
    runs = records_of(sweep)
    found = compare(runs, metrics=["accuracy/val"])
    assert (found.tag, found.best.mode, found.best.job) == ("accuracy/val", "max", 4)
    assert found.best.value == pytest.approx(1 - runs[4].value / 10)
    assert compare(runs, metrics=["throughput/step_ms"]).best.job in (2, 3, 10, 11)
    several = compare(runs, metrics=["throughput/step_ms:max", "loss/val"])
    assert (several.tag, several.best.mode) == ("throughput/step_ms", "max")


def test_runs_with_different_monitors_have_no_best(folder, write_run):
    write_run(folder / "runs" / "a")
    write_run(folder / "runs" / "b", config={"monitor": "accuracy/val", "mode": "max"})
    status, shown = run("runs", "--output", "here")
    assert status == 0
    assert (
        "because the runs monitor different tags: accuracy/val (max), loss/val (min). Compare them by --metric TAG"
        in shown
    )
    assert "\nbest " not in shown
    shown = run("runs", "--output", "here", "--metric", "accuracy/val:max")[1]
    assert "best    a, accuracy/val 0.95" in shown


def test_without_matplotlib_the_page_has_no_pictures(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, shown = run(sweep)
    assert status == 0
    assert "no pictures: a report with pictures needs the package matplotlib, which is not installed: pip" in shown
    page = Parsed((sweep / "report" / "report.html").read_text())
    assert not any(tag == "img" for tag, _ in page.tags)
    assert len(page.rows) > 12


def test_runs_that_were_not_completed_are_dashed(folder, write_run):
    for seed, values in enumerate(([1.0, 2.0], [3.0, 6.0])):
        write_run(folder / str(seed), f"seed={seed}", curves={"loss/val": values})
    write_run(folder / "2", "seed=2", curves={"loss/val": [7.0, 7.0]}, status="interrupted")
    charts = [
        {chart.name: chart.png for chart in draw(compare(records_of(*places)))[0]}
        for places in ((folder / "0", folder / "1"), (folder,))
    ]
    assert charts[0]["curve-loss-val"] != charts[1]["curve-loss-val"]


def test_a_band_is_a_mean_and_a_sample_deviation():
    drawn = np.random.default_rng(0).normal(size=(5, 7))
    found = band([curve(range(0, 70, 10), values) for values in drawn])
    assert found.steps.tolist() == list(range(0, 70, 10))
    np.testing.assert_allclose(found.mean, drawn.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.deviation, drawn.std(axis=0, ddof=1), rtol=1e-12)
    # Curves are interpolated in the range of steps that all of them have.
    found = band([curve([0, 10, 20], [0, 10, 0]), curve([5, 15, 40], [1, 1, 1])])
    assert found.steps.tolist() == [5, 10, 15, 20]
    np.testing.assert_allclose(found.mean, [3, 5.5, 3, 0.5], rtol=1e-12)
    assert band([curve([0, 1], [1, 1]), curve([2, 3], [1, 1])]) is None
    assert band([curve([], [])]) is None
    # A value that is not finite is a gap in the band.
    found = band([curve([0, 1, 2], [1, np.inf, 3]), curve([0, 1, 2], [1, 1, 5])])
    assert np.isnan(found.mean).tolist() == [False, True, False]
    assert (found.mean[2], found.deviation[2]) == (4, pytest.approx(np.sqrt(2)))
    alone = band([curve([3, 4], [1, 2])])
    assert (alone.mean.tolist(), np.isnan(alone.deviation).all()) == ([1, 2], True)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["swep"], 2, r"swep does not exist; expected a run directory"),
        (["file"], 2, r"file is a file; expected a run directory"),
        (["empty"], 2, r"empty: no run found; expected a run directory"),
        (
            ["sweep", "--metric", "accuracy/vl"],
            2,
            r"--metric: no run has the tag accuracy/vl; .* Did you mean accuracy/val\?",
        ),
        (["sweep", "--repeat-over", "sed"], 2, r"--repeat-over: the runs do not differ in sed; .* Did you mean seed\?"),
        (["sweep", "--output", "file/below"], 1, r"the report cannot be written to file/below: .* --output\n"),
    ],
)
def test_a_wrong_command_is_one_clear_line(folder, sweep, capsys, arguments, status, message):
    (folder / "empty").mkdir()
    (folder / "file").touch()
    assert report.main(arguments) == status
    assert re.match(message, capsys.readouterr().err)
    assert not (folder / "outputs").exists()


@pytest.mark.slow
def test_the_command_does_not_import_torch(sweep):
    program = """
import sys
from exp.extras.report.report import main
import exp.sweeps.stacking
status = main(["sweep", "--output", "here"])
heavy = {"torch", "lightning", "sklearn", "torchmetrics", "matplotlib.pyplot"} & {*sys.modules}
sys.exit(status or (str(heavy) if heavy else 0))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
