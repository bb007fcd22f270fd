"""Checkpoint files are complete or missing, and reading them executes no code."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import resource
import signal
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from exp.engine.checkpoint import (
    AtomicCheckpointIO,
    ThreadedCheckpointIO,
    copy_checkpoint,
    read_checkpoint,
    require_plain,
)
from exp.errors import RunError


def checkpoint(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((size,), value)}, "epoch": 3, "names": ["a", None, True]}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(), path)
    return path


def test_plain_values_are_read_back(written: Path) -> None:
    found = AtomicCheckpointIO().load_checkpoint(written, weights_only=False)
    assert torch.equal(found["state_dict"]["weight"], torch.ones(1000))
    assert found["names"] == ["a", None, True]
    assert [path.name for path in written.parent.iterdir()] == ["last.ckpt"]
    value = {"a": [1, 2.5, "x", None, True, (1, 2)], "size": torch.Size([1, 2]), "dtype": torch.float16, 3: b"x"}
    require_plain(value)
    AtomicCheckpointIO().save_checkpoint({"state_dict": value}, written)
    assert read_checkpoint(written)["state_dict"] == value


@pytest.mark.parametrize(
    "value",
    [Path("x"), nn.Linear(1, 1), functools.partial(print), {1, object()}],
    ids=["path", "module", "partial", "set"],
)
def test_other_values_are_not_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RunError, match=r"callbacks\.mine.* is a .*Leave the entry out of state_dict"):
        AtomicCheckpointIO().save_checkpoint({"callbacks": {"mine": {"value": value}}}, tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_older_file(written: Path) -> None:
    before = written.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The limit simulates a full disk: write() writes the first part, then fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError) as caught:
            AtomicCheckpointIO().save_checkpoint(checkpoint(2.0, size=1_000_000), written)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == ["last.ckpt"]


def test_a_flipped_bit_is_found(written: Path) -> None:
    sound = bytearray(written.read_bytes())
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        place, bit = (int(torch.randint(n, (), generator=generator)) for n in (len(sound), 8))
        damaged = bytearray(sound)
        damaged[place] ^= 1 << bit
        written.write_bytes(bytes(damaged))
        try:
            found = read_checkpoint(written)
        except RunError:
            continue
        # Checksums do not cover names, dates and padding, but the values are intact.
        assert torch.equal(found["state_dict"]["weight"], torch.ones(1000))
    place = sound.index(torch.ones(4).numpy().tobytes())
    written.write_bytes(sound[:place] + b"\x01" + sound[place + 1 :])
    with pytest.raises(RunError, match=r"damaged: the checksum of .*data/0"):
        read_checkpoint(written)


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_files_that_are_no_checkpoints_are_refused(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"

    def refuse(words: str, file: Path | str = path) -> None:
        with pytest.raises(RunError, match=words):
            AtomicCheckpointIO().load_checkpoint(file, weights_only=False)

    for missing in (path, tmp_path, "http://127.0.0.1:1/x.ckpt"):
        refuse("is not a file", missing)
    for content in (b"", b"PK\x03\x04 not a zip", pickle.dumps({"state_dict": {}})):
        path.write_bytes(content)
        refuse("is damaged, or is not a file of")
    with zipfile.ZipFile(written) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as compressed:
        for entry in archive.infolist():
            compressed.writestr(entry.filename, archive.read(entry))
    refuse("is compressed")
    torch.save({"weight": torch.ones(1)}, path)
    refuse("no entry state_dict")
    torch.save({"state_dict": {}, "callbacks": {"x": Attack(tmp_path / "was_here")}}, path)
    refuse("would execute code")
    assert not (tmp_path / "was_here").exists()


def test_a_copy_does_not_change_with_its_source(written: Path) -> None:
    best = written.with_name("best.ckpt")
    best.write_text("older")
    copy_checkpoint(written, best)
    copy_checkpoint(written, best)
    AtomicCheckpointIO().save_checkpoint(checkpoint(2.0), written)
    assert float(read_checkpoint(best)["state_dict"]["weight"][0]) == 1.0
    assert float(read_checkpoint(written)["state_dict"]["weight"][0]) == 2.0
    assert sorted(path.name for path in written.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


class Monitor(Callback):
    """Callback that sets the monitored value of each epoch."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.callback_metrics["loss/val"] = torch.tensor(self.values[trainer.current_epoch])


def test_a_file_that_is_removed_before_its_copy_leaves_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    io = ThreadedCheckpointIO()
    io.copy_checkpoint(path, path.with_name("best.ckpt"))
    io.save_checkpoint({"state_dict": {"weight": torch.arange(6.0)}}, path)
    io.settle()
    assert [one.name for one in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [("min", (float("nan"), 3.0, 2.0, 2.5), (2.0, 21)), ("max", (1.0, 3.0, float("inf"), 2.5), (3.0, 14))],
)
def test_the_best_value_is_finite(tmp_path: Path, small_run: ModuleType, mode: str, values: Any, best: Any) -> None:
    small = small_run.Small(tmp_path, callbacks=(Monitor(*values),))
    small.checkpointing.mode, small.checkpointing.config = mode, "seed: 0\n"
    small.fit()
    path = tmp_path / "checkpoints" / "best.ckpt"
    value, step = best
    expected = {"metric": "loss/val", "value": value, "step": step, "checkpoint": str(path)}
    assert {key: small.checkpointing.best[key] for key in expected} == expected
    assert small.checkpointing.best["metrics"]["loss/val"] == value
    assert read_checkpoint(path)["global_step"] == step
    assert read_checkpoint(small.last)["global_step"] == 28
    assert read_checkpoint(small.last)["exp_config"] == "seed: 0\n"


def test_the_best_within_an_epoch_has_validated_weights(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, max_epochs=1, val_check_interval=3, limit_train_batches=3)
    small.fit()
    fresh = small_run.Small(tmp_path / "fresh")
    fresh.trainer.validate(
        fresh.module, datamodule=fresh.data, ckpt_path=str(small.checkpointing.best_path), verbose=False
    )
    assert fresh.recording.metrics["loss/val"] == small.checkpointing.best["value"]


def test_an_unknown_monitor_is_an_error(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path)
    small.checkpointing.monitor = "acuracy/val"
    with pytest.raises(RunError, match=r"monitor is acuracy/val, which nothing logs.*accuracy/val"):
        small.fit()


def test_the_training_loss_can_be_monitored(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, limit_val_batches=0)
    small.checkpointing.monitor = "loss/train"
    small.fit()
    assert small.checkpointing.best["value"] == small.recording.metrics["loss/train"]
    assert small.checkpointing.best_path.is_file()


def test_a_run_may_write_no_checkpoint(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path)
    small.checkpointing.is_saving_last = small.checkpointing.is_saving_best = False
    small.fit()
    assert not (tmp_path / "checkpoints").exists()
