"""What a network in parts excludes follows from what the strategy is: its name, and who wrote it, change nothing."""

from __future__ import annotations

import pytest

import exp
from exp.errors import ConfigError

WISHES = {
    "optimizer": ("optimizer._target_=torch.optim.Adafactor",),
    "compile": ("runtime.compile=true",),
    "terms": ("+objective=r1",),
    "finetuning": ("+callbacks.mine={_target_: lightning.pytorch.callbacks.BackboneFinetuning}",),
    "swa": ("+callbacks.mine={_target_: lightning.pytorch.callbacks.StochasticWeightAveraging, swa_lrs: 0.1}",),
    "subclass": ("+callbacks.mine={_target_: my_callbacks.Own}",),
}
OWN = """
from lightning.pytorch.callbacks import ModelPruning


class Own(ModelPruning):
    def __init__(self) -> None:
        super().__init__("l1_unstructured")
"""
LIGHTNINGS = "# Lightning's own: strategy=mine\n_target_: lightning.pytorch.strategies.FSDPStrategy\nname: mine\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    folder = tmp_path / "conf" / "strategy"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(LIGHTNINGS)
    (tmp_path / "my_callbacks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def told(*command):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose(["launch.accelerator=cpu", *command]))
    return {(fault.key, fault.got.replace("=mine", "=fsdp"), fault.expected) for fault in caught.value.faults}


@pytest.mark.parametrize("wish", WISHES)
def test_another_name_or_another_author_is_refused_alike(wish):
    expected = told("strategy=fsdp", *WISHES[wish])
    assert expected
    assert told("strategy=fsdp", "strategy.name=mine", *WISHES[wish]) == expected
    assert told("strategy=mine", *WISHES[wish]) == expected


@pytest.mark.parametrize("command", ["strategy=single", "strategy=single strategy.name=mine"])
def test_single_by_another_name_takes_one_device(command):
    faults = told(*command.split(), "launch.devices=2")
    assert [key for key, _, _ in faults] == ["strategy.name"]
