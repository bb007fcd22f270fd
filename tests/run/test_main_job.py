"""The main job, as a newcomer types it: files, figures, exit statuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN_FILES = {
    "config.yaml", "overrides.yaml", "provenance.json", "train.log", "report.json", "report.md",
    "checkpoints/last.ckpt", "checkpoints/best.ckpt",
    "table.csv", "pictures/loss.png", "pictures/metrics.png", "pictures/gradients.png",
}  # fmt: skip
REPORT_KEYS = {
    "status", "metrics", "best", "steps", "epochs", "wall_seconds", "step_ms", "peak_memory_mib", "world_size",
    "precision", "strategy", "command", "versions", "error", "directory", "monitor", "tags",
    "parent", "not_written",
}  # fmt: skip


def train(*overrides, cwd):
    """With the start of Python, as typed; the main job is lived so once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "exp.train", *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=300)


def only_run(cwd: Path, name="train") -> Path:
    (directory,) = (cwd / "outputs" / name).glob("*/*")
    return directory


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("main")
    return train(cwd=cwd), cwd


def test_ends_with_a_table_and_the_dashboards_command(main_job):
    done, _ = main_job
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert "python -m exp.dashboard outputs" in done.stdout
    assert done.stderr == ""


def test_learns_the_digits(main_job):
    _, cwd = main_job
    report = json.loads((only_run(cwd) / "report.json").read_text())
    assert report["metrics"]["accuracy/val"] >= 0.97
    assert report["metrics"]["accuracy/test"] >= 0.95


def test_run_directory_is_the_contract(main_job):
    _, cwd = main_job
    directory = only_run(cwd)
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    (events,) = files - RUN_FILES
    assert files >= RUN_FILES
    assert events.startswith("tensorboard/events.out.tfevents.")
    assert set(os.listdir(cwd)) == {"outputs"}


def test_report_holds_the_contracts_keys(main_job):
    _, cwd = main_job
    report = json.loads((only_run(cwd) / "report.json").read_text())
    assert set(report) == REPORT_KEYS
    assert report["status"] == "completed"
    assert (report["world_size"], report["precision"], report["strategy"]) == (1, "fp32", "auto")
    assert (report["steps"], report["epochs"]) == (600, 30)
    assert report["best"]["metric"] == "loss/val"
    assert report["command"] == "python -m exp.train"
    assert report["error"] is None


def test_a_checkpoint_alone_gives_the_same_test_figures(main_job, tmp_path, commands):
    _, cwd = main_job
    best = only_run(cwd) / "checkpoints" / "best.ckpt"
    done = commands.run("train=false", "test=true", f"resume={best}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = json.loads((only_run(cwd) / "report.json").read_text())["metrics"]
    after = json.loads((only_run(tmp_path) / "report.json").read_text())["metrics"]
    assert after["loss/test"] == before["loss/test"]
    assert after["accuracy/test"] == before["accuracy/test"]
    assert not (only_run(tmp_path) / "checkpoints").exists()


def test_ctrl_c_saves_and_resume_goes_on(tmp_path, commands):
    command = commands.start("trainer.max_epochs=2000", "test=false", cwd=tmp_path)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("outputs/train/*/*/checkpoints/last.ckpt")):
        assert time.monotonic() < deadline
        assert command.process.is_alive(), command.end()
        time.sleep(0.05)
    os.kill(command.process.pid, signal.SIGINT)
    ended = command.end(seconds=60)
    error = ended.stderr
    assert ended.returncode == 130
    assert "last.ckpt" in error
    assert "Traceback" not in error
    directory = only_run(tmp_path)
    report = json.loads((directory / "report.json").read_text())
    assert report["status"] == "interrupted"
    steps = report["steps"]
    assert 0 < steps < 40_000
    done = commands.run(
        "test=false", "name=second", "trainer.max_epochs=2000", f"trainer.max_steps={steps + 30}",
        f"resume={directory / 'checkpoints' / 'last.ckpt'}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((only_run(tmp_path, "second") / "report.json").read_text())["steps"] == steps + 30


def test_a_failing_run_reports_its_error_and_exits_1(tmp_path, commands):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "broken.yaml").write_text(
        "# Fails in its third step: model=broken\n_target_: mine.Broken\n"
    )
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Broken(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.calls = torch.nn.Linear(64, 10), 0\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        if self.calls == 3:\n"
        "            raise ArithmeticError('the third step')\n"
        "        return self.layer(x.flatten(1))\n"
    )
    done = commands.run("model=broken", cwd=tmp_path)
    assert done.returncode == 1
    assert "the third step" in done.stderr
    report = json.loads((only_run(tmp_path) / "report.json").read_text())
    assert report["status"] == "failed"
    assert report["error"]["type"] == "ArithmeticError"
    assert "in forward failed with ArithmeticError: the third step" in report["error"]["message"]
    assert "Traceback" in (only_run(tmp_path) / "train.log").read_text()
