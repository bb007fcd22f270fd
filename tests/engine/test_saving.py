"""When checkpoints are saved, which are kept, and by whom they are written: none of it changes the run."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from exp.engine import checkpoint
from exp.engine.checkpoint import AtomicCheckpointIO, ThreadedCheckpointIO, on_host, read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")
ALWAYS = 1e-9


def stop() -> None:
    raise KeyError


def state(path: Path) -> dict[str, Any]:
    """What two runs must have alike: without the time that they took."""
    found = read_checkpoint(path)
    return {key: found[key] for key in ("state_dict", "optimizer_states", "exp_position", "exp_best", "exp_kept")}


def equal(one: Path, other: Path) -> bool:
    first, second = state(one), state(other)
    torch.testing.assert_close(first.pop("state_dict"), second.pop("state_dict"), rtol=0, atol=0)
    (optimizer,), (expected,) = first.pop("optimizer_states"), second.pop("optimizer_states")
    torch.testing.assert_close(optimizer["state"], expected["state"], rtol=0, atol=0)
    return first == second


# --- by the clock ---


def test_the_clock_saves_within_an_epoch_and_the_run_goes_on_exactly(tmp_path: Path, small_run: ModuleType) -> None:
    def run(name: str, **settings: Any) -> Any:
        saving = {"every_n_minutes": ALWAYS}
        return small_run.Small(tmp_path / name, every_n_steps=None, saving=saving, max_epochs=2, **settings)

    whole = run("whole")
    whole.fit()
    broken = run("broken", callbacks=(small_run.At("on_train_batch_end", 5, stop),))
    with pytest.raises(KeyError):
        broken.fit()
    assert read_checkpoint(broken.last)["global_step"] == 4
    again = run("again")
    again.fit(resume=broken.last)
    torch.testing.assert_close(again.weights(), whole.weights(), rtol=0, atol=0)


def test_it_saves_when_the_time_has_come_and_no_oftener(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_run.Small(tmp_path, every_n_steps=None, saving={"every_n_minutes": 1.0}, max_epochs=1)
    now, saved = [0.0], []
    monkeypatch.setattr("exp.engine.checkpointing.time.monotonic", lambda: now[0])
    own = small.trainer.save_checkpoint

    def save(path: Path, **settings: Any) -> None:
        saved.append(small.trainer.global_step)
        own(path, **settings)

    small.trainer.save_checkpoint = save
    pass_time = small_run.Callback()
    pass_time.on_train_batch_end = lambda *_: now.__setitem__(0, now[0] + 25.0)
    small.trainer.callbacks.insert(1, pass_time)
    small.fit()
    assert saved == [3, 6, 7]  # 75 s, 150 s, the end


def test_ranks_save_by_the_clock_of_the_first(tmp_path: Path, elsewhere: Any) -> None:
    settings = {"plain_network": True, "every_n_steps": None, "max_epochs": 1, "slow_steps": 0.25}
    settings |= {"saving": {"every_n_minutes": 0.01}, "kill": ["on_train_batch_end", 7]}
    for rank in elsewhere.ranks(tmp_path, 2, **settings):
        elsewhere.end(rank)
    assert 1 <= read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] < 7


# --- the best ones ---


@pytest.mark.parametrize("threaded", [False, True])
def test_the_best_ones_are_kept_also_over_a_resume(tmp_path: Path, small_run: ModuleType, threaded: bool) -> None:
    def run(name: str, **settings: Any) -> Any:
        more = {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 3, "every_n_steps": 3}
        return small_run.Small(tmp_path / name, saving={"keep": 3}, threaded=threaded, **more, **settings)

    whole = run("whole")
    whole.fit()
    values = sorted((value, step) for (tag, step), value in whole.values.seen.items() if tag == "loss/val")
    best = [step for _, step in values[:3]]
    files = {f"best-{step}.ckpt" for step in best}
    folder = whole.last.parent
    assert {path.name for path in folder.iterdir()} == files | {"best.ckpt", "last.ckpt"}
    assert [entry["step"] for entry in whole.checkpointing.kept] == best
    assert all(read_checkpoint(folder / f"best-{step}.ckpt")["global_step"] == step for step in best)
    assert equal(folder / "best.ckpt", folder / f"best-{best[0]}.ckpt")
    for batches in (6, 13):
        broken = run(f"broken{batches}", callbacks=(small_run.At("on_train_batch_end", batches, stop),))
        with pytest.raises(KeyError):
            broken.fit()
        again = run(f"again{batches}")
        again.fit(resume=broken.last)
        assert {path.name for path in again.last.parent.iterdir()} == files | {"best.ckpt", "last.ckpt"}
        for name in files | {"best.ckpt", "last.ckpt"}:
            assert equal(again.last.parent / name, folder / name), name


def test_a_kill_between_the_last_and_the_best_loses_neither(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> Any:
        return small_run.Small(tmp_path / name, saving={"keep": 2}, max_epochs=2, every_n_steps=None)

    whole = run("whole")
    whole.fit()
    broken = run("broken")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "copy_checkpoint", lambda *_: stop())
        with pytest.raises(KeyError):
            broken.fit()
    assert [path.name for path in broken.last.parent.iterdir()] == ["last.ckpt"]
    again = run("again")
    again.fit(resume=broken.last)
    for path in whole.last.parent.iterdir():
        assert equal(path, again.last.parent / path.name)


# --- by a thread ---


def slow_down(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    """Call something before each file that is written, in the thread that writes it."""
    own = AtomicCheckpointIO.write

    def write(io: AtomicCheckpointIO, content: Any, path: Path) -> None:
        before()
        own(io, content, path)

    monkeypatch.setattr(AtomicCheckpointIO, "write", write)


@pytest.fixture(params=["packed", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small state is packed, and a large one copied."""
    if request.param == "copied":
        monkeypatch.setattr(checkpoint, "PACKED_BYTES", 0)
    return str(request.param)


