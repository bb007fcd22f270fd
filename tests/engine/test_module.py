"""Training steps equal those of a loop by hand."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional

from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.data.randomness import reseed
from exp.engine.progress import Limits, Position, total_steps
from exp.errors import ExpError, RunError
from exp.models.inference import network_call
from exp.objectives.objective import Term
from exp.objectives.terms import CrossEntropy

pytestmark = pytest.mark.numeric


def by_hand(
    small: Any, epochs: int, *, accumulate: int = 1, clip: float | None = None, network: nn.Module
) -> list[float]:
    """Train without Lightning, and return the loss of each optimizer step."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    loader = small.data.data.loader("train")
    losses = []
    for epoch in range(epochs):
        batches = list(loader)
        for place, batch in enumerate(batches):
            if place % accumulate == 0:
                optimizer.zero_grad()
                window: list[tuple[float, int]] = []
                count = min(accumulate, len(batches) - place)
            reseed(seed=0, rank=0, epoch=epoch, batch=place)
            inputs, target = batch.data
            loss = functional.cross_entropy(network(inputs), target)
            (loss / count).backward()
            window.append((float(loss.detach()), batch.global_size))
            if place % accumulate == accumulate - 1 or place == len(batches) - 1:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
                optimizer.step()
                losses.append(sum(value * size for value, size in window) / sum(size for _, size in window))
    return losses


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.5)])
def test_fit_equals_a_loop_by_hand_bit_for_bit(
    tmp_path: Path, small_run: ModuleType, accumulate: int, clip: float | None
) -> None:
    small = small_run.Small(tmp_path, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    small.fit()
    network = small_run.network()
    losses = by_hand(small, 4, accumulate=accumulate, clip=clip, network=network)
    assert all(torch.equal(tensor, network.state_dict()[name]) for name, tensor in small.weights().items())
    found = [
        value for (tag, _), value in sorted(small.values.seen.items(), key=lambda one: one[0][1]) if tag == "loss/train"
    ]
    assert found == pytest.approx(losses, rel=1e-6 if accumulate > 1 else 0, abs=0)


def test_epoch_values_are_means_over_samples(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, max_epochs=1)
    small.fit()
    network = small.module.network.eval()
    with torch.no_grad():
        batches = [batch.data for batch in small.data.data.loader("val")]
        inputs, target = (torch.cat(column) for column in zip(*batches, strict=True))
        output = network(inputs)
    assert len(batches[0][1]) != len(batches[-1][1])
    assert small.recording.metrics["loss/val"] == pytest.approx(
        float(functional.cross_entropy(output, target)), rel=1e-6
    )
    accuracy = float((output.argmax(dim=1) == target).float().mean())
    assert small.recording.metrics["accuracy/val"] == pytest.approx(accuracy, rel=1e-6)
    losses = [value for (tag, _), value in small.values.seen.items() if tag == "loss/train"]
    sizes = [batch.size for batch in small.data.data.loader("train")]
    expected = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert small.recording.metrics["loss/train"] == pytest.approx(expected, rel=1e-12)


class Draws(nn.Module):
    """Layer that draws random numbers in its forward and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.drawn: list[Any] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.drawn.append((float(torch.rand(())), random.random(), np.random.random()))
        else:
            torch.rand(7)
            random.random()
        return self.linear(inputs)


def test_random_numbers_depend_on_the_step_only(tmp_path: Path, small_run: ModuleType) -> None:
    models = [Draws(), Draws()]
    small_run.Small(tmp_path / "a", model=models[0]).fit()
    small_run.Small(tmp_path / "b", model=models[1], limit_val_batches=0).fit()
    assert models[0].drawn == models[1].drawn
    assert len(set(models[0].drawn)) == 28


def test_several_terms_have_values_each(tmp_path: Path, small_run: ModuleType) -> None:
    terms = {"ce": nn.CrossEntropyLoss(), "smooth": nn.CrossEntropyLoss(label_smoothing=0.5)}
    small = small_run.Small(tmp_path, terms=terms, max_epochs=1, limit_train_batches=1)
    small.fit()
    seen, step = small.values.seen, 1
    total = seen["loss/train/ce", step] + seen["loss/train/smooth", step]
    assert seen["loss/train", step] == pytest.approx(total, rel=1e-6)
    assert {"loss/val/ce", "loss/val/smooth"} <= small.recording.metrics.keys()


class ByName(nn.Module):
    """Network that takes two entries of a batch by name, and returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 2)

    def forward(self, input: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(torch.cat([input, right], dim=1))
        return {"output": scores, "probabilities": scores.softmax(dim=1)}


def test_a_batch_of_names_fits_a_network_of_those_names(tmp_path: Path, small_run: ModuleType) -> None:
    inputs, target = small_run.samples()
    entries = {"input": inputs, "right": -inputs, "target": target}
    data = Data(dataset=Tensors(entries=entries), batch_size=16, parts={"train": 0.7, "val": 0.3})
    small = small_run.Small(tmp_path, data=data, model=ByName())
    small.fit()
    assert small.trainer.global_step == 28


def test_a_batch_without_a_target_trains_named_terms(tmp_path: Path, small_run: ModuleType) -> None:
    inputs, label = small_run.samples()
    dataset = Tensors(entries={"input": inputs, "label": label}, num_classes=2)
    data = Data(dataset=dataset, batch_size=16, parts={"train": 0.7, "val": 0.3})
    settings = {"data": data, "plain_network": True, "terms": {"ce": Term(loss=CrossEntropy(), target="label")}}
    small = small_run.Small(tmp_path / "without", metrics={}, **settings)
    small.fit()
    assert small.recording.metrics["loss/val"] < 0.7
    with pytest.raises(RunError, match=r"accuracy.target is 'target', a name that neither .*: input, label"):
        small_run.Small(tmp_path / "with", **settings).fit()
    # An autoencoder has inputs only.
    dataset = Tensors(entries=(inputs,))
    data = Data(dataset=dataset, batch_size=16, parts={"train": 0.7, "val": 0.3}, num_outputs=6)
    settings = {"data": data, "model": nn.Linear(6, 6), "metrics": {}}
    small_run.Small(tmp_path / "own", terms={"mse": Term(loss=nn.MSELoss(), target="input")}, **settings).fit()
    with pytest.raises(RunError, match=r"the target of a term is 'target', .*: input, output"):
        small_run.Small(tmp_path / "missing", terms={"mse": nn.MSELoss()}, **settings).fit()


class Options(nn.Module):
    """Wrapper of a network with a target and options as optional arguments, as in libraries."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None, **options: object) -> torch.Tensor:
        assert not options
        return self.inner(x)


def test_a_network_is_called_with_its_names() -> None:
    linear, wrapped = nn.Linear(2, 1), Options(nn.Linear(2, 1))
    batch = {"input": torch.ones(1, 2), "target": torch.ones(1)}
    for network in (linear, nn.Sequential(linear), wrapped):
        assert network_call(network)(network, batch).shape == (1, 1)
    assert network_call(wrapped, ("image",))(wrapped, {"image": batch["input"]}).shape == (1, 1)
    with pytest.raises(
        RunError, match=r"the batch has inputs \['x', 'y'\].*forward has parameters \['input', 'right'\]"
    ):
        network_call(ByName())(ByName(), {"x": torch.ones(1), "y": torch.ones(1)})


LENGTHS: list[tuple[dict[str, Any], int | None, int | None, int | None]] = [
    ({"max_epochs": 4, "accumulate_grad_batches": 3}, None, 7, 12),
    ({"max_epochs": 4, "limit_train_batches": 0.5}, None, 7, 12),
    ({"max_epochs": 4, "overfit_batches": 2}, None, 7, 8),
    ({"max_epochs": 4}, 10, 7, 10),
    ({"max_epochs": -1}, 10, 7, 10),
    ({"max_epochs": -1}, None, 7, None),
    ({"max_epochs": 4}, None, None, None),
    ({"max_epochs": 4, "limit_train_batches": 5}, None, None, 20),
]


def test_a_callback_may_set_the_accumulated_batches(tmp_path: Path, small_run: ModuleType) -> None:
    class Accumulates(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.accumulate_grad_batches = 1 + trainer.current_epoch

    run = small_run.Small(tmp_path / "steps", schedule="steps", callbacks=(Accumulates(),))
    run.fit()
    assert run.trainer.global_step == 7 + 4 + 3 + 2


def test_the_length_of_a_run(tmp_path: Path, small_run: ModuleType) -> None:
    for arguments, max_steps, batches, expected in LENGTHS:
        trainer = small_run.Small(tmp_path, **arguments).trainer
        assert total_steps(trainer, Limits(max_steps=max_steps), batches) == expected, arguments


def test_a_run_resumed_with_other_batches_ends_behind_those_that_are_left(
    tmp_path: Path, small_run: ModuleType
) -> None:
    trainer = small_run.Small(tmp_path, max_epochs=4, accumulate_grad_batches=2).trainer
    done = Position(epoch=1, batch=4, step=9, batches=20)
    # Steps of two batches: two steps remain in epoch 1, and each of the two further epochs has four.
    assert total_steps(trainer, Limits(resumed=done), 7) == 9 + 2 + 8
    done = Position(epoch=1, batch=7, step=9, batches=20, validation_due=True, epoch_complete=True)
    assert total_steps(trainer, Limits(resumed=done), 7) == 9 + 8


def test_a_schedule_ends_with_the_run(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, schedule="cosine", accumulate_grad_batches=2, log_every_n_steps=1)
    small.fit()
    rates = [small.values.seen["optimizer/lr/default", step] for step in range(1, 17)]
    assert rates[0] == pytest.approx(1e-2 / 4)
    assert max(rates) == rates[3] == pytest.approx(1e-2)
    assert rates[-1] < 1e-3
    assert small.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_data_may_lack_a_val_part_but_no_batch(tmp_path: Path, small_run: ModuleType) -> None:
    part = Tensors(entries=small_run.samples(20), num_classes=2)
    small = small_run.Small(tmp_path, data=Data(train=part, batch_size=5), max_epochs=2)
    small.fit()
    assert small.trainer.global_step == 8
    assert small.checkpointing.best is None
    with pytest.raises(ExpError, match="batch"):
        small_run.Small(tmp_path, data=Data(train=part, batch_size=64, drop_last=True)).fit()
