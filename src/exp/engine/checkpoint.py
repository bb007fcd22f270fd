"""Checkpoint files, written whole or not at all, checked when they are read, and never executed."""

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

# The folder of a run directory in which they are.
CHECKPOINTS = "checkpoints"
# The entry with the version of what exp writes. Formats 1 and 2 also had the shapes and the checksums of all entries.
MANIFEST, FORMAT = "exp_manifest", 3
NUMBERS = frozenset({bool, int, float, type(None)})
# Where nobody says whether a thread writes: the largest state that is copied for it, of which two may wait.
LARGEST_COPY = 2**30
# Where a checkpoint keeps the weights as they are trained; its state_dict holds the averaged ones.
CURRENT = "current_model_state"
# What a checkpoint holds, by name: tensors and plain values, nested as they are.
State = dict[str, Any]


class AtomicCheckpointIO(CheckpointIO):
    """Writes beside the target, syncs, renames: a reader finds the old file or the new one, after a kill, too.

    Lightning's own writes to $TMPDIR and moves the file, without a sync: on another filesystem that is a copy, which a
    kill or a full disk leaves half done where the good file was.

    is_synced: whether a file is on the disk when it is saved; see exp.files.open_atomic.
    """

    # A state of at most so many bytes is packed into the bytes of its file at once, which takes 1 ms a MB.
    packed_bytes = 16 * 2**20

    def __init__(self, *, is_synced: bool = True) -> None:
        super().__init__()
        self._is_synced = is_synced

    def save_checkpoint(
        self, checkpoint: State, path: str | os.PathLike[str], storage_options: object | None = None
    ) -> None:
        """Write a checkpoint in the place of the older one.

        Raises: OSError with the system's own reason, the older file untouched; RunError for what cannot be read back.
        """
        if storage_options is not None:
            raise RunError("checkpoints are written to local files; storage_options has no meaning here")
        require_plain(checkpoint)
        self._save(checkpoint, Path(path))

    def _save(self, checkpoint: State, path: Path) -> None:
        self.write(packed(checkpoint) if bytes_of(checkpoint) <= self.packed_bytes else checkpoint, path)

    def write(self, checkpoint: State | bytes, path: Path) -> None:
        """Write a checkpoint, or the bytes that `packed` made of one, in the place of the older file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(checkpoint, bytes):
            write_atomic(path, checkpoint, is_synced=self._is_synced)
            return
        with open_atomic(path, is_synced=self._is_synced) as file:
            try:
                torch.save(with_manifest(checkpoint), file)
            except RuntimeError as error:
                # torch's writer replaces the error of the file by one about positions.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,
    ) -> State:
        """Read a checkpoint, on CPU: tensors and plain values only, whatever `weights_only` says.

        What waits to be written is written first.

        Raises: RunError where the file is not there, is damaged, or holds anything else.
        """
        self.settle()
        return read_checkpoint(path, map_location=map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)

    def copy_checkpoint(self, source: Path, target: Path) -> None:
        """Copy a file that was saved, whole or not at all.

        If the file was removed meanwhile, there is no copy.
        """
        with suppress(FileNotFoundError):
            copy_checkpoint(source, target)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Save what may be written later, where that is possible: whoever enters this settles before it is read."""
        yield

    def settle(self) -> None:
        """Return when everything that was asked for is done.

        Raises: what went wrong with it.
        """


