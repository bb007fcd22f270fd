"""The confusion matrix: counts as scikit-learn's, drawn so that they can be read back, over ranks as in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from exp.errors import RunError
from exp.hooks.class_counts import predicted, rows
from exp.hooks.confusion import Confusion, Matrix
from exp.hooks.figures import matrix, short


def alone(tensor):
    return tensor[None]


def hook(**settings) -> Confusion:
    found = Confusion(**settings)
    found.setup(torch.nn.Linear(1, 1))
    return found


@pytest.mark.parametrize("shape", [(200,), (20, 7)])
def test_counts_are_those_of_scikit_learn_and_what_is_no_class_does_not_count(shape):
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(*shape, 5, generator=draw)
    targets = torch.randint(0, 5, shape, generator=draw)
    ignored = torch.rand(shape, generator=draw) < 0.2
    given = targets.masked_fill(ignored, -100)
    given.view(-1)[0] = 5
    ignored.view(-1)[0] = True
    found = hook(num_classes=5)
    for part in (slice(0, 13), slice(13, None)):
        found.evaluated("val", {"output": scores[part], "target": given[part]})
    panel = found.after_evaluation("val", alone)["confusion/val"]
    expected = confusion_matrix(targets[~ignored].numpy(), scores.argmax(-1)[~ignored].numpy(), labels=range(5))
    assert panel.counts.tolist() == expected.tolist()
    # The next evaluation begins anew, and one of another stage is none of its own.
    found.evaluated("test", {"output": scores, "target": targets})
    assert found.after_evaluation("test", alone)["confusion/test"].counts.sum() == targets.numel()
    assert hook(num_classes=5, stages=["test"]).after_evaluation("val", alone) is None


@pytest.mark.parametrize(("outputs", "targets"), [((8,), (8,)), ((8, 1), (8,)), ((8,), (8, 1)), ((8, 1), (8, 1))])
def test_one_output_for_two_classes_is_cut_at_the_threshold(outputs, targets):
    scores = torch.tensor([-2.0, -0.1, 0.1, 0.4, 0.6, 3.0, 0.0, 0.5])
    classes = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1])
    for threshold in (0.0, 0.5):
        found = hook(num_classes=2, threshold=threshold)
        found.evaluated("val", {"output": scores.reshape(outputs), "target": classes.reshape(targets).float()})
        counts = found.after_evaluation("val", alone)["confusion/val"].counts
        assert counts.tolist() == confusion_matrix(classes, (scores > threshold).long()).tolist()


def test_classes_on_another_axis_and_names_that_are_not_there_are_told():
    with pytest.raises(RunError, match=r"output is \[2, 5, 3, 3\], target \[2, 3, 3\].*must be \[2, 3, 3, 5\]"):
        hook(num_classes=5).evaluated("val", {"output": torch.zeros(2, 5, 3, 3), "target": torch.zeros(2, 3, 3)})
    with pytest.raises(RunError, match=r"there is no kind; .* there are output, target"):
        hook(num_classes=5, target="kind").evaluated("val", {"output": torch.zeros(2, 5), "target": torch.zeros(2)})


def test_a_tie_and_a_text_are_read_as_the_metrics_read_them():
    scores, classes = rows(
        {"a": torch.zeros(2, 3, 4), "b": torch.ones(2, 3)}, output="a", target="b", num_classes=4, hook="confusion"
    )
    assert scores.shape == (6, 4)
    assert classes.tolist() == [1] * 6
    assert predicted(scores, threshold=0.0).tolist() == [0] * 6


def corner(sheet: np.ndarray, classes: int) -> tuple[int, int, int]:
    """Top and left of the table, and the width of a cell: the sheet ends 12 pixels below the table."""
    cell = max(1, min(30, 900 // classes))
    top = sheet.shape[0] - 12 - cell * classes
    # Lines of this grey part the cells where they are wide enough, and the sheet may be wider than the table.
    is_line = (sheet[top] == 225).all(-1)
    return top, is_line.argmax() if is_line.any() else sheet.shape[1] - 12 - cell * classes, cell


@pytest.mark.parametrize("classes", [2, 10, 41, 100, 300])
def test_cells_of_the_picture_are_read_back_as_shares_of_their_row(classes):
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 50, (classes, classes)) * (draw.random((classes, classes)) < 0.3)
    counts[0] = 0  # a class that has no sample
    counts += np.diag([0, *draw.integers(50, 5000, classes - 1)])
    sheet = matrix(counts, normalised=False, title="")
    assert sheet.dtype == np.uint8
    assert sheet.shape[2] == 3
    assert max(sheet.shape) < 1100
    top, left, cell = corner(sheet, classes)
    # Beside the figure and the line: a cell's second pixel from its upper left.
    inside = min(1, cell - 1)
    cells = sheet[top + inside : top + cell * classes : cell, left + inside : left + cell * classes : cell].astype(
        float
    )
    assert cells.shape[:2] == counts.shape
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # Blue takes its red away, red its blue: of 255 of white, all at a share of 1.
    hits, misses = 1 - cells[..., 0] / 255, 1 - cells[..., 2] / 255
    seen = np.where(np.eye(classes, dtype=bool), hits, misses) ** 2
    expected = np.where(shares > 0, np.maximum(shares, 0.04), 0)
    assert np.abs(seen - expected).max() < 0.01


def test_figures_are_short_and_there_only_where_a_cell_has_room():
    assert [short(count) for count in (0, 7, 999, 1000, 1249, 9_949, 9_960, 45_300, 3_140_000)] == [
        "0", "7", "999", "1.0k", "1.2k", "9.9k", "10k", "45k", "3.1M",
    ]  # fmt: skip
    for classes, has_figures in ((40, True), (60, False)):
        sheet = matrix(np.eye(classes, dtype=int), normalised=True, title="")
        top, left, cell = corner(sheet, classes)
        first = sheet[top + 1 : top + cell, left + 1 : left + cell]
        assert (len(np.unique(first.reshape(-1, 3), axis=0)) > 1) == has_figures


def test_the_picture_says_how_many_samples_and_waits_as_counts():
    panel = Matrix(torch.tensor([[3, 1], [0, 4]]), True)
    image = panel.drawn()
    assert image.pixels.dtype == torch.uint8
    assert image.pixels.shape[:2] == (1, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU runs ahead of its host")
def test_on_a_gpu_counting_waits_for_nothing():
    found = hook(num_classes=5)
    found.setup(torch.nn.Linear(1, 1).cuda())
    values = {"output": torch.randn(64, 5).cuda(), "target": torch.randint(0, 5, (64,)).cuda()}
    found.evaluated("val", values)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found.evaluated("val", values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.after_evaluation("val", alone)["confusion/val"].counts.sum() == 128
