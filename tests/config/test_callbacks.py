"""Callbacks of Lightning that exp replaces are refused, and other callbacks work."""

from __future__ import annotations

from pathlib import Path

import pytest

import exp
from exp.errors import ConfigError

CALLBACKS = "lightning.pytorch.callbacks"
SHORT = ["data=wine", "trainer.max_epochs=1", "model=mlp", "model.constants.width=4"]
REFUSED = {
    "LearningRateFinder": "python -m exp.find_lr",
    "BackboneFinetuning": "freeze.unfreeze",
    "BasePredictionWriter": "hooks=[samples]",
    "ModelPruning, pruning_fn: l1_unstructured": "torch.nn.utils.prune",
    "EMAWeightAveraging": "callbacks=[ema]",
    "StochasticWeightAveraging, swa_lrs: 0.01": "callbacks=[ema]",
    "GradientAccumulationScheduler, scheduling: {0: 1}": "trainer.accumulate_grad_batches",
    "TQDMProgressBar": "trainer.enable_progress_bar=true",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_replaced_callback_suggests_its_replacement(name: str) -> None:
    command = [*SHORT, "trainer.enable_progress_bar=false", f"+callbacks.mine={{_target_: {CALLBACKS}.{name}}}"]
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose(command))
    assert len(caught.value.errors) == 1
    assert REFUSED[name] in str(caught.value)
    assert caught.value.errors[0].key.startswith("callbacks.mine")


def test_a_progress_bar_of_lightning_replaces_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bar = f"+callbacks.bar={{_target_: {CALLBACKS}.RichProgressBar}}"
    report = exp.fit(exp.compose([*SHORT, bar, "hydra.run.dir=run"]))
    assert report.status == "completed"
    printed = capsys.readouterr().out
    assert "Epoch 0/0" in printed
    assert "epoch 1/1" not in printed
