"""The moving average of the weights: values, validation and checkpoints with it, and an exact resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from exp.engine.checkpoint import read_checkpoint
from exp.engine.ema import CURRENT, ExponentialMovingAverage
from exp.errors import RunError

pytestmark = [
    pytest.mark.numeric,
    # Lightning warns if a checkpoint with averages is read without the callback that wrote it.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Weights(Callback):
    """Callback that keeps the weights after each training batch and in each validation batch."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.trained.append(copied(module))

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.validated.append(copied(module))


def copied(module: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if name.startswith("network")}


def by_hand(states: Sequence[dict[str, Tensor]], decays: Sequence[float]) -> dict[str, Tensor]:
    """Return the moving average of parameters in float64, and the last value of buffers."""
    average = {name: tensor.double() for name, tensor in states[0].items()}
    for state, decay in zip(states[1:], decays, strict=True):
        for name, tensor in state.items():
            kept = decay * average[name] + (1 - decay) * tensor.double()
            average[name] = kept if name.endswith(("weight", "bias")) else tensor.double()
    return average


def close(found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    wide = {name: tensor.double() for name, tensor in found.items() if name in expected}
    torch.testing.assert_close(wide, expected, rtol=rtol, atol=atol)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def test_validation_sees_the_average_of_the_formula(tmp_path: Path, small_run: ModuleType) -> None:
    class Reference(Callback):
        model: AveragedModel

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.model = AveragedModel(module.network, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.model.update_parameters(module.network)

    average, weights, reference = ExponentialMovingAverage(decay=0.9, warmup=False), Weights(), Reference()
    small = small_run.Small(tmp_path / "average", max_epochs=2, callbacks=(reference, average, weights))
    small.fit()
    close(copied(small.module), by_hand(weights.trained, [0.9] * 13))
    assert all(
        torch.equal(average.average[f"network.{name}"], one) for name, one in reference.model.module.named_parameters()
    )
    # An epoch has two validation batches. Training continues from the trained weights, not from the average.
    close(weights.validated[0], by_hand(weights.trained[:7], [0.9] * 6))
    assert equal(weights.validated[2], copied(small.module))
    assert equal(copied(small.module), dict(average.average))
    plain = Weights()
    small_run.Small(tmp_path / "plain", max_epochs=2, callbacks=(plain,)).fit()
    assert all(equal(one, other) for one, other in zip(plain.trained, weights.trained, strict=True))


def test_the_warm_up_counts_optimizer_steps(tmp_path: Path, small_run: ModuleType) -> None:
    average, weights = ExponentialMovingAverage(decay=0.5), Weights()
    small_run.Small(tmp_path, accumulate_grad_batches=7, max_epochs=12, callbacks=(average, weights)).fit()
    used = weights.trained[6::7]
    decays = [min(0.5, (1 + n) / (10 + n)) for n in range(1, len(used))]
    expected = by_hand(used, decays)
    close(dict(average.average), {name: expected[name] for name in average.average})


class Masked(nn.Module):
    """Network with infinite numbers in a buffer and in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 2)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.frozen = nn.Parameter(torch.tensor([0.1, float("-inf")]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) + self.mask.softmax(1).sum(0) + self.frozen.exp()


def test_infinite_buffers_and_frozen_parameters_are_copied(tmp_path: Path, small_run: ModuleType) -> None:
    average, weights = ExponentialMovingAverage(decay=0.9, warmup=False), Weights()
    small = small_run.Small(tmp_path, max_epochs=1, model=Masked(), callbacks=(average, weights))
    small.fit()
    expected = by_hand(weights.trained, [0.9] * 6) | {"network.frozen": weights.trained[0]["network.frozen"].double()}
    close(copied(small.module), expected)


@pytest.mark.parametrize(("word", "phases"), [("fp64", False), ("fp16", False), ("fp64", True)])
def test_skipped_steps_do_not_move_the_average(tmp_path: Path, small_run: ModuleType, word: str, phases: bool) -> None:
    class Poison(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (0, 3, 4):
                batch.data[0].fill_(float("nan"))

    average, weights = ExponentialMovingAverage(decay=0.9), Weights()
    settings = {"word": word, "non_finite": "skip", "phases": phases}
    small_run.Small(tmp_path / "whole", max_epochs=2, callbacks=(Poison(), average, weights), **settings).fit()
    states = [weights.trained[place] for place in (1, 2, 5, 6, 8, 9, 12, 13)]
    expected = by_hand(states, [min(0.9, (1 + n) / (10 + n)) for n in range(1, 8)])
    tolerances = {"rtol": 0, "atol": 1e-12} if word == "fp64" else {}
    close(dict(average.average), {name: expected[name] for name in average.average}, **tolerances)
    resumed = ExponentialMovingAverage(decay=0.9)
    for steps in (5, 14):
        small = small_run.Small(
            tmp_path / "parts", max_epochs=2, max_steps=steps, callbacks=(Poison(), resumed), **settings
        )
        small.fit(resume=small.last if steps > 5 else None)
    assert equal(dict(resumed.average), dict(average.average))


def test_checkpoints_hold_the_average(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path / "run", callbacks=("ema",))
    small.fit()
    path = small.checkpointing.best_path
    best = read_checkpoint(path)
    assert not equal(best["state_dict"], best[CURRENT])
    for callbacks in (("ema",), ()):
        alone = small_run.Small(tmp_path / "alone", callbacks=callbacks)
        alone.trainer.validate(alone.module, datamodule=alone.data, ckpt_path=str(path), verbose=False)
        assert alone.recording.metrics["loss/val"] == small.checkpointing.best["value"]
        assert equal(alone.module.state_dict(), best["state_dict"])


def test_half_precision_is_averaged_in_float32(tmp_path: Path, small_run: ModuleType) -> None:
    """An average in bfloat16 with a decay near 1 would not change."""
    average, weights = ExponentialMovingAverage(decay=0.999, warmup=False), Weights()
    small = small_run.Small(tmp_path, word="bf16_true", callbacks=(average, weights))
    small.fit()
    expected = by_hand(weights.trained, [0.999] * 27)
    close(dict(average.average), {name: expected[name] for name in average.average})
    saved = read_checkpoint(small.last)
    assert equal(saved["state_dict"], dict(average.average))
    assert saved[CURRENT]["network.0.weight"].dtype == torch.bfloat16
    assert torch.equal(small.weights()["0.weight"], average.average["network.0.weight"].bfloat16())


def test_saving_averages_keeps_the_gradients_of_ranks(ranks: Any) -> None:
    """A parameter loses DDP's hooks for the average of gradients if the dtype of its data changes temporarily."""
    run = ["strategy=ddp", "launch.accelerator=cpu", "launch.devices=2", "precision=bf16_true", "callbacks=ema"]
    run += ["trainer.max_epochs=null", "trainer.max_steps=6", "hooks=[]", "logger=[]", "test=false"]
    often = ranks.train(*run, "checkpoint.every_n_steps=2", ranks=2).directory / "checkpoints" / "last.ckpt"
    once = ranks.train(*run, ranks=2).directory / "checkpoints" / "last.ckpt"
    assert equal(read_checkpoint(often)[CURRENT], read_checkpoint(once)[CURRENT])


class Short(LightningModule):
    """Module with another name for its parameter in state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"weight": self.layer.weight.detach()}


def test_a_state_dict_with_other_names_is_an_error() -> None:
    module, average = Short(), ExponentialMovingAverage()
    average.average = {"layer.weight": torch.full((1, 2), 3.0)}
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    with pytest.raises(RunError, match=r"the state_dict of Short has no entry layer\.weight"):
        average.on_save_checkpoint(Trainer(logger=False, accelerator="cpu"), module, checkpoint)


def test_a_checkpoint_without_an_average_is_reported(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    plain = small_run.Small(tmp_path / "plain", max_epochs=1)
    plain.fit()
    small_run.Small(tmp_path / "averaged", max_epochs=2, callbacks=("ema",)).fit(resume=plain.last)
    assert "the checkpoint has no averaged weights" in caplog.text