@pytest.mark.parametrize("more", [{}, {"callbacks": ("ema",)}, {"word": "fp16"}, {"phases": True}])
def test_a_thread_writes_what_the_run_would_have_written(
    tmp_path: Path, small_run: ModuleType, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Slowly, so that the steps go on meanwhile."""
    threads = set()

    def slowly() -> None:
        threads.add(threading.current_thread().name.partition("_")[0])
        time.sleep(0.02)

    slow_down(monkeypatch, slowly)
    runs = {}
    for threaded in (False, True):
        small = small_run.Small(tmp_path / str(threaded), threaded=threaded, every_n_steps=1, max_epochs=2, **more)
        small.fit()
        runs[threaded] = small.last.parent
    assert threads == {"MainThread", "checkpoints"}
    for name in ("last.ckpt", "best.ckpt"):
        first, second = (read_checkpoint(runs[threaded] / name) for threaded in (False, True))
        assert first["exp_manifest"]["entries"].keys() == second["exp_manifest"]["entries"].keys()
        torch.testing.assert_close(first["state_dict"], second["state_dict"], rtol=0, atol=0)
        assert first["exp_position"] == second["exp_position"]
        assert first["exp_best"] == second["exp_best"]
    assert not list(runs[True].glob(".*"))


def test_a_killed_run_with_a_thread_goes_on_exactly(tmp_path: Path, elsewhere: Any, small_run: ModuleType) -> None:
    whole = small_run.Small(tmp_path / "whole", every_n_steps=1, max_epochs=2)
    whole.fit()
    settings = {"every_n_steps": 1, "max_epochs": 2, "threaded": True, "resume": True}
    assert elsewhere.run(tmp_path / "parts", kill=["on_train_batch_end", 6], **settings) == -9
    assert elsewhere.run(tmp_path / "parts", **settings) == 0
    torch.testing.assert_close(torch.load(tmp_path / "parts" / "weights.0.pt"), whole.weights(), rtol=0, atol=0)


def test_at_most_two_are_held_and_they_are_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    own, gate, written = AtomicCheckpointIO.write, threading.Semaphore(0), []

    def write(io: AtomicCheckpointIO, content: Any, path: Path) -> None:
        gate.acquire()
        own(io, content, path)
        written.append(read_checkpoint(path)["epoch"])

    monkeypatch.setattr(AtomicCheckpointIO, "write", write)
    io = ThreadedCheckpointIO()
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
    third.join(0.2)
    assert third.is_alive()  # it waits for a place
    for _ in range(3):
        gate.release()
    third.join(20)
    io.settle()
    assert written == [0, 1, 2]
    assert read_checkpoint(tmp_path / "best.ckpt")["state_dict"]["w"].tolist() == [1.0, 1.0, 1.0]
    assert read_checkpoint(tmp_path / "last.ckpt")["epoch"] == 2


def test_what_a_thread_cannot_write_ends_the_run_and_the_older_file_stands(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    own, count = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        count[0] += os.readlink(f"/proc/self/fd/{descriptor}").endswith(".partial")
        if count[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    small = small_run.Small(tmp_path, threaded=True, every_n_steps=1, max_epochs=1)
    with pytest.raises(OSError, match="No space left on device") as caught:
        small.fit()
    assert caught.value.filename == str(small.last)
    assert read_checkpoint(small.last)["global_step"] == 2
    assert count[0] == 3


def test_what_a_callback_saves_is_there_when_it_has_saved_it(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind what waits, which is written first."""
    slow_down(monkeypatch, lambda: time.sleep(0.05))
    steps = []

    class Saving(small_run.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            steps.append([read_checkpoint(path)["global_step"] for path in (tmp_path / "own.ckpt", small.last)])

    small = small_run.Small(
        tmp_path, threaded=True, every_n_steps=1, max_epochs=1, limit_train_batches=3, callbacks=(Saving(),)
    )
    small.trainer.callbacks.reverse()  # of hooks at one point, ours before theirs
    small.last.parent.mkdir()
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 0}, small.last)
    small.fit()
    assert steps == [[1, 0], [2, 1], [3, 2]]


