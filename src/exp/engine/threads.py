"""How many threads an operator may use on a CPU."""

from __future__ import annotations

import torch
from torch import nn

# Multiply-adds of one step's linear layers. Below it an operator is over before a second thread has begun: the digits
# MLP (52,000 parameters, batch 64) took 8 ms a step with one thread and 99 ms with two on two cores that others used,
# and no longer with one on a quiet machine.
SMALL_STEP = 2**25


def set_threads(requested: int | None, *, network: nn.Module, batch_size: int) -> int:
    """Sets the threads of this process's operators, and returns how many.

    requested: None takes one thread for a small network, and leaves torch's choice otherwise (OMP_NUM_THREADS or the
        cores; a rank's launcher has shared them out).
    batch_size: samples of a batch.
    """
    if requested is not None:
        torch.set_num_threads(requested)
    elif sum(parameter.numel() for parameter in network.parameters()) * batch_size < SMALL_STEP:
        torch.set_num_threads(1)
    return torch.get_num_threads()
