"""src/exp passes mypy with the settings in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_type_checker_finds_nothing():
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
