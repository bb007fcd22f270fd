"""How many threads an operator may use on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

# Multiply-adds of one forward. Below it an operator is over before a second thread has begun: the digits MLP (52,000
# parameters, batch 64) took 8 ms a step with one thread and 99 ms with two, on two cores that others used as well.
SMALL_FORWARD = 2**28


def set_threads(requested: int | None, *, network: nn.Module, input_shape: Sequence[int], batch_size: int) -> int:
    """Sets the threads of this process's operators, and returns how many.

    requested: None takes one thread for a small network, and leaves torch's choice otherwise (OMP_NUM_THREADS or the
        cores; a rank's launcher has shared them out).
    input_shape: of one sample. batch_size: samples that this rank has of a batch.
    """
    # No layer meets more positions than the input has, so no forward has more multiply-adds than this.
    bound = sum(parameter.numel() for parameter in network.parameters()) * batch_size * math.prod(input_shape)
    if requested is not None:
        torch.set_num_threads(requested)
    elif bound < SMALL_FORWARD:
        torch.set_num_threads(1)
    return torch.get_num_threads()
