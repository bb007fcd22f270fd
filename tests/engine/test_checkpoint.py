"""Checkpoint files: whole or not there, and nothing in them is executed."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import pickle
import resource
import runpy
import shutil
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
    packed,
    read_checkpoint,
    require_plain,
)
from exp.errors import RunError
from exp.files import sweep_partial_files

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def checkpoint(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((size,), value)}, "epoch": 3, "names": ["a", None, True]}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(), path)
    return path


def test_what_is_written_is_read(written: Path) -> None:
    found = AtomicCheckpointIO().load_checkpoint(written, weights_only=False)
    assert torch.equal(found["state_dict"]["weight"], torch.ones(1000))
    assert found["names"] == ["a", None, True]
    assert [path.name for path in written.parent.iterdir()] == ["last.ckpt"]


def test_a_full_disk_gives_the_systems_own_error_and_keeps_the_older_file(written: Path) -> None:
    before = written.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The limit stands for the disk's end: write() gives the first part, then an error.
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


def test_a_kill_while_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "from exp.engine.checkpoint import AtomicCheckpointIO\n"
        "for value in range(10_000):\n"
        "    state = {'state_dict': {'weight': torch.full((200_000,), float(value))}}\n"
        "    AtomicCheckpointIO().save_checkpoint(state, PATH)\n"
    )
    context = multiprocessing.get_context("forkserver")
    for attempt in range(6):
        process = context.Process(target=runpy.run_path, args=(str(program), {"PATH": str(path)}))
        process.start()
        seen = path.stat().st_mtime_ns if path.is_file() else 0
        while not path.is_file() or path.stat().st_mtime_ns == seen:
            assert process.is_alive()
        process.join(0.003 * attempt)
        process.kill()
        process.join()
        weight = read_checkpoint(path)["state_dict"]["weight"]
        assert bool((weight == weight[0]).all())
    sweep_partial_files(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "program.py"]


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
        # What no checksum covers are names, dates and padding; the values are as they were.
        assert torch.equal(found["state_dict"]["weight"], torch.ones(1000))


def test_a_damaged_tensor_is_named(written: Path) -> None:
    content = written.read_bytes()
    place = content.index(torch.ones(4).numpy().tobytes())
    written.write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    with pytest.raises(RunError, match=r"damaged: the checksum of .*data/0"):
        read_checkpoint(written)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", pickle.dumps({"state_dict": {}})])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(RunError, match="damaged or is not a checkpoint"):
        read_checkpoint(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.ckpt", tmp_path, "http://127.0.0.1:1/x.ckpt"):
        with pytest.raises(RunError, match="is not there, or is not a file"):
            read_checkpoint(path)


def test_compressed_entries_are_refused(written: Path) -> None:
    with zipfile.ZipFile(written) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    with pytest.raises(RunError, match="compressed entries"):
        read_checkpoint(written)


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {}, "callbacks": {"x": Attack(tmp_path / "was_here")}}, path)
    with pytest.raises(RunError, match="would be code"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    assert not (tmp_path / "was_here").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "weights.pt")
    with pytest.raises(RunError, match="no state_dict"):
        read_checkpoint(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    "value",
    [Path("x"), nn.Linear(1, 1), functools.partial(print), {1, object()}],
    ids=["path", "module", "partial", "set"],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RunError, match=r"callbacks\.mine.* is a .*Keep it out of state_dict"):
        AtomicCheckpointIO().save_checkpoint({"callbacks": {"mine": {"value": value}}}, tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())


def test_plain_values_are_read_back(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, "x", None, True, (1, 2)], "size": torch.Size([1, 2]), "dtype": torch.float16, 3: b"x"}
    require_plain(value)
    AtomicCheckpointIO().save_checkpoint({"state_dict": value}, tmp_path / "x.ckpt")
    assert read_checkpoint(tmp_path / "x.ckpt")["state_dict"] == value


def test_a_copy_replaces_its_target_and_does_not_change_with_its_source(written: Path) -> None:
    best = written.with_name("best.ckpt")
    best.write_text("older")
    copy_checkpoint(written, best)
    copy_checkpoint(written, best)
    AtomicCheckpointIO().save_checkpoint(checkpoint(2.0), written)
    assert float(read_checkpoint(best)["state_dict"]["weight"][0]) == 1.0
    assert float(read_checkpoint(written)["state_dict"]["weight"][0]) == 2.0
    assert sorted(path.name for path in written.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


# --- which ones a run writes ---


class Monitor(Callback):
    """Gives the monitored value of each epoch."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.callback_metrics["loss/val"] = torch.tensor(self.values[trainer.current_epoch])


