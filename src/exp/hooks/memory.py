"""Hook `memory`, which logs the memory use of a step, and reports what filled the memory when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

import psutil
import torch
from torch import Tensor, nn

from exp.hooks.hook import Boundary, Hook, Period, Values
from exp.hooks.memory_snapshot import take
from exp.hooks.memory_use import HOST, MIB, Peak, is_out_of_memory, peak_of
from exp.hooks.saved_tensors import Kept, SavedTensors, storages
from exp.hooks.step import Step
from exp.nested import tensors_in

log = logging.getLogger(__name__)

# Name in tags of the phase of a step that ends at each boundary.
PHASES: dict[Boundary, str] = {"forward": "forward", "backward": "backward", "optimizer": "step"}
# Name in tags of the only phase before the optimizer step of a pipeline, whose schedule alternates forward and
# backward.
TOGETHER = "forward_backward"


class Memory(Hook):
    """Hook that logs four parts of each process's memory, and memory counters of the device and the host.

    The parts are:
      - `memory/parameters_mib`
      - `memory/gradients_mib`, after the backward
      - `memory/optimizer_mib`, after the step
      - `memory/activations_mib`: tensors that the forward saves for the backward, without parameters and buffers. If
        micro-batches are accumulated, the largest value of a micro-batch is logged.

    The first three parts are exact. A storage that several tensors share counts once. On CUDA, `memory/peak_mib` is the
    largest memory use of the allocator since the start.

    With `details`, these tags are added:
      - `memory/host_rss_mib`: resident set size of the process.
      - `memory/host_peak_<phase>_mib`, on Linux: peak of the resident set in the forward, the backward and the
        optimizer step. A pipeline alternates forward and backward, and has one phase `forward_backward` instead.
      - `memory/peak_<phase>_mib`, on CUDA: peak of the allocator in each phase.
      - `memory/allocated_mib` and `memory/reserved_mib`, on CUDA.
      - `memory/fragmentation`, on CUDA: fraction of the reserved memory that is not allocated.

    The values are those of rank 0. With `details` and several ranks, each tag also has `/min`, `/mean` and `/max` over
    the ranks.

    If memory runs out, a table is written to the log, and a suggestion is added to the error.

    Args:
        every_n_steps: Steps between two records. `auto` depends on the length of the run. In a recorded step, the
            forward of a tiny network takes up to 25 percent longer. Default: auto.
        details: Whether values of the host, the phases, the allocator and all ranks are logged. Default: False.
    """

    longest = {"every_n_steps": 50}

    def __init__(self, *, every_n_steps: Period = "auto", details: bool = False) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.details = details
        self._process = psutil.Process()
        self._network: nn.Module | None = None
        # Values of the current step, or of the last recorded step.
        self._activations = 0
        self._peaks: dict[str, int] = {}
        self._has_forward = False
        self._gradients = 0.0
        self._kept = Kept()
        # Tags that have a value on at least one rank, in a run with several ranks. None before the first record.
        self._tags: set[str] | None = None

    def setup(self, network: nn.Module) -> None:
        self._network = network

    def teardown(self) -> None:
        self._network = None
        self._kept = Kept()

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
        return SavedTensors(step.network, step.data, self._keep)

    def after_backward(self, step: Step) -> Values:
        gradients = mebibytes(parameter.grad for parameter in step.network.parameters() if parameter.grad is not None)
        # Each phase of the training has other gradients. The largest size is logged.
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
            values |= self._add_details(values, step)
        self._activations, self._gradients, self._peaks, self._has_forward = 0, 0.0, {}, False
        return values

    def _add_details(self, parts: Mapping[str, float | Tensor], step: Step) -> dict[str, float | Tensor]:
        """Return the values of the host and the allocator by tag, and the values in `parts`.

        With several ranks, the result also has statistics of all values over the ranks.
        """
        place = step.device
        dtype = torch.float32 if place.type == "mps" else torch.float64
        # The gather is also a barrier for the ranks.
        ranks = len(step.gather(torch.zeros(1, dtype=dtype, device=place)))
        values: dict[str, float | Tensor] = {
            "memory/host_rss_mib": self._process.memory_info().rss / MIB,
            **_allocator_values(place),
            **{tag: peak / MIB for tag, peak in self._peaks.items()},
        }
        if ranks > 1:
            own = {"memory/gradients_mib": self._gradients, **parts, **values}
            tags = sorted({*own, *_peak_tags(place)})
            numbers = torch.tensor([own.get(tag, torch.nan) for tag in tags], dtype=dtype, device=place)
            found = step.gather(numbers)
            if self._tags is None:
                # The tags are computed only once, because reading them waits for the device.
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
        """Keep the result of a forward if it is the largest in this step, or if the forward failed."""
        if failed or kept.size >= self._activations:
            self._kept = kept
        self._activations = max(self._activations, kept.size)

    # --- out of memory ---

    def on_error(self, error: BaseException, step: Step | None) -> None:
        if self._network is None or not is_out_of_memory(error):
            return
        message, table = take(error, step, network=self._network, kept=self._kept)
        log.error("%s\n\n%s", message, table)
        error.add_note(message)


def mebibytes(tensors: Iterable[Tensor]) -> float:
    """Return the total size in MiB of the storages of tensors. A shared storage counts once."""
    return sum(storages(tensors).values()) / MIB


def _counters(device: torch.device) -> dict[str, Peak]:
    """Return the memory counters that can be reset, by the first part of their tags."""
    counters: dict[str, Peak] = {"host_peak": HOST} if HOST.can_restart else {}
    return {**counters, "peak": peak_of(device)} if device.type == "cuda" else counters


def _peak_tag(kind: str, phase: str) -> str:
    return f"memory/{kind}_{phase}_mib"


def _peak_tags(device: torch.device) -> list[str]:
    return [_peak_tag(kind, phase) for kind in _counters(device) for phase in (*PHASES.values(), TOGETHER)]


def _allocator_values(device: torch.device) -> dict[str, float]:
    """Return the current values of a CUDA device's allocator by tag. For other devices, the result is empty."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {
        "memory/allocated_mib": allocated / MIB,
        "memory/reserved_mib": reserved / MIB,
        "memory/fragmentation": (reserved - allocated) / reserved if reserved else 0.0,
    }


def _over_ranks(found: Tensor) -> dict[str, Tensor]:
    """Return the minimum, mean and maximum over ranks of K values. Missing values are ignored.

    A missing value is nan. For example, a stage of a pipeline has no forward phase.

    Args:
        found: Values of R ranks, `[R, K]`.

    Returns:
        The entries `min`, `mean` and `max`, `[K]` each.
    """
    missing = found.isnan()
    return {
        "min": found.masked_fill(missing, torch.inf).amin(0),
        "mean": found.nanmean(0),
        "max": found.masked_fill(missing, -torch.inf).amax(0),
    }
