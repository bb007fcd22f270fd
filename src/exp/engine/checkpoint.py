"""Checkpoint files, written whole or not at all, checked when they are read, and never executed."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn

from exp.errors import RunError
from exp.files import replacing, sync_directory
from exp.nested import mapped

SUFFIX = ".partial"
# What a checkpoint holds, by name: tensors and plain values, nested as they are.
State = dict[str, Any]


class AtomicCheckpointIO(CheckpointIO):
    """Writes beside the target, syncs, renames: a reader finds the old file or the new one, after a kill, too.

    Lightning's own writes to $TMPDIR and moves the file, without a sync: on another filesystem that is a copy, which a
    kill or a full disk leaves half done where the good file was.
    """

    def save_checkpoint(
        self, checkpoint: State, path: str | os.PathLike[str], storage_options: object | None = None
    ) -> None:
        """Write a checkpoint in the place of the older one.

        Raises: OSError with the system's own reason, the older file untouched; RunError for what cannot be read back.
        """
        if storage_options is not None:
            raise RunError("checkpoints are written to local files; storage_options has no meaning here")
        require_plain(checkpoint)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _written(target) as file:
            torch.save(checkpoint, cast(BinaryIO, file))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,
    ) -> State:
        """Read a checkpoint, on CPU: tensors and plain values only, whatever `weights_only` says.

        Raises: RunError where the file is not there, is damaged, or holds anything else.
        """
        return read_checkpoint(path, map_location=map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


def read_checkpoint(path: str | os.PathLike[str], *, map_location: str | torch.device | None = None) -> State:
    """Read a run's checkpoint; see AtomicCheckpointIO.load_checkpoint."""
    checkpoint = read_plain(path, map_location=map_location)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise RunError(f"{path} is not a checkpoint of a run: it has no state_dict")
    return checkpoint


def read_plain(path: str | os.PathLike[str], *, map_location: str | torch.device | None = None) -> Any:
    """Read what AtomicCheckpointIO, or torch.save, wrote: tensors and plain values.

    Raises: RunError where the file is not there, is damaged, or holds anything else.
    """
    path = Path(path)
    _require_sound(path)
    try:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunError(
            f"{path} cannot be read as a checkpoint: {reason}. Only tensors and plain values are read, because "
            "anything else in it would be code"
        ) from error


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all; without writing its content again where the disk allows it."""
    partial = _partial(target)
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:  # a filesystem without hard links, or another one
        with replacing(target, partial.name) as file:
            file.write(source.read_bytes())
        return
    # A rename between two names of one file does nothing and leaves both.
    partial.replace(target)
    partial.unlink(missing_ok=True)
    sync_directory(target.parent)


def sweep_partial_files(directory: Path) -> None:
    """Remove what a killed run left half written."""
    for path in directory.glob(f".*{SUFFIX}"):
        path.unlink(missing_ok=True)


def require_plain(value: object, *, key: str = "") -> None:
    """Check that a checkpoint will be readable, which torch would say only when it is read.

    Raises: RunError naming the entry that is neither a tensor nor a plain value.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | Tensor | torch.dtype):
        return
    if isinstance(value, torch.device):
        return
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        for name, item in value.items():
            require_plain(item, key=f"{key}.{name}" if key else str(name))
        return
    if isinstance(value, Sequence | Set) and type(value).__module__ in ("builtins", "torch"):
        for place, item in enumerate(value):
            require_plain(item, key=f"{key}.{place}")
        return
    raise RunError(
        f"the checkpoint's {key} is a {type(value).__module__}.{type(value).__qualname__}; expected tensors, numbers, "
        "texts and lists or dicts of them, because nothing else is read back. Keep it out of state_dict()"
    )


def lay_out_optimizer_states(checkpoint: State, network: nn.Module) -> None:
    """Lay the state of a checkpoint's optimizers out as the network is that it will be loaded for.

    What lies in memory in two orders at once is no fault to torch, and wrong: a fused optimizer walks through a weight
    and its averages in the order of their memory (seen in torch 2.13, AdamW and Adam on CPU).
    """
    if "optimizer_states" in checkpoint:
        is_last = any(_is_channels_last(parameter) for parameter in network.parameters())
        layout = torch.channels_last if is_last else torch.contiguous_format
        checkpoint["optimizer_states"] = mapped(
            checkpoint["optimizer_states"],
            lambda value: value.contiguous(memory_format=layout) if value.dim() == 4 else value,
        )


@contextmanager
def _written(target: Path) -> Iterator[_Remembering]:
    """Give a file for torch.save that takes its target's place, and tell the system's own error of a write."""
    with replacing(target, _partial(target).name) as raw:
        file = _Remembering(raw)
        try:
            yield file
        except Exception as error:
            if file.error is not None and error is not file.error:
                raise file.error from error
            raise


class _Remembering:
    """A file that keeps the OSError of a write: torch's writer turns it into a RuntimeError about positions."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self.raw.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.raw.flush()


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}{SUFFIX}")


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
