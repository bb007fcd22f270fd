"""Detection of out-of-memory errors, the size of the failed allocation, and the error message."""

from __future__ import annotations

import re

import torch

from exp.errors import message_of

# Messages of torch's allocators and CUDA's libraries that raise a plain RuntimeError (torch 2.13).
ALLOCATORS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|MPS backend out of memory|CUDA error: out of memory"
    r"|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
)
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has run out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATORS.search(message_of(error)) is not None


def asked_for(error: BaseException) -> int | None:
    """Return the size of the failed allocation in bytes; None if the message does not state it."""
    found = ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def explain(error: BaseException, *, is_built: bool) -> str:
    """Return the report of the hook `memory`, or a hint to use the hook, followed by the allocator's message.

    Args:
        error: The error.
        is_built: Whether network and data are already built. Before that point no hook runs.
    """
    message = str(error).partition("\n")[0] or type(error).__name__
    if is_built:
        without = "out of memory. The hook memory says in which layer, what filled it, and what to try: +hooks=memory"
    else:
        without = "out of memory while the network and the data were made, before training"
    return "\n".join([*(getattr(error, "__notes__", None) or [without]), message])
