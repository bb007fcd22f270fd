"""Combinations that Lightning would refuse after the run directory was made, and faults that follow from others."""

from pathlib import Path

import pytest

from exp.check.__main__ import main as check


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(capsys, command: str) -> str:
    assert check(command.split(";")) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("command", "key"), [
    ("trainer.val_check_interval=500;trainer.limit_train_batches=20", "trainer.val_check_interval"),
    ("trainer.val_check_interval=0.5;trainer.check_val_every_n_epoch=null", "trainer.val_check_interval"),
    ("scheduler=plateau;trainer.check_val_every_n_epoch=null;trainer.val_check_interval=30",
     "trainer.check_val_every_n_epoch"),
    ("+trainer.barebones=true", "trainer.barebones"),
    ("data.parts.val=0", "data.parts.val"),
    # The tag of a metric is its name, and loss/val is the objective's.
    ("+metrics.loss={_target_: torchmetrics.MeanMetric}", "metrics.loss"),
    ("+metrics.confusion={_target_: torchmetrics.MeanMetric};+hooks=confusion", "metrics.confusion"),
    ("+objective.train={_target_: torch.nn.CrossEntropyLoss}", "objective.train"),
    ("+phases=body_and_head;+phases.max=${phases.head};strategy=ddp;launch.devices=2;launch.accelerator=cpu;"
     "hooks.memory.details=true",
     "phases.max"),
])  # fmt: skip
def test_what_would_die_in_the_run_is_a_fault(capsys, command, key):
    text = refusal(capsys, command)
    assert text.startswith("1 fault")
    assert f"  {key}: " in text


@pytest.mark.parametrize("command", [
    "trainer.val_check_interval=20;trainer.limit_train_batches=20",
    "trainer.val_check_interval=500;trainer.limit_train_batches=20;trainer.check_val_every_n_epoch=null",
    "data.parts.val=0;monitor=loss/train",
    "data.parts.val=0;monitor=loss/train_epoch",
])  # fmt: skip
def test_what_runs_is_none(command):
    assert check(command.split(";")) == 0


def test_what_the_data_has_not_filled_in_yet_is_no_fault_of_its_own(capsys):
    text = refusal(capsys, "experiment=gpt;trainer.max_time={x: 1}")
    assert text.startswith("1 fault")
    assert "trainer.max_time" in text


@pytest.mark.parametrize("command", ["data.dataset.foo=1", "trainer.reload_dataloaders_every_n_epoch=1"])
def test_a_habit_is_proposed_for_a_word_like_it_in_its_own_place(capsys, command):
    text = refusal(capsys, command)
    assert "Write data=" not in text
    assert "Write trainer.max_epochs" not in text


def test_the_check_of_a_sweep_writes_nothing_where_it_starts(capsys, monkeypatch):
    made = []
    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path, *rest, **named: (made.append(path), mkdir(path, *rest, **named)))
    assert check(["-m", "seed=0,1"]) == 0
    assert list(Path.cwd().iterdir()) == []
    assert [path for path in made if path.resolve().is_relative_to(Path.cwd())] == []


@pytest.mark.parametrize("word", ["bf16", "fp32", "fp16_true"])
def test_a_setting_of_the_loss_scale_is_a_fault_with_a_word_that_scales_no_loss(word, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check([f"precision={word}", "precision.scaler.init_scale=1e9", "precision.scaler.growth_interval=5"]) == 2
    said = capfd.readouterr().err
    assert "precision.scaler.init_scale: 1000000000.0" in said
    assert "precision.scaler.growth_interval: 5" in said
    assert "choose precision=fp16" in said


def test_loaders_of_ones_own_without_a_module_are_told_as_what_they_are(capsys, monkeypatch, tmp_path):
    (tmp_path / "own_loaders.py").write_text(
        "from lightning.pytorch import LightningDataModule\n\n\nclass Own(LightningDataModule):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = refusal(capsys, "data={_target_: own_loaders.Own};security.allow=[own_loaders]")
    assert text.startswith("1 fault")
    assert "data._target_: own_loaders.Own, a LightningDataModule" in text
    assert "data.dataset: nothing" not in text