def test_a_state_that_is_too_large_for_a_copy_is_written_before_the_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    slow_down(monkeypatch, lambda: threads.append(threading.current_thread().name.partition("_")[0]))
    io = ThreadedCheckpointIO(largest=40)
    with io.in_background():
        for size in (10, 11):
            io.save_checkpoint({"state_dict": {"w": torch.zeros(size)}}, tmp_path / "last.ckpt")
    io.settle()
    assert threads == ["checkpoints", "MainThread"]


def test_a_worker_that_is_forked_while_a_thread_writes_keeps_no_lock_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the copy of the best would wait for the worker's end, and the worker is told to end behind it."""
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


def test_a_copy_keeps_tied_weights_tied_and_its_own_numbers() -> None:
    layer = nn.Linear(3, 3)
    tied = nn.Sequential(layer, nn.Linear(3, 3))
    tied[1].weight = layer.weight
    state = {"state_dict": tied.state_dict(), "list": [1, {"a": torch.ones(2)}], "text": "x"}
    copied = on_host(state)
    with torch.no_grad():
        layer.weight.zero_()
    state["list"][1]["a"].zero_()
    assert copied["state_dict"]["0.weight"] is copied["state_dict"]["1.weight"]
    assert copied["state_dict"]["0.weight"].abs().sum() > 0
    assert copied["list"][1]["a"].tolist() == [1.0, 1.0]
    assert type(copied["state_dict"]) is type(state["state_dict"])
    assert json.dumps(copied["text"]) == '"x"'


def test_what_was_written_into_a_directory_that_went_away_is_abandoned_and_the_next_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename of the run's directory takes the half-written file along, and its own rename then finds none."""
    own, home = os.fsync, tmp_path / "checkpoints"
    writing, is_moved = threading.Event(), threading.Event()

    def fsync(descriptor: int) -> None:
        writing.set()
        is_moved.wait(60)
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    io = ThreadedCheckpointIO()
    with io.in_background():
        io.save_checkpoint({"state_dict": {}, "epoch": 1}, home / "last.ckpt")
        assert writing.wait(60)
        home.rename(tmp_path / "moved")
        is_moved.set()
        io.abandon()
        io.save_checkpoint({"state_dict": {}, "epoch": 2}, home / "last.ckpt")
    io.settle()
    assert read_checkpoint(home / "last.ckpt")["epoch"] == 2
