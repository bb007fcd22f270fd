"""A killed run resumes exactly: losses, metrics and weights equal those of an unbroken run bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import Dataset

from exp.data.data import Data
from exp.engine.checkpoint import AtomicCheckpointIO
from exp.engine.pruning import Pruning
from exp.errors import Interrupted, RunError
from exp.files import open_atomic

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3, "every_n_steps": 1},
    "steps_by_epoch": {"schedule": "steps"},
    "max_steps_within_an_epoch": {"max_steps": 17},
    "max_steps_at_an_epochs_end": {"max_steps": 21},
    "max_steps_alone": {"max_steps": 21, "max_epochs": None},
    "validation_within_accumulated": {"val_check_interval": 3, "accumulate_grad_batches": 2, "every_n_steps": 1},
    "validation_every_second_epoch": {"check_val_every_n_epoch": 2, "schedule": "plateau"},
    "validation_across_epochs": {"check_val_every_n_epoch": None, "val_check_interval": 5},
    "averaged_plateau": {"callbacks": ("ema",), "schedule": "plateau", "accumulate_grad_batches": 2},
    "stopped_early": {"callbacks": ("early_stopping",), "max_epochs": 20},
    "weighted": {"loss": {"class_weights": [1.0, 5.0]}},
    "phases_accumulated": {"phases": True, "accumulate_grad_batches": 3, "every_n_steps": 1, "callbacks": ("ema",)},
    "phases_fp16": {"phases": True, "word": "fp16", "val_check_interval": 3},
}


KILLS = [("on_train_batch_end", 9), ("on_train_batch_start", 3), ("on_before_optimizer_step", 5)]
HOOKS = (
    "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_batch_end",
    "on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end",
)  # fmt: skip


def run_in_parts(
    small_run: ModuleType, directory: Path, kills: Sequence[tuple[str, int]], **plan: Any
) -> tuple[Any, dict[Any, float]]:
    """Run, kill the run at each (hook, count) and resume it; return the last part of the run, and all values."""
    callbacks = plan.pop("callbacks", ())
    values: dict[Any, float] = {}
    for kill in [*kills, None]:
        extra = () if kill is None else (small_run.At(*kill),)
        part = small_run.Small(directory, callbacks=(*callbacks, *extra), **plan)
        with contextlib.suppress(small_run.Killed):
            part.fit(resume=part.last if part.last.is_file() else None)
        values |= part.values.seen
    return part, values


@pytest.mark.parametrize("name", PLANS)
def test_a_run_killed_three_times_equals_an_unbroken_one(tmp_path: Path, small_run: ModuleType, name: str) -> None:
    whole = small_run.Small(tmp_path / "whole", **PLANS[name])
    whole.fit()
    assert_equal_runs(whole, *run_in_parts(small_run, tmp_path / "parts", KILLS, **PLANS[name]))


@pytest.mark.parametrize("kill", [("on_train_batch_end", 17), ("on_validation_batch_end", 3)])
@pytest.mark.parametrize("name", ["plain", *(name for name in PLANS if name.startswith("validation_"))])
def test_a_pruner_counts_validations_over_a_resume(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, kill: tuple[str, int]
) -> None:
    monkeypatch.setattr("exp.engine.pruning.TrialOfJob", lambda *_, **__: SimpleNamespace(pruned_at=None))
    whole, earlier, resumed = (Pruning(trial=0, monitor="none", pruner="none", sweep=tmp_path) for _ in range(3))
    small_run.Small(tmp_path / "whole", callbacks=(whole,), **PLANS[name]).fit()
    broken = small_run.Small(tmp_path / "parts", callbacks=(earlier, small_run.At(*kill)), **PLANS[name])
    with pytest.raises(small_run.Killed):
        broken.fit()
    small_run.Small(tmp_path / "parts", callbacks=(resumed,), **PLANS[name]).fit(resume=broken.last)
    assert resumed.validations == whole.validations > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulated", "averaged_plateau", "phases_fp16", "validation_within_accumulated"])
def test_a_kill_at_any_hook_loses_nothing(tmp_path: Path, small_run: ModuleType, share: Any, name: str) -> None:
    plan = {**PLANS[name], "max_epochs": 2}
    whole = small_run.Small(tmp_path / "whole", **plan)
    whole.fit()
    for kill in share.of(list(itertools.product(HOOKS, range(1, 15)))):
        assert_equal_runs(whole, *run_in_parts(small_run, tmp_path / f"{kill}", [kill], **plan))


class KilledWriter(AtomicCheckpointIO):
    """Checkpoint writer that kills the run at moment `at`; moments are before and after each change of a file."""

    def __init__(self, kill: Callable[[], None], at: int) -> None:
        super().__init__()
        self.kill, self.at, self.points = kill, at, 0

    def _point(self) -> None:
        self.points += 1
        if self.points == self.at:
            self.kill()

    def write(self, *given: Any) -> None:
        self._point()
        super().write(*given)
        self._point()

    def copy_checkpoint(self, *given: Any) -> None:
        self._point()
        super().copy_checkpoint(*given)
        self._point()

    def remove_checkpoint(self, *given: Any) -> None:
        self._point()
        super().remove_checkpoint(*given)
        self._point()


def test_a_kill_at_any_moment_of_a_save_loses_nothing(tmp_path: Path, small_run: ModuleType) -> None:
    """The kills include moments between two files, such as after last.ckpt and before best.ckpt."""

    def run(name: str, io: AtomicCheckpointIO | None = None) -> Any:
        plan = {"accumulate_grad_batches": 2, "every_n_steps": 1, "val_check_interval": 4, "max_epochs": 1}
        return small_run.Small(tmp_path / name, io=io, schedule="cosine", word="fp16", **plan)

    counting = KilledWriter(small_run.kill, at=0)
    whole = run("whole", counting)
    whole.fit()
    assert counting.points >= 10
    files = {path.name for path in whole.last.parent.iterdir()}
    for at in range(1, counting.points + 1):
        broken = run(f"at {at}", KilledWriter(small_run.kill, at=at))
        with pytest.raises(small_run.Killed):
            broken.fit()
        part = run(f"at {at}")
        part.fit(resume=part.last if part.last.is_file() else None)
        assert_equal_runs(whole, part, {**broken.values.seen, **part.values.seen})
        assert {path.name for path in part.last.parent.iterdir()} == files
        for name in files:
            assert small_run.saved(part.last.with_name(name)) == small_run.saved(whole.last.with_name(name)), name


def test_a_run_killed_by_the_system_equals_an_unbroken_one(
    tmp_path: Path, elsewhere: Any, logged: Callable[..., Any]
) -> None:
    settings = {"accumulate_grad_batches": 2, "schedule": "cosine", "threaded": True}
    assert elsewhere.run(tmp_path / "whole", **settings) == 0
    for kill in (["on_train_batch_end", 11], ["on_validation_end", 1]):
        assert elsewhere.run(tmp_path / "parts", resume=True, kill=kill, **settings) == -9
    assert elsewhere.run(tmp_path / "parts", resume=True, **settings) == 0
    expected, found = logged(tmp_path / "whole"), logged(tmp_path / "parts")
    assert {key: found[key] for key in expected} == expected
    weights = [torch.load(tmp_path / name / "weights.0.pt") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Noisy(Dataset):
    """Data set with noise from torch's generator, as random transforms of users add."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + torch.randn(6), self.targets[index]


