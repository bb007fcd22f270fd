"""Invalid combinations of settings that the check reports, and errors that only follow from other errors."""

from pathlib import Path

import pytest

from exp.cli.check import main as check


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
    # The tag of this metric would be loss/val, which is the tag of the objective.
    ("+metrics.loss={_target_: torchmetrics.MeanMetric}", "metrics.loss"),
    ("+metrics.confusion={_target_: torchmetrics.MeanMetric};+hooks=confusion", "metrics.confusion"),
    ("+objective.train={_target_: torch.nn.CrossEntropyLoss}", "objective.train"),
])  # fmt: skip
def test_a_combination_that_lightning_refuses_is_an_error(capsys, command, key):
    text = refusal(capsys, command)
    assert text.startswith("1 error")
    assert f"  {key}: " in text


@pytest.mark.parametrize("command", [
    "trainer.val_check_interval=20;trainer.limit_train_batches=20",
    "trainer.val_check_interval=500;trainer.limit_train_batches=20;trainer.check_val_every_n_epoch=null",
    "data.parts.val=0;monitor=loss/train",
    "data.parts.val=0;monitor=loss/train_epoch",
])  # fmt: skip
def test_a_valid_combination_passes(command):
    assert check(command.split(";")) == 0


def test_an_open_size_adds_no_error(capsys):
    text = refusal(capsys, "experiment=gpt;trainer.max_time={x: 1}")
    assert text.startswith("1 error")
    assert "trainer.max_time" in text


def test_the_check_of_a_sweep_writes_nothing():
    assert check(["-m", "seed=0,1"]) == 0
    assert list(Path.cwd().iterdir()) == []


def test_a_loss_scale_needs_a_precision_that_scales(capsys):
    text = refusal(capsys, "precision=bf16;precision.scaler.init_scale=1e9")
    assert "precision.scaler.init_scale: 1000000000.0" in text
    assert "choose precision=fp16" in text


def test_a_data_module_needs_a_module(capsys, monkeypatch, tmp_path):
    (tmp_path / "own_loaders.py").write_text(
        "from lightning.pytorch import LightningDataModule\n\n\nclass Own(LightningDataModule):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = refusal(capsys, "data={_target_: own_loaders.Own};security.allow=[own_loaders]")
    assert text.startswith("1 error")
    assert "data._target_: own_loaders.Own, a LightningDataModule" in text
    assert "data.dataset: nothing" not in text
