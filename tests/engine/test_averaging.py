"""The moving average of the weights: its numbers, where it is used, and that a resume keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from exp.check.parameters import node_faults
from exp.engine.ema import CURRENT, ExponentialMovingAverage

BATCHES = 6

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings(
        # Lightning's advice, of no use to data in memory.
        "ignore:The '(train|val|test)_dataloader' does not have many workers",
        "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "ignore:Checkpoint directory .* exists and is not empty",
        # Some tests go on, on purpose, without the callback that wrote the checkpoint, or write elsewhere.
        "ignore:Be aware that when using `ckpt_path`",
        "ignore:The dirpath has changed",
    ),
]


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Sequence[Tensor], index: int) -> None:
        self.log("loss/val", nn.functional.mse_loss(self.network(batch[0]), batch[1]))

    def test_step(self, batch: Sequence[Tensor], index: int) -> None:
        self.log("loss/test", nn.functional.mse_loss(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Weights(Callback):
    """The weights after each optimizer step, and those that validation saw."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.trained.append(copied(module.state_dict()))

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.validated.append(copied(module.state_dict()))


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def loader(count: int = BATCHES) -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(count)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def trainer(callbacks: Sequence[Callback], directory: Path, epochs: int = 2, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=directory,
        callbacks=list(callbacks),
        **settings,
    )


def by_hand(states: Sequence[dict[str, Tensor]], decays: Sequence[float]) -> dict[str, Tensor]:
    """The formula in float64; integers are the last."""
    average = {name: tensor.double() for name, tensor in states[0].items()}
    for state, decay in zip(states[1:], decays, strict=True):
        for name, tensor in state.items():
            old = average[name]
            average[name] = (
                decay * old + (1 - decay) * tensor.double() if tensor.is_floating_point() else tensor.double()
            )
    return average


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name].double(), right[name].double(), rtol=1e-5, atol=1e-6)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_average_is_the_formula_and_validation_sees_it(tmp_path: Path) -> None:
    average, weights = ExponentialMovingAverage(decay=0.9, warmup=False), Weights()
    module = Regression()
    trainer([average, weights], tmp_path, enable_checkpointing=False).fit(module, loader(), loader(2))
    close(dict(average.average), by_hand(weights.trained, [0.9] * (2 * BATCHES - 1)))
    # Two validation batches an epoch; the second epoch trained on from the weights themselves.
    close(weights.validated[0], by_hand(weights.trained[:BATCHES], [0.9] * (BATCHES - 1)))
    assert equal(weights.validated[2], dict(average.average))
    assert equal(module.state_dict(), dict(average.average))

    plain = Weights()
    trainer([plain], tmp_path, enable_checkpointing=False).fit(Regression(), loader(), loader(2))
    assert all(equal(a, b) for a, b in zip(plain.trained, weights.trained, strict=True))


def test_the_average_of_parameters_is_torchs_bit_for_bit(tmp_path: Path) -> None:
    class Reference(Callback):
        model: AveragedModel

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.model = AveragedModel(module.network, multi_avg_fn=get_ema_multi_avg_fn(0.95))

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.model.update_parameters(module.network)

    average, reference = ExponentialMovingAverage(decay=0.95, warmup=False), Reference()
    trainer([reference, average], tmp_path, enable_checkpointing=False).fit(Regression(), loader(), loader(2))
    for name, parameter in reference.model.module.named_parameters():
        assert torch.equal(average.average[f"network.{name}"], parameter)


def test_warm_up_start_and_period(tmp_path: Path) -> None:
    average, weights = ExponentialMovingAverage(decay=0.5, every_n_steps=2, start_step=3), Weights()
    trainer([average, weights], tmp_path, enable_checkpointing=False).fit(Regression(), loader(), loader(2))
    used = weights.trained[2::2]
    decays = [min(0.5, (1 + n) / (10 + n)) for n in range(1, len(used))]
    assert decays[0] < 0.5 == max(*decays, 0.5)
    close(dict(average.average), by_hand(used, decays))


