"""Runs on data of the kinds that may be larger than memory, gone on with in the middle of an epoch."""

from pathlib import Path

import numpy as np
import pytest
import torch

import exp
from exp.engine.checkpoint import read_checkpoint

KINDS = {
    "tokens": [
        *("data=token_file", "data.dataset.path=tokens.bin", "data.dataset.vocabulary_size=50", "metrics=[]"),
        *("data.dataset.block_size=8", "data.shuffle_block=4", "data.shuffle_window=3", "data.batch_size=8"),
    ],
    "packed": [
        *("data=csv_regression", "data.dataset.path=table.csv", "data.dataset.target=c", "data.dataset.packed=true"),
        "metrics=[]",
    ],
    "index": [
        *("data=stream", "data.dataset.files={train: table.csv, val: table.csv}", "data.dataset.index=true"),
        *("data.dataset.target=c", "data.dataset.task=regression", "data.shuffle_block=16", "data.shuffle_window=4"),
        *("objective=[mse]", "metrics=[]", "data.num_workers=1"),
    ],
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    generator.integers(0, 50, 2000, dtype=np.uint16).tofile("tokens.bin")
    np.savetxt("table.csv", generator.normal(size=(400, 3)), delimiter=",", header="a,b,c", comments="")


def run(kind, name, steps, *more):
    report = exp.fit(
        exp.compose(
            [
                *(*KINDS[kind], "callbacks=[]", "logger=[]", "hooks=[]", "test=false", f"trainer.max_steps={steps}"),
                *("trainer.enable_progress_bar=false", f"hydra.run.dir=outputs/{name}", *more),
            ]
        )
    )
    assert report.status == "completed"
    return read_checkpoint(Path("outputs") / name / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_goes_on_within_an_epoch_ends_as_the_unbroken_one(kind):
    whole = run(kind, "whole", 20)
    run(kind, "half", 7)
    rest = run(kind, "rest", 20, "resume=outputs/half/checkpoints/last.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in rest.items())
