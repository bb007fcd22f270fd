"""What a tab offers, without a shell; tests/command/test_shells.py presses the key."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exp import completion, composed_keys
from exp.commands import COMMANDS, HYDRA_FLAGS, SECTIONS
from exp.completion import answer, completed, main
from exp.config.groups import PRIMARY, open_search_path
from exp.source_signature import parameters_in_source


@pytest.fixture(autouse=True)
def here(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    yield tmp_path
    completion._places_of.cache_clear()


def offered(line: str, behind: str = "") -> list[str]:
    """The whole words that may stand at the end of a line."""
    return answer("bash", line.rpartition(" ")[2], line, behind)


def test_the_commands_and_their_own_words():
    assert set(COMMANDS) < set(offered("exp "))
    assert offered("exp warm st") == ["start", "status", "stop"]
    assert offered("exp help warm") == ["warm"]
    assert offered("exp dashboard --page h") == ["hparams", "histograms"]
    assert offered("exp export run=x quantize=") == ["quantize=int8"]
    assert offered("exp gallery len") == ["lenet"]
    assert offered("exp check --a") == ["--all"]
    assert offered("exp train --cfg=") == ["--cfg=job", "--cfg=hydra", "--cfg=all"]
    assert offered("exp train --config-name x mo") == offered("exp train mo")
    assert offered("python -m exp.pl") == ["exp.plan"]
    assert "exp.train" in offered("python3 -u -m ")
    assert offered("exp trian mod") == []


@pytest.mark.parametrize(
    "program", ["exp train", "python -m exp.train", "python -m exp train", "exp check", "exp find_lr"]
)
def test_groups_and_options(program):
    assert offered(f"{program} optimizer=ada")[0] == "optimizer=adadelta"
    assert {"model=", "model.", "monitor=", "mode="} == set(offered(f"{program} mo")) - {"module="}


def test_of_every_group_every_option():
    """The folders are listed; Hydra, which takes half a second, would say the same."""
    _, vocabulary = open_search_path(config_dir=None, config_name=PRIMARY)
    for group in vocabulary.groups:
        options = vocabulary.options(group)
        assert sorted(offered(f"exp train {group}=")[: len(options)]) == sorted(f"{group}={one}" for one in options), (
            group
        )


def test_a_sign_leaves_what_goes_with_it():
    added = offered("exp train +")
    assert {"+hooks=", "+precision=", "+trainer."} < set(added)
    assert "+model=" not in added  # of which there is one
    assert offered("exp train ~hooks.") == ["~hooks.gradients", "~hooks.memory", "~hooks.throughput"]
    assert offered("exp train hooks=[gradients] ~hooks.") == ["~hooks.gradients"]


def test_lists_and_sweeps_go_on_and_offer_nothing_twice():
    assert offered("exp train 'hooks=[gradients,me") == ["hooks=[gradients,memory,", "hooks=[gradients,memory]"]
    assert "hooks=[gradients,gradients" not in offered("exp train hooks=[gradients,")
    assert offered("exp train -m optimizer=sgd,adamw") == ["optimizer=sgd,adamw"]
    assert "hooks=[" in offered("exp train hooks=")
    assert "model=[" not in offered("exp train model=")


def test_keys_are_those_of_the_config_as_it_is_typed():
    assert "optimizer.momentum=" not in offered("exp train optimizer.")
    assert "optimizer.momentum=" in offered("exp train optimizer=sgd optimizer.")
    assert "optimizer.momentum=" in offered("exp train optimizer.", behind="x optimizer=sgd")
    assert "optimizer.momentum=" in offered("exp train -m optimizer=sgd,adam optimizer.")
    assert "optimizer.momentum=" in offered("exp train optimizer._target_=torch.optim.SGD optimizer.")
    # Of a group's options, a layer's class, a key that was added, and what exp's own classes take.
    assert offered("exp train model=lenet model.layers.conv1.out_c") == ["model.layers.conv1.out_channels="]
    assert "optimizer.own=" in offered("exp train +optimizer.own=3 optimizer.")
    assert offered("exp train hooks.gradients.histogram") == ["hooks.gradients.histogram_every_n_steps="]
    # What is wrong elsewhere is told by the command itself.
    assert offered("exp train model=nonsense 'hooks=[a,' seed=x trainer.max_ep") == ["trainer.max_epochs="]
    # What exp gives a class, or has another key for, is no key.
    assert not {"optimizer.params=", "trainer.devices="} & {
        *offered("exp train optimizer."),
        *offered("exp train trainer."),
    }
    assert offered("exp why trainer.max_ep") == ["trainer.max_epochs"]
    assert offered("exp train hydra.swe") == ["hydra.sweep.", "hydra.sweeper."]
    assert "hydra.sweep.dir=" in offered("exp train hydra.sweep.")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("mode", ["min", "max"]),
        ("test", ["true", "false"]),
        ("checkpoint.async", ["true", "false", "null"]),
        ("trainer.enable_progress_bar", ["true", "false"]),
        ("launch.accelerator", ["auto", "cpu", "cuda", "mps"]),
        ("sweep.pruner", ["none", "median", "asha", "hyperband"]),
        ("optimizer.amsgrad", ["true", "false"]),
        ("hooks.gradients.clipped", ["total", "each", "null"]),
        ("scheduler.interval", ["step", "epoch"]),
        ("monitor", ["loss/val", "accuracy/val"]),
        ("hydra/launcher", ["exp", "slurm", "ray"]),
        ("optimizer.lr", []),
    ],
)
def test_values(key, values):
    assert offered(f"exp train {key}=") == [f"{key}={value}" for value in values]


def test_files_for_keys_that_are_paths(here):
    (here / "a folder").mkdir()
    (here / "a folder" / "last.ckpt").touch()
    (here / ".hidden").touch()
    assert offered("exp train sweep.resume=") == ["sweep.resume=auto", "sweep.resume=a\\ folder/"]
    assert offered("exp train resume=") == ["resume=auto", "resume=a\\ folder/"]
    assert answer("bash", "a\\ f", "exp train weights.from=a\\ f", "") == ["a\\ folder/"]
    # In quotes as it is.
    assert answer("bash", "a fo", "exp train 'resume=a fo", "") == ["a folder/", "a folder/..."]
    assert answer("bash", "a folder/l", "exp train 'weights.from=a folder/l", "") == ["a folder/last.ckpt"]
    assert offered("exp train data=csv data.dataset.path=a") == ["data.dataset.path=a\\ folder/"]
    assert offered("exp export run=") == ["run=a\\ folder/"]
    assert offered("exp report --output ") == ["a\\ folder/"]
    assert offered("exp replay a") == ["a\\ folder/"]


def test_the_users_own_configs_come_first_and_changes_are_seen(here):
    conf = here / "conf" / "optimizer"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("# Mine: optimizer=mine\n_target_: torch.optim.SGD\nlr: 0.1\n")
    completion._places_of.cache_clear()
    assert offered("exp train optimizer=")[0] == "optimizer=mine"
    assert "optimizer.own_key=" not in offered("exp train optimizer=mine optimizer.")
    (conf / "mine.yaml").write_text("# Mine: optimizer=mine\n_target_: torch.optim.SGD\nlr: 0.1\nown_key: 1\n")
    assert "optimizer.own_key=" in offered("exp train optimizer=mine optimizer.")
    (here / "conf" / "train.yaml").write_text("defaults: [_self_]\nmine_alone: {width: 3}\n")
    assert offered("exp train mine_") == ["mine_alone."]
    assert "trainer." in offered("exp train tr")
    more = here / "more" / "model" / "small"
    more.mkdir(parents=True)
    (more / "tiny.yaml").write_text("# Tiny: model=small/tiny\n_target_: torch.nn.Flatten\n")
    assert offered("exp train --config-dir more model=sm") == ["model=small/"]
    assert offered("exp train --config-dir=more model=small/") == ["model=small/tiny"]


def test_what_is_kept_holds_names_and_no_values(here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here))
    (here / "conf" / "logger").mkdir(parents=True)
    (here / "conf" / "logger" / "own.yaml").write_text(
        "own: {_target_: exp.loggers.MetricsCsv, address: very-secret}\n"
    )
    assert "logger.own.address=" in offered("exp train logger=own 'name=other-secret' logger.own.")
    assert not Path(os.environ["XDG_CACHE_HOME"], "exp", "completion.json").exists()  # of files alone nothing is kept
    assert "logger.own.address=" in offered("exp train logger=own 'vars={a:third-secret}' logger.own.")
    kept = Path(os.environ["XDG_CACHE_HOME"], "exp", "completion.json").read_text()
    assert "address" in kept
    assert "secret" not in kept


def test_zsh_is_told_where_a_word_is_divided():
    """The script strips what stands before that sign, and offers the rest."""
    assert answer("zsh", "", "exp train model=le", "") == ["=", "lenet"]
    assert answer("zsh", "", "exp train hooks=\\[gradients,me", "") == [",", "memory,", "memory]"]
    assert answer("zsh", "", "exp train trainer.max_ep", "") == [".", "max_epochs="]
    assert answer("zsh", "", "exp tra", "") == ["", "train"]
    assert answer("zsh", "", "exp train model=zzz", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_of_a_shell_is_printed(shell, capsys):
    assert main([shell]) == 0
    assert f"answer {shell}" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert f'eval "$(exp completion {shell})"' in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_refused(words, capsys):
    assert main(words) == 2
    assert "expected bash or zsh" in capsys.readouterr().err


def test_a_key_imports_neither_torch_nor_hydra(tmp_path):
    """Of a choice of groups that nobody asked for before, either: it takes a seventh of a second."""
    code = (
        "import sys; from exp.completion import answer\n"
        "for line in ('exp tr', 'exp train mod', 'exp train model=le', 'exp train trainer.max_ep',\n"
        "             'exp train experiment=gpt optimizer=sgd optimizer.mom', 'exp train data=wine runtime.matmul=',\n"
        "             'exp train hooks=[gradients] ~hooks.', 'exp train +optimizer.own=3 optimizer.ow'):\n"
        "    assert answer('bash', '', line, ''), line\n"
        "print(sorted({'torch', 'lightning', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert done.stdout == "[]\n"


def test_what_only_hydra_knows_is_made_ready_while_a_person_types(here, monkeypatch):
    (here / "conf" / "local").mkdir(parents=True)
    (here / "conf" / "local" / "default.yaml").write_text("# @package _global_\n# Mine\nvars: {a: &a {b: 1}, c: *a}\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here))
    line = [sys.executable, "-m", "exp", "completion", "answer", "bash", "le", "exp train model=le", ""]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "lenet\n"
    kept, ends = here / "exp" / "completion.json", time.monotonic() + 60
    while not kept.exists() and time.monotonic() < ends:
        time.sleep(0.05)
    before = kept.read_text()
    assert "conv1" in before
    assert "model.layers.conv1." in offered("exp train model=lenet model.layers.")
    assert "vars.c.b=" in offered("exp train model=lenet vars.c.")
    assert kept.read_text() == before  # and nothing was composed


def test_the_table_of_commands_is_whole():
    """Every module that can be run is a command, and what it takes is what the table says."""
    import exp

    root = Path(exp.__file__).parent
    programs = {path.stem for path in root.glob("*.py") if '__name__ == "__main__"' in path.read_text()} - {"__main__"}
    programs |= {path.parent.name for path in root.glob("*/__main__.py")}
    assert {name for commands in SECTIONS.values() for name in commands} == programs
    assert {command.module for command in COMMANDS.values()} == {f"exp.{name}" for name in programs}
    for name, command in COMMANDS.items():
        file = root / f"{name}.py" if (root / f"{name}.py").is_file() else root / name / "__main__.py"
        text = file.read_text()
        flags = [flag.partition("=")[0] for flag in (*command.flags, *command.keys)]
        if command.module in ("exp.check", "exp.data"):
            text += (root / "config" / "command.py").read_text()
        if name == "serve":
            text += (root / "export.py").read_text()
        assert [flag for flag in flags if f'"{flag}"' not in text and flag != "security.allow"] == [], name


def test_the_flags_of_hydra_are_those_that_exp_takes():
    from exp.config.hydra_adapter import argument_parser

    known = {option for action in argument_parser("exp")._actions for option in action.option_strings}
    assert {flag.partition("=")[0] for flag in HYDRA_FLAGS} < known
    assert known - {flag.partition("=")[0] for flag in HYDRA_FLAGS} <= {
        *("-h", "--run", "-r", "-m", "-c", "-p", "-cd", "-cn", "-cp", "-i", "-sc", "--config-path"),
        *("--experimental-rerun", "--shell-completion"),
    }


@pytest.mark.parametrize("target", ["torch.optim.AdamW", "torch.nn.Linear", "lightning.pytorch.Trainer"])
def test_a_signature_in_the_source_is_that_of_the_class(target):
    import importlib
    import inspect

    module, _, name = target.rpartition(".")
    taken = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    assert list(parameters_in_source(target)) == taken
    assert parameters_in_source("nothing.there.Net") == {}


def test_of_the_users_own_class_beside_the_configs(here):
    (here / "own.py").write_text(
        "raise SystemExit('it was imported')\n"
        "class Base:\n    def __init__(self, *, depth: int, gated: bool = False): ...\n"
        "class Net(Base):\n    def __init__(self, width: int, **rest): ...\n"
    )
    assert parameters_in_source("own.Net") == {"width": [], "depth": [], "gated": ["true", "false"]}


def test_a_line_without_exp_is_nobodys():
    assert completed(["python", "-m", "http.server"], "80").names == ()


def test_a_virtual_environment_called_env_is_not_walked_through(tmp_path):
    Path(".env/lib").mkdir(parents=True)
    before = composed_keys._state(".env")
    Path(".env/lib/some.yaml").write_text("a: 1\n")
    assert composed_keys._state(".env") == before
    assert "trainer.max_epochs=" in offered("exp train trainer.")
