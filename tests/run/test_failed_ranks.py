"""A failed run of several ranks has a report with the first cause. tests/launch tests killed ranks."""

import json

import pytest

from exp.engine.checkpoint import read_checkpoint

MINE = """
import os
import torch

class Fragile(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(64, 10), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == 3 and os.environ["RANK"] == "1":
            raise ArithmeticError('the third step')
        return self.layer(x.flatten(1))
"""


def test_the_report_names_the_rank_that_failed_first(tmp_path, write, commands):
    write("conf/model/fragile.yaml", "# Fails: model=fragile\n_target_: raising.Fragile\n")
    write("raising.py", MINE)
    # The check also builds the model in the parent, where RANK is not set.
    overrides = ["model=fragile", "strategy=ddp", "launch.accelerator=cpu", "trainer.enable_progress_bar=false"]
    done = commands.run(*overrides, cwd=tmp_path, environment={"RANK": "0"})
    assert done.returncode == 1
    assert "rank 1 failed with ArithmeticError: the third step" in done.stdout + done.stderr
    (path,) = tmp_path.glob("outputs/train/*/*/report.json")
    report = json.loads(path.read_text())
    assert report["status"] == "failed"
    assert "rank 1" in report["error"]["message"]
    assert "the third step" in report["error"]["message"]
    assert report["world_size"] == 2


TAKES = """
import shutil
from pathlib import Path
from lightning.pytorch import Callback

class Takes(Callback):
    def __init__(self, *, what: str) -> None:
        self.what = what

    def on_train_batch_end(self, trainer, *_):
        run = Path(trainer.default_root_dir)
        if trainer.global_step != 3 or not trainer.is_global_zero:
            return
        trainer.strategy.checkpoint_io.settle()  # a checkpoint that is being written would be lost
        if self.what == "run":
            run.rename(f"{run}-moved")
        else:
            shutil.rmtree(run / self.what)
"""


@pytest.mark.parametrize("what", ["run", "checkpoints"])
def test_a_run_with_a_removed_directory_completes(tmp_path, write, commands, what):
    write("conf/callbacks/takes.yaml", f"takes: {{_target_: taking.Takes, what: {what}}}\n")
    write("taking.py", TAKES)
    short = ["trainer.limit_train_batches=3", "trainer.limit_val_batches=1", "trainer.max_epochs=3", "test=false"]
    saving = ["checkpoint.every_n_steps=1", "hooks=[]", "trainer.enable_progress_bar=false"]
    where = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"]
    done = commands.run("callbacks=[takes]", *where, *short, *saving, cwd=tmp_path)
    (path,) = tmp_path.glob("outputs/train/*/*/report.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["status"] == "completed"
    assert read_checkpoint(path.parent / "checkpoints" / "last.ckpt")["global_step"] == 9