def test_accumulated_batches_count_once(tmp_path: Path) -> None:
    average, weights = ExponentialMovingAverage(decay=0.9, warmup=False), Weights()
    settings = {"accumulate_grad_batches": 3, "enable_checkpointing": False}
    trainer([average, weights], tmp_path, **settings).fit(Regression(), loader(), loader(2))
    used = weights.trained[2::3]
    for name, value in by_hand(used, [0.9] * (len(used) - 1)).items():
        if "running" not in name and "tracked" not in name:  # BatchNorm counts batches, not steps
            torch.testing.assert_close(average.average[name].double(), value, rtol=1e-5, atol=1e-6)


def test_checkpoints_hold_the_average_and_the_test_stage_uses_it(tmp_path: Path) -> None:
    average = ExponentialMovingAverage(decay=0.9)
    saving = ModelCheckpoint(dirpath=tmp_path, filename="best", monitor="loss/val", save_weights_only=False)
    module = Regression()
    fitted = trainer([average, saving], tmp_path)
    fitted.fit(module, loader(), loader(2))
    best = torch.load(saving.best_model_path, weights_only=True)
    assert not equal(best["state_dict"], best[CURRENT])
    [tested] = fitted.test(module, loader(2), ckpt_path=saving.best_model_path, weights_only=True, verbose=False)
    assert tested["loss/test"] == pytest.approx(saving.best_model_score.item(), abs=0.0)
    assert equal(module.state_dict(), best["state_dict"])
    # Alone, in another trainer, with and without the callback.
    for callbacks in ([ExponentialMovingAverage(decay=0.9)], []):
        alone = trainer(callbacks, tmp_path, enable_checkpointing=False)
        [again] = alone.test(Regression(), loader(2), saving.best_model_path, weights_only=True, verbose=False)
        assert again == tested


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    def run(epochs: int, resume: str | None = None) -> tuple[ExponentialMovingAverage, Weights, ModelCheckpoint]:
        average, weights = ExponentialMovingAverage(decay=0.9), Weights()
        saving = ModelCheckpoint(dirpath=tmp_path / str(epochs), filename="last")
        fitted = trainer([average, weights, saving], tmp_path, epochs)
        fitted.fit(Regression(), loader(), loader(2), ckpt_path=resume, weights_only=True)
        return average, weights, saving

    unbroken, all_weights, _ = run(4)
    _, _, saving = run(2)
    resumed, late_weights, _ = run(4, saving.best_model_path)
    assert equal(dict(resumed.average), dict(unbroken.average))
    assert all(equal(a, b) for a, b in zip(late_weights.trained, all_weights.trained[-2 * BATCHES :], strict=True))
    assert resumed.state_dict() == unbroken.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_is_in_float32_and_does_not_stall(tmp_path: Path, dtype: torch.dtype) -> None:
    class Half(Regression):
        """All but the batch norm in half precision, as under a true word."""

        def __init__(self) -> None:
            super().__init__()
            self.network[0].to(dtype)

        def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
            return nn.functional.mse_loss(self.network[1:](self.network[0](batch[0].to(dtype)).float()), batch[1])

        def validation_step(self, batch: Sequence[Tensor], index: int) -> None:
            self.log("loss/val", self.training_step(batch, index))

        test_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.02)

    average, weights, saving = ExponentialMovingAverage(decay=0.999, warmup=False), Weights(), ModelCheckpoint(tmp_path)
    module = Half()
    trainer([average, weights, saving], tmp_path, epochs=8).fit(module, loader(), loader(2))
    expected = by_hand(weights.trained, [0.999] * (8 * BATCHES - 1))
    close(dict(average.average), expected)
    # In the weights' own dtype most of it would have stood still.
    stalled = weights.trained[0]["network.0.weight"].clone()
    for state in weights.trained[1:]:
        stalled.lerp_(state["network.0.weight"], 0.001)
    moved = (expected["network.0.weight"] - weights.trained[0]["network.0.weight"].double()).abs().max()
    assert (stalled.double() - expected["network.0.weight"]).abs().max() > 0.5 * moved
    # The module has them in its own dtype; the checkpoint as they are, so that a resume goes on exactly.
    assert module.network[0].weight.dtype == dtype
    assert torch.equal(module.network[0].weight, average.average["network.0.weight"].to(dtype))
    saved = torch.load(saving.best_model_path, weights_only=True)
    assert equal(saved["state_dict"], dict(average.average))
    assert saved[CURRENT]["network.0.weight"].dtype == dtype
    resumed = ExponentialMovingAverage(decay=0.999, warmup=False)
    again = trainer([resumed], tmp_path, epochs=8, enable_checkpointing=False)
    again.fit(Half(), loader(), loader(2), ckpt_path=saving.best_model_path, weights_only=True)
    assert equal(dict(resumed.average), dict(average.average))
    [tested] = again.test(Half(), loader(2), saving.best_model_path, weights_only=True, verbose=False)
    [direct] = again.test(module, loader(2), verbose=False)
    assert tested["loss/val"] == direct["loss/val"]


