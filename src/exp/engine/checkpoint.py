"""Functions that write checkpoint files atomically, and read them without executing code."""

from __future__ import annotations

import copy
import io
import os
import shutil
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn

from exp.errors import RunError
from exp.files import close_in_forks, lock, open_atomic, partial_path, sync_directory, write_atomic
from exp.nested import map_tensors, tensors_in

# Folder of the checkpoints in a run directory.
CHECKPOINTS = "checkpoints"
# Checkpoint entry with the version of the format. Formats 1 and 2 also contained shapes and checksums of all entries.
MANIFEST, FORMAT = "exp_manifest", 3
NUMBERS = frozenset({bool, int, float, type(None)})
# Size in bytes of the largest state that is copied for the writing thread when checkpoint.async is not set. Two copies
# may be in memory at a time.
LARGEST_COPY = 2**30
# Checkpoint entry with the trained weights, present if the entry state_dict has averaged weights.
CURRENT = "current_model_state"
# Content of a checkpoint by name: nested tensors and plain values.
State = dict[str, Any]


class AtomicCheckpointIO(CheckpointIO):
    """Checkpoint writer that keeps either the old or the new file intact if the process is killed.

    It writes to a partial file, syncs it and renames it. Lightning's class writes to $TMPDIR and moves the file without
    a sync. If $TMPDIR is on another filesystem, the move is a copy. A kill or a full disk during this copy leaves an
    incomplete file instead of the old one.

    Args:
        is_synced: Whether a file is synced to the disk before its save returns; see exp.files. Default: True.
    """

    # Size in bytes of the largest state that is serialized in memory. Serializing takes 1 ms per MB.
    packed_bytes = 16 * 2**20

    def __init__(self, *, is_synced: bool = True) -> None:
        super().__init__()
        self._is_synced = is_synced

    def save_checkpoint(
        self, checkpoint: State, path: str | os.PathLike[str], storage_options: object | None = None
    ) -> None:
        """Write a checkpoint, and replace the existing file.

        Raises:
            OSError: The write failed. The old file is unchanged.
            RunError: An entry has a type that cannot be loaded again.
        """
        if storage_options is not None:
            raise RunError("storage_options is not supported: checkpoints are local files")
        require_plain(checkpoint)
        self._save(checkpoint, Path(path))

    def _save(self, checkpoint: State, path: Path) -> None:
        self.write(serialize(checkpoint) if bytes_of(checkpoint) <= self.packed_bytes else checkpoint, path)

    def write(self, checkpoint: State | bytes, path: Path) -> None:
        """Replace the file by a checkpoint, which may already be serialized."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(checkpoint, bytes):
            write_atomic(path, checkpoint, is_synced=self._is_synced)
            return
        with open_atomic(path, is_synced=self._is_synced) as file:
            try:
                torch.save(with_manifest(checkpoint), file)
            except RuntimeError as error:
                # torch's writer replaces the file's OSError by an error about positions.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,
    ) -> State:
        """Read a checkpoint after all pending writes have finished.

        The file may contain only tensors and plain values, whatever the value of `weights_only`.

        Raises:
            RunError: The file is missing or damaged, or contains other objects.
        """
        self.settle()
        return read_checkpoint(path, map_location=map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)

    def copy_checkpoint(self, source: Path, target: Path) -> None:
        """Copy a saved file atomically. If the file has been removed, return without an error."""
        with suppress(FileNotFoundError):
            copy_checkpoint(source, target)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Return a context in which saves may finish later. The caller must call `settle` before the files are read."""
        yield

    def settle(self) -> None:
        """Wait until all pending writes have finished. Raise the error of a failed write."""


