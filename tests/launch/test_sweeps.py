"""Every rank of a sweep's job has the values of the job."""

import json

RECORDER = '''
import json, os
from pathlib import Path
from lightning.pytorch import Callback

class Recorder(Callback):
    """Records what each rank trains with. fail: the lr at which rank 1 fails alone."""

    def __init__(self, *, lr: float, fail: float) -> None:
        self.lr, self.fail = lr, fail

    def on_train_start(self, trainer, module):
        if trainer.global_rank == 1 and self.lr == self.fail:
            raise ValueError("alone")

    def on_train_end(self, trainer, module):
        used = trainer.optimizers[0].param_groups[0]["lr"]
        Path("records").mkdir(exist_ok=True)
        Path("records", f"{os.getpid()}.json").write_text(
            json.dumps([self.lr, used, trainer.world_size, trainer.global_rank])
        )
'''
OPTION = "# callbacks=[recorder]\nrecorder: {_target_: recorder.Recorder, lr: '${optimizer.lr}', fail: 0.001}\n"
SMALL = ["callbacks=[recorder]", "hooks=[]", "optimizer=sgd", "logger=[]", "test=false"]
SMALL += ["trainer.max_steps=2", "trainer.limit_val_batches=1"]


def test_a_sweep_over_numbers_of_ranks_continues_after_a_failed_rank(commands, tmp_path):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "recorder.yaml").write_text(OPTION)
    (tmp_path / "recorder.py").write_text(RECORDER)
    words = ["optimizer.lr=0.001,0.01", "strategy=auto,ddp", "launch.accelerator=cpu"]
    done = commands.run("-m", *SMALL, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1 failed with ValueError: alone" in done.stderr + done.stdout
    assert len(list(tmp_path.glob("outputs/*/sweeps/*/*"))) == 1
    found = sorted(json.loads(path.read_text()) for path in (tmp_path / "records").iterdir())
    # learning rate in the config, learning rate of the optimizer, number of ranks, rank
    assert found == [[0.001, 0.001, 1, 0], [0.01, 0.01, 1, 0], [0.01, 0.01, 2, 0], [0.01, 0.01, 2, 1]]
