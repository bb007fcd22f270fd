"""The hook `memory`: what the memory of a step is used for, on each rank, and what filled it where it ran out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor, nn

from exp.errors import Fault
from exp.hooks.hook import Boundary, Hook, Period, Values
from exp.hooks.memory_peaks import HOST, Peak, peak_of
from exp.hooks.memory_snapshot import record_history, stop_history, take
from exp.hooks.out_of_memory import is_out_of_memory
from exp.hooks.saved_tensors import Kept, SavedTensors, storages
from exp.hooks.step import Step
from exp.nested import tensors_in

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint

log = logging.getLogger(__name__)

MIB = 2**20
NOTES = 100_000
# What has passed at each boundary.
PHASES: dict[Boundary, str] = {"forward": "forward", "backward": "backward", "optimizer": "step"}
# What has passed at a pipeline's backward: its schedule runs the forward of one micro-batch between those of others.
TOGETHER = "forward_backward"
OVER_RANKS = ("min", "mean", "max")


class Memory(Hook):
    """Logs four parts of each process's memory, measured at their step, and what the device and the host say.

    `memory/parameters_mib`, `memory/gradients_mib` (when the backward is done) and `memory/optimizer_mib` (when the
    step is) are exact to the byte: each storage counts once, however many tensors share it. `memory/activations_mib` is
    what the forward keeps for the backward, parameters and buffers excluded; the largest micro-batch's where gradients
    are accumulated. On CUDA `memory/peak_mib` is the largest that the allocator gave since the start.

    With `details` there are, too: `memory/host_rss_mib`, the process's resident set, and
    `memory/host_peak_<phase>_mib`, the largest one in the forward, the backward and the optimizer's step, where the
    system counts it (Linux). Of a pipeline the phase `forward_backward` is in the place of the first two, which its
    stages run by turns. On CUDA `memory/allocated_mib` and `memory/reserved_mib` are the allocator's,
    `memory/fragmentation` is the share of what is reserved that is not allocated, and `memory/peak_<phase>_mib` the
    largest allocated in the phase.

    These are the first rank's. With `details` each tag of several ranks has /min, /mean and /max over them, too.

    Where memory runs out, `on_error` leaves a file below the run directory, a table in the log, and a suggestion.

    details: whether host, phases, allocator and all ranks are told beside the parts.
    record_history: on CUDA, who asked the allocator for what goes into that file; it slows each allocation.

    It is measured on few steps because the forward of such a step costs up to a quarter more on a tiny network.
    """

    longest = {"every_n_steps": 50}

    def __init__(self, *, every_n_steps: Period = "auto", details: bool = False, record_history: bool = False) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.details, self.record_history = details, record_history
        self._process = psutil.Process()
        self._network: nn.Module | None = None
        # Of the step under way, and of the last forward that was measured.
        self._activations = 0
        self._peaks: dict[str, int] = {}
        self._has_forward = False
        self._gradients = 0.0
        self._kept = Kept()
        self._measured_at: int | None = None
        # What any of several ranks has.
        self._tags: set[str] | None = None

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        """A history of an allocator that there is not, and phases that are called as a figure over ranks."""
        yield from super().faults(planned)
        if planned.placement.world_size > 1 and self.details:
            for name in sorted({*OVER_RANKS}.intersection(planned.config["phases"])):
                yield self.fault(
                    key=f"phases.{name}",
                    got=f"a phase whose tag memory/gradients_mib/{name} is a figure over ranks, too",
                    expected=f"a name that is none of {', '.join(OVER_RANKS)}",
                    cure=f"rename the phase, or {self.leave_out}",
                )
        accelerator = planned.placement.accelerator
        if self.record_history and accelerator != "cuda":
            expected = "false: only the CUDA allocator has a history"
            yield self.fault("record_history", got=f"true on {accelerator}", expected=expected)

    def setup(self, network: nn.Module) -> None:
        self._network = network
        if self.record_history:
            record_history(NOTES)

    def teardown(self) -> None:
        if self._network is not None and self.record_history:
            stop_history()
        self._network = None
        self._kept, self._measured_at = Kept(), None

    # --- a measured step ---

    def passed(self, boundary: Boundary, step: Step) -> None:
        if not self.details:
            return
        self._has_forward |= boundary == "forward"
        phase = PHASES.get(boundary)
        if boundary == "backward" and not self._has_forward:
            phase = TOGETHER
        for kind, peak in _counters(step.device).items():
            found = peak.restart()
            if phase is None:
                continue
            tag = _peak_tag(kind, phase)
            self._peaks[tag] = max(self._peaks.get(tag, 0), found)

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        network = step.network
        # Batches of data in memory are views of one storage: each counts for its own part of it.
        given: Counter[int] = Counter()
        for tensor in tensors_in(step.data):
            given[tensor.untyped_storage().data_ptr()] += tensor.nbytes
        self._measured_at = step.index
        return SavedTensors(lambda: [*network.parameters(), *network.buffers()], given, self._keep)

    def after_backward(self, step: Step) -> Values:
        gradients = mebibytes(parameter.grad for parameter in step.network.parameters() if parameter.grad is not None)
        # With phases each has gradients of its own.
        self._gradients = max(self._gradients, gradients)
        return {"memory/gradients_mib": gradients}

    def after_step(self, step: Step) -> Values:
        values: dict[str, float | Tensor] = {
            "memory/parameters_mib": mebibytes(step.network.parameters()),
            "memory/optimizer_mib": mebibytes(tensors_in([optimizer.state for optimizer in step.optimizers])),
            "memory/activations_mib": self._activations / MIB,
        }
        if step.device.type == "cuda":
            values["memory/peak_mib"] = peak_of(step.device).so_far() / MIB
        if self.details:
            values |= self._detailed(values, step)
        self._activations, self._gradients, self._peaks, self._has_forward = 0, 0.0, {}, False
        return values

    def _detailed(self, parts: Mapping[str, float | Tensor], step: Step) -> dict[str, float | Tensor]:
        """What the host and the allocator say, and all of it over the ranks where there are several."""
        place = step.device
        dtype = torch.float32 if place.type == "mps" else torch.float64
        # The ranks are at one point from here on: a barrier that also tells how many there are.
        ranks = len(step.gather(torch.zeros(1, dtype=dtype, device=place)))
        values: dict[str, float | Tensor] = {
            "memory/host_rss_mib": self._process.memory_info().rss / MIB,
            **_allocated(place),
            **{tag: peak / MIB for tag, peak in self._peaks.items()},
        }
        if ranks > 1:
            own = {"memory/gradients_mib": self._gradients, **parts, **values}
            tags = sorted({*own, *_peak_tags(place)})
            numbers = torch.tensor([own.get(tag, torch.nan) for tag in tags], dtype=dtype, device=place)
            found = step.gather(numbers)
            if self._tags is None:
                # Only once, for it waits for the device.
                nowhere = found.isnan().all(0).tolist()
                self._tags = {tag for tag, is_nowhere in zip(tags, nowhere, strict=True) if not is_nowhere}
            values |= {
                f"{tag}/{word}": number
                for word, numbers in _over_ranks(found).items()
                for tag, number in zip(tags, numbers.unbind(), strict=True)
                if tag in self._tags
            }
        return values

    def _keep(self, kept: Kept, failed: bool) -> None:
        """Of several micro-batches the largest; where the forward failed, what it had kept by then."""
        if failed or kept.size >= self._activations:
            self._kept = kept
        self._activations = max(self._activations, kept.size)

    # --- where it ran out ---

    def on_error(self, error: BaseException, step: Step | None) -> None:
        if self._network is None or not is_out_of_memory(error):
            return
        kept, at = self._kept, self._measured_at
        snapshot = take(error, step, network=self._network, kept=kept, measured_at=at)
        where = "" if self.directory is None else snapshot.write(self.directory / self.name)
        log.error("%s\n\n%s", snapshot.headline(), snapshot.table())
        told = f"{snapshot.headline()}. Try {snapshot.suggestion}"
        error.add_note(f"{told}\nWhat filled the memory is in {where}" if where else told)


def mebibytes(tensors: Iterable[Tensor]) -> float:
    """The size in MiB of the storages of `tensors`, each counted once."""
    return sum(storages(tensors).values()) / MIB


def _counters(device: torch.device) -> dict[str, Peak]:
    """Those that can be set back, by the beginning of their tags."""
    counters: dict[str, Peak] = {"host_peak": HOST} if HOST.can_restart else {}
    return {**counters, "peak": peak_of(device)} if device.type == "cuda" else counters


def _peak_tag(kind: str, phase: str) -> str:
    return f"memory/{kind}_{phase}_mib"


def _peak_tags(device: torch.device) -> list[str]:
    return [_peak_tag(kind, phase) for kind in _counters(device) for phase in (*PHASES.values(), TOGETHER)]


def _allocated(device: torch.device) -> dict[str, float]:
    """What the allocator of a CUDA device says now."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {
        "memory/allocated_mib": allocated / MIB,
        "memory/reserved_mib": reserved / MIB,
        "memory/fragmentation": (reserved - allocated) / reserved if reserved else 0.0,
    }


def _over_ranks(found: Tensor) -> dict[str, Tensor]:
    """The smallest, the mean and the largest of each of K values of R ranks: `[R, K]` to `[K]`.

    A rank need not have all, and those that it has not are nan: the stages of a pipeline have no one forward, say.
    """
    missing = found.isnan()
    return {
        "min": found.masked_fill(missing, torch.inf).amin(0),
        "mean": found.nanmean(0),
        "max": found.masked_fill(missing, -torch.inf).amax(0),
    }
