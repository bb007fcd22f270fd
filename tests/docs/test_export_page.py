"""docs/export.md: its commands run in a folder with its run and write their files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from exp.cli.train import main as train
from exp.extras.export.export import main as export

pytest.importorskip("onnxscript", reason="the extra export is not installed")
pytest.importorskip("onnxruntime", reason="the extra export is not installed")

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text("utf-8")
COMMAND = re.compile(r"^    python -m exp\.(\w+) (.+)$", re.MULTILINE)
PROGRAMS = {"train": train, "export": export}


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = COMMAND.findall(PAGE)
    assert len(done) == 4
    for program, line in done:
        words = [*shlex.split(line), *(["trainer.enable_progress_bar=false"] if program == "train" else [])]
        assert PROGRAMS[program](words) == 0, line
    for name in ("outputs/digits/exports/network.onnx", "digits.pt2", "raw.onnx"):
        assert Path(name).is_file()
