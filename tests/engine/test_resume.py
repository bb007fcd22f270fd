"""A run that was killed goes on as if nothing had been: losses, metrics, weights, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import Dataset

from exp.data.data import Data
from exp.engine.checkpoint import read_checkpoint
from exp.errors import Interrupted, RunError
from exp.files import replacing

pytestmark = [
    # Lightning 2.6 on torch 2.13, in its copy of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "each_step": {"every_n_steps": 1},
    "epochs_only": {"every_n_steps": None},
    "accumulated": {"accumulate_grad_batches": 3, "every_n_steps": 1},
    "fp16": {"word": "fp16"},
    "cosine": {"schedule": "cosine"},
    "steps_by_epoch": {"schedule": "steps"},
    "plateau": {"schedule": "plateau"},
    "max_steps_within_an_epoch": {"max_steps": 17},
    "max_steps_at_an_epochs_end": {"max_steps": 21},
    "max_steps_alone": {"max_steps": 21, "max_epochs": None},
    "validation_within_epochs": {"val_check_interval": 3, "every_n_steps": 1},
    "validation_within_accumulated": {"val_check_interval": 3, "accumulate_grad_batches": 2, "every_n_steps": 1},
    "validation_every_second_epoch": {"check_val_every_n_epoch": 2, "schedule": "plateau"},
    "validation_across_epochs": {"check_val_every_n_epoch": None, "val_check_interval": 5},
    "limited_batches": {"limit_train_batches": 5},
    "averaged": {"callbacks": ("ema",)},
    "averaged_plateau": {"callbacks": ("ema",), "schedule": "plateau", "accumulate_grad_batches": 2},
    "stopped_early": {"callbacks": ("early_stopping",), "max_epochs": 20},
    "clipped": {"gradient_clip_val": 0.1},
    "phases": {"phases": True},
    "phases_accumulated": {"phases": True, "accumulate_grad_batches": 3, "every_n_steps": 1, "callbacks": ("ema",)},
    "phases_fp16": {"phases": True, "word": "fp16", "val_check_interval": 3},
}


def interrupted_at(small_run: ModuleType, hook: str, count: int) -> Callback:
    def stop() -> None:
        raise small_run.Killed

    return small_run.At(hook, count, stop)


KILLS: dict[str, list[tuple[str, int]]] = {
    "batches": [("on_train_batch_end", 6), ("on_train_batch_end", 7)],
    "three_times": [("on_train_batch_end", 9), ("on_train_batch_start", 3), ("on_before_optimizer_step", 5)],
    "validation": [("on_validation_start", 2), ("on_validation_batch_end", 2)],
    "epochs": [("on_train_epoch_end", 2), ("on_train_epoch_start", 2)],
}


@pytest.mark.parametrize(
    ("name", "kills"),
    [(name, KILLS["three_times"]) for name in PLANS]
    + [(name, KILLS["validation"]) for name in ("plain", "accumulated", "plateau", "averaged", "max_steps_alone")]
    + [(name, kills) for name in ("plain", "plateau") for kills in (KILLS["batches"], KILLS["epochs"])],
)
def test_a_run_that_was_broken_off_several_times_equals_the_unbroken_one(
    tmp_path: Path, small_run: ModuleType, name: str, kills: list[tuple[str, int]]
) -> None:
    plan = dict(PLANS[name])
    whole = small_run.Small(tmp_path / "whole", **plan)
    whole.fit()
    callbacks = plan.pop("callbacks", ())
    values: dict[Any, float] = {}
    for kill in [*kills, None]:
        extra = () if kill is None else (interrupted_at(small_run, *kill),)
        part = small_run.Small(tmp_path / "parts", callbacks=(*callbacks, *extra), **plan)
        with contextlib.suppress(small_run.Killed):
            part.fit(resume=part.last if part.last.is_file() else None)
        values |= part.values.seen
    assert_equal_runs(whole, part, values)


@pytest.mark.parametrize(
    ("settings", "kills"),
    [
        ({"every_n_steps": 2}, [["on_train_batch_end", 5], ["on_train_batch_end", 9]]),
        (
            {"accumulate_grad_batches": 2, "schedule": "cosine"},
            [["on_train_batch_end", 11], ["on_validation_end", 1]],
        ),
        (
            {"phases": True, "accumulate_grad_batches": 2, "every_n_steps": 1},
            [["on_train_batch_end", 12], ["on_before_optimizer_step", 7]],
        ),
    ],
    ids=["plain", "accumulated", "phases"],
)
def test_a_run_that_was_killed_by_the_system_twice_equals_the_unbroken_one(
    tmp_path: Path, elsewhere: Any, logged: Callable[..., Any], settings: dict[str, Any], kills: list[list[Any]]
) -> None:
    assert elsewhere.run(tmp_path / "whole", **settings) == 0
    for kill in kills:
        assert elsewhere.run(tmp_path / "parts", resume=True, kill=kill, **settings) == -9
    assert elsewhere.run(tmp_path / "parts", resume=True, **settings) == 0
    assert_equal_directories(tmp_path / "whole", tmp_path / "parts", logged)


def test_a_run_on_two_ranks_that_was_killed_twice_equals_the_unbroken_one(
    tmp_path: Path, elsewhere: Any, logged: Callable[..., Any]
) -> None:
    def run(name: str, **settings: Any) -> list[int]:
        ranks = elsewhere.ranks(tmp_path / name, 2, resume=True, every_n_steps=2, schedule="plateau", **settings)
        if "kill" in settings:
            elsewhere.end(ranks[0])
            ranks[1].kill()
        return [elsewhere.end(rank) for rank in ranks]

    assert run("whole") == [0, 0]
    assert run("parts", kill=["on_train_batch_end", 6])[0] == -9
    assert run("parts", kill=["on_train_batch_end", 8])[0] == -9
    assert run("parts") == [0, 0]
    assert_equal_directories(tmp_path / "whole", tmp_path / "parts", logged)
    first, second = (torch.load(tmp_path / "whole" / f"weights.{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first if "running" not in name)


def assert_equal_directories(whole: Path, parts: Path, logged: Callable[..., Any]) -> None:
    expected, found = logged(whole), logged(parts)
    assert {key: found[key] for key in expected} == expected
    results = [json.loads((folder / "result.0.json").read_text()) for folder in (whole, parts)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["step"] == results[1]["step"]
    weights = [torch.load(folder / "weights.0.pt") for folder in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Noisy(Dataset):
    """Samples with noise, drawn from torch's generator as a user's transforms do."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + torch.randn(6), self.targets[index]


