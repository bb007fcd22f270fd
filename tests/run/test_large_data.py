"""Runs on data sets that may be larger than memory resume exactly within an epoch."""

from pathlib import Path

import numpy as np
import pytest
import torch

import exp
from exp.engine.checkpoint import read_checkpoint

KINDS = {
    "tokens": [
        *("data=token_file", "data.dataset.path=tokens.bin", "data.dataset.vocabulary_size=50", "metrics=[]"),
        *("data.dataset.block_size=8", "data.batch_size=8"),
    ],
    "table": ["data=csv_regression", "data.dataset.path=table.csv", "data.dataset.target=c", "metrics=[]"],
    "stream": [
        *("data=stream", "data.dataset.files={train: table.csv, val: table.csv}"),
        *("data.dataset.target=c", "data.dataset.task=regression"),
        *("objective=[mse]", "metrics=[]", "data.num_workers=1"),
    ],
}


@pytest.fixture(autouse=True)
def files(place):
    generator = np.random.default_rng(0)
    generator.integers(0, 50, 2000, dtype=np.uint16).tofile("tokens.bin")
    np.savetxt("table.csv", generator.normal(size=(400, 3)), delimiter=",", header="a,b,c", comments="")


def run(kind, name, *more):
    quiet = ("callbacks=[]", "logger=[]", "hooks=[]", "test=false", "trainer.enable_progress_bar=false")
    exp.fit(exp.compose([*KINDS[kind], *quiet, f"hydra.run.dir=outputs/{name}", *more]))
    return read_checkpoint(Path("outputs") / name / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.mark.parametrize(
    "kind", ["table", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tokens", "stream"))]
)
def test_a_run_resumes_exactly_within_an_epoch(kind):
    whole = run(kind, "whole", "trainer.max_steps=20")
    run(kind, "half", "trainer.max_steps=7")
    rest = run(kind, "rest", "trainer.max_steps=20", "resume=outputs/half/checkpoints/last.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in rest.items())
