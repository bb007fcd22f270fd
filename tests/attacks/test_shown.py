"""What a run shows is what a program by hand computes, for a few configs at random; 200: tests/attacks/shown.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "shown.py"
# Among them: phases, a resume in the middle, fp16, steps that are skipped, averages, a plateau, a regression.
SEEDS = (5, 8, 13, 17, 24, 31, 61, 64, 121, 173)


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("shown", PROGRAM)
    module = sys.modules["shown"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_tag_is_what_a_program_by_hand_computes_at_each_step_once(tmp_path, monkeypatch, program, seed):
    monkeypatch.chdir(tmp_path)
    assert program.attack(tmp_path, [seed]) == {}