@pytest.mark.parametrize("is_large", [False, True])
def test_a_directory_that_goes_while_a_file_in_it_is_written_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    rename, path = Path.replace, tmp_path / "checkpoints" / "last.ckpt"
    moved = []

    def replace(partial: Path, target: Path) -> Path:
        if not moved:
            moved.append(rename(path.parent, tmp_path / "moved"))
        return rename(partial, target)

    monkeypatch.setattr(Path, "replace", replace)
    state = {"state_dict": {"weight": torch.arange(6.0)}}
    io = ThreadedCheckpointIO()
    io.write(state if is_large else packed(state), path)
    assert torch.equal(read_checkpoint(path)["state_dict"]["weight"], torch.arange(6.0))
    assert not list(path.parent.glob(".*"))
    # What goes before it is copied leaves no copy, and is no reason to stop.
    shutil.rmtree(path.parent)
    io.copy_checkpoint(path, path.with_name("best.ckpt"))
    io.save_checkpoint(state, path)
    io.settle()
    assert [one.name for one in path.parent.iterdir()] == ["last.ckpt"]


def test_the_best_is_the_smallest_and_never_a_nan(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, callbacks=(Monitor(float("nan"), 3.0, 2.0, 2.5),))
    small.fit()
    assert small.checkpointing.best == {
        "metric": "loss/val",
        "value": 2.0,
        "step": 21,
        "checkpoint": str(tmp_path / "checkpoints" / "best.ckpt"),
    }
    assert read_checkpoint(small.checkpointing.best_path)["global_step"] == 21
    assert read_checkpoint(small.last)["global_step"] == 28


def test_the_best_can_be_the_largest(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, callbacks=(Monitor(1.0, 3.0, float("inf"), 2.5),))
    small.checkpointing.mode = "max"
    small.fit()
    assert (small.checkpointing.best["value"], small.checkpointing.best["step"]) == (3.0, 14)


def test_the_best_of_a_validation_within_an_epoch_has_the_validated_weights(
    tmp_path: Path, small_run: ModuleType
) -> None:
    small = small_run.Small(tmp_path, max_epochs=1, val_check_interval=3, limit_train_batches=3)
    small.fit()
    fresh = small_run.Small(tmp_path / "fresh")
    fresh.trainer.validate(
        fresh.module, datamodule=fresh.data, ckpt_path=str(small.checkpointing.best_path), verbose=False
    )
    assert fresh.recording.metrics["loss/val"] == small.checkpointing.best["value"]


def test_a_monitor_that_nothing_gives_is_named(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path)
    small.checkpointing.monitor = "acuracy/val"
    with pytest.raises(RunError, match=r"monitor is acuracy/val, which nothing gives.*accuracy/val"):
        small.fit()


def test_the_training_loss_can_be_monitored(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, limit_val_batches=0)
    small.checkpointing.monitor = "loss/train"
    small.fit()
    assert small.checkpointing.best["value"] == small.recording.metrics["loss/train"]
    assert small.checkpointing.best_path.is_file()


def test_no_file_where_none_is_asked_for(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path)
    small.checkpointing.is_saving_last = small.checkpointing.is_saving_best = False
    small.fit()
    assert not (tmp_path / "checkpoints").exists()


def test_the_config_is_kept_as_text(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path, max_epochs=1)
    small.checkpointing.config = "seed: 0\n"
    small.fit()
    assert read_checkpoint(small.last)["exp_config"] == "seed: 0\n"


def test_left_over_files_are_swept_when_a_run_starts(tmp_path: Path, small_run: ModuleType) -> None:
    left = tmp_path / "checkpoints" / ".last.ckpt.partial"
    left.parent.mkdir()
    left.write_text("half")
    small_run.Small(tmp_path, max_epochs=1).fit()
    assert not left.exists()
