"""The adapter of torch's private snapshot of the CUDA allocator, which https://pytorch.org/memory_viz shows.

Relied on, and tested: `_record_memory_history` and `_dump_snapshot` of `torch.cuda.memory`, as PyTorch's own page
"Understanding CUDA Memory Usage" writes them (torch 2.13).
"""

from __future__ import annotations

from pathlib import Path

import torch


def record_history(max_entries: int) -> None:
    """From now on the allocator notes who asked for what; of more than `max_entries` notes the last."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def stop_history() -> None:
    """Notes nothing from now on."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump(path: Path) -> None:
    """Writes the allocator's blocks, and its notes where there are any, as a pickle of plain values."""
    torch.cuda.memory._dump_snapshot(str(path))