class ThreadedCheckpointIO(AtomicCheckpointIO):
    """Writes in a thread, while the steps go on: one thing after the other, in the order in which it was asked for.

    What is saved is brought to the host first: a small state as the bytes of its file, for a thread that pickled would
    take the interpreter from the steps; a large one as a copy, whose writes need the interpreter little.
    At most one checkpoint waits behind the one that is being written: the next waits for its place. What went wrong is
    raised by the next call, and nothing is written behind it. What is not saved `in_background` is on the disk when it
    is saved: a callback of the user's may read it at once.

    largest: bytes of a state that is copied; a larger one is written before the steps go on. None: any is copied.
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
        self._submit(self.write, packed(checkpoint) if size <= self.packed_bytes else on_host(checkpoint), path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._submit(super().remove_checkpoint, path)

    def copy_checkpoint(self, source: Path, target: Path) -> None:
        self._submit(super().copy_checkpoint, source, target)

    def settle(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            if self._has_failed:
                return  # else a copy of what was not written would take a good file's place
            try:
                work(*arguments)
            except BaseException:
                self._has_failed = True
                raise

        self._pending.append(self._thread.submit(run))


def bytes_of(checkpoint: State) -> int:
    """Return the bytes of the tensors in a checkpoint."""
    return sum(tensor.nbytes for tensor in tensors_in(checkpoint))


def packed(checkpoint: State) -> bytes:
    """Return the file that a checkpoint becomes."""
    buffer = io.BytesIO()
    torch.save(with_manifest(checkpoint), buffer)
    return buffer.getvalue()


def with_manifest(checkpoint: State) -> State:
    """Return a checkpoint with the version of its format."""
    return {**checkpoint, MANIFEST: {"format": FORMAT}}


def on_host(checkpoint: State) -> State:
    """Copy a checkpoint to the host, with its mappings and lists: what is trained on changes nothing of it.

    Tensors that are one, such as tied weights, are one in the copy.
    """
    known: dict[tuple[object, ...], Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            place = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
            if place not in known or not value.numel():
                known[place] = value.detach().to("cpu", copy=True)
            return known[place]
        if isinstance(value, dict):
            result = copy.copy(value)  # with the versions that a state dict carries
            result.update((key, copied(item)) for key, item in value.items())
            return result
        if type(value) in (list, tuple):
            return type(value)(copied(item) for item in value)
        return copy.copy(value) if isinstance(value, set) else value

    result: State = copied(checkpoint)
    return result


def read_checkpoint(path: str | os.PathLike[str], *, map_location: str | torch.device | None = None) -> State:
    """Read a run's checkpoint; see AtomicCheckpointIO.load_checkpoint."""
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
    """Read what AtomicCheckpointIO, or torch.save, wrote: tensors and plain values.

    Raises: RunError where the file is not there, is damaged, or holds anything else.
    """
    path = Path(path)
    _require_sound(path)
    return load_plain(path, kind="a checkpoint", map_location=map_location)


def load_plain(path: Path, *, kind: str, map_location: str | torch.device | None = None) -> Any:
    """Return what torch.load reads from a file without running code. kind: what the file is, for the error.

    Raises:
        RunError: The file is damaged, or holds anything except tensors and plain values.
    """
    try:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"{path} cannot be read as {kind}: {reason}. Only tensors and plain values are read, because anything "
            "else in it would be code"
        ) from error


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all; without writing its content again where the disk allows it."""
    partial = partial_path(target)
    with source.open("rb") as file, close_in_forks(file):
        # The link is the same file, and whoever sweeps what the dead left asks for its lock.
        lock(file)
        try:
            os.link(source, partial)
        except OSError:  # a filesystem without hard links, or another one
            with open_atomic(target) as copy:
                shutil.copyfileobj(file, copy)
            return
        try:
            partial.replace(target)
        finally:
            # A rename between two names of one file does nothing and leaves both; one that fails leaves this one, too.
            partial.unlink(missing_ok=True)
    sync_directory(target.parent)


def require_plain(value: object, *, key: str = "", fix: str = "Keep it out of state_dict()") -> None:
    """Check that a checkpoint will be readable, which torch would say only when it is read.

    key: of the value, dotted. fix: what to do about one that will not be.
    Raises: RunError naming the entry that is neither a tensor nor a plain value.
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
        "texts and lists or dicts of them, because nothing else is read back. "
        f"{fix}"
    )


def is_plain(value: object) -> bool:
    """Return whether a checkpoint can hold the value."""
    try:
        require_plain(value)
    except RunError:
        return False
    return True


def lay_out_optimizer_states(checkpoint: State, network: nn.Module) -> None:
    """Lay the state of a checkpoint's optimizers out as the network is that it will be loaded for.

    What lies in memory in two orders at once is no error to torch, and wrong: a fused optimizer walks through a weight
    and its averages in the order of their memory (seen in torch 2.13, AdamW and Adam on CPU).
    """
    if "optimizer_states" in checkpoint:
        is_last = any(_is_channels_last(parameter) for parameter in network.parameters())
        layout = torch.channels_last if is_last else torch.contiguous_format
        checkpoint["optimizer_states"] = map_tensors(
            checkpoint["optimizer_states"],
            lambda value: value.contiguous(memory_format=layout) if value.dim() == 4 else value,
        )


def _require_sound(path: Path) -> None:
    """torch.load takes flipped bits for values; the zip's checksums do not."""
    if not path.is_file():
        raise RunError(f"{path} is not there, or is not a file; expected a checkpoint, such as checkpoints/last.ckpt")
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise RunError(
                    f"{path} has compressed entries ({packed[0]}); torch writes none, and a small file could fill the "
                    "memory"
                )
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise RunError(f"{path} is damaged or is not a checkpoint: {error}") from error
    if damaged is not None:
        raise RunError(f"{path} is damaged: the checksum of {damaged} is wrong. Take another checkpoint")


def _is_channels_last(tensor: Tensor) -> bool:
    # A weight of one channel, or one pixel, is both.
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and not tensor.is_contiguous()