def test_samples_that_workers_change_at_random_are_the_same_after_a_kill(tmp_path: Path, small_run: ModuleType) -> None:
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
    values: dict[Any, float] = {}
    for kill in [("on_train_batch_end", 5), ("on_train_batch_end", 6), None]:
        extra = () if kill is None else (interrupted_at(small_run, *kill),)
        part = small_run.Small(tmp_path / "parts", data=data(2), callbacks=extra, max_epochs=2)
        with contextlib.suppress(small_run.Killed):
            part.fit(resume=part.last if part.last.is_file() else None)
        values |= part.values.seen
    assert_equal_runs(whole, part, values)


def test_a_resumed_run_that_was_complete_does_nothing_and_says_how_to_train_longer(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for limits, done, longer in (
        ({}, "4 epochs of trainer.max_epochs=4", "trainer.max_epochs=8"),
        ({"max_steps": 17}, "17 steps of trainer.max_steps=17", "trainer.max_steps=34"),
        ({"max_time": 0.001}, "trainer.max_time", "trainer.max_time="),
    ):
        caplog.clear()
        whole = small_run.Small(tmp_path / str(limits), **limits)
        whole.fit()
        assert "nothing is left" not in caplog.text
        again = small_run.Small(tmp_path / f"again {limits}", **limits)
        again.fit(resume=whole.last)
        assert f"nothing is left to train: {whole.last} has done" in caplog.text
        assert done in caplog.text
        assert f"To train longer: {longer}" in caplog.text
        assert not again.values.seen
        assert again.trainer.global_step == whole.trainer.global_step
        assert again.recording.metrics == whole.recording.metrics
        # The new directory is one to evaluate from, too, and to go on from.
        assert again.checkpointing.best_path.read_bytes() == whole.checkpointing.best_path.read_bytes()
        assert again.last.read_bytes() == whole.last.read_bytes()


def test_a_run_that_had_only_its_last_validation_left_to_do_has_a_last_checkpoint(
    tmp_path: Path, small_run: ModuleType
) -> None:
    whole = small_run.Small(tmp_path / "whole", max_epochs=2)
    whole.fit()
    signal_in_validation = small_run.At("on_validation_batch_end", 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    first = small_run.Small(tmp_path / "first", max_epochs=2, callbacks=(signal_in_validation,))
    with pytest.raises(Interrupted):
        first.fit()
    again = small_run.Small(tmp_path / "again", max_epochs=2)
    again.fit(resume=first.last)
    assert again.trainer.global_step == whole.trainer.global_step
    assert_equal_checkpoints(again.last, whole.last)


@pytest.mark.parametrize("callbacks", [(), ("ema",), ("lightning_ema",)], ids=["plain", "ema", "lightning_ema"])
def test_a_complete_run_goes_on_with_more_epochs(
    tmp_path: Path, small_run: ModuleType, callbacks: tuple[str, ...]
) -> None:
    small_run.Small(tmp_path / "a", max_epochs=2, callbacks=callbacks).fit()
    longer = small_run.Small(tmp_path / "a", max_epochs=4, callbacks=callbacks)
    longer.fit(resume=longer.last)
    whole = small_run.Small(tmp_path / "b", max_epochs=4, callbacks=callbacks)
    whole.fit()
    assert all(torch.equal(tensor, whole.weights()[name]) for name, tensor in longer.weights().items())
    assert_equal_checkpoints(longer.last, whole.last)


def test_lightnings_averages_are_not_saved_as_the_weights_by_a_signal_in_a_validation(
    tmp_path: Path, small_run: ModuleType
) -> None:
    callbacks = ("lightning_ema",)
    whole = small_run.Small(tmp_path / "whole", max_epochs=3, callbacks=callbacks)
    whole.fit()
    signal_in_validation = small_run.At("on_validation_batch_end", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    part = small_run.Small(tmp_path / "parts", max_epochs=3, callbacks=(*callbacks, signal_in_validation))
    with pytest.raises(Interrupted):
        part.fit()
    part = small_run.Small(tmp_path / "parts", max_epochs=3, callbacks=callbacks)
    part.fit(resume=part.last)
    assert_equal_checkpoints(part.last, whole.last)


def test_a_run_whose_directory_is_taken_away_saves_its_state_and_says_so(tmp_path: Path, small_run: ModuleType) -> None:
    taken = small_run.At("on_train_batch_end", 9, lambda: shutil.rmtree(tmp_path / "run"))
    run = small_run.Small(tmp_path / "run", callbacks=(taken,))
    run.values.path = tmp_path / "values.jsonl"  # opened again for each value
    with pytest.raises(RunError, match=r"run was removed or renamed while .* at step 12 is in .*last\.ckpt"):
        run.fit()
    whole = small_run.Small(tmp_path / "whole")
    whole.fit()
    again = small_run.Small(tmp_path / "again")
    again.fit(resume=run.last)
    assert all(torch.equal(tensor, whole.weights()[name]) for name, tensor in again.weights().items())


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("", "last.ckpt is written anew; the best is sought anew from here; the others are kept no longer"),
        ("last.ckpt", "The run goes on: last.ckpt is written anew"),
        ("best.ckpt", "The run goes on: the best is sought anew from here"),
        ("best-7.ckpt", "The run goes on: the others are kept no longer"),
    ],
)
def test_checkpoints_that_somebody_removes_are_named_and_the_run_goes_on(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture, name: str, then: str, threaded: bool
) -> None:
    def take() -> None:
        run.checkpointing.settle(run.trainer)
        path = run.last.parent / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    saving = {"keep": 4}  # more than there are epochs
    take_at = small_run.At("on_train_batch_end", 17, take)
    run = small_run.Small(tmp_path / "run", callbacks=(take_at,), saving=saving, threaded=threaded)
    run.fit()
    (told,) = [record.getMessage() for record in caplog.records if "removed while the run goes on" in record.message]
    assert str(run.last.parent / name) in told
    assert told.endswith(then)
    assert read_checkpoint(run.last)["global_step"] == 28
    named = [run.checkpointing.best_path] if run.checkpointing.best is not None else []
    named += [run.last.with_name(f"best-{entry['step']}.ckpt") for entry in run.checkpointing.kept]
    assert len(named) > 2
    assert all(path.is_file() for path in named)
    whole = small_run.Small(tmp_path / "whole", saving=saving)
    whole.fit()
    assert all(torch.equal(tensor, whole.weights()[name]) for name, tensor in run.weights().items())


def test_what_a_killed_run_left_half_written_goes_with_the_next_one(tmp_path: Path, small_run: ModuleType) -> None:
    first = small_run.Small(tmp_path / "first", max_epochs=1)
    first.fit()
    left = [tmp_path / "first" / ".report.json.1.2.partial", first.last.with_name(".last.ckpt.1.2.partial")]
    left.append(first.last.with_name(".last.ckpt.partial"))  # of an older version
    left.append(tmp_path / "first" / "pictures" / ".loss.png.1.2.partial")
    left[-1].parent.mkdir(exist_ok=True)
    others = [tmp_path / ".last.ckpt.1.2.partial", first.last.with_name(".mine.partial")]
    for path in (*left, *others):
        path.touch()
    best = first.checkpointing.best_path
    with replacing(best) as file:  # somebody writes there now
        file.write(b"whole")
        again = small_run.Small(tmp_path / "again", max_epochs=2)
        again.fit(resume=first.last)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    assert best.read_bytes() == b"whole"


def test_a_checkpoint_of_another_kind_can_be_evaluated_but_not_resumed(tmp_path: Path, small_run: ModuleType) -> None:
    class Foreign(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "foreign.ckpt")

    first = small_run.Small(tmp_path / "a", max_epochs=1, callbacks=(Foreign(),))
    first.fit()
    again = small_run.Small(tmp_path / "a", max_epochs=2)
    with pytest.raises(RunError, match="says nothing of its position"):
        again.fit(resume=tmp_path / "foreign.ckpt")
    fresh = small_run.Small(tmp_path / "b")
    fresh.trainer.test(fresh.module, datamodule=fresh.data, ckpt_path=str(tmp_path / "foreign.ckpt"), verbose=False)
    assert all(torch.equal(tensor, first.weights()[name]) for name, tensor in fresh.weights().items())


def test_the_best_is_forgotten_where_its_file_is_not_beside_the_checkpoint(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def stop() -> None:
        raise small_run.Killed

    # The last is of step 8, so that it is not the best itself, which is of step 7.
    first = small_run.Small(tmp_path / "a", max_epochs=2, callbacks=(small_run.At("on_train_batch_end", 9, stop),))
    with pytest.raises(small_run.Killed):
        first.fit()
    first.checkpointing.best_path.unlink()
    again = small_run.Small(tmp_path / "b", max_epochs=2)
    again.fit(resume=first.last)
    assert "best is sought anew" in caplog.text
    assert again.checkpointing.best["step"] == 14
    assert again.checkpointing.best_path.is_file()


def assert_equal_runs(whole: Any, part: Any, values: dict[Any, float]) -> None:
    assert {key: values[key] for key in whole.values.seen if key in values} == whole.values.seen
    # Learning rates and loss scales have a point more where a part begins.
    assert all(tag.startswith(("optimizer/", "precision/")) for tag, _ in values.keys() - whole.values.seen.keys())
    assert part.trainer.global_step == whole.trainer.global_step
    assert part.recording.metrics == whole.recording.metrics
    found, expected = part.checkpointing.best, whole.checkpointing.best
    assert (found["value"], found["step"]) == (expected["value"], expected["step"])
    weights = part.weights()
    for tag, tensor in whole.weights().items():
        assert torch.equal(weights[tag], tensor), tag


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    """All but the time that it took."""
    found, expected = (read_checkpoint(path) for path in (one, other))
    assert found.keys() == expected.keys()
    for key in found.keys() - {"exp_seconds", "exp_latest", "exp_manifest", "loops"}:
        assert_same(found[key], expected[key], key)


def assert_same(found: Any, expected: Any, key: str) -> None:
    assert type(found) is type(expected), key
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected), key
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), key
        for name in found:
            assert_same(found[name], expected[name], f"{key}.{name}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), key
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{key}.{place}")
    else:
        assert found == expected, key


def test_a_run_that_keeps_no_best_does_not_miss_one(
    tmp_path: Path, small_run: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    first = small_run.Small(tmp_path / "first", max_epochs=1)
    first.fit()
    run = small_run.Small(tmp_path / "run", saving={"save_best": False})
    run.fit(resume=first.last)
    assert run.checkpointing.best is None
    assert "removed while the run goes on" not in caplog.text
