"""What a run that ran out of memory leaves: a file, a table in the log, and a suggestion.

The adapter of torch's private snapshot of the CUDA allocator, which https://pytorch.org/memory_viz shows. Relied on,
and tested: `_record_memory_history` and `_dump_snapshot` of `torch.cuda.memory`, as PyTorch's own page "Understanding
CUDA Memory Usage" writes them (torch 2.13).
"""

from __future__ import annotations

import gc
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from exp.files import write_whole
from exp.hooks.out_of_memory import asked_for
from exp.hooks.saved_tensors import Kept, failing_module, held, storages
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.shared_types import dtype_name
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
                dump_history(path.with_suffix(".pickle"))
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


Kind = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "batch", "other"]
# The columns of a table by module.
PARTS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True)
class Live:
    """A storage that is alive, by the tensor that uses it.

    module: the path of its owner in the network, empty for the network itself; None where it has none.
    name: of a parameter or buffer, in full; of an entry of the optimizer's state behind the parameter's.
    size: of the storage, in bytes.
    """

    kind: Kind
    size: int
    module: str | None = None
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Owners:
    """What is known of a run's tensors, by the addresses of their storages.

    kept: the activations of the last forward that was measured.
    """

    def __init__(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, data: object, kept: Kept
    ) -> None:
        self._known: dict[int, Live] = {}
        parameters = dict(network.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        paths = {id(module): path for path, module in network.named_modules()}
        for name, parameter in parameters.items():
            self._add(parameter, "parameters", _owner(name), name)
            if parameter.grad is not None:
                self._add(parameter.grad, "gradients", _owner(name), name)
        for name, buffer in network.named_buffers():
            self._add(buffer, "buffers", _owner(name), name)
        for parameter, key, tensor in _states(optimizers):
            name = names.get(id(parameter), "")
            self._add(tensor, "optimizer", _owner(name), f"{name} {key}".strip())
        for tensor in tensors_in(data):
            self._add(tensor, "batch", None, "")
        self._kept = {at: paths.get(id(module)) for at, module in kept.at.items()}

    def _add(self, tensor: Tensor, kind: Kind, module: str | None, name: str) -> None:
        for part in held(tensor):
            # Not as a view that happens to be alive, too, such as a weight transposed.
            self._known.setdefault(part.untyped_storage().data_ptr(), _live(part, kind, module, name))

    def live(self) -> list[Live]:
        """What the garbage collector knows of, each storage once, the largest first.

        It knows tensors that Python has seen: those that only a graph holds are missing, but in a measured step.
        """
        found: dict[int, Live] = {}
        for tensor in _tensors():
            at = tensor.untyped_storage().data_ptr()
            if at in found or not tensor.untyped_storage().nbytes():
                continue
            if at in self._known:
                found[at] = self._known[at]
            elif at in self._kept:
                found[at] = _live(tensor, "activations", self._kept[at])
            else:
                found[at] = _live(tensor, "other")
        return sorted(found.values(), key=lambda one: -one.size)


def by_module(tensors: Iterable[Live]) -> dict[str, dict[Kind, int]]:
    """Bytes of the four parts, by the path of the module that has them; the module with most first."""
    rows: dict[str, dict[Kind, int]] = {}
    for one in tensors:
        if one.kind in PARTS and one.module is not None:
            row = rows.setdefault(one.module, dict.fromkeys(PARTS, 0))
            row[one.kind] += one.size
    return dict(sorted(rows.items(), key=lambda item: -sum(item[1].values())))


def _live(tensor: Tensor, kind: Kind, module: str | None = None, name: str = "") -> Live:
    return Live(
        kind=kind,
        size=tensor.untyped_storage().nbytes(),
        module=module,
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )


def _tensors() -> Iterator[Tensor]:
    for thing in gc.get_objects():
        # By its type, because to ask a stranger's class may run its code.
        # Those of torch itself that have no storage, fake and functional ones of a compiler, say another device.
        kind = type(thing)
        is_real = issubclass(kind, Tensor) and not kind.__module__.startswith("torch._subclasses")
        if is_real and thing.device.type != "meta":
            yield from held(thing)


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[Any, str, Tensor]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            entries: Mapping[str, Any] = state if isinstance(state, Mapping) else {"": state}
            for key, value in entries.items():
                for tensor in tensors_in(value):
                    yield parameter, key, tensor


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Use:
    """Bytes of this process, and what there is to divide them by.

    gradients: of all parameters that learn, whether or not they are there yet.
    activations: those that a forward had no room for included.
    halves: of the activations, those that are in a float of 16 bits already.
    samples: of this process's micro-batch. holders: modules that keep activations.
    devices: that could share the run; 1 where they have one memory, as ranks on one CPU.
    is_sharded: whether parameters lie in shards over the ranks already.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    halves: int = 0
    samples: int = 1
    holders: int = 1
    devices: int = 1
    is_sharded: bool = False


def advice(use: Use) -> str:
    """What saves most of these bytes, and of which."""
    kept = use.activations
    state = use.parameters + use.gradients + use.optimizer
    of_kept, of_state = f"of {_mib(kept)} of activations", f"of {_mib(state)} of parameters, gradients and optimizer"
    smaller = (
        "a smaller data.batch_size and trainer.accumulate_grad_batches as many times larger: the step stays the same, "
        f"and half the samples at a time save half {of_kept}"
    )
    choices = [
        # Down to one sample at a time.
        (kept * (1 - 1 / use.samples), smaller),
        (
            state * (1 - 1 / use.devices) if not use.is_sharded else 0,
            f"strategy=fsdp over {use.devices} devices: each holds its share {of_state}",
        ),
        # A network of n alike layers keeps the ends of about sqrt(n) segments (Chen et al. 2016, arXiv:1604.06174).
        (
            kept * (1 - 1 / math.sqrt(use.holders)) if use.is_sharded else 0,
            f"strategy.activation_checkpointing=[...], the repeated blocks: it computes most {of_kept} again",
        ),
        ((kept - use.halves) / 2, f"precision=bf16: it saves up to half {of_kept}"),
    ]
    saved, line = max(choices, key=lambda choice: choice[0])
    if saved <= 0:
        return (
            f"a smaller network, or a device with more memory: there is no batch to make smaller, and {_mib(state)} "
            "are parameters, gradients and optimizer"
        )
    return line


def record_history(max_entries: int) -> None:
    """From now on the allocator notes who asked for what; of more than `max_entries` notes the last."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def stop_history() -> None:
    """Notes nothing from now on."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_history(path: Path) -> None:
    """Writes the allocator's blocks, and its notes where there are any, as a pickle of plain values."""
    torch.cuda.memory._dump_snapshot(str(path))
