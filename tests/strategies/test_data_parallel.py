"""nn.DataParallel in one process: warning, options that replicas do not support, and a replica on each GPU."""

from __future__ import annotations

import pytest
import torch

from exp.cli.train import main
from exp.config.settings import settings_of
from exp.extras.gallery.data_parallel import DataParallel
from exp.strategies.placement import Machine, placement
from exp.strategies.strategy import Blueprint

SHORT = ("model=sequential", "optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=2", "test=false")


def test_a_command_warns_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["strategy=data_parallel", "launch.accelerator=cpu", "hooks=[]", *SHORT]) == 0
    output = capsys.readouterr()
    assert (output.out + output.err).count("write strategy=ddp") == 1


@pytest.mark.parametrize(
    ("word", "keep", "key"),
    [("bf16_true", {}, "precision.word"), ("bf16", {"head": "fp32"}, "precision.keep"), ("bf16", {}, None)],
)
def test_replicas_refuse_what_casts_at_edges(word, keep, key):
    strategy = DataParallel()
    settings = settings_of({"runtime": {"compile": False}, "precision": {"word": word, "keep": keep}})
    for devices, accelerator in ((2, "cuda"), (1, "cuda"), (2, "cpu")):
        machine = Machine(gpus=2, mps=False)
        placed = placement(
            "data_parallel", devices=devices, accelerator=accelerator, demand=strategy.demand, machine=machine
        )
        network = torch.nn.Linear(1, 1)
        planned = Blueprint(network=network, placement=placed, batch_size=4, precision=word, settings=settings)
        refused = key if (devices, accelerator) == (2, "cuda") else None
        assert [error.key for error in strategy.errors(planned)] == ([refused] if refused else [])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nn.DataParallel needs two GPUs")
def test_two_gpus_train_what_one_process_trains(ranks):
    one = ranks.train(*SHORT, "strategy=single")
    two = ranks.train(*SHORT, "strategy=data_parallel", "launch.devices=2")
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    assert list(two.checkpoint()["state_dict"]) == list(one.checkpoint()["state_dict"])
