"""Two ranks and one process have the same weights and metrics from the same global batches."""

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.numeric
# The 1257 training samples of digits are 19 batches of 64 and one of 41, which two ranks cannot divide equally.
ONE_EPOCH = ["trainer.max_epochs=1", "data.batch_size=64", "optimizer=sgd", "optimizer.lr=0.05", "test=false"]


def train(commands, place: Path, *overrides: str) -> tuple[dict, dict[str, torch.Tensor], set[str]]:
    place.mkdir()
    done = commands.run(*ONE_EPOCH, "precision=fp64", "launch.accelerator=cpu", *overrides, cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = place.glob("outputs/*/*/*")
    report = json.loads((directory / "report.json").read_text())
    state = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return report, state, {path.name for path in directory.iterdir()}


def test_two_ranks_equal_one_process(commands, tmp_path):
    one, weights, files = train(commands, tmp_path / "one", "strategy=single")
    two, weights_of_two, files_of_two = train(commands, tmp_path / "two", "strategy=ddp")
    assert one["steps"] == two["steps"] == 20
    assert (one["world_size"], two["world_size"]) == (1, 2)
    torch.testing.assert_close(weights_of_two, weights, rtol=1e-9, atol=1e-11)
    # Each validation sample counts once.
    for tag in ("accuracy/val", "loss/val"):
        assert one["metrics"][tag] == pytest.approx(two["metrics"][tag], rel=1e-9)
    assert files_of_two - files == {"train.rank1.log"}
    assert files <= files_of_two
