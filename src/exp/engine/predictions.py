"""Functions that write the predictions of each rank, and read the predictions of all ranks in sample order.

Each rank writes predictions/<share>.npz to the run directory. The share is the index of the part of each global batch
that the rank uses. The file contains an array `<batch number>.<output name>`, `[b, ...]`, with the network's output for
b samples. Ranks that split one model have the same share, and only one of these ranks writes the file.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

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
    """Callback that writes this rank's predictions when the prediction ends.

    Args:
        directory: Run directory.
        share: Index of the part of each global batch that this rank uses.
    """

    def __init__(self, *, directory: Path, share: int) -> None:
        super().__init__()
        self.directory, self.share = directory / FOLDER, share
        self._arrays: dict[str, np.ndarray] = {}
        self._batches = 0

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int, *_: object
    ) -> None:
        if isinstance(outputs, NoOutput):
            return
        data = batch.data if isinstance(batch, Batch) else batch
        held = len(next(iter(tensors_in(data))))
        found, others = as_arrays(outputs, held=held)
        if others and not self._batches and self.share == 0:
            log.warning("predictions leave out outputs that are not tensors [B, ...]: %s", ", ".join(others))
        # If a batch has fewer samples than there are ranks, some ranks get a placeholder batch of size 0.
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


class NoOutput:
    """Result of predict_step on ranks of a pipeline that are not in the last stage and have no output."""


def as_arrays(outputs: object, *, held: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the tensor outputs of a network as arrays by name, and the names of all other outputs.

    Half precision is converted to float32. An output without a name is called `output`.

    Args:
        outputs: Output of the network.
        held: Number of samples in the batch, B.

    Raises:
        RunError: No output is a tensor `[B, ...]`.
    """
    named: Mapping[str, object] = {"output": outputs} if isinstance(outputs, Tensor) else named_parts(outputs)
    found, others = {}, []
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == held:
            value = value.detach().cpu()
            found[name] = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
        else:
            others.append(name)
    if not found:
        raise RunError(
            f"the network returned a {type(outputs).__name__}; expected a tensor [B, ...], or a mapping of tensors"
        )
    return found, others


def archive_of(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of an .npz file with the given arrays."""
    content = io.BytesIO()
    save: Callable[..., None] = np.savez  # NumPy's stub treats any keyword as its option allow_pickle
    save(content, **arrays)
    return content.getvalue()


def read_shares(directory: Path) -> dict[str, list[np.ndarray]]:
    """Return the predictions for all samples, in the order of the samples.

    Args:
        directory: Run directory.

    Returns:
        A list of arrays `[b, ...]` for each output name. Concatenate the arrays to get all samples.

    Raises:
        RunError: The directory has no predictions.
    """
    paths = sorted((directory / FOLDER).glob("*.npz"), key=lambda path: int(path.stem))
    if not paths:
        raise RunError(f"{directory} has no predictions: the network returned no output, or the data has no samples")
    shares = []
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            shares.append({name: file[name] for name in file.files})
    names = [key.removeprefix("0.") for key in shares[0] if key.startswith("0.")]
    batches = range(len(shares[0]) // len(names))
    # A global batch consists of the parts of the ranks, in the order of the ranks.
    return {
        name: [share[f"{batch}.{name}"] for batch in batches for share in shares if len(share[f"{batch}.{name}"])]
        for name in names
    }
