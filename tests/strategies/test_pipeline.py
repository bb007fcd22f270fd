"""Stages of a pipeline: division of batches and layers, and messages between ranks."""

from __future__ import annotations

import pytest
import torch

from exp.strategies.pipeline import Pipeline
from exp.strategies.pipeline_stages import count_micro_batches, keep_samples, split_micro_batches

TWO = ("strategy=pipeline", "launch.accelerator=cpu", "launch.devices=2")


# A network with batch norm needs a single micro-batch.
NORMED = ("model=resnet", "strategy.schedule=gpipe", "strategy.microbatches=1")


# The gradients of model=branches are views.
@pytest.mark.slow
@pytest.mark.parametrize("words", [NORMED, ("model=branches",)])
def test_models_whose_stages_are_special(ranks, settings, alone, require_same_run, words):
    require_same_run(alone(words[0], *settings), ranks.train(*settings, *TWO, *words, ranks=2))


@pytest.mark.slow
def test_the_config_names_the_layers_of_stages(ranks, run, reference, require_same_run):
    named = (
        "strategy.layers=[[embedding,positions],['blocks.0'],[blocks.1],[norm,head]]",
        "strategy.schedule=interleaved_1f1b",
    )
    require_same_run(reference, ranks.train(*run, *TWO, *named, ranks=2))


def test_micro_batches_hold_each_sample_once():
    data = {"x": torch.arange(10.0).reshape(5, 2), "names": ["a"]}
    found = split_micro_batches(data, size=5, count=4)
    assert [piece.data["x"].shape for piece in found] == [(2, 2)] * 4
    assert [piece.size for piece in found] == [2, 2, 1, 0]
    held = torch.cat([keep_samples(piece.data["x"], piece.size) for piece in found])
    assert torch.equal(held, data["x"])
    # An empty micro-batch gets copies of the last sample, which is a valid input.
    assert torch.equal(found[3].data["x"], data["x"][4:].expand(2, 2))


@pytest.mark.parametrize(("batch", "ranks", "least", "multiple", "expected"), [
    (64, 2, 2, 1, 8), (60, 2, 2, 1, 6), (61, 2, 2, 1, 2), (64, 4, 4, 4, 16), (60, 4, 4, 4, 12), (8, 4, 8, 1, 8),
])  # fmt: skip
def test_automatic_micro_batches_divide_a_share_evenly(batch, ranks, least, multiple, expected):
    found = count_micro_batches("auto", batch_size=batch, ranks=ranks, least=least, multiple_of=multiple)
    assert found == expected


def test_stages_go_around_the_ranks():
    assert Pipeline(schedule="interleaved_1f1b", stages=6).owners(3) == [0, 1, 2, 0, 1, 2]
