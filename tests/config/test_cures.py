"""Every cure for a habit leads somewhere: what it says to write composes, and passes the first stage of the check."""

import re

import pytest

import exp
from exp.check.stages import first_stage
from exp.config.habits import KEYS, OPTIONS, cure_of_key, cure_of_option
from exp.config.reading import read
from exp.sweeps.sweep import compose_sweep

# What somebody would have typed for the key that the cure ends in.
SAMPLES = {
    "launch.devices": "2", "launch.nodes": "1", "launch.accelerator": "gpu", "strategy": "ddp", "model": "mlp",
    "data": "digits", "data_dir": "elsewhere", "optimizer": "sgd", "optimizer.lr": "0.1", "scheduler": "cosine",
    "optimizer.weight_decay": "0.1", "monitor": "loss/val", "name": "mine", "objective": "cross_entropy",
    "logger": "tensorboard", "metrics": "accuracy", "hooks": "gradients", "callbacks": "early_stopping",
    "experiment": "example", "trainer.max_epochs": "2", "trainer.max_steps": "2",
}  # fmt: skip
COMMAND = re.compile(r"(?<![\w/.])([a-z_]+(?:[./][a-z_]+)*)=([^\s,;:]+)")
RESTS = {"model.optimizer.": "weight_decay", "model.scheduler.": "interval"}


# Of a cluster and of a sweep, which a single run refuses: the last test tries them whole.
ELSEWHERE = ("hydra/launcher=slurm", "hydra.launcher.cluster=local", "optimizer.lr=interval(")


def commands(cure: str) -> list[str]:
    found = [f"{key}={value}" for key, value in COMMAND.findall(cure) if value not in ("PATH", "...")]
    return [command for command in found if not command.startswith(ELSEWHERE)]


def told_by_keys() -> list[str]:
    found = set()
    for key in KEYS:
        whole = key + RESTS[key] if key in RESTS else f"{key}x" if key.endswith(".") else key
        cured = COMMAND.findall(cure_of_key(whole, "VALUE"))
        sample = next((SAMPLES[name] for name, value in cured if "VALUE" in value and name in SAMPLES), "epoch")
        found |= set(commands(cure_of_key(whole, sample)))
    return sorted(found)


def told_by_options() -> list[str]:
    cures = [cure_of_option(group, option) for group, options in OPTIONS.items() for option in options]
    return sorted({command for cure in cures for command in commands(cure)})


@pytest.mark.parametrize("command", sorted({*told_by_keys(), *told_by_options()}))
def test_what_a_cure_says_to_write_is_right(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    key = command.partition("=")[0]
    # A mode of max needs something that is better when higher.
    others = ["monitor=accuracy/val"] if command == "mode=max" else []
    faults = [fault for fault in first_stage(read(exp.compose([command, *others]))) if fault.key.startswith(key)]
    assert faults == []


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in OPTIONS for option in OPTIONS[group]])
def test_no_habit_hides_an_option_that_is_there(tmp_path, monkeypatch, group, option):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(exp.ConfigError):
        exp.compose([f"{group}={option}"])


@pytest.mark.parametrize(
    ("cure", "words"),
    [
        (cure_of_option("hydra/launcher", "submitit_local"), ("hydra/launcher=slurm", "hydra.launcher.cluster=local")),
        (cure_of_key("hparams_search", "VALUE"), ("optimizer.lr=interval(1e-4,1e-1)",)),
    ],
)
def test_a_cure_of_a_sweep_composes_as_one(tmp_path, monkeypatch, cure, words):
    monkeypatch.chdir(tmp_path)
    assert all(word in cure for word in words)
    compose_sweep([*words, "seed=0,1", "sweep.sampler=random"])
