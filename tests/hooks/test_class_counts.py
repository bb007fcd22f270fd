"""Counts of the hook confusion and curves of pr_curve for whole evaluations equal those of scikit-learn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_score, recall_score

from exp.errors import RunError
from exp.extras.evaluation.class_counts import predict_classes, rows
from exp.extras.evaluation.confusion import Confusion, Matrix, matrix, short
from exp.extras.evaluation.pr_curve import PRCurve, cases, count_reached
from exp.hooks.panels import THRESHOLDS


def alone(tensor):
    return tensor[None]


def evaluated(kind, *batches, **settings):
    """Run an evaluation of (output, target) batches, and return the panels of a hook."""
    hook = kind(**settings)
    hook.setup(torch.nn.Linear(1, 1))
    for output, target in batches:
        hook.evaluated("val", {"output": output, "target": target})
    return hook.after_evaluation("val", alone)


@pytest.mark.parametrize("shape", [(200,), (20, 7)])
def test_the_confusion_counts_equal_scikit_learns(shape):
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(*shape, 5, generator=draw)
    targets = torch.randint(0, 5, shape, generator=draw)
    ignored = torch.rand(shape, generator=draw) < 0.2
    given = targets.masked_fill(ignored, -100)
    given.view(-1)[0] = 5  # 5 is not a class
    ignored.view(-1)[0] = True
    hook = Confusion(num_classes=5)
    hook.setup(torch.nn.Linear(1, 1))
    for part in (slice(0, 13), slice(13, None)):
        hook.evaluated("val", {"output": scores[part], "target": given[part]})
    panel = hook.after_evaluation("val", alone)["confusion/val"]
    expected = confusion_matrix(targets[~ignored].numpy(), scores.argmax(-1)[~ignored].numpy(), labels=range(5))
    assert panel.counts.tolist() == expected.tolist()
    # Each stage and each evaluation starts with zero counts.
    hook.evaluated("test", {"output": scores, "target": targets})
    assert hook.after_evaluation("test", alone)["confusion/test"].counts.sum() == targets.numel()
    assert Confusion(num_classes=5, stages=["test"]).after_evaluation("val", alone) is None


@pytest.mark.parametrize(("outputs", "targets"), [((8,), (8, 1)), ((8, 1), (8,))])
def test_one_output_for_two_classes_has_a_threshold(outputs, targets):
    scores = torch.tensor([-2.0, -0.1, 0.1, 0.4, 0.6, 3.0, 0.0, 0.5])
    classes = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1])
    batch = scores.reshape(outputs), classes.reshape(targets).float()
    for threshold in (0.0, 0.5):
        counts = evaluated(Confusion, batch, num_classes=2, threshold=threshold)["confusion/val"].counts
        assert counts.tolist() == confusion_matrix(classes, (scores > threshold).long()).tolist()


def test_wrong_shapes_and_names_are_errors():
    with pytest.raises(
        RunError, match=r"output has shape \[2, 5, 3, 3\], and target \[2, 3, 3\].*expected \[2, 3, 3, 5\]"
    ):
        evaluated(Confusion, (torch.zeros(2, 5, 3, 3), torch.zeros(2, 3, 3)), num_classes=5)
    with pytest.raises(RunError, match=r"no tensor kind; expected one of output, target"):
        evaluated(Confusion, (torch.zeros(2, 5), torch.zeros(2)), num_classes=5, target="kind")


def test_a_tie_is_the_first_class():
    values = {"a": torch.zeros(2, 3, 4), "b": torch.ones(2, 3)}
    scores, classes = rows(values, output="a", target="b", num_classes=4, hook="confusion")
    assert scores.shape == (6, 4)
    assert classes.tolist() == [1] * 6
    assert predict_classes(scores, threshold=0.0).tolist() == [0] * 6


def corner(sheet: np.ndarray, classes: int) -> tuple[int, int, int]:
    """Return top, left and cell width of the table in a sheet, which ends 12 pixels below the table."""
    cell = max(1, min(30, 900 // classes))
    top = sheet.shape[0] - 12 - cell * classes
    # Gray lines separate wide cells, and the sheet may be wider than the table.
    is_line = (sheet[top] == 225).all(-1)
    return top, is_line.argmax() if is_line.any() else sheet.shape[1] - 12 - cell * classes, cell


@pytest.mark.parametrize("classes", [2, 41, 300])
def test_the_cells_show_shares_of_their_row(classes):
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 50, (classes, classes)) * (draw.random((classes, classes)) < 0.3)
    counts[0] = 0  # a class without samples
    counts += np.diag([0, *draw.integers(50, 5000, classes - 1)])
    sheet = matrix(counts, title="")
    assert sheet.dtype == np.uint8
    assert max(sheet.shape) < 1100
    top, left, cell = corner(sheet, classes)
    # This pixel of a cell has the background color: it is not on a line or a number.
    inside = min(1, cell - 1)
    cells = sheet[top + inside : top + cell * classes : cell, left + inside : left + cell * classes : cell] / 255
    assert cells.shape == (*counts.shape, 3)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # Correct predictions are blue, without red. Wrong predictions are red, without blue.
    seen = np.where(np.eye(classes, dtype=bool), 1 - cells[..., 0], 1 - cells[..., 2]) ** 2
    assert np.abs(seen - np.where(shares > 0, np.maximum(shares, 0.04), 0)).max() < 0.01


def test_large_cells_hold_short_numbers():
    numbers = {0: "0", 999: "999", 1000: "1.0k", 1249: "1.2k", 9_960: "10k", 45_300: "45k", 3_140_000: "3.1M"}
    assert {count: short(count) for count in numbers} == numbers
    for classes, has_numbers in ((40, True), (60, False)):
        sheet = matrix(np.eye(classes, dtype=int), title="")
        top, left, cell = corner(sheet, classes)
        first = sheet[top + 1 : top + cell, left + 1 : left + cell]
        assert (len(np.unique(first.reshape(-1, 3), axis=0)) > 1) == has_numbers
    image = Matrix(torch.tensor([[3, 1], [0, 4]])).draw()
    assert image.pixels.dtype == torch.uint8
    assert image.pixels.shape[:2] == (1, 3)


def test_classes_are_called_by_their_names():
    hook = Confusion(num_classes=2, target="kind")
    hook.attach(torch.nn.Linear(1, 1), class_names={"kind": ["disc", "bar"], "target": ["a", "b"]})
    hook.evaluated("val", {"output": torch.eye(2), "kind": torch.tensor([0, 0])})
    panel = hook.after_evaluation("val", alone)["confusion/val"]
    assert panel.names == ("disc", "bar")
    assert not torch.equal(panel.draw().pixels, replace(panel, names=()).draw().pixels)


def assert_curve(panel, probabilities: np.ndarray, positive: np.ndarray) -> None:
    """Assert that a panel has scikit-learn's precision and recall of `probabilities >= threshold` at each threshold."""
    true_positives, false_positives, true_negatives, false_negatives = panel.counts.double().numpy()
    for place, limit in enumerate(np.linspace(0, 1, THRESHOLDS, dtype=np.float32)):
        chosen = probabilities >= limit
        found = true_positives[place] + false_positives[place]
        precision = true_positives[place] / found if found else 1.0
        recall = true_positives[place] / (true_positives[place] + false_negatives[place])
        assert precision == pytest.approx(precision_score(positive, chosen, zero_division=1))
        assert recall == pytest.approx(recall_score(positive, chosen))
        assert true_negatives[place] == (~chosen & ~positive).sum()


