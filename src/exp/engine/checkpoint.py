"""Functions that write checkpoint files atomically, and read them and weight files without executing code."""

from __future__ import annotations

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
from torch import Tensor

from exp.errors import MissingExtraError, RunError
from exp.files import close_in_forks, lock, open_atomic, partial_path, sync_directory, write_atomic
from exp.models.lora import merge_state_dict
from exp.nested import tensors_in
from exp.spelling import among

# Folder of the checkpoints in a run directory.
CHECKPOINTS = "checkpoints"
# File in which exp.resume --verify stores the state that it computes again.
VERIFIED = "state.ckpt"
# Checkpoint entry with the version of the format. Formats 1 and 2 also contained shapes and checksums of all entries.
MANIFEST, FORMAT = "exp_manifest", 3
NUMBERS = frozenset({bool, int, float, type(None)})
# Largest size in bytes of a state that a thread writes if checkpoint.async is not set. Two copies of the state may be
# in memory at the same time.
LARGEST_COPY = 2**30
# Largest size in bytes of a state that is serialized in memory if no thread writes. Serializing takes 1 ms per MB.
PACKED_BYTES = 16 * 2**20
# Checkpoint entry with the trained weights. It exists only if the entry state_dict has averaged weights.
CURRENT = "current_model_state"
# Content of a checkpoint by name: nested tensors and plain values.
State = dict[str, Any]
# Entries under which programs usually save a state dict.
PLACES = ("state_dict", "model_state_dict", "model", "module", "params", "net")
# Prefixes that wrapper modules add to all names.
WRAPPERS = ("module.", "_orig_mod.")
OWN = "network."


class AtomicCheckpointIO(CheckpointIO):
    """Checkpoint writer that leaves a complete file, old or new, if the process is killed.

    The writer writes to a temporary file in the same directory, syncs this file to the disk and renames it. Lightning's
    writer writes to $TMPDIR and moves the file without a sync. If $TMPDIR is on another filesystem, the move is a copy.
    If the process is killed or the disk is full during this copy, the old file is lost.

    Args:
        is_synced: Whether a save syncs the file to the disk before it returns; see exp.files. Default: True.
    """

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
            raise RunError("storage_options is not supported, because exp writes checkpoints to local files")
        require_plain(checkpoint)
        self._save(checkpoint, Path(path))

    def _save(self, checkpoint: State, path: Path) -> None:
        # Serializing small states in memory needs fewer writes.
        self.write(serialize(checkpoint) if bytes_of(checkpoint) <= PACKED_BYTES else checkpoint, path)

    def write(self, checkpoint: State | bytes, path: Path) -> None:
        """Write a checkpoint to a path. The checkpoint is given as a state or as the bytes of a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(checkpoint, bytes):
            write_atomic(path, checkpoint, is_synced=self._is_synced)
            return
        with open_atomic(path, is_synced=self._is_synced) as file:
            try:
                torch.save(with_manifest(checkpoint), file)
            except RuntimeError as error:
                # torch's writer replaces the OSError of the write by an unrelated RuntimeError about file positions.
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

        The file may contain only tensors and plain values. The argument `weights_only` has no effect.

        Raises:
            RunError: The file is missing or damaged, or contains other objects.
        """
        self.settle()
        return read_checkpoint(path, map_location=map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)

    def copy_checkpoint(self, source: Path, target: Path) -> None:
        """Copy a saved file atomically. Do nothing if the file does not exist."""
        with suppress(FileNotFoundError):
            copy_checkpoint(source, target)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Return a context in which a save may return before it has written the file.

        Call `settle` before reading the file.
        """
        yield

    def settle(self) -> None:
        """Wait until all pending writes have finished. Raise the error of a failed write."""


class ThreadedCheckpointIO(AtomicCheckpointIO):
    """Checkpoint writer that writes files in a thread while training continues.

    The state is serialized before the thread receives it, because pickling in the thread would compete with training
    for the interpreter. Files are written in the order of the calls. At most one checkpoint waits while the previous
    one is written, and the next save blocks. If a write fails, the next call raises the error, and no later checkpoint
    is written. Outside of `in_background`, a save returns only after the file is on the disk, because a user's callback
    may read the file.

    Args:
        largest: Largest size in bytes of a state that the thread writes. Training waits while a larger state is
            written. None: no limit. Default: None.
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
        if not self._is_deferring or (self._largest is not None and bytes_of(checkpoint) > self._largest):
            self.settle()
            super()._save(checkpoint, path)
            return
        while self._pending and (len(self._pending) >= self.MOST or self._pending[0].done()):
            self._pending.popleft().result()
        self._submit(self.write, serialize(checkpoint), path)

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
    """Return a copy of the checkpoint with an entry for the version of the format."""
    return {**checkpoint, MANIFEST: {"format": FORMAT}}


