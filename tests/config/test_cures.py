"""Every cure leads somewhere: pasted as it stands it gives a run, or another answer that is the last."""

import os
import re
import runpy
from pathlib import Path

import pytest

from exp.config.habits import (
    FLAGS_OF_OTHERS,
    KEYS,
    OPTIONS,
    TIMES,
    VALUES,
    cure_of_flag,
    cure_of_key,
    cure_of_option,
    cure_of_value,
)
from exp.sweeps.sweep import compose_sweep

HERE = Path(__file__).parent
PASTING = runpy.run_path(str(HERE / "pasting.py"))
answer, commands_in, pasted = PASTING["answer"], PASTING["commands_in"], PASTING["pasted"]
TABLE = runpy.run_path(str(HERE / "test_wrong_commands.py"))["TABLE"]
# Of the others a share, and all with ATTACKS in the environment: each cure is two or three compositions.
IS_WHOLE = "ATTACKS" in os.environ
COMPOSED = runpy.run_path(str(HERE / "test_compose.py"))["WRONG"][:: 1 if IS_WHOLE else 4]
INPUTS = (HERE.parent / "attacks" / "wrong_inputs.txt").read_text().splitlines()[:: 1 if IS_WHOLE else 24]

# What somebody would have typed for a key whose cure asks for it; for the others a number.
SAMPLES = {
    "launch.devices": "2", "launch.accelerator": "cpu", "strategy": "ddp", "model": "mlp", "data": "digits",
    "data_dir": "elsewhere", "optimizer": "sgd", "scheduler": "cosine", "scheduler.interval": "epoch",
    "monitor": "val/loss", "mode": "min", "name": "mine", "objective": "cross_entropy", "logger": "csv",
    "metrics": "f1", "hooks": "memory", "callbacks": "ema", "experiment": "example", "precision": "bf16",
    "hydra.run.dir": "outputs/mine", "resume": "'last.ckpt'", "sweep.storage": "'sqlite:///a.db'",
    "optimizer.lr": "0.1", "optimizer.weight_decay": "0.1", "data.parts.val": "0.1", "data.parts.test": "0.1",
}  # fmt: skip
SWITCHES = ("runtime.", "print_config", "trainer.enable", "checkpoint.save", "strategy.sync")
RESTS = {"model.optimizer.": "weight_decay", "datamodule.": "batch_size", "optim.": "lr"}
# What a command alone cannot have: a file, a cluster, a task of another kind. Their own answers say so.
LAST = {
    "resume": "a checkpoint file that is there", "hydra.launcher.cluster": "submit to SLURM",
    "objective.mse.loss._target_": "10 classes", "objective.huber.loss._target_": "10 classes",
    "objective.l1.loss._target_": "10 classes", "metrics.rmse._target_": "10 classes",
    "hydra/launcher": "a sweep, whose jobs it carries",
}  # fmt: skip


def told_by_keys():
    for key, template in KEYS.items():
        asked = re.search(r"([\w.]+)=\[?\{value\}", template)
        wanted = asked[1] if asked else ""
        sample = "true" if wanted.startswith(SWITCHES) else SAMPLES.get(wanted, "2")
        if not key.endswith("."):
            yield cure_of_key(key, sample)
        elif "{rest}" in template:
            yield cure_of_key(key + RESTS.get(key, "interval"), "0.1" if key in ("model.optimizer.", "optim.") else
                              "8" if key in RESTS else "epoch")  # fmt: skip
        else:
            yield cure_of_key(f"{key}x", sample)
    for key, words in VALUES.items():
        yield from (cure_of_value(key, word) for word in words)
    yield from (cure_of_value(key, f"3{unit}") for key, units in TIMES.items() for unit in units)
    for group, options in OPTIONS.items():
        yield from (cure_of_option(group, option) for option in options)
    yield from (cure_of_flag(flag, "true") for flag in FLAGS_OF_OTHERS)


TOLD = sorted(set(told_by_keys()))
COMMANDS = sorted({tuple(command) for cure in TOLD for command in commands_in(cure)})
IN_A_TEST = 8


def test_every_cure_of_a_habit_begins_with_a_word_that_says_what_to_do():
    """So that no code is capitalised: `print_config and tags are keys` begins no sentence."""
    assert {cure.split(" ")[0] for cure in TOLD} == {"Write", "Leave", "It"}


@pytest.mark.parametrize("first", range(0, len(COMMANDS), IN_A_TEST))
def test_what_the_cure_of_a_habit_says_to_write_passes_the_check(tmp_path, monkeypatch, first):
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS[first : first + IN_A_TEST]:
        for fault in answer(command):
            assert fault.key in LAST, (command, str(fault))
            assert LAST[fault.key] in fault.expected, (command, str(fault))


def test_no_habit_hides_an_option_that_is_there():
    conf = HERE.parents[1] / "conf"
    told = [f"{group}/{option}.yaml" for group, options in OPTIONS.items() for option in options]
    assert [path for path in told if (conf / path).exists()] == []


def followed(argv, directory, files=()):
    """Each cure of a command pasted into it, with what is answered then, and again: what is left at the end."""
    for name, text in dict(files).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    first = answer(argv)
    known = {(fault.key, fault.got) for fault in first}
    for fault in first:
        for command in pasted(argv, fault):
            others = known - {(fault.key, fault.got)}
            for second in answer(command):
                if (second.key, second.got) in others:
                    continue
                assert (second.key, second.got) != (fault.key, fault.got), (argv, fault.cure, command)
                for again in pasted(command, second):
                    left = [third for third in answer(again) if (third.key, third.got) not in known]
                    assert not left, (argv, fault.cure, command, second.cure, again, [str(third) for third in left])


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.title)
def test_a_cure_of_the_table_of_wrong_commands_is_followed_by_a_run_or_the_last_answer(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    followed(case.argv, tmp_path, case.files)


@pytest.mark.parametrize("first", range(0, len(COMPOSED), IN_A_TEST))
def test_so_is_one_of_a_wrong_override(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for override, _, _ in COMPOSED[first : first + IN_A_TEST]:
        followed([override], tmp_path)


@pytest.mark.parametrize("first", range(0, len(INPUTS), IN_A_TEST))
def test_so_is_one_of_an_input_that_cannot_be_meant(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in INPUTS[first : first + IN_A_TEST]:
        followed(line.rpartition(" | ")[0].split(" "), tmp_path)


def test_a_cure_of_a_search_composes_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command,) = commands_in(cure_of_key("hparams_search", "mnist_optuna"))
    assert command[0] == "-m"
    compose_sweep(command[1:])
