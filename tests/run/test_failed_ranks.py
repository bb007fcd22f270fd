"""A run of several ranks that fails leaves a report with the first cause."""

import json

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


def test_the_report_names_the_rank_that_failed_first(tmp_path, commands):
    """One that is killed: tests/launch/test_train_command.py."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "fragile.yaml").write_text("# Fails: model=fragile\n_target_: raising.Fragile\n")
    (tmp_path / "raising.py").write_text(MINE)
    # The check builds it in the parent, too; a rank's own number is set by the launcher.
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
