"""kill -9 at random moments, resumed until the run is done; a thousand: python tests/attacks/kills.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "kills.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("kills", PROGRAM)
    module = sys.modules["kills"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("overrides", "kills"), [("PLAIN", 16), ("FULL", 7)])
def test_a_run_that_is_killed_again_and_again_is_the_unbroken_one(tmp_path, commands, program, overrides, kills):
    found = program.attack(commands, tmp_path, getattr(program, overrides), kills=kills, seed=1)
    assert (found.unreadable, found.different, found.partial, found.inconsistent, found.failed) == ([], [], [], [], [])
    assert found.kills == kills
