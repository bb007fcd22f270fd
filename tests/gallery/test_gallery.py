"""The list of the gallery is complete and its command imports little, and each experiment has a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import exp
from exp.cli.gallery import main, titles

FOLDER = Path(__file__).parent
EXPERIMENTS = Path(exp.__file__).parent / "conf" / "experiment"


def test_the_list_has_each_experiment_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    blocks = [block.splitlines() for block in capsys.readouterr().out.strip().split("\n\n")]
    assert [block[0] for block in blocks] == sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))
    for name, title, command in blocks:
        assert len(title) > 20, name
        assert command == f"  python -m exp.train experiment={name}"
        assert (Path(__file__).parents[2] / "docs" / "gallery" / f"{name}.png").is_file()


def test_a_name_prints_its_yaml_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lenet"]) == 0
    assert capsys.readouterr().out == (EXPERIMENTS / "lenet.yaml").read_text()


def test_an_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lennet"]) == 2
    assert "Did you mean lenet?" in capsys.readouterr().err


def test_the_list_needs_neither_torch_nor_hydra() -> None:
    heavy = "import sys, exp.cli.gallery as g; g.main([]); print({'torch', 'hydra', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_each_experiment_has_a_test_that_says_its_number() -> None:
    functions = [node for path in FOLDER.glob("test_*.py") for node in ast.parse(path.read_text()).body]
    said = {node.name: ast.get_docstring(node) for node in functions if isinstance(node, ast.FunctionDef)}
    assert [name for name in titles() if not said.get(f"test_{name}")] == []
