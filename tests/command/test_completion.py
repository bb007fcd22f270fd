"""Words that the tab key offers, without a shell; tests/command/test_shells.py uses bash."""

import re
from pathlib import Path

import pytest

import exp
from exp.cli.commands import COMMANDS
from exp.cli.completion import answer, main


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(line: str) -> list[str]:
    """Return the completions of the last word of a line."""
    return answer(line.rpartition(" ")[2], line)


def test_commands_groups_and_their_flags_are_offered():
    assert set(COMMANDS) < set(offered("exp "))
    assert offered("exp train --cfg h") == ["hydra"]
    assert offered("exp evaluate run=x stage=") == ["stage=test", "stage=val", "stage=all"]
    assert offered("exp gallery len") == ["lenet"]
    assert offered("exp train --cfg=") == ["--cfg=job", "--cfg=hydra", "--cfg=all"]
    assert offered("exp trian mod") == []
    assert offered("exp train optimizer=ada")[0] == "optimizer=adadelta"
    assert {"model=", "model.", "monitor=", "mode="} == set(offered("exp train mo")) - {"module="}


def test_signs_and_lists_restrict_what_is_offered():
    added = offered("exp train +")
    assert {"+hooks=", "+precision=", "+trainer."} < set(added)
    assert "+model=" not in added  # a single group
    assert offered("exp train 'hooks=[gradients,me") == ["hooks=[gradients,memory,", "hooks=[gradients,memory]"]


def test_keys_follow_the_overrides_on_the_line():
    assert "optimizer.momentum=" not in offered("exp train optimizer.")
    assert "optimizer.momentum=" in offered("exp train optimizer=sgd optimizer.")
    assert offered("exp train model=lenet model.layers.conv1.out_c") == ["model.layers.conv1.out_channels="]
    assert "logger.own.a=" in offered("exp train 'vars={b:1}' +logger.own={a:2} logger.own.")
    # A wrong override in another word has no effect.
    assert offered("exp train model=nonsense 'hooks=[a,' seed=x trainer.max_ep") == ["trainer.max_epochs="]
    assert offered("exp why trainer.max_ep") == ["trainer.max_epochs"]


@pytest.mark.parametrize(
    ("key", "values"),
    [("test", ["true", "false"]), ("optimizer.lr", []), ("resume", [])],
)
def test_values_of_a_key_are_offered(key, values):
    assert offered(f"exp train {key}=") == [f"{key}={value}" for value in values]


def test_user_configs_come_first_and_are_read_again(here):
    conf = here / "conf" / "optimizer"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("# Mine: optimizer=mine\n_target_: torch.optim.SGD\nlr: 0.1\n")
    assert offered("exp train optimizer=")[0] == "optimizer=mine"
    assert "optimizer.own_key=" not in offered("exp train optimizer=mine optimizer.")
    (conf / "mine.yaml").write_text("# Mine: optimizer=mine\n_target_: torch.optim.SGD\nlr: 0.1\nown_key: 1\n")
    assert "optimizer.own_key=" in offered("exp train optimizer=mine optimizer.")


def test_a_user_class_is_not_imported(here):
    (here / "conf" / "model").mkdir(parents=True)
    (here / "own.py").write_text("raise SystemExit('it was imported')\n")
    assert "model._target_=" in offered("exp train model._target_=own.Net model.")


def test_bash_replaces_the_end_of_a_word():
    assert answer("le", "exp train model=le") == ["lenet"]
    assert answer("model=zzz", "exp train model=zzz") == []


def test_the_script_of_a_shell_is_printed(capsys):
    assert main(["zsh"]) == 0
    assert "completion answer" in capsys.readouterr().out
    assert main(["fish"]) == 2
    assert "expected bash or zsh" in capsys.readouterr().err


def test_the_command_table_matches_the_modules():
    root = Path(exp.__file__).parent
    programs = {path.stem for path in root.glob("*.py") if '__name__ == "__main__"' in path.read_text()} - {"__main__"}
    programs |= {path.parent.name for path in root.glob("*/__main__.py")}
    # Read as text, because the imported table has no commands of removed folders of exp.extras.
    table = (root / "cli" / "commands.py").read_text()
    assert set(re.findall(r'^        "(\w+)": ', table, re.MULTILINE)) == programs
    for command in COMMANDS.values():
        assert root.joinpath(*command.module.split(".")).with_suffix(".py").is_file(), command
