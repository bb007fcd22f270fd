"""Limits end a run at the right step, and a run that ends by a signal saves its state."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback

from exp.engine.progress import seconds_of, take_limits
from exp.errors import Interrupted
from exp.signals import SignalFlag


def wait_for(path: Path, text: str, *, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not (path.is_file() and text in path.read_text()):
        assert time.monotonic() < end, f"{text} does not come in {path}"
        time.sleep(0.02)


def test_a_signal_saves_the_state_for_an_exact_resume(
    tmp_path: Path, elsewhere: Any, logged: Callable[..., Any]
) -> None:
    assert elsewhere.run(tmp_path / "whole", every_n_steps=None) == 0
    settings = {"every_n_steps": None, "resume": True}
    process = elsewhere.start(tmp_path / "parts", slow_steps=0.3, **settings)
    wait_for(tmp_path / "parts" / "values.0.jsonl", '"loss/train", 3')
    os.kill(process.pid, signal.SIGTERM)
    assert elsewhere.end(process) == 128 + signal.SIGTERM
    result = json.loads((tmp_path / "parts" / "result.0.json").read_text())
    assert "the state is saved in" in result["error"]
    assert 3 <= result["step"] < 28
    assert elsewhere.run(tmp_path / "parts", **settings) == 0
    expected, found = logged(tmp_path / "whole"), logged(tmp_path / "parts")
    assert {key: found[key] for key in expected} == expected


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_ranks(tmp_path: Path, elsewhere: Any) -> None:
    ranks = elsewhere.ranks(tmp_path, 2, slow_steps=0.02, max_epochs=100_000, every_n_steps=None)
    wait_for(tmp_path / "values.0.jsonl", '"loss/train", 6')
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert [elsewhere.end(rank) for rank in ranks] == [143, 143]
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow
def test_a_second_signal_ends_the_process(tmp_path: Path, elsewhere: Any) -> None:
    process = elsewhere.start(tmp_path, slow_steps=4.0)
    wait_for(tmp_path / "values.0.jsonl", '"loss/train", 1')
    # Repeat the signal, because on a busy machine two signals in a row may arrive as one.
    ends = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < ends:
        os.kill(process.pid, signal.SIGTERM)
        process.join(0.05)
    assert elsewhere.end(process, seconds=1) == -signal.SIGTERM


def test_handlers_are_put_back(tmp_path: Path, small_run: ModuleType) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    seen: list[Any] = []

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    small_run.Small(tmp_path / "a", max_epochs=1, callbacks=(Look(),)).fit()
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
    assert seen[0] not in before
    failing = small_run.At("on_train_batch_end", 2)
    with pytest.raises(small_run.Killed):
        small_run.Small(tmp_path / "b", max_epochs=1, callbacks=(failing,)).fit()
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_in_another_thread_trains_without_handlers(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, max_epochs=1)
    thread = threading.Thread(target=small.fit)
    thread.start()
    thread.join()
    assert small.trainer.global_step == 7


def test_a_signal_behind_the_last_batch_is_not_lost(tmp_path: Path, small_run: ModuleType) -> None:
    kill = small_run.At("on_train_epoch_end", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    small = small_run.Small(tmp_path, max_epochs=1, callbacks=(kill,))
    with pytest.raises(Interrupted) as caught:
        small.fit()
    assert caught.value.exit_status == 143
    assert caught.value.checkpoint == str(small.last)


def test_a_signal_waits_for_accumulated_batches(tmp_path: Path, small_run: ModuleType) -> None:
    kill = small_run.At("on_train_batch_start", 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    small = small_run.Small(tmp_path, accumulate_grad_batches=3, every_n_steps=None, callbacks=(kill,))
    with pytest.raises(Interrupted, match="the state is saved in") as caught:
        small.fit()
    assert caught.value.exit_status == 130
    assert torch.load(small.last)["exp_position"] == {
        "epoch": 0,
        "batch": 3,
        "step": 1,
        "batches": 3,
        "validation_due": False,
        "epoch_complete": False,
    }


def test_a_signal_ends_the_test_stage(tmp_path: Path, small_run: ModuleType) -> None:
    kill = small_run.At("on_test_batch_start", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    small = small_run.Small(tmp_path, callbacks=(kill,))
    with pytest.raises(Interrupted):
        small.trainer.test(small.module, datamodule=small.data, verbose=False)


def test_a_second_signal_leaves_a_notebook_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    flag = SignalFlag()
    flag.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.received == signal.SIGINT
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        flag.restore()


def test_max_steps_ends_with_a_validation_and_a_checkpoint(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, max_steps=10)
    small.fit()
    assert small.trainer.global_step == 10
    assert ("loss/val", 10) in small.values.seen
    assert torch.load(small.last)["exp_position"]["batch"] == 3


def test_max_time_counts_over_a_resume(tmp_path: Path, small_run: ModuleType) -> None:
    limits = {"max_time": {"seconds": 0.2}, "max_epochs": 100_000}
    small = small_run.Small(tmp_path, **limits)
    small.fit()
    steps = small.trainer.global_step
    assert 0 < steps < 700_000
    again = small_run.Small(tmp_path, **limits)
    again.fit(resume=again.last)
    assert again.trainer.global_step == steps


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_max_time_reads_what_it_writes(days: int, hours: int, minutes: int, seconds: int) -> None:
    expected = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    assert seconds_of(f"{days:02d}:{hours:02d}:{minutes:02d}:{seconds:02d}") == expected
    assert seconds_of({"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}) == expected


def test_limits_are_read_as_users_write_them() -> None:
    written = {90: 90.0, 0.5: 0.5, "90s": 90.0, "30m": 1800.0, "1h30m": 5400.0, "2d1h": 176_400.0, "1h5s": 3605.0}
    assert {time: seconds_of(time) for time in written} == written
    # With max_epochs=null, another limit ends the run.
    arguments, limits = take_limits({"max_epochs": None, "max_steps": 5, "max_time": None})
    assert (arguments, limits.max_steps, limits.max_seconds) == ({"max_epochs": -1}, 5, None)
    assert take_limits({"max_epochs": 3, "max_steps": -1})[0] == {"max_epochs": 3}
