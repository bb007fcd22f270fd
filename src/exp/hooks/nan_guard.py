"""The hook `nan_guard`: stops before an optimizer takes a loss or a gradient that is not finite.

                    on a CPU            on a GPU, all optimizers fused      on a GPU, otherwise
the flag            loss, norms         loss, norms: on the device          the same
the update stops    an error, at once   found_inf, on the device            an error, at once
the host looks      at once             some steps later, or at a flush     at once: it waits for the backward
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from exp.errors import Fault, NonFiniteError, RunError
from exp.hooks.findings import Finding, finding_of, message
from exp.hooks.hook import Hook
from exp.hooks.norms import norms
from exp.hooks.step import Step, Update
from exp.hooks.step_trace import Trace, trace_of
from exp.nested import mapped
from exp.precision.scaler import release

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A step whose flag is on its way to the host."""

    index: int
    update: Update
    flag: _OnItsWay
    buffers: Copies


class NanGuard(Hook):
    """Ends the run before a step whose loss or gradient is not finite, with the weights as they were before it.

    The error names the first module that gave such a number. nan_guard/step-<n>.pt in the run directory has the batches
    of the step, and the weights from before it. A gradient counts as not finite if its 2-norm is not.

    Under the loss scale of fp16 a gradient that is not finite is routine, and its step is skipped anyway: the run ends
    where the loss is not finite, or where the scale has fallen below 1.

    steps_in_flight: how many steps a GPU may be behind before the host looks; their batches are kept meanwhile.
    """

    needs = frozenset({"whole_parameters", "own_backward", "one_thread"})
    least = {"steps_in_flight": 1}

    def __init__(self, *, steps_in_flight: int = 8) -> None:
        super().__init__()
        self.steps_in_flight = steps_in_flight
        self._forget()

    def _forget(self) -> None:
        self._step: Step | None = None
        self._buffers: BuffersBefore | None = None
        self._before: Copies | None = None
        self._is_compiled = True  # until the first step says otherwise
        self._waiting: deque[_Seen] = deque()
        self._latch: Tensor | None = None
        self._held: list[Optimizer] = []

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        """An optimizer that may run the network itself, several times a step, is none to stop."""
        yield from super().faults(planned)
        # Those of phases get no closure to call.
        for kind in planned.optimizers if not planned.config["phases"] else ():
            if kind.__module__.startswith("torch.optim.") and not issubclass(kind, LBFGS):
                continue
            yield self.fault(
                key="optimizer._target_",
                got=f"{planned.config['optimizer']['_target_']}, with hooks.{self.name}",
                expected="one of torch.optim but LBFGS: another may make the gradients of a step several times, "
                "and steps by the last of them, whereas the first is looked at",
                cure=f"Choose another optimizer, or {self.leave_out}",
            )

    # --- the run ---

    def setup(self, network: nn.Module) -> None:
        self._forget()
        self._buffers = BuffersBefore(network)

    def teardown(self) -> None:
        for optimizer in self._held:
            release(optimizer)
        self._forget()

    def around_forward(self, step: Step) -> None:
        if self._before is None and self._buffers is not None:
            self._before = self._buffers.take(all_of_them=self._is_compiled)

    def before_update(self, step: Step, update: Update) -> None:
        self._step = step
        before, self._before = self._before or [], None
        self._is_compiled = update.is_compiled
        later = self._looks_later(step, update)
        flag = self._flag(step, update, on_host=not later and step.device.type == "cpu")
        if later:
            assert isinstance(flag, Tensor)
            flag = self._held_back(flag, update)
        elif flag == 0.0 and isinstance(flag, float):
            return  # on the host, and fine
        seen = _Seen(
            index=step.index,
            update=update,
            flag=_OnItsWay(flag),
            buffers=before,
        )
        self._waiting.append(seen)
        # Not where the flag happens to have arrived: the ranks of a run must look at one step together.
        while len(self._waiting) > (self.steps_in_flight if later else 0):
            self._look()

    def before_write(self) -> None:
        # It waits for the device anyway, and would end the run itself by a loss that is not a number.
        while self._waiting:
            self._look()

    # --- the look ---

    def _looks_later(self, step: Step, update: Update) -> bool:
        """Whether the device stops the update by itself, so that nobody has to wait for it."""
        return step.device.type == "cuda" and update.can_hold

    def _flag(self, step: Step, update: Update, *, on_host: bool) -> Tensor | float:
        """1 where the step must not be taken, on any rank; 0-d in float32, or a float on the host."""
        gradients = [
            parameter.grad
            for group in update.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        sizes = norms([gradient for gradient in gradients if gradient.numel()])
        if on_host:
            is_lost = not all(math.isfinite(loss.item()) for loss in update.losses)
            is_bad = not all(math.isfinite(size.item()) for size in sizes)
            flag: Tensor | float = float(is_lost or (is_bad and (update.scale is None or float(update.scale) < 1.0)))
        else:
            device = step.device
            lost = ~torch.stack([loss.to(device) for loss in update.losses]).isfinite().all()
            bad = ~torch.stack([size.to(device) for size in sizes]).isfinite().all() if sizes else lost
            if update.scale is not None:
                bad = bad & (torch.as_tensor(update.scale, device=device) < 1.0)
            flag = (lost | bad).to(torch.float32)
        if update.window.batches[0][0].world_size == 1:
            return flag
        worst = step.gather(torch.as_tensor(flag, dtype=torch.float32)).amax()
        return worst.item() if on_host else worst

    def _held_back(self, flag: Tensor, update: Update) -> Tensor:
        """From the first bad step on no optimizer changes anything, until the host has seen it."""
        self._latch = flag if self._latch is None else torch.maximum(self._latch, flag)
        update.hold(self._latch)
        if all(update.optimizer is not one for one in self._held):
            self._held.append(update.optimizer)
        return flag

    def _look(self) -> None:
        seen = self._waiting.popleft()
        if seen.flag.value():
            self._waiting.clear()
            self._stop(seen)

    # --- the stop ---

    def _stop(self, seen: _Seen) -> None:
        step, update = self._step, seen.update
        assert step is not None
        put_back(seen.buffers)
        losses = [float(loss) for loss in update.losses]
        world_size = update.window.batches[0][0].world_size
        path, unwritten = self._write(step, seen, world_size=world_size)
        trace, untraced = _traced(update, step.network)
        finding = finding_of(
            trace,
            index=seen.index,
            losses=losses,
            phase=update.window.phase,
            path=None if path is None else _shown(path),
            problems=[*unwritten, *untraced],
        )
        found = [Finding.decoded(row) for row in step.gather(finding.encoded().to(step.device)).cpu()]
        raise NonFiniteError(message(found))

    def _write(self, step: Step, seen: _Seen, *, world_size: int) -> tuple[Path | None, list[str]]:
        """The file, and why there is none."""
        if self.directory is None:
            return None, ["The run has no directory, so the step was not kept."]
        update, window = seen.update, seen.update.window
        ending = f".rank{step.rank}" if world_size > 1 else ""
        path = self.directory / self.name / f"step-{seen.index}{ending}.pt"
        contents = {
            "step": seen.index,
            "epoch": window.epoch,
            "phase": window.phase,
            "seed": step.seed,
            "rank": step.rank,
            "scale": None if update.scale is None else float(update.scale),
            "batches": [{"data": _copied(batch.data), "batch_idx": batch_idx} for batch, batch_idx in window.batches],
            "network": _copied({**dict(step.network.named_parameters()), **dict(step.network.named_buffers())}),
        }
        try:
            update.save(path, contents)
        except (OSError, RunError) as error:
            return None, [f"The step could not be kept in {path}: {error}."]
        return path, []


class _OnItsWay:
    """A number that the host asks for later: copied from a GPU beside what it computes."""

    def __init__(self, number: Tensor | float) -> None:
        self._number, self._event = number, None
        if isinstance(number, Tensor) and number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> float:
        """Waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)


def _traced(update: Update, network: nn.Module) -> tuple[Trace | None, list[str]]:
    try:
        return trace_of(update.again, update.window, network=network, objective=update.objective), []
    except Exception as error:  # out of memory, or a network that cannot run twice: the stop must be told all the same
        return None, [f"The step could not be run again to find the module: {type(error).__name__}: {error}."]


def _copied(data: object) -> Any:
    """Return the same entries with copies on the host, in dicts, lists and tuples. A file has whole storages."""
    if isinstance(data, Tensor):
        return data.detach().cpu().clone()
    if isinstance(data, Mapping):
        return {name: _copied(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        parts = [_copied(value) for value in data]
        return parts if isinstance(data, list) else tuple(parts)
    return mapped(data, _copied)


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


# A large buffer is a mask or a queue, and a copy of it at every step would cost.
SMALL_BYTES = 2**16


Copies = list[tuple[nn.Module, str, Tensor]]


class BuffersBefore:
    """Copies of buffers on their device: of small ones always, of large ones where they changed since the last copy.

    Compiled code does not count its changes on every path, so a compiled network has all of them copied. Modules that
    have no buffer when this is made are not looked at.
    """

    def __init__(self, network: nn.Module) -> None:
        self._owners = [one for one in network.modules() if any(True for _ in one.buffers(recurse=False))]
        self._large: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}

    def take(self, *, all_of_them: bool) -> Copies:
        """Owner, name and copy of what each buffer holds now; no copy is changed any more. Waits for nothing."""
        return [
            (owner, name, self._copy(owner, name, buffer, anew=all_of_them))
            for owner in self._owners
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def _copy(self, owner: nn.Module, name: str, buffer: Tensor, *, anew: bool) -> Tensor:
        if anew or buffer.nbytes <= SMALL_BYTES:
            return buffer.detach().clone()
        key, version = (id(owner), name), buffer._version
        known = self._large.get(key)
        if known is None or known[0] is not buffer or known[1] != version:
            known = self._large[key] = (buffer, version, buffer.detach().clone())
        return known[2]


@torch.no_grad()
def put_back(copies: Copies) -> None:
    """The buffers hold again what they held."""
    for owner, name, before in copies:
        owner.get_buffer(name).copy_(before)
