"""Precision-recall curves of whole evaluations: scikit-learn's figures at every threshold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_score, recall_score

from exp.hooks.pr_curve import PRCurve, cases, reached


def alone(tensor):
    return tensor[None]


def curves(batches, **settings):
    hook = PRCurve(**settings)
    hook.setup(torch.nn.Linear(1, 1))
    for output, target in batches:
        hook.evaluated("val", {"output": output, "target": target})
    return hook.after_evaluation("val", alone)


def compare(panel, probabilities: np.ndarray, positive: np.ndarray, thresholds: int) -> None:
    """With scikit-learn's precision and recall of `probabilities >= threshold`, at every threshold."""
    true_positives, false_positives, true_negatives, false_negatives = panel.counts.double().numpy()
    for place, limit in enumerate(np.linspace(0, 1, thresholds, dtype=np.float32)):
        predicted = probabilities >= limit
        found = true_positives[place] + false_positives[place]
        precision = true_positives[place] / found if found else 1.0
        recall = true_positives[place] / (true_positives[place] + false_negatives[place])
        assert precision == pytest.approx(precision_score(positive, predicted, zero_division=1))
        assert recall == pytest.approx(recall_score(positive, predicted))
        assert true_negatives[place] == (~predicted & ~positive).sum()


def test_each_class_against_the_rest_over_several_batches():
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (300,), generator=draw)
    scores = torch.randn(300, 4, generator=draw) + 2 * torch.nn.functional.one_hot(targets, 4)
    given = targets.clone()
    given[:20] = -100
    batches = [(scores[part], given[part]) for part in (slice(0, 128), slice(128, 256), slice(256, None))]
    found = curves(batches, num_classes=4, thresholds=31)
    assert list(found) == [f"pr_curve/val/{one}" for one in range(4)]
    probabilities = scores.softmax(-1).numpy()[20:]
    for one in range(4):
        compare(found[f"pr_curve/val/{one}"], probabilities[:, one], (targets == one).numpy()[20:], 31)


def test_of_many_classes_the_first_ones_and_of_two_the_second():
    batch = (torch.randn(9, 12), torch.arange(9))
    assert len(curves([batch], num_classes=12)) == 10
    assert list(curves([batch], num_classes=12, max_classes=2)) == ["pr_curve/val/0", "pr_curve/val/1"]
    assert list(curves([batch], num_classes=12, positive_class=11)) == ["pr_curve/val"]
    draw = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 2, (100,), generator=draw)
    scores = torch.randn(100, 2, generator=draw)
    found = curves([(scores, targets)], num_classes=2, thresholds=11)
    compare(found["pr_curve/val"], scores.softmax(-1)[:, 1].numpy(), targets.bool().numpy(), 11)


@pytest.mark.parametrize("given", [False, True])
def test_one_output_is_a_score_or_a_probability(given):
    draw = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 2, (100,), generator=draw)
    scores = torch.randn(100, generator=draw) + targets
    output = scores.sigmoid() if given else scores
    for positive, shares in ((1, scores.sigmoid()), (0, 1 - scores.sigmoid())):
        found = curves(
            [(output[:, None], targets)], num_classes=2, probabilities=given, positive_class=positive, thresholds=21
        )
        compare(found["pr_curve/val"], shares.numpy(), (targets == positive).numpy(), 21)


def test_a_score_that_is_not_a_number_reaches_no_threshold():
    shares = torch.tensor([[float("nan")], [0.0], [0.5], [1.0]])
    positive = torch.ones(4, 1, dtype=torch.bool)
    counted = torch.ones(4, dtype=torch.bool)
    found = cases(reached(shares, positive, counted=counted, thresholds=3))
    assert found[0, 0].tolist() == [3, 2, 1]
    assert found[0, 3].tolist() == [1, 2, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU runs ahead of its host")
def test_on_a_gpu_counting_waits_for_nothing():
    hook = PRCurve(num_classes=5)
    hook.setup(torch.nn.Linear(1, 1).cuda())
    values = {"output": torch.randn(64, 5).cuda(), "target": torch.randint(0, 5, (64,)).cuda()}
    hook.evaluated("val", values)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hook.evaluated("val", values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hook.after_evaluation("val", alone)["pr_curve/val/0"].counts[:, 0].sum() == 128
