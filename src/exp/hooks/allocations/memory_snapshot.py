"""What a run that ran out of memory leaves: a file, a table in the log, and a suggestion."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from exp.files import write_whole
from exp.hooks.allocations import cuda_snapshot
from exp.hooks.allocations.live_tensors import PARTS, Kind, Live, Owners, by_module
from exp.hooks.allocations.memory_advice import Use, advice
from exp.hooks.allocations.out_of_memory import asked_for, failing_module
from exp.hooks.allocations.saved_tensors import Kept, storages
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.strategies.process_group import global_rank
from exp.strategies.whole_state import local

log = logging.getLogger(__name__)

MIB = 2**20
ROWS = 10
IN_FILE = 40
# Beside the paths of modules, none of which has a bracket.
OBJECTIVE = "(objective)"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was there when memory ran out. The fields are the keys of the file.

    step, rank: where it was. device: of the network's input. module: whose call failed, by its path.
    requested_bytes: that there was no room for. measured_at_step: where the activations were counted last.
    parts: bytes of the four parts. modules: the same by the module that has them. tensors: the largest that are alive.
    """

    step: int | None
    rank: int
    device: str
    module: str | None
    error: str
    requested_bytes: int | None
    parts: Mapping[Kind, int]
    modules: Mapping[str, Mapping[Kind, int]]
    measured_at_step: int | None
    tensors: Sequence[Live]
    suggestion: str

    def write(self, directory: Path) -> str:
        """As JSON, beside CUDA's own snapshot on CUDA.

        Returns: the files, for a message; empty where they cannot be written, which the log says.
        """
        path = directory / f"out_of_memory.rank{self.rank}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(self), indent=1) + "\n")
            if self.device.startswith("cuda"):
                cuda_snapshot.dump(path.with_suffix(".pickle"))
                return f"{path} and {path.with_suffix('.pickle')}"
        except OSError as error:
            log.error("%s cannot be written: %s", path, error.strerror or error)
            return ""
        return str(path)

    def headline(self) -> str:
        """Where, and how much was asked for."""
        where = "" if self.step is None else f" in step {self.step}"
        if self.module is not None:
            where += f", in {self.module or 'the network itself'}"
        asked = "" if self.requested_bytes is None else f": {_mib(self.requested_bytes)} more were asked for"
        return f"out of memory on {self.device}{where}{asked}"

    def table(self) -> str:
        """The modules that hold most, and the largest tensors, as text of fixed width."""
        rows = [["MiB, by module", *PARTS]]
        for name, row in list(self.modules.items())[:ROWS]:
            rows.append([name or "(network)", *(_number(row[part]) for part in PARTS)])
        rows.append(["all", *(_number(self.parts[part]) for part in PARTS)])
        largest = [["largest live tensors", "MiB", "shape", "dtype", "what"]]
        for one in self.tensors[:ROWS]:
            shape = "x".join(map(str, one.shape)) or "-"
            name = one.name or one.module or "-"
            largest.append([name, _number(one.size), shape, one.dtype, one.kind])
        return f"{_aligned(rows)}\n\n{_aligned(largest)}"


def take(
    error: BaseException, step: Step | None, *, network: nn.Module, kept: Kept, measured_at: int | None
) -> Snapshot:
    """What there is now.

    kept: what the last forward that was measured kept, in step `measured_at`.
    """
    optimizers = () if step is None else step.optimizers
    # Addresses of another step may belong to other tensors by now.
    known = kept if step is not None and step.index == measured_at else Kept()
    owners = Owners(network, optimizers, data=None if step is None else step.data, kept=known)
    live = owners.live()
    # As they were measured, for most of them live in a graph alone.
    modules = by_module(one for one in live if one.kind != "activations")
    for name, size in kept_by(network, kept).items():
        modules.setdefault(name, dict.fromkeys(PARTS, 0))["activations"] += size
    module, asked = failing_module(error, network), asked_for(error)
    use = _use(step, network, optimizers, kept)
    if module is not None and asked is not None:
        use = replace(use, activations=use.activations + asked)
    return Snapshot(
        step=None if step is None else step.index,
        rank=global_rank(),
        device="the host" if step is None else str(step.device),
        module=module,
        error=str(error),
        requested_bytes=asked,
        parts={part: sum(row[part] for row in modules.values()) for part in PARTS},
        modules=dict(sorted(modules.items(), key=lambda item: -sum(item[1].values()))),
        measured_at_step=measured_at,
        tensors=live[:IN_FILE],
        suggestion=advice(use),
    )


def kept_by(network: nn.Module, kept: Kept) -> dict[str, int]:
    """Bytes of activations by the path of the module that keeps them; `objective` is no module of the network."""
    paths = {module: path for path, module in network.named_modules()}
    found: Counter[str] = Counter()
    for module, size in kept.by_module.items():
        found[paths.get(module, OBJECTIVE)] += size
    return found


def _use(step: Step | None, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], kept: Kept) -> Use:
    parameters = list(network.parameters())
    batch = [] if step is None else [tensor for tensor in tensors_in(step.data) if tensor.dim()]
    on_cuda = step is not None and step.device.type == "cuda"
    return Use(
        parameters=sum(storages(parameters).values()),
        gradients=sum(local(one).nbytes for one in parameters if one.requires_grad),
        optimizer=sum(storages(tensors_in([optimizer.state for optimizer in optimizers])).values()),
        activations=kept.size,
        halves=kept.half,
        samples=max(len(batch[0]), 1) if batch else 1,
        holders=max(len(kept.by_module), 1),
        devices=torch.cuda.device_count() if on_cuda else 1,
        is_sharded=any(local(one) is not one for one in parameters),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _number(size: int) -> str:
    return f"{size / MIB:,.2f}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
