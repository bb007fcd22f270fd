"""A command that the process of `python -m exp.warm` runs behaves as one that Python starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exp.launch import handover

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is forked at all")
CALLBACK = """
from pathlib import Path
from lightning.pytorch import Callback

class Own(Callback):
    def on_train_start(self, *_):
        Path("command").write_text(Path("/proc/self/cmdline").read_text())
"""
SHORT = (
    *("trainer.max_steps=4", "trainer.limit_val_batches=1", "test=false", "hydra.run.dir=outputs/run"),
    *("+callbacks.own={_target_: own.Own}", "trainer.enable_progress_bar=false"),
)
# Longer than any machine takes.
SECONDS = 200.0


def start(runtime: Path, *line: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime)}
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", *line], env=environment, **given)


def output_of(runtime: Path, *line: str) -> str:
    output, errors = start(runtime, *line).communicate(timeout=SECONDS)
    assert errors == ""
    return output


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """The runtime directory of a user with a warm parent."""
    place = tmp_path_factory.mktemp("runtime")
    place.chmod(0o700)
    assert output_of(place, "exp.warm", "--idle", "20m").startswith("it waits")
    yield place
    output_of(place, "exp.warm", "stop")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "own.py").write_text(CALLBACK)
    monkeypatch.chdir(tmp_path)


def test_a_warm_parent_runs_commands_unless_told_otherwise(runtime, here):
    command = start(runtime, "exp.train", *SHORT)
    output, errors = command.communicate(timeout=SECONDS)
    assert "exp.warm" in Path("command").read_text()
    assert ("completed" in output, errors, command.returncode) == (True, "", 0)
    assert re.fullmatch(r"one waits already: process \d+\n", output_of(runtime, "exp.warm"))
    status = r"process \d+ waits, 1 commands? so far\n"
    assert re.fullmatch(status, output_of(runtime, "exp.warm", "status"))
    assert output_of(runtime, "exp.train", "runtime.warm=false", "--version").startswith("exp ")
    assert re.fullmatch(status, output_of(runtime, "exp.warm", "status"))


def test_a_folder_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = Path(handover.folder())
    place.mkdir(mode=0o700)
    assert handover.folder() == str(place)
    place.chmod(0o750)
    with pytest.raises(handover.UnsafeFolderError, match=re.escape(f"{place} must be a directory of your own")):
        handover.folder()
