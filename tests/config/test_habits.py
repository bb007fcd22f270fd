"""Commands of other frameworks in habits.txt run, or their error has the command that runs.

docs/make_habits.py makes a page of the site from the same table.
"""

import runpy
import shlex
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PASTING = runpy.run_path(str(HERE / "pasting.py"))
answer, fixed = PASTING["answer"], PASTING["fixed"]
LINES = (HERE / "habits.txt").read_text().splitlines()
TABLE = [tuple(line.split(" | ")) for line in LINES if line and not line.startswith("#")]
TYPED = [
    "+server.host=here +server.port=80",
    "-m hydra.launcher.n_jobs=2 seed=1,2",
    "trainer.devices=-1",
    "trainer.logger=false",
    "logger.wandb.tags=[a]",
    "trainer.enable_checkpointing=false",
    "trainer=ddp_sim trainer.devices=2",
    "model=resnet trainer.sync_batchnorm=true",
    "trainer.max_epochs=20 model.optimizer.lr=1e-4",
    "extras.ignore_warnings=true",
]
MOST_ROUNDS = 4


def line_that_runs(typed):
    """Apply the fix of each error until no error is left."""
    argv = shlex.split(typed)
    for _ in range(MOST_ROUNDS):
        errors = answer(argv)
        if not errors:
            return argv
        for error in errors:
            argv = next(iter(fixed(argv, error)), argv)
    raise AssertionError(f"{typed}: {shlex.join(argv)} is refused: {[str(error) for error in answer(argv)]}")


@pytest.mark.parametrize("typed", TYPED)
def test_the_fixes_lead_to_the_line_of_the_table(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = dict(TABLE)[typed]
    wanted = [] if line == "leave out" else shlex.split(line)
    assert sorted(line_that_runs(typed)) == sorted(wanted)