def test_random_samples_of_workers_resume_exactly(tmp_path: Path, small_run: ModuleType) -> None:
    def data(num_workers: int) -> Data:
        return Data(
            dataset=Noisy(*small_run.samples()),
            batch_size=16,
            parts={"train": 0.8, "val": 0.2},
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
            num_classes=2,
        )

    whole = small_run.Small(tmp_path / "whole", data=data(0), max_epochs=2)
    whole.fit()
    kills = [("on_train_batch_end", 5), ("on_train_batch_end", 6)]
    assert_equal_runs(whole, *run_in_parts(small_run, tmp_path / "parts", kills, data=data(2), max_epochs=2))


def test_a_resumed_complete_run_says_how_to_train_longer(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for limits, reached in (
        ({}, "trainer.max_epochs=4"),
        ({"max_steps": 17}, "trainer.max_steps=17"),
        ({"max_time": 0.001}, "trainer.max_time, 0.001 s"),
    ):
        caplog.clear()
        whole = small_run.Small(tmp_path / str(limits), callbacks=("ema",), **limits)
        whole.fit()
        assert "nothing is left" not in caplog.text
        again = small_run.Small(tmp_path / f"again {limits}", callbacks=("ema",), **limits)
        again.fit(resume=whole.last)
        assert f"nothing is left to train: {whole.last} has reached {reached}, the limit of the whole" in caplog.text
        assert not again.values.seen
        assert all(torch.equal(tensor, again.weights()[name]) for name, tensor in whole.weights().items())
        assert again.trainer.global_step == whole.trainer.global_step
        assert again.recording.metrics == whole.recording.metrics
        # The new directory has checkpoints, so that it can be evaluated and resumed.
        assert again.checkpointing.best_path.read_bytes() == whole.checkpointing.best_path.read_bytes()
        assert again.last.read_bytes() == whole.last.read_bytes()


@pytest.mark.parametrize(("callbacks", "batch"), [((), 3), (("ema",), 2)], ids=["plain", "ema"])
def test_a_signal_in_a_validation_saves_the_trained_weights(
    tmp_path: Path, small_run: ModuleType, callbacks: tuple[str, ...], batch: int
) -> None:
    """In the cases without an average, the signal comes in the last validation, when training is complete."""

    def run(name: str, *more: Any, epochs: int = 3 if callbacks else 2) -> Any:
        return small_run.Small(tmp_path / name, max_epochs=epochs, callbacks=(*callbacks, *more))

    whole = run("whole")
    whole.fit()
    first = run("first", small_run.At("on_validation_batch_end", batch, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(Interrupted):
        first.fit()
    again = run("again")
    again.fit(resume=first.last)
    assert again.trainer.global_step == whole.trainer.global_step
    assert small_run.saved(again.last) == small_run.saved(whole.last)


@pytest.mark.parametrize("callbacks", [(), ("ema",)], ids=["plain", "ema"])
def test_a_complete_run_resumes_with_more_epochs(
    tmp_path: Path, small_run: ModuleType, callbacks: tuple[str, ...]
) -> None:
    small_run.Small(tmp_path / "a", max_epochs=2, callbacks=callbacks).fit()
    longer = small_run.Small(tmp_path / "a", max_epochs=4, callbacks=callbacks)
    longer.fit(resume=longer.last)
    whole = small_run.Small(tmp_path / "b", max_epochs=4, callbacks=callbacks)
    whole.fit()
    assert all(torch.equal(tensor, whole.weights()[name]) for name, tensor in longer.weights().items())
    assert small_run.saved(longer.last) == small_run.saved(whole.last)


@pytest.mark.parametrize("phases", [False, True])
def test_a_longer_run_has_the_rates_of_its_length(tmp_path: Path, small_run: ModuleType, phases: bool) -> None:
    small_run.Small(tmp_path, schedule="cosine", max_epochs=2, phases=phases).fit()
    longer = small_run.Small(tmp_path, schedule="cosine", max_epochs=4, phases=phases)
    longer.fit(resume=longer.last)
    tag = "optimizer/lr/" + ("head" if phases else "default")
    found = {step: value for (name, step), value in longer.values.seen.items() if name == tag}
    # A cosine over 28 steps with 3 steps of warm-up. Repeats of a phase do not step the schedule.
    expected = {step: 1e-2 * (1 + math.cos(math.pi * (step - 4) / 25)) / 2 for step in range(15, 29)}
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_run_whose_directory_is_removed_saves_its_state(tmp_path: Path, small_run: ModuleType) -> None:
    taken = small_run.At("on_train_batch_end", 9, lambda: shutil.rmtree(tmp_path / "run", ignore_errors=True))
    run = small_run.Small(tmp_path / "run", callbacks=(taken,))
    run.values.path = tmp_path / "values.jsonl"  # the logger opens this file for each value, and its folder must exist
    run.fit()
    whole = small_run.Small(tmp_path / "whole")
    whole.fit()
    assert small_run.saved(run.last)["state_dict"] == small_run.saved(whole.last)["state_dict"]


def test_a_run_removes_half_written_files(tmp_path: Path, small_run: ModuleType) -> None:
    first = small_run.Small(tmp_path / "first", max_epochs=1)
    first.fit()
    left = [tmp_path / "first" / ".report.json.1.2.partial", first.last.with_name(".last.ckpt.1.2.partial")]
    left.append(first.last.with_name(".last.ckpt.partial"))  # name in older versions
    left.append(tmp_path / "first" / "pictures" / ".loss.png.1.2.partial")
    left[-1].parent.mkdir(exist_ok=True)
    others = [tmp_path / ".last.ckpt.1.2.partial", first.last.with_name(".mine.partial")]
    for path in (*left, *others):
        path.touch()
    best = first.checkpointing.best_path
    with open_atomic(best) as file:  # as if another process were writing this file
        file.write(b"whole")
        again = small_run.Small(tmp_path / "again", max_epochs=2)
        again.fit(resume=first.last)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    assert best.read_bytes() == b"whole"


def test_a_foreign_checkpoint_can_only_be_evaluated(tmp_path: Path, small_run: ModuleType) -> None:
    class Foreign(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "foreign.ckpt")

    first = small_run.Small(tmp_path / "a", max_epochs=1, callbacks=(Foreign(),))
    first.fit()
    again = small_run.Small(tmp_path / "a", max_epochs=2)
    with pytest.raises(RunError, match="has no position"):
        again.fit(resume=tmp_path / "foreign.ckpt")
    fresh = small_run.Small(tmp_path / "b")
    fresh.trainer.test(fresh.module, datamodule=fresh.data, ckpt_path=str(tmp_path / "foreign.ckpt"), verbose=False)
    assert all(torch.equal(tensor, first.weights()[name]) for name, tensor in fresh.weights().items())


def test_a_best_without_its_file_is_forgotten(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    # last.ckpt has step 8, and the best checkpoint step 7.
    first = small_run.Small(tmp_path / "a", max_epochs=2, callbacks=(small_run.At("on_train_batch_end", 9),))
    with pytest.raises(small_run.Killed):
        first.fit()
    first.checkpointing.best_path.unlink()
    again = small_run.Small(tmp_path / "b", max_epochs=2)
    again.fit(resume=first.last)
    assert "searches for a new best value" in caplog.text
    assert again.checkpointing.best["step"] == 14
    assert again.checkpointing.best_path.is_file()


def assert_equal_runs(whole: Any, part: Any, values: dict[Any, float]) -> None:
    assert {key: values[key] for key in whole.values.seen if key in values} == whole.values.seen
    # A resumed run logs its first learning rate and loss scale again, which are additional points.
    assert all(tag.startswith(("optimizer/", "precision/")) for tag, _ in values.keys() - whole.values.seen.keys())
    assert part.trainer.global_step == whole.trainer.global_step
    assert part.recording.metrics == whole.recording.metrics
    found, expected = part.checkpointing.best, whole.checkpointing.best
    assert (found["value"], found["step"]) == (expected["value"], expected["step"])
    weights = part.weights()
    for tag, tensor in whole.weights().items():
        assert torch.equal(weights[tag], tensor), tag
