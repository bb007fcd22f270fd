"""report.json is valid JSON, read_report returns the written report, and best and last results are not mixed."""

import json
import math
import subprocess
import sys

import pytest
import torch

import exp
from exp.check.stages import compose
from exp.construct import plain_config
from exp.errors import RunError
from exp.run_report import Report, as_markdown, print_report, read_report, write_report
from exp.start import fit

# The learning rate grows by a factor of 30 per epoch, so that the last epochs are worse than the first ones.
GROWING = "scheduler={_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 30.0, interval: epoch}"
OVERFITTED = ("model=mlp", GROWING, "precision=fp64", "hooks=[]", "logger=[]", "data.batch_size=128")


def a_report(directory, **changed):
    values = {"status": "completed", "directory": str(directory), "metrics": {"loss/val": 0.5}} | changed
    return Report(**values)


def test_a_written_report_is_read_back(tmp_path):
    report = a_report(tmp_path, best={"metric": "loss/val", "value": 0.25, "step": 3, "checkpoint": "best.ckpt"})
    write_report(report)
    assert read_report(tmp_path) == report


@pytest.mark.process
def test_the_report_of_a_lost_job_needs_no_torch(tmp_path):
    (tmp_path / "plain.json").write_text(json.dumps(plain_config(exp.compose([]))))
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from exp.config.settings import settings_of\n"
        "from exp.errors import RunError\n"
        "from exp.run_report import Ongoing, write_bad_end\n"
        "settings = settings_of(json.loads(Path('plain.json').read_text()))\n"
        "ongoing = Ongoing(Path.cwd(), settings, overrides=[], world_size=1)\n"
        "write_bad_end(ongoing, RunError('lost'), has_ranks=True)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert read_report(tmp_path).error == {"type": "RunError", "message": "lost"}


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
    assert "| loss/val |        0.5 |" in text
    assert "python -m exp.dashboard ." in text  # valid in the run directory


def test_a_directory_without_a_report_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"report\.json does not exist"):
        read_report(tmp_path)


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory):
    """A run with best weights before the last ones."""
    directory = tmp_path_factory.mktemp("overfitted")
    found = fit(compose([*OVERFITTED, "trainer.max_epochs=4", f"hydra.run.dir={directory}"]))
    assert found.best["step"] < found.steps
    return found


def evaluated(directory, weights, part):
    """Return loss and accuracy of saved weights on a split of the data, computed by hand."""
    run = exp.load(directory)
    samples = run.data.part(part)
    inputs, targets = map(torch.stack, zip(*(samples[index] for index in range(len(samples))), strict=True))
    with torch.no_grad():
        scores = run.network(weights)(inputs.to(torch.float64))
    loss = torch.nn.functional.cross_entropy(scores, targets)
    return {"loss": loss.item(), "accuracy": (scores.argmax(-1) == targets).double().mean().item()}


def test_results_are_those_of_the_saved_weights(overfitted):
    for part, weights, metrics in (
        ("val", "best", overfitted.best_metrics),
        ("test", "best", overfitted.best_metrics),
        ("val", "last", overfitted.metrics),
    ):
        for name, value in evaluated(overfitted.directory, weights, part).items():
            assert metrics[f"{name}/{part}"] == pytest.approx(value, abs=1e-6), (name, part, weights)
    assert overfitted.best_metrics["loss/val"] == overfitted.best["value"]
    assert read_report(overfitted.directory).best_metrics == overfitted.best_metrics


def test_a_resumed_run_keeps_the_metrics_of_its_best(overfitted, tmp_path):
    """The first run stops right after its best validation, within an epoch that the resumed run completes."""
    settings = [*OVERFITTED, "trainer.max_epochs=4"]
    stop = overfitted.best["step"]
    first = fit(compose([*settings, f"trainer.max_steps={stop}", f"hydra.run.dir={tmp_path / 'first'}"]))
    last = tmp_path / "first" / "checkpoints" / "last.ckpt"
    assert first.best_metrics.keys() == overfitted.best_metrics.keys()
    again = fit(compose([*settings, f"resume='{last}'", f"hydra.run.dir={tmp_path / 'second'}"]))
    assert again.best_metrics == pytest.approx(overfitted.best_metrics, rel=1e-12)


