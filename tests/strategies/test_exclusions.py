"""Exclusions depend on the traits of a strategy, and not on its name or module."""

from __future__ import annotations

import pytest

import exp
from exp.errors import ConfigError

WISHES = {
    "optimizer": ("optimizer._target_=torch.optim.Adafactor",),
    "subclass": ("+callbacks.mine={_target_: my_callbacks.Own}",),
}
OWN = """
from lightning.pytorch.callbacks import BaseFinetuning


class Own(BaseFinetuning):
    def freeze_before_training(self, pl_module) -> None: ...

    def finetune_function(self, pl_module, epoch, optimizer) -> None: ...
"""
LIGHTNINGS = (
    "# Lightning's FSDPStrategy: strategy=mine\n_target_: lightning.pytorch.strategies.FSDPStrategy\nname: mine\n"
)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    folder = tmp_path / "conf" / "strategy"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(LIGHTNINGS)
    (tmp_path / "my_callbacks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def errors_of(*command):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose(["launch.accelerator=cpu", *command]))
    return {(error.key, error.got.replace("=mine", "=fsdp"), error.expected) for error in caught.value.errors}


@pytest.mark.parametrize("wish", WISHES)
def test_another_name_or_author_changes_no_exclusion(wish):
    expected = errors_of("strategy=fsdp", *WISHES[wish])
    assert expected
    assert errors_of("strategy=fsdp", "strategy.name=mine", *WISHES[wish]) == expected
    assert errors_of("strategy=mine", *WISHES[wish]) == expected


def test_an_unknown_option_of_lightnings_class_is_an_error():
    ((key, _, _),) = errors_of("strategy=mine", "+strategy.cpu_ofload=true")
    assert key == "strategy.cpu_ofload"