class ThreadedCheckpointIO(AtomicCheckpointIO):
    """Checkpoint writer that writes in a thread, in the order of the calls, while training continues.

    A small state is serialized before the thread receives it. Pickling in the thread would compete with training for
    the interpreter. A large state is copied to the host. At most one checkpoint waits while another is written; a
    further save blocks. If a write fails, the next call raises its error, and no later checkpoint is written. Outside
    of `in_background`, a save returns after the file is on the disk, because a user's callback may read it.

    Args:
        largest: Size in bytes of the largest state that is copied. A larger state is written before training continues.
            None copies every state. Default: None.
    """

    MOST = 2

    def __init__(self, *, largest: int | None = None) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: deque[Future[None]] = deque()
        self._has_failed = False
        self._is_deferring = False
        self._largest = largest

    @contextmanager
    def in_background(self) -> Iterator[None]:
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def _save(self, checkpoint: State, path: Path) -> None:
        size = bytes_of(checkpoint)
        if not self._is_deferring or (self._largest is not None and size > self._largest):
            self.settle()
            super()._save(checkpoint, path)
            return
        while self._pending and (len(self._pending) >= self.MOST or self._pending[0].done()):
            self._pending.popleft().result()
        self._submit(self.write, serialize(checkpoint) if size <= self.packed_bytes else on_host(checkpoint), path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._submit(super().remove_checkpoint, path)

    def copy_checkpoint(self, source: Path, target: Path) -> None:
        self._submit(super().copy_checkpoint, source, target)

    def settle(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            if self._has_failed:
                return  # a copy of a file that was not written would replace a good file
            try:
                work(*arguments)
            except BaseException:
                self._has_failed = True
                raise

        self._pending.append(self._thread.submit(run))


def bytes_of(checkpoint: State) -> int:
    """Return the total size of the tensors in a checkpoint, in bytes."""
    return sum(tensor.nbytes for tensor in tensors_in(checkpoint))


def serialize(checkpoint: State) -> bytes:
    """Return a checkpoint as the bytes of its file."""
    buffer = io.BytesIO()
    torch.save(with_manifest(checkpoint), buffer)
    return buffer.getvalue()


def with_manifest(checkpoint: State) -> State:
    """Return the checkpoint with an additional entry: the version of the format."""
    return {**checkpoint, MANIFEST: {"format": FORMAT}}


def on_host(checkpoint: State) -> State:
    """Return a copy of a checkpoint in host memory. Later training steps do not change the copy.

    Tensors that share memory, such as tied weights, share memory in the copy, too.
    """
    known: dict[tuple[object, ...], Tensor] = {}

    def copy_value(value: Any) -> Any:
        if isinstance(value, Tensor):
            place = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
            if place not in known or not value.numel():
                known[place] = value.detach().to("cpu", copy=True)
            return known[place]
        if isinstance(value, dict):
            result = copy.copy(value)  # keeps the version numbers of a state dict
            result.update((key, copy_value(item)) for key, item in value.items())
            return result
        if type(value) in (list, tuple):
            return type(value)(copy_value(item) for item in value)
        return copy.copy(value) if isinstance(value, set) else value

    result: State = copy_value(checkpoint)
    return result


def read_checkpoint(path: str | os.PathLike[str], *, map_location: str | torch.device | None = None) -> State:
    """Return the content of a run's checkpoint. AtomicCheckpointIO.load_checkpoint documents the errors."""
    checkpoint = read_plain(path, map_location=map_location)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise RunError(f"{path} is not a checkpoint of a run: it has no state_dict")
    manifest = checkpoint.get(MANIFEST)
    if isinstance(manifest, dict) and manifest["format"] > FORMAT:
        raise RunError(
            f"{path} is of format {manifest['format']}, and this exp reads formats up to {FORMAT}: "
            "a newer exp wrote it. Update exp to resume from it"
        )
    return checkpoint


def read_plain(path: str | os.PathLike[str], *, map_location: str | torch.device | None = None) -> Any:
    """Return the tensors and plain values of a file that AtomicCheckpointIO or torch.save wrote.

    Raises:
        RunError: The file is missing or damaged, or contains other objects.
    """
    path = Path(path)
    _require_sound(path)
    return load_plain(path, kind="a checkpoint", map_location=map_location)


def load_plain(path: Path, *, kind: str, map_location: str | torch.device | None = None) -> Any:
    """Return the content of a file by torch.load, without executing code.

    Args:
        path: Path of the file.
        kind: Description of the file for the error message, such as "a checkpoint".
        map_location: Argument of torch.load. Default: CPU.

    Raises:
        RunError: The file is damaged, or contains objects other than tensors and plain values.
    """
    try:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"{path} cannot be read as {kind}: {reason}. Only tensors and plain values are read, because other objects "
            "would execute code"
        ) from error


def copy_checkpoint(source: Path, target: Path, *, is_synced: bool = True) -> None:
    """Copy a file atomically. The copy is a hard link if the filesystem supports hard links.

    Args:
        source: File to copy.
        target: Path of the copy.
        is_synced: Whether the copy is synced to the disk before this function returns. Default: True.
    """
    partial = partial_path(target)
    with source.open("rb") as file, close_in_forks(file):
        # The lock also protects the link, because a link is the same file: sweep_partial_files skips locked files.
        lock(file)
        try:
            os.link(source, partial)
        except OSError:  # the filesystem has no hard links, or the paths are on different filesystems
            with open_atomic(target, is_synced=is_synced) as copy:
                shutil.copyfileobj(file, copy)
            return
        try:
            partial.replace(target)
        finally:
            # A rename between two names of the same file leaves both names.
            partial.unlink(missing_ok=True)
    if is_synced:
        sync_directory(target.parent)


def require_plain(value: object, *, key: str = "", fix: str = "Keep it out of state_dict()") -> None:
    """Raise RunError for a value that is neither a tensor nor a plain value.

    torch saves such a value but fails when it loads the file.

    Args:
        value: Entry of a checkpoint.
        key: Dotted name of the entry.
        fix: Advice for the error message.
    """
    if type(value) in NUMBERS or isinstance(value, bool | int | float | complex | str | bytes | Tensor | torch.dtype):
        return
    if isinstance(value, torch.device):
        return
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        for name, item in value.items():
            require_plain(item, key=f"{key}.{name}" if key else str(name), fix=fix)
        return
    if isinstance(value, Sequence | Set) and type(value).__module__ in ("builtins", "torch"):
        for place, item in enumerate(value):
            require_plain(item, key=f"{key}.{place}", fix=fix)
        return
    raise RunError(
        f"the checkpoint's {key} is a {type(value).__module__}.{type(value).__qualname__}; expected tensors, numbers, "
        f"texts, and lists or dicts of them, because nothing else can be read back. {fix}"
    )


def is_plain(value: object) -> bool:
    """Return whether the value can be saved in a checkpoint."""
    try:
        require_plain(value)
    except RunError:
        return False
    return True


def lay_out_optimizer_states(checkpoint: State, network: nn.Module) -> None:
    """Convert the optimizer states of a checkpoint to the memory format of the network's weights.

    A fused optimizer reads a weight and its averages in the order of their memory. If the memory formats differ, it
    computes wrong numbers without an error (torch 2.13, AdamW and Adam on CPU).
    """
    if "optimizer_states" in checkpoint:
        is_last = any(_is_channels_last(parameter) for parameter in network.parameters())
        layout = torch.channels_last if is_last else torch.contiguous_format
        checkpoint["optimizer_states"] = map_tensors(
            checkpoint["optimizer_states"],
            lambda value: value.contiguous(memory_format=layout) if value.dim() == 4 else value,
        )


def _require_sound(path: Path) -> None:
    """Raise RunError if the file is missing, damaged or compressed.

    The checksums of the zip file are compared, because torch.load accepts flipped bits.
    """
    if not path.is_file():
        raise RunError(f"{path} is not a file; expected a checkpoint, such as checkpoints/last.ckpt")
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise RunError(
                    f"{path} has compressed entries ({packed[0]}), which torch does not write; a small file could fill "
                    "the memory"
                )
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise RunError(f"{path} is damaged or is not a checkpoint: {error}") from error
    if damaged is not None:
        raise RunError(f"{path} is damaged: the checksum of {damaged} is wrong. Use another checkpoint")


def _is_channels_last(tensor: Tensor) -> bool:
    # A weight of one channel or one pixel has both formats.
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and not tensor.is_contiguous()
