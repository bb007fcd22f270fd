"""The command `exp`: its help, misspelled commands, and modules that are run by path."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import exp
from exp.cli.commands import COMMANDS
from exp.cli.dispatch import main

ROOT = Path(exp.__file__).parent


def of(*line: str | Path, here: Path) -> tuple[int, str, str]:
    done = subprocess.run(list(map(str, line)), cwd=here, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_the_help_lists_each_command(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert max(map(len, lines)) <= 100
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"exp {exp.__version__}, Hydra 1.")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian model=lenet seed=1", "train model=lenet seed=1"),
        ("exp-train model=mlp", "train model=mlp"),
        ("sweep seed=0,1", "train -m seed=0,1"),
        # The command is missing or is not the first word.
        ("+precision=bf16 'hooks=[a,b]'", "train +precision=bf16 'hooks=[a,b]'"),
        ("~hooks.memory", "train '~hooks.memory'"),
        ("--multirun train seed=0,1", "train --multirun seed=0,1"),
        ("model=lenet check", "check model=lenet"),
    ],
)
def test_a_misspelled_command_suggests_a_line_that_runs(typed, meant, capsys):
    assert main(shlex.split(typed)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"exp: {shlex.split(typed)[0]} is not a command. Write:"
    assert second.endswith(f"exp {meant}")


def test_an_unknown_command_lists_all_commands(capsys):
    assert main(["zebra"]) == 2
    assert capsys.readouterr().err.endswith(f"is not a command. The commands are {', '.join(COMMANDS)}\n")


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["train", "--nonsense"], "train --nonsense"),
        pytest.param(["help", "gallery"], "gallery --help", marks=pytest.mark.slow),
        pytest.param(["report", "nowhere"], "report nowhere", marks=pytest.mark.slow),
    ],
)
def test_a_command_behaves_as_its_module(words, module, scripts, tmp_path):
    expected = of(sys.executable, "-m", *f"exp.{module}".split(), here=tmp_path)
    assert of(scripts / "exp", *words, here=tmp_path) == expected
    assert of(sys.executable, "-m", "exp", *words, here=tmp_path) == expected


def test_an_entry_point_adds_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "spiral_command.py").write_text("import sys\ndef main():\n    print(sys.argv[1:])\n    return 3\n")
    metadata = tmp_path / "spirals-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: spirals\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[exp.commands]\nspirals = spiral_command:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["exp", "spirals", "a=1"])
    with pytest.raises(SystemExit, match="3"):
        main()
    assert capsys.readouterr().out == "['a=1']\n"
    assert main([]) == 0
    assert "  spirals " in capsys.readouterr().out
