"""nn.DataParallel in one process: on CPU as it is, on GPUs with a replica each."""

from __future__ import annotations

import pytest
import torch

from exp.strategies.data_parallel import DataParallel
from exp.strategies.placement import Machine, placement
from exp.strategies.strategy import Blueprint

SHORT = ("optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=30", "test=false")


@pytest.mark.parametrize("model", ["sequential", "branches"])
def test_on_cpu_it_is_one_process(ranks, model):
    one = ranks.train(f"model={model}", *SHORT, "strategy=single")
    two = ranks.train(f"model={model}", *SHORT, "strategy=data_parallel", "launch.accelerator=cpu", "launch.devices=2")
    assert two.losses == one.losses
    assert list(two.checkpoint()["state_dict"]) == list(one.checkpoint()["state_dict"])
    assert two.report["strategy"] == "data_parallel"
    assert two.report["world_size"] == 1


def test_as_a_command_it_warns_once(tmp_path, commands):
    done = commands.run("strategy=data_parallel", "launch.accelerator=cpu", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("write strategy=ddp") == 1


@pytest.mark.parametrize(
    ("word", "keep", "key"),
    [
        ("bf16_true", {}, "precision.word"),
        ("fp16_true", {}, "precision.word"),
        ("bf16", {"head": "fp32"}, "precision.keep"),
        ("bf16", {}, None),
    ],
)
def test_what_casts_at_edges_is_refused_where_there_are_replicas(word, keep, key):
    strategy = DataParallel()
    config = {"runtime": {"compile": False}, "precision": {"word": word, "keep": keep}}
    for devices, accelerator in ((2, "cuda"), (1, "cuda"), (2, "cpu")):
        placed = placement(
            "data_parallel",
            devices=devices,
            accelerator=accelerator,
            demand=strategy.demand,
            machine=Machine(gpus=2, mps=False),
        )
        network = torch.nn.Linear(1, 1)
        planned = Blueprint(network=network, placement=placed, batch_size=4, precision=word, config=config)
        refused = key if (devices, accelerator) == (2, "cuda") else None
        assert [fault.key for fault in strategy.faults(planned)] == ([refused] if refused else [])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nn.DataParallel needs two GPUs")
def test_on_two_gpus(ranks):
    one = ranks.train("model=sequential", *SHORT, "strategy=single")
    two = ranks.train("model=sequential", *SHORT, "strategy=data_parallel", "launch.devices=2")
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    assert list(two.checkpoint()["state_dict"]) == list(one.checkpoint()["state_dict"])
