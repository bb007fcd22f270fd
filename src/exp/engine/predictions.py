"""Keep what a network gives for each sample, over ranks, and put the shares of all ranks together again.

predictions/<share>.npz of a run directory, one file for each share of the batches, has `<number>.<name>` `[b, ...]`:
what the network gives by name for this share of a global batch. Ranks that hold parts of one model have one share, and
one of them writes.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from exp.errors import RunError
from exp.files import write_atomic
from exp.nested import named_parts, tensors_in
from exp.shared_types import Batch

FOLDER = "predictions"

log = logging.getLogger(__name__)


class Predictions(Callback):
    """Writes this rank's share of what the network gives, at the end.

    directory: of the run. share: which of how many shares of each global batch is this rank's.
    """

    def __init__(self, *, directory: Path, share: int) -> None:
        super().__init__()
        self.directory, self.share = directory / FOLDER, share
        self._arrays: dict[str, np.ndarray] = {}
        self._batches = 0

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: object
    ) -> None:
        if isinstance(outputs, Nothing):
            return
        data = batch.data if isinstance(batch, Batch) else batch
        held = len(next(iter(tensors_in(data))))
        found, others = as_arrays(outputs, held=held)
        if others and not self._batches and self.share == 0:
            log.warning("left out, for it is no tensor [B, ...]: %s", ", ".join(others))
        # Where a batch is smaller than the world, a rank holds a stand-in.
        size = batch.size if isinstance(batch, Batch) else held
        self._arrays |= {f"{self._batches}.{name}": array[:size] for name, array in found.items()}
        self._batches += 1

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._batches:
            return
        try:
            self.directory.mkdir(exist_ok=True)
            write_atomic(self.directory / f"{self.share}.npz", archive_of(self._arrays))
        except OSError as error:
            raise RunError(f"{error.filename or self.directory}: {error.strerror or error}") from error


class Nothing:
    """What a rank gives in predict_step that has no output, as all but the last stage of a pipeline."""


def as_arrays(outputs: Any, *, held: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """What a network gave, by name: each `[B, ...]`, half precision as float32; `output` where it has no names.

    held: samples of the batch, B.
    Returns: the arrays; and the names of what is no tensor `[B, ...]`.
    Raises: RunError where nothing of it is one.
    """
    named: Mapping[str, Any] = {"output": outputs} if isinstance(outputs, Tensor) else named_parts(outputs)
    found, others = {}, []
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == held:
            value = value.detach().cpu()
            found[name] = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
        else:
            others.append(name)
    if not found:
        raise RunError(f"the network gives a {type(outputs).__name__}; expected a tensor [B, ...], or several by name")
    return found, others


def archive_of(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of an .npz file of arrays by name."""
    content = io.BytesIO()
    save: Callable[..., None] = np.savez  # whose stub takes any name for that of its one option
    save(content, **arrays)
    return content.getvalue()


def read_shares(directory: Path) -> dict[str, list[np.ndarray]]:
    """What the network gave for all samples, in their order, by name: a list of arrays `[b, ...]`.

    directory: of the run. Raises: RunError where there are no shares.
    """
    paths = sorted((directory / FOLDER).glob("*.npz"), key=lambda path: int(path.stem))
    if not paths:
        raise RunError(f"{directory} holds no predictions: the network gave nothing, or the data has no samples")
    shares = []
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            shares.append({name: file[name] for name in file.files})
    names = [key.removeprefix("0.") for key in shares[0] if key.startswith("0.")]
    batches = range(len(shares[0]) // len(names))
    # The samples of one batch after the other, and of each batch those of one share after the other.
    return {
        name: [share[f"{batch}.{name}"] for batch in batches for share in shares if len(share[f"{batch}.{name}"])]
        for name in names
    }
