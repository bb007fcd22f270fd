"""nn.DataParallel in one process: on CPU as it is, on GPUs with a replica each."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

SHORT = ("optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=30", "test=false")


@pytest.mark.parametrize("model", ["sequential", "module_dict"])
def test_on_cpu_it_is_one_process(ranks, model):
    one = ranks.train(f"model={model}", *SHORT, "strategy=single")
    two = ranks.train(f"model={model}", *SHORT, "strategy=data_parallel", "launch.accelerator=cpu", "launch.devices=2")
    assert two.losses == one.losses
    assert list(two.checkpoint()["state_dict"]) == list(one.checkpoint()["state_dict"])
    assert two.report["strategy"] == "data_parallel"
    assert two.report["world_size"] == 1


def test_as_a_command_it_warns_once(tmp_path):
    command = [sys.executable, "-m", "exp.train", "strategy=data_parallel", "launch.accelerator=cpu", *SHORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("write strategy=ddp") == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nn.DataParallel needs two GPUs")
def test_on_two_gpus(ranks):
    one = ranks.train("model=sequential", *SHORT, "strategy=single")
    two = ranks.train("model=sequential", *SHORT, "strategy=data_parallel", "launch.devices=2")
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    assert list(two.checkpoint()["state_dict"]) == list(one.checkpoint()["state_dict"])
