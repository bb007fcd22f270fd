"""A downloaded YAML file cannot extend the allow list, import a module or run a program."""

import sys
from pathlib import Path

import pytest

from exp.cli.check import main as check

POPEN = "{_target_: subprocess.Popen, args: [touch, ran]}"
STOPPING = "callbacks: {stop: {_target_: lightning.pytorch.callbacks.EarlyStopping, _args_: [loss/val, 0.0, %s]}}\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Write a module that creates a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    (installed / "tracer_module.py").write_text("open('ran', 'w').close()\nclass Thing: pass\n")
    yield
    assert not Path("ran").exists()
    assert "tracer_module" not in sys.modules


def refusal(capsys, *arguments: str) -> str:
    assert check(list(arguments)) == 2
    return capsys.readouterr().err


def experiment(text: str) -> str:
    file = Path("conf/experiment/bad.yaml")
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{text}")
    return "experiment=bad"


@pytest.mark.parametrize("key", ["security.allow", "security", "++security.allow.0"])
def test_a_sweeper_cannot_allow_a_package(capsys, key):
    value = "{allow: [subprocess]}" if key == "security" else "[subprocess]"
    sweeper = f'hydra: {{sweeper: {{params: {{{key}: "{value}", seed: "0,1"}}}}}}\n'
    text = refusal(capsys, "-m", experiment(sweeper + STOPPING % POPEN))
    assert "hydra.sweeper.params" in text
    assert "security" in text


@pytest.mark.parametrize("name", ["task", "hydra"])
def test_a_file_cannot_change_the_recorded_overrides(capsys, name):
    recorded = f'hydra: {{overrides: {{{name}: ["security.allow=[subprocess]"]}}}}\n'
    assert f"hydra.overrides.{name}" in refusal(capsys, "-m", "seed=0,1", experiment(recorded + STOPPING % POPEN))


def test_an_interpolation_hides_no_target_of_the_sweeper(capsys):
    hidden = f"evil: {{sampler: {POPEN}}}\nhydra: {{sweeper: {{params: '${{evil}}'}}}}\n"
    assert "hydra.sweeper" in refusal(capsys, "-m", "seed=0,1", experiment(hidden))


@pytest.mark.parametrize("typed", ["security.allow.0=torchmetrics", "trainer.max_epoch=3"])
def test_a_file_cannot_allow_a_package(capsys, typed):
    bad = experiment("security: {allow: [tracer_module, tracer_module]}\nmodel: {_target_: tracer_module.Thing}\n")
    text = refusal(capsys, typed, bad)
    assert "security.allow: [" in text
    assert "in a file" in text


def test_a_package_as_search_path_is_not_imported(capsys):
    primary = Path("theirs/mine.yaml")
    primary.parent.mkdir()
    primary.write_text('defaults: [train, _self_]\nhydra: {searchpath: ["pkg://tracer_module"]}\n')
    for arguments in (
        ["--config-dir", "theirs", "--config-name", "mine"],
        ["hydra.searchpath=['pkg://tracer_module']"],
    ):
        assert "hydra.searchpath: pkg://tracer_module" in refusal(capsys, *arguments)


ARGUMENTS = {
    "a node as text": (STOPPING % POPEN, "callbacks.stop._args_.2"),
    "text as a number": (STOPPING % "three", "callbacks.stop._args_.2"),
    "too many": ("model: {_target_: torch.nn.Linear, _args_: [64, 10, true, null, null, 3]}\n", "model._args_.5"),
    "also given by name": ("model: {_target_: torch.nn.Linear, in_features: 64, _args_: [64, 10]}\n", "model._args_.0"),
    "keyword arguments only": ("trainer: {_args_: [cpu]}\n", "trainer._args_.0"),
    "given by exp": ("scheduler: {_args_: [null]}\n", "scheduler._args_.0"),
}


@pytest.mark.parametrize("wrong", ARGUMENTS)
def test_positional_arguments_are_checked(capsys, wrong):
    text, key = ARGUMENTS[wrong]
    assert f"{key}" in refusal(capsys, experiment(text))


def test_right_positional_arguments_pass(capsys):
    assert check([experiment(STOPPING % "5")]) == 0
