"""Two ranks are one process: the same weights and the same metrics from the same global batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.numeric

# 1257 training samples of digits: 19 batches of 64 and a last one of 41, which two ranks cannot halve.
ONE_EPOCH = ["trainer.max_epochs=1", "data.batch_size=64", "optimizer=sgd", "optimizer.lr=0.05", "test=false"]


def trained(commands, place: Path, *overrides: str) -> tuple[dict, dict[str, torch.Tensor], Path]:
    done = commands.run(*ONE_EPOCH, "launch.accelerator=cpu", *overrides, cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = place.glob("outputs/*/*/*")
    report = json.loads((directory / "report.json").read_text())
    state = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return report, state, directory


@pytest.fixture(scope="module")
def single(tmp_path_factory, commands):
    return trained(commands, tmp_path_factory.mktemp("single"), "strategy=single")


@pytest.fixture(scope="module")
def double(tmp_path_factory, commands):
    return trained(commands, tmp_path_factory.mktemp("double"), "strategy=ddp")


def test_the_weights_after_an_epoch_with_a_short_last_batch_are_equal(single, double):
    (report_one, one, _), (report_two, two, _) = single, double
    assert report_one["steps"] == report_two["steps"] == 20
    assert (report_one["world_size"], report_two["world_size"]) == (1, 2)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-5, msg=name)


def test_the_metrics_count_every_sample_once(single, double):
    one, two = single[0]["metrics"], double[0]["metrics"]
    assert one["accuracy/val"] == pytest.approx(two["accuracy/val"], abs=1e-6)
    assert one["loss/val"] == pytest.approx(two["loss/val"], abs=1e-5)


def test_the_run_directory_of_several_ranks_holds_one_more_log_and_nothing_of_the_launch(single, double):
    one, two = ({path.name for path in directory.iterdir()} for _, _, directory in (single, double))
    assert two - one == {"train.rank1.log"}
    assert one <= two


@pytest.mark.any_processor
def test_torchrun_runs_a_frozen_directory(double, tmp_path):
    frozen = tmp_path / "frozen"
    frozen.mkdir()
    for name in ("config.yaml", "overrides.yaml", "provenance.json"):
        (frozen / name).write_text((double[2] / name).read_text())
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "exp.worker", str(frozen)]
    done = subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((frozen / "report.json").read_text())
    assert (report["world_size"], report["status"]) == (2, "completed")
    state = torch.load(frozen / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, weight in double[1].items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-6, msg=name)