class Doubled(Regression):
    """Its files hold twice its first layer's weights, as a hook of state dicts has it."""

    def __init__(self) -> None:
        super().__init__()
        self.saves = 0
        self.network.register_buffer("passing", torch.zeros(3), persistent=False)

        def on_save(layer: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            self.saves += 1
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

        self.network[0].register_state_dict_post_hook(on_save)
        self.network[0].register_load_state_dict_pre_hook(self._on_load)

    @staticmethod
    def _on_load(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


def test_hooks_of_state_dicts_are_for_files_alone(tmp_path: Path) -> None:
    def run(kind: type[Regression], epochs: int, resume: str | None = None) -> tuple[Any, Any, str]:
        average, saving = ExponentialMovingAverage(decay=0.9), ModelCheckpoint(tmp_path / f"{kind.__name__}{epochs}")
        module = kind()
        fitted = trainer([average, saving], tmp_path, epochs)
        fitted.fit(module, loader(), loader(2), ckpt_path=resume, weights_only=True)
        return module, average, saving.best_model_path

    plain, _, plain_path = run(Regression, 2)
    doubled, average, doubled_path = run(Doubled, 2)
    # Two epochs' checkpoints, each with both kinds of weights; no step asks for a state dict.
    assert doubled.saves == 4
    assert "network.passing" not in average.average
    assert equal(dict(plain.named_parameters()), dict(doubled.named_parameters()))
    files = [torch.load(path, weights_only=True) for path in (plain_path, doubled_path)]
    for kind in ("state_dict", CURRENT):
        expected = files[0][kind] | {"network.0.weight": files[0][kind]["network.0.weight"] * 2}
        assert equal(expected, files[1][kind])
    unbroken, all_averages, _ = run(Regression, 4)
    resumed, late_averages, _ = run(Doubled, 4, doubled_path)
    assert equal(dict(unbroken.named_parameters()), dict(resumed.named_parameters()))
    assert equal(dict(all_averages.average), dict(late_averages.average))


def test_a_checkpoint_without_an_average_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, filename="plain")
    trainer([saving], tmp_path).fit(Regression(), loader(), loader(2))
    fitted = trainer([ExponentialMovingAverage()], tmp_path, 3, enable_checkpointing=False)
    with caplog.at_level("WARNING"):
        fitted.fit(Regression(), loader(), loader(2), ckpt_path=saving.best_model_path, weights_only=True)
    assert "the checkpoint has no averaged weights" in caplog.text


def test_values_out_of_range_are_faults() -> None:
    node = {"_target_": "exp.engine.ema.ExponentialMovingAverage", "decay": 1.0, "every_n_steps": 0, "start_step": 0}
    found = {fault.key: fault.expected for fault in node_faults("callbacks.ema", node, allow=())}
    assert found == {
        "callbacks.ema.decay": "a number, 0 or more and below 1",
        "callbacks.ema.every_n_steps": "a whole number of steps, 1 or more",
        "callbacks.ema.start_step": "an optimizer step, 1 or more",
    }
