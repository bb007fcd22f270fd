"""Commands and Python code of docs/after-the-run.md run on the run of the page, and write their files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from exp.cli.evaluate import main as evaluate
from exp.cli.predict import main as predict
from exp.cli.train import main as train

PAGE = (Path(__file__).parents[2] / "docs" / "after-the-run.md").read_text("utf-8")
COMMAND = re.compile(r"^    python -m exp\.(\w+) (.+)$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"train": train, "evaluate": evaluate, "predict": predict}
QUIET = "trainer.enable_progress_bar=false"


@pytest.mark.slow
def test_commands_and_python_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands) -> None:
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    for name, count in (("pets.csv", 60), ("new.csv", 9)):
        rows = [f"{3.0 * place + draws.normal():.3f},{('cat', 'dog')[place]}" for place in draws.integers(0, 2, count)]
        Path(name).write_text("\n".join(["height,kind", *rows]) + "\n")
    pets = ["data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind", "hydra.run.dir=outputs/pets", QUIET]
    assert train([*pets, "trainer.max_epochs=1"]) == 0
    np.savez("new.npz", input=draws.random((5, 1, 8, 8), dtype=np.float32))
    done = [(program, line) for program, line in COMMAND.findall(PAGE) if program in PROGRAMS]
    assert len(done) == 9
    for program, line in done:
        words = [*shlex.split(line), *([QUIET] if program == "train" else [])]
        if "strategy=ddp" in words:
            ended = commands.run(*words, module=f"exp.{program}")
            assert ended.returncode == 0, ended.stderr
        else:
            assert PROGRAMS[program](words) == 0
    assert all(Path(name).is_file() for name in ("answers.csv", "answers.npz", "answers.jsonl"))
    names: dict[str, object] = {}
    for block in PYTHON.findall(PAGE):
        exec(compile(block, "after-the-run.md", "exec"), names)
    assert names["found"].outputs["output"].shape == (8, 10)


@pytest.mark.slow
def test_export_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript", reason="the extra export is not installed")
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    export = pytest.importorskip("exp.extras.export.export", reason="the folder of exp.export was removed").main
    monkeypatch.chdir(tmp_path)
    programs = {"train": train, "export": export}
    done = [(program, line) for program, line in COMMAND.findall(PAGE) if program in programs]
    assert len(done) == 3
    for program, line in done:
        words = [*shlex.split(line), *([QUIET] if program == "train" else [])]
        assert programs[program](words) == 0, line
    for name in ("outputs/digits/exports/network.onnx", "digits.onnx"):
        assert Path(name).is_file()
