"""Tests of functions that map the tensors in nested data and keep the container classes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exp.engine.forward import make_passes
from exp.nested import map_tensors, tensors_in


class Pair(NamedTuple):
    left: Any
    right: Any


def test_mapped_keeps_classes_and_other_values() -> None:
    data = OrderedDict(
        a=Pair(torch.ones(2), [torch.ones(3), "word", None]), size=torch.Size([2, 3]), b=(1, torch.ones(4))
    )
    result = map_tensors(data, lambda tensor: tensor * 2)
    assert type(result) is OrderedDict
    assert type(result["a"]) is Pair
    assert type(result["size"]) is torch.Size
    assert result["a"].right[1:] == ["word", None]
    assert result["b"][0] == 1
    assert [tensor.tolist() for tensor in tensors_in(result)] == [[2.0] * 2, [2.0] * 3, [2.0] * 4]
    assert [tensor.tolist() for tensor in tensors_in(data)] == [[1.0] * 2, [1.0] * 3, [1.0] * 4]


def test_passes_accept_a_named_tuple() -> None:
    data = Pair(torch.ones(2, 3), torch.zeros(2))
    network = nn.Linear(3, 1)

    def run(runner: Any, batch: Pair) -> dict[str, Tensor]:
        return {"input": batch.left, "output": runner(batch.left)}

    with torch.inference_mode():
        inside = Pair(torch.ones(2, 3), torch.zeros(2))
    for batch in (data, inside):
        passes = make_passes(frozenset({"input_gradients"}), network=network, run=run, data=batch)
        assert type(passes.data) is Pair
        values = passes.run()
        slope = passes.gradients(values["output"], values["input"])
        assert torch.equal(slope, network.weight.expand(2, 3))
        assert passes.run()["output"].shape == (2, 1)
    assert not data.left.requires_grad
