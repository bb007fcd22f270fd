"""exp as one command: what it runs, what it says of a word that is none of its commands, and files run by path."""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exp
from exp import command_clock
from exp.__main__ import HABITS, main, right_line
from exp.commands import COMMANDS
from exp.output import loading_torch
from exp.run_report import Report, print_report

ROOT = Path(exp.__file__).parent


def of(*line: str | Path, here: Path) -> tuple[int, str, str]:
    done = subprocess.run(list(map(str, line)), cwd=here, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_help_has_a_line_for_each_command(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert max(map(len, lines)) <= 100


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"exp {exp.__version__}, Hydra 1.")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian", "train"),
        ("trian model=lenet seed=1", "train model=lenet seed=1"),
        ("chek", "check"),
        ("find-lr model=mlp", "find_lr model=mlp"),
        ("findlr", "find_lr"),
        ("Dashboard", "dashboard"),
        ("eval run=x", "evaluate run=x"),
        ("exp.train a=1", "train a=1"),
        ("fit model=lenet", "train model=lenet"),
        ("sweep seed=0,1", "train -m seed=0,1"),
        ("tensorboard outputs", "dashboard outputs"),
        # The command was left out, or does not stand first.
        ("model=lenet", "train model=lenet"),
        ("+precision=bf16 'hooks=[a,b]'", "train +precision=bf16 'hooks=[a,b]'"),
        ("~hooks.memory", "train '~hooks.memory'"),
        ("-m seed=0,1", "train -m seed=0,1"),
        ("--multirun train seed=0,1", "train --multirun seed=0,1"),
        ("model=lenet check", "check model=lenet"),
    ],
)
def test_a_word_that_is_no_command_is_answered_by_the_line_that_runs(typed, meant, capsys):
    assert main(shlex.split(typed)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"exp: {shlex.split(typed)[0]} is no command. Write:"
    assert second.endswith(f"exp {meant}")
    assert meant.split()[0] in COMMANDS


@pytest.mark.parametrize("word", ["zebra", "", "outputs/train"])
def test_where_nothing_is_near_all_are_listed(word, capsys):
    assert main([word]) == 2
    assert capsys.readouterr().err.endswith(f"is no command. There are {', '.join(COMMANDS)}\n")


def test_what_others_call_a_command_is_none_of_exps():
    assert not set(HABITS) & set(COMMANDS)
    assert {right_line([habit]).split()[0] for habit in HABITS} <= set(COMMANDS)


@pytest.mark.parametrize(
    "words", [["gallery", "lenet"], ["train", "--nonsense"], ["report", "nowhere"], ["plan", "-h"]]
)
def test_a_command_is_its_module_to_the_byte(words, scripts, tmp_path):
    name, *rest = words
    by_module = of(sys.executable, "-m", f"exp.{name}", *rest, here=tmp_path)
    assert of(scripts / "exp", *words, here=tmp_path) == by_module
    assert of(sys.executable, "-m", "exp", *words, here=tmp_path) == by_module


def test_help_of_a_command_is_its_own(scripts, tmp_path):
    by_module = of(sys.executable, "-m", "exp.warm", "--help", here=tmp_path)
    assert of(scripts / "exp", "help", "warm", here=tmp_path) == by_module
    assert by_module[0] == 0


def test_nothing_beside_the_script_is_imported(scripts, tmp_path):
    shutil.copy(scripts / "exp", tmp_path / "exp")
    for name in ("yaml", "hydra", "json", "tensorboard"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it was imported')")
    status, _, errors = of(tmp_path / "exp", "train", "model=lenett", here=tmp_path)
    assert (status, "Did you mean lenet?" in errors) == (2, True)


@pytest.mark.parametrize(
    ("file", "words", "told"),
    [
        ("train.py", ["debug=one_batch", "test=false"], "completed"),
        ("check/__main__.py", ["--help"], "Flags:"),
        ("report.py", ["--help"], "usage: "),
        ("warm.py", ["--help"], "usage: "),
        ("", ["gallery", "lenet"], "experiment=lenet"),
    ],
)
def test_a_file_that_is_run_by_its_path_does_the_same(file, words, told, tmp_path):
    """As an editor runs it, with its folder first on the path, where `tensorboard` and `data` are rooms of exp."""
    status, output, errors = of(sys.executable, ROOT / file, *words, here=tmp_path)
    assert (status, errors) == (0, "")
    assert told in output


def test_the_time_told_is_the_commands(tmp_path, capsys):
    """From its start on, in which the imports are, and not the run's alone, which report.json has."""
    report = Report(status="completed", directory=str(tmp_path), wall_seconds=0.3)
    with command_clock.counting():
        command_clock.began_at(command_clock.now() - 7.0)
        with command_clock.counting():  # of a command that another one calls
            print_report(report)
    told = capsys.readouterr().out
    assert 7.0 <= float(re.search(r"completed in ([\d.]+) s", told)[1]) < 60.0
    assert re.search(r"time +[\d.]+ s, of which the run took 0.3 s", told)
    # In a notebook, where no command goes on.
    print_report(report)
    assert "completed in 0.3 s" in capsys.readouterr().out


def test_what_loads_torch_says_so_on_a_terminal_and_takes_it_back(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Screen())
    with loading_torch():  # which this process has done
        pass
    assert sys.stderr.getvalue() == ""
    monkeypatch.delitem(sys.modules, "torch")
    with loading_torch():
        assert sys.stderr.getvalue() == "loading torch\r"
    assert sys.stderr.getvalue() == f"loading torch\r{' ' * len('loading torch')}\r"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with loading_torch():
        pass
    assert sys.stderr.getvalue() == ""


def test_a_process_began_when_it_was_started():
    began = command_clock.now()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert began - 0.02 <= command_clock.process_began(process.pid) <= command_clock.now()
    finally:
        process.communicate(b"\n")


def test_where_the_system_says_no_beginning_a_command_counts_from_now(monkeypatch):
    def closed(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", closed)
    before = command_clock.now()
    assert before <= command_clock.process_began() <= command_clock.now()
    # Of another process nothing is made up.
    with pytest.raises(OSError, match="denied"):
        command_clock.process_began(1)
