"""A step that is not finite, here and there in a run; everywhere: python tests/attacks/non_finite.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "non_finite.py"


@pytest.fixture
def program(monkeypatch):
    spec = importlib.util.spec_from_file_location("non_finite", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "non_finite", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_nothing_that_is_not_finite_is_saved_and_no_such_run_completes(tmp_path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    chosen = program.cases(0.005, 1, settings=list(program.SETTINGS), kinds=list(program.KINDS))
    found = program.attack(tmp_path, chosen)
    assert (found.not_finite, found.wrong_end, found.wrong_step) == ([], [], [])
    assert found.runs == len(chosen) > 10
    assert min(found.completed, found.failed) > 3
