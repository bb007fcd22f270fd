"""The index has another `exp`: both in one environment are told at once, in whichever order they came."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exp
from exp.name_clash import refuse_a_second_exp

PACKAGE = Path(exp.__file__).parent
THEIRS = {"exp/__init__.py": "", "exp/run.py": "VALUE = 1\n", "exp/gopt.py": "", "exp-0.5.1.dist-info/METADATA": ""}


def install_ours(site: Path) -> None:
    shutil.copytree(PACKAGE, site / "exp", ignore=shutil.ignore_patterns("__pycache__", "conf"), dirs_exist_ok=True)
    (site / "exp_framework-0.1.0.dist-info").mkdir()


def install_theirs(site: Path) -> None:
    for name, text in THEIRS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def uninstall_theirs(site: Path) -> None:
    for name in THEIRS:
        (site / name).unlink()
    (site / "exp-0.5.1.dist-info").rmdir()


def told(site: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    # -S: this environment's own exp would stand in for one without an __init__.py.
    command = [sys.executable, "-S", *words]
    done = subprocess.run(command, env=environment, cwd=site.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("-c", "import exp"), ("-m", "exp.train"), ("-m", "exp.doctor")])
def test_theirs_then_ours(tmp_path: Path, words: tuple[str, ...]) -> None:
    site = tmp_path / "site"
    install_theirs(site)
    install_ours(site)
    last = told(site, *words)
    assert last.startswith(f"ImportError: exp-0.5.1 is installed in {site} beside exp-framework. pip uninstall -y exp ")


@pytest.mark.parametrize(
    "words", [("-c", "from exp.errors import ConfigError"), ("-m", "exp.train"), ("-m", "exp.plan")]
)
def test_ours_then_theirs(tmp_path: Path, words: tuple[str, ...]) -> None:
    site = tmp_path / "site"
    install_ours(site)
    install_theirs(site)
    last = told(site, *words)
    assert last.startswith(f"ImportError: {site}/exp/__init__.py is not exp-framework's: ")
    assert "pip uninstall -y exp exp-framework, then install exp-framework again" in last


def test_what_their_uninstallation_leaves(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install_ours(site)
    install_theirs(site)
    uninstall_theirs(site)
    assert told(site, "-m", "exp.train").startswith(f"ImportError: {site}/exp/__init__.py is not exp-framework's: ")


def test_neighbours_with_similar_names_pass(tmp_path: Path) -> None:
    for name in ("exp_framework-0.1.0.dist-info", "exp_convert-0.0.1.dist-info", "exp-data", "expo-1.0.dist-info"):
        (tmp_path / name).mkdir()
    refuse_a_second_exp(str(tmp_path))
    refuse_a_second_exp(str(tmp_path / "archive.zip"))
    (tmp_path / "exp-0.3-py3.11.egg-info").mkdir()
    with pytest.raises(ImportError, match=r"exp-0\.3-py3\.11 is installed"):
        refuse_a_second_exp(str(tmp_path))
