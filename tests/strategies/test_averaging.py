"""Gradients averaged by flat collectives equal the mean computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def averaged(rank):
    """Return the gradients after average_gradients for each bucket size, and a module after broadcast_state."""
    from exp.strategies import gradient_averaging
    from exp.strategies.gradient_averaging import broadcast_state

    torch.manual_seed(rank.global_rank)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module[1].running_mean.fill_(rank.global_rank + 7)
    broadcast_state(module)
    state = [value.tolist() for value in module.state_dict().values()]
    found = {}
    for size in (16, 2**20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_averaging, "BUCKET_BYTES", size)
            found[size] = gradients(rank)
    return found, state


def gradients(rank):
    from exp.strategies.gradient_averaging import average_gradients

    shapes = {"both": (3, 4), "first": (5,), "second": (2, 2), "neither": (3,), "frozen": (2,), "double": (4,)}
    parameters = {}
    for number, (name, shape) in enumerate(shapes.items()):
        dtype = torch.float64 if name == "double" else torch.float32
        parameters[name] = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=name != "frozen")
        holders = {"first": (0,), "second": (1,), "neither": (), "frozen": ()}.get(name, (0, 1))
        if rank.global_rank in holders:
            # A gradient that is not contiguous, like that of a transposed product.
            piece = torch.arange(parameters[name].numel(), dtype=dtype).reshape(shape[::-1]).T
            parameters[name].grad = piece * (10 * rank.global_rank + 1) + number
    average_gradients(parameters.values())
    return {name: None if p.grad is None else p.grad.tolist() for name, p in parameters.items()}


def test_ranks_average_gradients_and_share_the_state_of_rank_0(ranks):
    both = torch.arange(12.0).reshape(4, 3).T
    expected = {
        "both": ((both * 1 + both * 11) / 2).tolist(),
        "first": ((torch.arange(5.0) + 1) / 2).tolist(),
        "second": ((torch.arange(4.0).reshape(2, 2).T * 11 + 2) / 2).tolist(),
        "neither": None,
        "frozen": None,
        "double": (torch.arange(4.0) * 6 + 5).tolist(),
    }
    (first, state), (second, same_state) = ranks.call(averaged, ranks=2)
    assert first == second == {16: expected, 2**20: expected}
    assert state == same_state
    assert state[4] == [7, 7, 7]
