"""PyPI has another package `exp`. If both are installed, the first import reports it."""

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


def last_line(site: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    # -S, because otherwise the exp of this environment replaces a package without an __init__.py.
    command = [sys.executable, "-S", *words]
    done = subprocess.run(command, env=environment, cwd=site.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("-c", "import exp"), ("-m", "exp.train")])
def test_an_exp_that_was_installed_before_is_reported(tmp_path: Path, words: tuple[str, ...]) -> None:
    site = tmp_path / "site"
    install_theirs(site)
    install_ours(site)
    last = last_line(site, *words)
    assert last.startswith(
        f"ImportError: exp-0.5.1 is installed in {site} next to exp-framework. pip uninstall -y exp "
    )


@pytest.mark.parametrize("is_left", [False, True])
def test_an_exp_that_was_installed_later_is_reported(tmp_path: Path, is_left: bool) -> None:
    """After the uninstallation of the other package, exp has no __init__.py."""
    site = tmp_path / "site"
    install_ours(site)
    install_theirs(site)
    if is_left:
        uninstall_theirs(site)
    last = last_line(site, "-m", "exp.train")
    assert last.startswith(f"ImportError: {site}/exp/__init__.py is not exp-framework's: ")
    assert "pip uninstall -y exp exp-framework, then install exp-framework again" in last


def test_packages_with_similar_names_pass(tmp_path: Path) -> None:
    for name in ("exp_framework-0.1.0.dist-info", "exp_convert-0.0.1.dist-info", "exp-data", "expo-1.0.dist-info"):
        (tmp_path / name).mkdir()
    refuse_a_second_exp(str(tmp_path))
    refuse_a_second_exp(str(tmp_path / "archive.zip"))
    (tmp_path / "exp-0.3-py3.11.egg-info").mkdir()
    with pytest.raises(ImportError, match=r"exp-0\.3-py3\.11 is installed"):
        refuse_a_second_exp(str(tmp_path))