def read_checkpoint(path: str | os.PathLike[str], *, map_location: str | torch.device | None = None) -> State:
    """Return the content of a checkpoint of a run. Raise the errors of AtomicCheckpointIO.load_checkpoint."""
    checkpoint = read_plain(path, map_location=map_location)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise RunError(f"{path} is not a checkpoint of a run, because it has no entry state_dict")
    manifest = checkpoint.get(MANIFEST)
    if isinstance(manifest, dict) and manifest["format"] > FORMAT:
        raise RunError(
            f"{path} was written by a newer version of exp, in format {manifest['format']}. This version reads formats "
            f"up to {FORMAT}. Update exp to read the checkpoint"
        )
    return checkpoint


def read_plain(path: str | os.PathLike[str], *, map_location: str | torch.device | None = None) -> Any:
    """Return the tensors and plain values of a file that AtomicCheckpointIO or torch.save wrote.

    Raises:
        RunError: The file is missing or damaged, or contains other objects.
    """
    path = Path(path)
    _require_sound(path)
    try:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"{path} cannot be read as a checkpoint: {reason}. Only tensors and plain values are read, because other "
            "objects would execute code"
        ) from error


def read_weights(path: Path, *, averaged: bool = True) -> dict[str, Tensor]:
    """Return the tensors of an exp checkpoint, a state dict of torch, or a safetensors file, on the CPU.

    Args:
        path: Path of the file.
        averaged: Whether to return averaged weights if the file has averaged weights. If false, the weights without
            averaging are returned. Default: True.

    Raises:
        RunError: The file is missing or damaged, or has no weights.
        MissingExtraError: safetensors is not installed.
    """
    if path.suffix == ".safetensors":
        return _without_prefixes(_read_safetensors(path))
    content = read_plain(path)
    if isinstance(content, Mapping) and not averaged:
        if CURRENT not in content:
            raise RunError(f"{path} has no averaged weights. Leave weights.averaged=false out")
        content = content[CURRENT]
    if isinstance(content, Mapping):
        for place in (content, *(content[name] for name in PLACES if name in content)):
            named = place if isinstance(place, Mapping) else {}
            weights = {str(name): value for name, value in named.items() if isinstance(value, Tensor)}
            if weights:
                return _without_prefixes(weights)
    entries = f". The file has the entries {among(map(str, content))}" if isinstance(content, Mapping) else ""
    raise RunError(f"{path} contains no state dict, which maps names to tensors{entries}")


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the names of the bare network, and with LoRA's products added to the weights.

    The prefixes of exp, DDP and torch.compile are removed from the names.
    """
    own = {name.removeprefix(OWN): tensor for name, tensor in weights.items() if name.startswith(OWN)}
    weights = own or weights
    for _ in WRAPPERS:
        for wrapper in WRAPPERS:
            if all(name.startswith(wrapper) for name in weights):
                weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
    return merge_state_dict(weights)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtraError(feature=str(path), package="safetensors", extra="safetensors") from error
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} cannot be read as safetensors: {error}") from error


def copy_checkpoint(source: Path, target: Path, *, is_synced: bool = True) -> None:
    """Copy a file atomically. The copy is a hard link if the filesystem supports hard links.

    Args:
        source: File to copy.
        target: Path of the copy.
        is_synced: Whether the copy is synced to the disk before this function returns. Default: True.
    """
    partial = partial_path(target)
    with source.open("rb") as file, close_in_forks(file):
        # A hard link is the same file, so the lock also protects the link from the removal of partial files.
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
            # If both names already belong to the same file, a rename leaves both names.
            partial.unlink(missing_ok=True)
    if is_synced:
        sync_directory(target.parent)


def require_plain(value: object, *, key: str = "", fix: str = "Leave the entry out of state_dict()") -> None:
    """Raise RunError for a value that is neither a tensor nor a plain value.

    torch could save such a value, but loading the file would fail.

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
        f"the entry {key} of the checkpoint is a {type(value).__module__}.{type(value).__qualname__}; expected a "
        f"tensor, number, text, or a list or dict of them, because other objects cannot be loaded. {fix}"
    )


def is_plain(value: object) -> bool:
    """Return whether the value can be saved in a checkpoint."""
    try:
        require_plain(value)
    except RunError:
        return False
    return True


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
                    f"the entry {packed[0]} of {path} is compressed, unlike in a file of torch.save. A small "
                    "compressed file could fill the memory"
                )
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise RunError(
            f"{path} is damaged, or is not a file of torch.save (torch 1.6 or later): {error}. Use another checkpoint, "
            "or save the file again"
        ) from error
    if damaged is not None:
        raise RunError(f"{path} is damaged: the checksum of its entry {damaged} is wrong. Use another checkpoint")
