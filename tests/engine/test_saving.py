"""Times of saves, kept checkpoints, and the writing thread, none of which changes the results of a run."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from exp.engine.checkpoint import AtomicCheckpointIO, ThreadedCheckpointIO, read_checkpoint

ALWAYS = 1e-9


def test_the_clock_saves_within_an_epoch(tmp_path: Path, small_run: ModuleType) -> None:
    settings = {"every_n_steps": None, "saving": {"every_n_minutes": ALWAYS}, "max_epochs": 2}
    whole = small_run.Small(tmp_path / "whole", **settings)
    whole.fit()
    broken = small_run.Small(tmp_path / "broken", callbacks=(small_run.At("on_train_batch_end", 5),), **settings)
    with pytest.raises(small_run.Killed):
        broken.fit()
    assert read_checkpoint(broken.last)["global_step"] == 4
    again = small_run.Small(tmp_path / "again", **settings)
    again.fit(resume=broken.last)
    assert small_run.saved(again.last) == small_run.saved(whole.last)


def test_the_clock_saves_no_oftener_than_its_period(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_run.Small(tmp_path, every_n_steps=None, saving={"every_n_minutes": 1.0}, max_epochs=1)
    now, saved = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Callback()
    clock.on_train_batch_end = lambda *_: now.append(now.pop() + 25.0)
    clock.on_save_checkpoint = lambda trainer, *_: saved.append(trainer.global_step)
    small.trainer.callbacks.insert(1, clock)
    small.fit()
    assert saved == [3, 6, 7]  # after 75 s, after 150 s, at the end


@pytest.mark.slow
def test_ranks_save_by_the_clock_of_rank_0(tmp_path: Path, elsewhere: Any) -> None:
    settings = {"plain_network": True, "every_n_steps": None, "max_epochs": 1, "slow_steps": 0.25}
    settings |= {"saving": {"every_n_minutes": 0.01}, "kill": ["on_train_batch_end", 7]}
    for rank in elsewhere.ranks(tmp_path, 2, **settings):
        elsewhere.end(rank)
    assert 1 <= read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] < 7


# --- the best one ---


@pytest.mark.parametrize("make_io", [AtomicCheckpointIO, ThreadedCheckpointIO])
def test_a_resumed_run_keeps_the_best_one(tmp_path: Path, small_run: ModuleType, make_io: Any) -> None:
    def run(name: str, **settings: Any) -> Any:
        more = {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 3, "every_n_steps": 3}
        return small_run.Small(tmp_path / name, io=make_io(), **more, **settings)

    whole = run("whole")
    whole.fit()
    best = min((value, step) for (tag, step), value in whole.values.seen.items() if tag == "loss/val")[1]
    files = {"best.ckpt", "last.ckpt"}
    assert {path.name for path in whole.last.parent.iterdir()} == files
    assert read_checkpoint(whole.checkpointing.best_path)["global_step"] == best
    for batches in (6, 13):
        broken = run(f"broken{batches}", callbacks=(small_run.At("on_train_batch_end", batches),))
        with pytest.raises(small_run.Killed):
            broken.fit()
        again = run(f"again{batches}")
        again.fit(resume=broken.last)
        for name in files:
            assert small_run.saved(again.last.with_name(name)) == small_run.saved(whole.last.with_name(name)), name


# --- by a thread ---


class Slow(ThreadedCheckpointIO):
    """Checkpoint writer that calls a function in its thread before each file."""

    def __init__(self, before: Callable[[], object], **settings: Any) -> None:
        super().__init__(**settings)
        self.before = before

    def write(self, content: Any, path: Path) -> None:
        self.before()
        super().write(content, path)


@pytest.mark.parametrize(
    "more",
    [
        {"callbacks": ("ema",)},
        {"word": "fp16", "accumulate_grad_batches": 2},
        pytest.param({"phases": True}, marks=pytest.mark.slow),
    ],
)
def test_a_thread_writes_the_same_files(tmp_path: Path, small_run: ModuleType, more: dict[str, Any]) -> None:
    threads = set()

    def before() -> None:
        threads.add(threading.current_thread().name.partition("_")[0])
        time.sleep(0.02)  # training continues meanwhile

    whole = small_run.Small(tmp_path / "plain", every_n_steps=1, max_epochs=2, **more)
    whole.fit()
    small = small_run.Small(tmp_path / "threaded", io=Slow(before), every_n_steps=1, max_epochs=2, **more)
    small.fit()
    assert threads == {"checkpoints"}
    for name in ("last.ckpt", "best.ckpt"):
        assert small_run.saved(small.last.with_name(name)) == small_run.saved(whole.last.with_name(name)), name
    assert not list(small.last.parent.glob(".*"))


def test_at_most_two_states_wait_and_are_written_in_order(tmp_path: Path) -> None:
    gate, written = threading.Semaphore(0), []

    class Gated(Slow):
        def write(self, content: Any, path: Path) -> None:
            super().write(content, path)
            written.append(read_checkpoint(path)["epoch"])

    io = Gated(gate.acquire)
    weight = torch.zeros(3)

    def save(epoch: int) -> None:
        weight.fill_(epoch)
        with io.in_background():
            io.save_checkpoint({"state_dict": {"w": weight}, "epoch": epoch}, tmp_path / "last.ckpt")

    save(0)
    save(1)
    io.copy_checkpoint(tmp_path / "last.ckpt", tmp_path / "best.ckpt")
    third = threading.Thread(target=save, args=(2,))
    third.start()
    third.join(0.1)
    assert third.is_alive()  # two states wait, so a third save blocks
    assert written == []
    for _ in range(3):
        gate.release()
    third.join(20)
    io.settle()
    assert written == [0, 1, 2]
    assert read_checkpoint(tmp_path / "best.ckpt")["state_dict"]["w"].tolist() == [1.0, 1.0, 1.0]
    assert read_checkpoint(tmp_path / "last.ckpt")["epoch"] == 2


def test_a_failed_write_of_a_thread_ends_the_run(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, count = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        count[0] += os.readlink(f"/proc/self/fd/{descriptor}").endswith(".partial")
        if count[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    small = small_run.Small(tmp_path, io=Slow(str), every_n_steps=1, max_epochs=1)
    with pytest.raises(OSError, match="No space left on device") as caught:
        small.fit()
    assert caught.value.filename == str(small.last)
    assert read_checkpoint(small.last)["global_step"] == 2
    assert count[0] == 3


def test_a_callbacks_checkpoint_is_written_immediately(tmp_path: Path, small_run: ModuleType) -> None:
    """The states that wait for the thread are written before it."""
    steps = []

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            steps.append([read_checkpoint(path)["global_step"] for path in (tmp_path / "own.ckpt", small.last)])

    small = small_run.Small(
        tmp_path,
        io=Slow(lambda: time.sleep(0.02)),
        every_n_steps=1,
        max_epochs=1,
        limit_train_batches=3,
        callbacks=(Saving(),),
    )
    small.trainer.callbacks.reverse()  # so that exp's callback comes before the user's
    small.last.parent.mkdir()
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 0}, small.last)
    small.fit()
    assert steps == [[1, 0], [2, 1], [3, 2]]


def test_a_very_large_state_is_written_without_the_thread(tmp_path: Path) -> None:
    threads = []
    io = Slow(lambda: threads.append(threading.current_thread().name.partition("_")[0]), largest=40)
    with io.in_background():
        for size in (10, 11):
            io.save_checkpoint({"state_dict": {"w": torch.zeros(size)}}, tmp_path / "last.ckpt")
    io.settle()
    assert threads == ["checkpoints", "MainThread"]


def test_a_forked_worker_keeps_no_lock_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker held the lock of the file, the copy of the best would wait for the end of the worker."""
    own, writing, forked = os.fsync, threading.Event(), threading.Event()

    def fsync(descriptor: int) -> None:
        writing.set()
        assert forked.wait(20)
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    io = ThreadedCheckpointIO()
    with io.in_background():
        io.save_checkpoint({"state_dict": {"w": torch.zeros(3)}}, tmp_path / "last.ckpt")
    assert writing.wait(20)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    forked.set()
    io.copy_checkpoint(tmp_path / "last.ckpt", tmp_path / "best.ckpt")
    settling = threading.Thread(target=io.settle)
    settling.start()
    settling.join(20)
    is_waiting = settling.is_alive()
    worker.kill()
    worker.join()
    settling.join()
    assert not is_waiting
    assert (tmp_path / "best.ckpt").samefile(tmp_path / "last.ckpt")
