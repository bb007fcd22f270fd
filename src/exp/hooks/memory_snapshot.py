"""Report of a run that ran out of memory: a message, and a table of what filled the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from exp.hooks.memory_use import MIB, asked_for
from exp.hooks.saved_tensors import Kept, address, dense_tensors, failing_module
from exp.hooks.step import Step
from exp.nested import tensors_in

ROWS = 10
# Name of the objective's row in the table. It cannot be a module path, because paths contain no brackets.
OBJECTIVE = "(objective)"
Part = Literal["parameters", "gradients", "optimizer", "activations"]
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer", "activations")
Rows = Mapping[str, Mapping[Part, int]]


def take(error: BaseException, step: Step | None, *, network: nn.Module, kept: Kept) -> tuple[str, str]:
    """Return two texts about the current memory use: a message, and a table of modules.

    The message contains the place and the size of the failed allocation, and the change that saves the most memory.

    Args:
        error: Error of the allocator.
        step: Current step; None outside of a step.
        network: Network of the run.
        kept: Activations of the last measured forward.
    """
    modules = _by_module(network, () if step is None else step.optimizers, kept)
    parts = {part: sum(row[part] for row in modules.values()) for part in PARTS}
    module, asked = failing_module(error, network), asked_for(error)
    place = "the host" if step is None else f"{step.device} in step {step.index}"
    if module is not None:
        place += f", in {module or 'the network itself'}"
    size = "" if asked is None else f": an allocation of {_mib(asked)} failed"
    suggestion = advice(parts, failed=asked if module is not None and asked is not None else 0)
    return f"out of memory on {place}{size}. Try {suggestion}", _table(modules, parts)


def _table(modules: Rows, parts: Mapping[Part, int]) -> str:
    """Return a table of the modules that use the most memory, as fixed-width text."""
    largest = sorted(modules.items(), key=lambda item: -sum(item[1].values()))[:ROWS]
    rows = [["MiB, by module", *PARTS]]
    for name, row in [*((name or "(network)", row) for name, row in largest), ("all", parts)]:
        rows.append([name, *(f"{row[part] / MIB:,.2f}" for part in PARTS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def _by_module(network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], kept: Kept) -> Rows:
    """Return the bytes of parameters, gradients, optimizer state and activations of each module, by path.

    A shared storage counts only in the first module that uses it.
    """
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
    """Yield all parameters, gradients and tensors of optimizer states.

    Yields:
        The kind of the tensor, the name of its parameter, and the tensor.
    """
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
    """Return the change that saves the most memory, as a text.

    Args:
        parts: Bytes of parameters, gradients, optimizer state and activations.
        failed: Size in bytes of the activation that could not be allocated; 0 if the allocation was no activation.
    """
    state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    if parts["activations"] + failed > state:
        return (
            "a smaller data.batch_size with a larger trainer.accumulate_grad_batches, precision=bf16, or "
            "strategy.activation_checkpointing"
        )
    return f"strategy=fsdp, which shards {_mib(state)} of weights, gradients and optimizer state, or a smaller network"
