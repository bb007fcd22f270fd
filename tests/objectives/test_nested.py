"""Walks over nested data keep its classes, wherever a step makes them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from exp.engine.forward import detached, make_passes
from exp.nested import mapped, rebuilt, tensors_in
from exp.strategies.pipeline_stages import cut, joined, micro_batches, shares


class Pair(NamedTuple):
    left: Any
    right: Any


def nested() -> Any:
    return OrderedDict(
        a=Pair(torch.ones(2), [torch.ones(3), "word", None]), size=torch.Size([2, 3]), b=(1, torch.ones(4))
    )


def test_every_class_is_kept_and_only_tensors_are_changed() -> None:
    data = nested()
    result = mapped(data, lambda tensor: tensor * 2)
    assert type(result) is OrderedDict
    assert type(result["a"]) is Pair
    assert type(result["size"]) is torch.Size
    assert result["a"].right[1:] == ["word", None]
    assert result["b"][0] == 1
    assert [tensor.tolist() for tensor in tensors_in(result)] == [[2.0] * 2, [2.0] * 3, [2.0] * 4]
    assert [tensor.tolist() for tensor in tensors_in(data)] == [[1.0] * 2, [1.0] * 3, [1.0] * 4]


@pytest.mark.parametrize("data", [defaultdict(list, a=torch.ones(1)), MappingProxyType({"a": torch.ones(1)})])
def test_a_mapping_of_any_class_has_its_values_changed(data: Any) -> None:
    assert dict(mapped(data, torch.neg)) == {"a": torch.tensor([-1.0])}
    assert dict(rebuilt(data, [3])) == {"a": 3}


def test_a_tensor_is_its_own_structure() -> None:
    assert mapped(torch.ones(()), torch.neg) == -1
    assert mapped("word", torch.neg) == "word"
    assert list(tensors_in(3)) == []


def test_micro_batches_of_a_named_tuple() -> None:
    data = Pair(torch.arange(5), {"x": torch.arange(10).reshape(5, 2)})
    pieces = micro_batches(data, size=5, count=2)
    assert [type(piece.data) for piece in pieces] == [Pair, Pair]
    assert pieces[1].data.left.tolist() == [3, 4, 4]
    back = joined(shares(data, size=5, count=2))
    assert type(back) is Pair
    assert torch.equal(back.right["x"], data.right["x"])
    assert cut(data, 2).left.tolist() == [0, 1]


def test_passes_over_a_batch_that_is_a_named_tuple() -> None:
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
        assert passes.run(precision="full")["output"].shape == (2, 1)
    assert not data.left.requires_grad


def test_an_output_of_any_structure_is_detached() -> None:
    leaf = torch.ones(2, requires_grad=True)
    found = detached(Pair(leaf * 2, {"x": [leaf * 3]}))
    assert type(found) is Pair
    assert not any(tensor.requires_grad for tensor in tensors_in(found))
