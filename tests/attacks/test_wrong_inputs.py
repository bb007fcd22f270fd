"""Inputs that cannot be meant: exit 2, at most 12 lines, the key named, no traceback, no directory.

wrong_inputs.txt: a command line, and what the answer names. An eighth of them, and all with ATTACKS=2000 in the
environment. Those that a user is likely to type, with what is to be said of each: tests/config/test_wrong_commands.py.
"""

import os
from pathlib import Path

import pytest

from exp.train import main

LINES = (Path(__file__).parent / "wrong_inputs.txt").read_text().splitlines()
CASES = [line.rpartition(" | ")[::2] for line in LINES]
SHARE = CASES if "ATTACKS" in os.environ else CASES[::8]
IN_A_TEST = 8


@pytest.mark.parametrize("first", range(0, len(SHARE), IN_A_TEST))
def test_inputs_that_cannot_be_meant(first, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for command, key in SHARE[first : first + IN_A_TEST]:
        status = main(command.split(" "))
        captured = capfd.readouterr()
        told = captured.out + captured.err
        assert status == 2, f"{command}: {told}"
        assert len(told.splitlines()) <= 12, f"{command}: {told}"
        assert key in told, f"{command}: {told}"
        assert "Traceback" not in told, f"{command}: {told}"
        assert not any(tmp_path.iterdir()), f"{command} makes {[*tmp_path.iterdir()]}"


def test_the_list_is_long():
    assert len(CASES) >= 320
