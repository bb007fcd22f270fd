"""Gradients averaged by flat collectives, against the mean computed by hand."""

from __future__ import annotations

import pytest


def averaged(rank, *, bucket_bytes):
    """The gradients of rank 0 and 1, some of them missing, after average_gradients."""
    import torch
    from torch import nn

    from exp.strategies import gradient_averaging as averaging

    averaging.BUCKET_BYTES = bucket_bytes
    shapes = {"both": (3, 4), "first": (5,), "second": (2, 2), "neither": (3,), "frozen": (2,), "double": (4,)}
    parameters = {}
    for number, (name, shape) in enumerate(shapes.items()):
        dtype = torch.float64 if name == "double" else torch.float32
        parameters[name] = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=name != "frozen")
        holders = {"first": (0,), "second": (1,), "neither": (), "frozen": ()}.get(name, (0, 1))
        if rank.global_rank in holders:
            # A gradient that does not lie in one piece, as a transposed product leaves it.
            piece = torch.arange(parameters[name].numel(), dtype=dtype).reshape(shape[::-1]).T
            parameters[name].grad = piece * (10 * rank.global_rank + 1) + number
    calls = []
    plain = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *a, **k: (calls.append(1), plain(*a, **k))[1]
    averaging.average_gradients(parameters.values())
    return {name: None if p.grad is None else p.grad.tolist() for name, p in parameters.items()}, len(calls)


@pytest.mark.parametrize(("bucket_bytes", "collectives"), [(2**20, 2), (16, 5)])
def test_the_mean_of_all_ranks_and_zeros_for_a_missing_one(ranks, bucket_bytes, collectives):
    import torch

    found = ranks.call(averaged, ranks=2, bucket_bytes=bucket_bytes)
    both = torch.arange(12.0).reshape(4, 3).T
    expected = {
        "both": (both * 1 + both * 11) / 2,
        "first": (torch.arange(5.0) + 1) / 2,
        "second": (torch.arange(4.0).reshape(2, 2).T * 11 + 2) / 2,
        "neither": None,
        "frozen": None,
        "double": torch.arange(4.0) * 6 + 5,
    }
    expected = {name: None if value is None else value.tolist() for name, value in expected.items()}
    assert [values for values, _ in found] == [expected, expected]
    assert [calls for _, calls in found] == [collectives, collectives]


def test_one_process_keeps_its_gradients():
    import torch

    from exp.strategies.gradient_averaging import average_gradients

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    average_gradients([parameter])
    assert parameter.grad.tolist() == [1, 1]


def broadcast(rank):
    import torch

    from exp.strategies.gradient_averaging import broadcast_state

    torch.manual_seed(rank.global_rank)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module[1].running_mean.fill_(rank.global_rank + 7)
    broadcast_state(module)
    return [value.tolist() for value in module.state_dict().values()]


def test_rank_zero_gives_its_state_to_all(ranks):
    first, second = ranks.call(broadcast, ranks=2)
    assert first == second
    assert first[4] == [7, 7, 7]
