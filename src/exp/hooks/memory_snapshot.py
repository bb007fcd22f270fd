"""Report of a run that ran out of memory: a file, a table in the log, and a suggestion."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from exp.files import write_atomic
from exp.hooks.memory_peaks import MIB
from exp.hooks.out_of_memory import asked_for
from exp.hooks.saved_tensors import Kept, address, dense_tensors, failing_module
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.strategies.process_group import global_rank

log = logging.getLogger(__name__)

ROWS = 10
# Name of the objective's row. Module paths contain no brackets.
OBJECTIVE = "(objective)"
Part = Literal["parameters", "gradients", "optimizer", "activations"]
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer", "activations")
Rows = Mapping[str, Mapping[Part, int]]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Memory use at the moment an allocation failed. The fields are the keys of the report's JSON file.

    Args:
        step: Optimizer step, counted from 1; None outside of a step.
        rank: Global rank.
        device: Device of the network's input.
        module: Path of the module whose forward failed; None if no forward failed.
        error: Message of the allocator.
        requested_bytes: Size of the failed allocation in bytes; None if the message does not state it.
        parts: Bytes by part: parameters, gradients, optimizer, activations.
        modules: Bytes by module and part, with the largest module first.
        measured_at_step: Step in which the activations were last measured; None if they were not measured.
        suggestion: Change that saves the most memory.
    """

    step: int | None
    rank: int
    device: str
    module: str | None
    error: str
    requested_bytes: int | None
    parts: Mapping[Part, int]
    modules: Rows
    measured_at_step: int | None
    suggestion: str

    def write(self, directory: Path) -> str:
        """Write the JSON file, and return its path. If it cannot be written, log the error and return an empty text."""
        path = directory / f"out_of_memory.rank{self.rank}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            log.error("%s cannot be written: %s", path, error.strerror or error)
            return ""
        return str(path)

    def headline(self) -> str:
        """Return a line with the place and the size of the failed allocation."""
        where = "" if self.step is None else f" in step {self.step}"
        if self.module is not None:
            where += f", in {self.module or 'the network itself'}"
        asked = "" if self.requested_bytes is None else f": {_mib(self.requested_bytes)} more were asked for"
        return f"out of memory on {self.device}{where}{asked}"

    def table(self) -> str:
        """Return a table of the modules that use the most memory, as fixed-width text."""
        shown = [(name or "(network)", row) for name, row in [*self.modules.items()][:ROWS]]
        rows = [["MiB, by module", *PARTS]]
        rows += [[name, *(f"{row[part] / MIB:,.2f}" for part in PARTS)] for name, row in [*shown, ("all", self.parts)]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
        )


def take(
    error: BaseException, step: Step | None, *, network: nn.Module, kept: Kept, measured_at: int | None
) -> Snapshot:
    """Return the snapshot of the current memory use.

    Args:
        error: Error of the allocator.
        step: Current step; None outside of a step.
        network: Network of the run.
        kept: Activations of the last measured forward.
        measured_at: Step of this forward; None if no forward was measured.
    """
    modules = _by_module(network, () if step is None else step.optimizers, kept)
    parts = {part: sum(row[part] for row in modules.values()) for part in PARTS}
    module, asked = failing_module(error, network), asked_for(error)
    return Snapshot(
        step=None if step is None else step.index,
        rank=global_rank(),
        device="the host" if step is None else str(step.device),
        module=module,
        error=str(error),
        requested_bytes=asked,
        parts=parts,
        modules=dict(sorted(modules.items(), key=lambda item: -sum(item[1].values()))),
        measured_at_step=measured_at,
        suggestion=advice(parts, failed=asked if module is not None and asked is not None else 0),
    )


def _by_module(network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], kept: Kept) -> Rows:
    """Return the bytes of each part by the path of the module that owns them. Each storage counts once."""
    rows: dict[str, dict[Part, int]] = {}
    seen: set[int] = set()
    for part, name, tensor in _owned_tensors(network, optimizers):
        for storage in (piece.untyped_storage() for piece in dense_tensors(tensor)):
            if address(storage) not in seen:
                seen.add(address(storage))
                rows.setdefault(name.rpartition(".")[0], dict.fromkeys(PARTS, 0))[part] += storage.nbytes()
    paths = {module: path for path, module in network.named_modules()}
    for module, size in kept.by_module.items():
        path = OBJECTIVE if module is None else paths.get(module, OBJECTIVE)
        rows.setdefault(path, dict.fromkeys(PARTS, 0))["activations"] += size
    return rows


def _owned_tensors(
    network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[Part, str, Tensor]]:
    """Yield the part, the parameter's name and the tensor for parameters, gradients and optimizer states."""
    for name, parameter in network.named_parameters():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    for owner, state in (item for optimizer in optimizers for item in optimizer.state.items()):
        for tensor in tensors_in(state):
            yield "optimizer", names.get(owner, ""), tensor


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def advice(parts: Mapping[Part, int], *, failed: int) -> str:
    """Return the change that saves the most memory.

    Args:
        parts: Bytes by part.
        failed: Size of the activation whose allocation failed, in bytes.
    """
    state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    if parts["activations"] + failed > state:
        return (
            "a smaller data.batch_size and trainer.accumulate_grad_batches as many times larger, which keeps the step "
            "the same, precision=bf16 or strategy.activation_checkpointing"
        )
    return f"strategy=fsdp, which shards {_mib(state)} of parameters, gradients and optimizer, or a smaller network"