def rows(report, capsys):
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return [[weights, metric, *values] for weights, metric, *values in cells]


BEST = {"metric": "loss/val", "value": 0.25, "step": 3, "checkpoint": "best.ckpt"}
LAST_METRICS = {"loss/train": 9.0, "loss/train_epoch": 0.6, "loss/val": 0.5, "loss/test": 0.75}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (  # the best weights are tested
            {"stage_steps": {"train": 8, "val": 8, "test": 3}},
            [["best, step 3", "loss", "1.0000", "0.2500", "0.7500"], ["last, step 8", "loss", "0.6000", "0.5000", ""]],
        ),
        (  # the last validation is before the last step
            {"stage_steps": {"train": 8, "val": 6, "test": 3}},
            [["best, step 3", "loss", "1.0000", "0.2500", "0.7500"], ["last, step 8", "loss", "0.6000", "", ""]],
        ),
        (
            {"stage_steps": {"train": 3, "val": 3, "test": 3}, "steps": 3},
            [["best and last, step 3", "loss", "1.0000", "0.2500", "0.7500"]],
        ),
        (
            {"stage_steps": {"train": 8, "val": 8, "test": 8}, "best": None, "best_metrics": {}},
            [["last, step 8", "loss", "0.6000", "0.5000", "0.7500"]],
        ),
        (
            {"steps": 0, "best": None, "best_metrics": {}, "metrics": {"loss/test": 0.75}, "stage_steps": {"test": 3}},
            [["as loaded", "loss", "", "", "0.7500"]],
        ),
    ],
)
def test_each_row_of_results_is_of_one_set_of_weights(changed, expected, tmp_path, capsys):
    best = {"loss/train": 1.0, "loss/val": 0.25, "loss/test": 0.75}
    report = a_report(tmp_path, **{"metrics": LAST_METRICS, "best": BEST, "best_metrics": best, "steps": 8} | changed)
    assert rows(report, capsys) == expected
    text = as_markdown(report)
    written = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert all(row in written for row in expected)


SHORT = ("model=mlp", "hooks=[]", "logger=[]", "data.batch_size=256", "test=false", "trainer.max_epochs=4")
EARLY = ("callbacks=[early_stopping]",)


@pytest.mark.parametrize(
    ("overrides", "ended_by", "epochs"),
    [
        ([], "trainer.max_epochs=4", 4),
        (["trainer.max_steps=3"], "trainer.max_steps=3", 0),
        (["trainer.max_time=1e-6"], "trainer.max_time, 1e-06 s", 0),
        (
            [*EARLY, "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=50"],
            "EarlyStopping (patience=1, min_delta=50): Monitored metric loss/val did not improve in the last 1 rec",
            2,
        ),
        (
            [*EARLY, "callbacks.early_stopping.stopping_threshold=100.0"],
            "EarlyStopping (patience=10, min_delta=0): Stopping threshold reached: loss/val = ",
            1,
        ),
    ],
)
def test_the_end_of_a_training_has_a_reason(overrides, ended_by, epochs, tmp_path, capsys):
    directory = tmp_path / "run"
    report = fit(compose([*SHORT, *overrides, f"hydra.run.dir={directory}"]))
    assert report.status == "completed"
    assert report.ended_by.startswith(ended_by)
    assert report.epochs in (epochs, epochs + 1)
    assert f"the training ended by {ended_by}" in (directory / "train.log").read_text()
    is_shown = "max_epochs" not in ended_by
    assert (f"- ended by: {ended_by}" in (directory / "report.md").read_text()) == is_shown
    print_report(report)
    assert ("ended by" in capsys.readouterr().out) == is_shown
