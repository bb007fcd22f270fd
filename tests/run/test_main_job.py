"""The default run `python -m exp.train`: its files, metrics and exit statuses."""

import json
import os
from pathlib import Path

import pytest

RUN_FILES = {
    "config.yaml", "overrides.yaml", "provenance.json", "train.log", "report.json", "report.md",
    "checkpoints/last.ckpt", "checkpoints/best.ckpt",
    "table.csv", "pictures/loss.png", "pictures/metrics.png", "pictures/gradients.png",
}  # fmt: skip
REPORT_KEYS = {
    "status", "metrics", "best", "best_metrics", "stage_steps", "ended_by", "steps", "epochs",
    "wall_seconds", "step_ms", "peak_memory_mib", "world_size",
    "precision", "strategy", "command", "versions", "error", "directory", "monitor", "tags",
    "parent", "not_written",
}  # fmt: skip


def only_run(cwd: Path, name="train") -> Path:
    (directory,) = (cwd / "outputs" / name).glob("*/*")
    return directory


@pytest.fixture(scope="module")
def main_job(tmp_path_factory, commands):
    cwd = tmp_path_factory.mktemp("main")
    return commands.run(cwd=cwd), cwd


def test_the_run_ends_with_a_table_and_a_command(main_job):
    done, cwd = main_job
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert "python -m exp.dashboard outputs" in done.stdout
    assert done.stderr == ""
    directory = only_run(cwd)
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    (events,) = files - RUN_FILES
    assert files >= RUN_FILES
    assert events.startswith("tensorboard/events.out.tfevents.")
    assert set(os.listdir(cwd)) == {"outputs"}


def test_the_report_has_the_keys_and_metrics_of_the_contract(main_job):
    _, cwd = main_job
    report = json.loads((only_run(cwd) / "report.json").read_text())
    assert set(report) == REPORT_KEYS
    assert report["metrics"]["accuracy/val"] >= 0.97
    assert report["metrics"]["accuracy/test"] >= 0.95
    assert report["status"] == "completed"
    assert (report["world_size"], report["precision"], report["strategy"]) == (1, "fp32", "auto")
    assert (report["steps"], report["epochs"]) == (600, 30)
    assert report["best"]["metric"] == "loss/val"
    assert report["command"] == "python -m exp.train"
    assert report["error"] is None


def test_a_checkpoint_gives_the_test_metrics_of_its_run(main_job, tmp_path, commands):
    _, cwd = main_job
    best = only_run(cwd) / "checkpoints" / "best.ckpt"
    done = commands.run("train=false", "test=true", f"resume={best}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = json.loads((only_run(cwd) / "report.json").read_text())["metrics"]
    after = json.loads((only_run(tmp_path) / "report.json").read_text())["metrics"]
    assert after["loss/test"] == before["loss/test"]
    assert after["accuracy/test"] == before["accuracy/test"]
    assert not (only_run(tmp_path) / "checkpoints").exists()
