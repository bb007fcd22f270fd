"""Random commands with a warm parent and without one; two hundred: python tests/attacks/warm_commands.py."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "warm_commands.py"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is forked at all")
def test_random_commands_are_the_same_with_a_warm_parent(tmp_path):
    spec = importlib.util.spec_from_file_location("warm_commands", PROGRAM)
    program = sys.modules["warm_commands"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    commands = int(os.environ.get("EXP_TEST_WARM_COMMANDS", "6"))
    assert program.attack(tmp_path, commands=commands, seed=3) == []