def test_curves_of_each_class_equal_scikit_learns():
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (300,), generator=draw)
    scores = torch.randn(300, 4, generator=draw) + 2 * torch.nn.functional.one_hot(targets, 4)
    given = targets.clone()
    given[:20] = -100
    batches = [(scores[part], given[part]) for part in (slice(0, 128), slice(128, 256), slice(256, None))]
    found = evaluated(PRCurve, *batches, num_classes=4)
    assert list(found) == [f"pr_curve/val/{one}" for one in range(4)]
    probabilities = scores.softmax(-1).numpy()[20:]
    for one in range(4):
        assert_curve(found[f"pr_curve/val/{one}"], probabilities[:, one], (targets == one).numpy()[20:])


def test_curves_are_of_chosen_classes():
    batch = (torch.randn(9, 12), torch.arange(9))
    assert len(evaluated(PRCurve, batch, num_classes=12)) == 10
    assert list(evaluated(PRCurve, batch, num_classes=12, max_classes=2)) == ["pr_curve/val/0", "pr_curve/val/1"]
    draw = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 2, (100,), generator=draw)
    scores = torch.randn(100, 2, generator=draw)
    found = evaluated(PRCurve, (scores, targets), num_classes=2)["pr_curve/val"]
    assert_curve(found, scores.softmax(-1)[:, 1].numpy(), targets.bool().numpy())


@pytest.mark.parametrize("given", [False, True])
def test_one_output_is_a_score_or_a_probability(given):
    draw = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 2, (100,), generator=draw)
    scores = torch.randn(100, generator=draw) + targets
    batch = (scores.sigmoid() if given else scores)[:, None], targets
    found = evaluated(PRCurve, batch, num_classes=2, probabilities=given)["pr_curve/val"]
    assert_curve(found, scores.sigmoid().numpy(), (targets == 1).numpy())


def test_a_score_of_nan_reaches_no_threshold(monkeypatch):
    monkeypatch.setattr("exp.extras.evaluation.pr_curve.THRESHOLDS", 3)
    shares = torch.tensor([[float("nan")], [0.0], [0.5], [1.0]])
    positive = torch.ones(4, 1, dtype=torch.bool)
    found = cases(count_reached(shares, positive, counted=torch.ones(4, dtype=torch.bool)))
    assert found[0, 0].tolist() == [3, 2, 1]
    assert found[0, 3].tolist() == [1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Confusion, PRCurve])
def test_counting_on_a_gpu_does_not_synchronize(kind, without_waiting):
    hook = kind(num_classes=5)
    hook.setup(torch.nn.Linear(1, 1).cuda())
    values = {"output": torch.randn(64, 5).cuda(), "target": torch.randint(0, 5, (64,)).cuda()}
    hook.evaluated("val", values)
    with without_waiting():
        hook.evaluated("val", values)
    panel = next(iter(hook.after_evaluation("val", alone).values()))
    assert (panel.counts.sum() if kind is Confusion else panel.counts[:, 0].sum()) == 128
