"""The command line: help without torch, wrong flags, exit statuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exp.cli.command_line import help_text, parse_arguments
from exp.cli.train import main
from exp.config.groups import open_search_path
from exp.config.search_path import OWN_CONF
from exp.errors import ConfigError

SEEN = """
import json, sys
from exp.cli.train import main
status = main(json.loads(sys.argv[1]))
names = ("torch", "lightning", "torchmetrics", "numpy", "sklearn", "tensorboard")
heavy = [name for name in names if name in sys.modules]
print("STATUS", status, "HEAVY", heavy)
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def slow(*arguments):
    return pytest.param(arguments, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cfg", "job", "--resolve", "model=mlp", "+precision=bf16"),
        ("--cfg", "job", "optimzer=sgd"),
        slow("--help"),
    ],
    ids=" ".join,
)
def test_questions_import_nothing_heavy(arguments):
    command = [sys.executable, "-c", SEEN, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"STATUS {2 if 'optimzer=sgd' in arguments else 0} HEAVY []" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    assert list(Path.cwd().iterdir()) == []


def test_cfg_job_prints_the_config(capsys):
    assert main(["--cfg", "job", "+precision=bf16", "--package", "precision"]) == 0
    assert "word: bf16" in capsys.readouterr().out
    assert main(["--cfg", "job", "--package", "precison"]) == 2
    assert "precison" in capsys.readouterr().err


def test_help_fits_a_screen_and_lists_the_options_of_a_group():
    vocabulary = open_search_path(config_dir=None, config_name="train")
    text = help_text(vocabulary)
    assert len(text.splitlines()) <= 40
    for directory in OWN_CONF.iterdir():
        if directory.is_dir():
            assert directory.name in text
            options = help_text(vocabulary, [directory.name])
            assert [path.stem for path in directory.glob("[!_]*.yaml") if path.stem not in options] == []
    assert max(map(len, text.splitlines())) <= 120
    with pytest.raises(ConfigError, match=r"optimzer; expected one of .*Did you mean optimizer"):
        help_text(vocabulary, ["optimzer"])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--experimental-rerun", "runs/x.pickle"], "Write from_run=runs"),
        (["--config-dir", "nowhere"], "--config-dir"),
        (["--config-name", "nothing"], "--config-name"),
        (["--resolve"], "--resolve"),
        (["-m", "--cfg", "job"], "--multirun --cfg"),
        (["--cfg", "jobb"], "jobb"),
        (["--cfg", "job", "seed=1,2"], "seed"),
        (["--shell-completion", "install=zsh"], 'Write eval "$(python -m exp completion bash)", or zsh'),
        (["-m", "optimizer=adamw,adamm"], "optimizer"),
        (["-m", "hydra.sweep.dir=.", "seed=1,2"], "hydra.sweep.dir"),
    ],
)
def test_a_wrong_flag_is_reported_on_stderr(arguments, key, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert key in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 12
    assert list(Path.cwd().iterdir()) == []


def test_flags_and_overrides_may_be_mixed():
    arguments = parse_arguments(["seed=1", "-m", "optimizer.lr=1,2", "--config-dir", ".", "name=x"])
    assert arguments.overrides == ["seed=1", "optimizer.lr=1,2", "name=x"]
    assert arguments.multirun
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_arguments(["--run", "-m"])


def test_a_closed_pipe_prints_no_traceback():
    command = f"{sys.executable} -m exp.train --cfg job | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


def test_a_console_script_finds_modules_next_to_conf(tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# Mine. Select it with model=mine\n_target_: mine.Net\n")
    (tmp_path / "mine.py").write_text("class Net:\n    VALUE = 3\n")
    program = "from exp.config.targets import resolve; print(resolve('mine.Net').VALUE)"
    script = tmp_path / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text(program)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "3", done.stderr
