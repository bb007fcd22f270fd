"""Tests of loss terms and their sum: formulas in float64, precision under autocast, and errors about shapes."""

# ruff: noqa: E501   whole messages are compared

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from exp.errors import ConfigError, RunError
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL, BCEWithLogits, CrossEntropy

pytestmark = pytest.mark.numeric

CLASSES = 5


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def cross_entropy_by_hand(
    scores: Tensor, target: Tensor, *, smoothing: float, weights: list[float] | None, ignored: int
) -> float:
    log_p = log_softmax(scores.double().numpy().reshape(-1, CLASSES))
    factor = np.ones(CLASSES) if weights is None else np.array(weights)
    total = norm = 0.0
    for row, label in zip(log_p, target.numpy().reshape(-1), strict=True):
        if label == ignored:
            continue
        total -= (1 - smoothing) * factor[label] * row[label] + smoothing / CLASSES * (factor * row).sum()
        norm += factor[label]
    return total / norm


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(
    ("smoothing", "weights", "ignored"),
    [(0.0, None, -100), (0.1, None, -100), (0.0, [1.0, 2.0, 0.5, 3.0, 1.0], -100), (0.2, [2.0, 1, 1, 1, 0.1], 2)],
)
def test_cross_entropy_follows_its_formula(
    shape: tuple[int, ...], smoothing: float, weights: list[float] | None, ignored: int
) -> None:
    scores, target = sample(*shape, CLASSES), classes(*shape)
    loss = CrossEntropy(label_smoothing=smoothing, class_weights=weights, ignore_index=ignored)
    expected = cross_entropy_by_hand(scores, target, smoothing=smoothing, weights=weights, ignored=ignored)
    assert loss(scores, target).item() == pytest.approx(expected, rel=1e-5)


def test_nll_of_log_probabilities_is_cross_entropy() -> None:
    scores, target = sample(3, 4, CLASSES), classes(3, 4)
    expected = cross_entropy_by_hand(scores, target, smoothing=0.0, weights=[1.0, 2, 3, 4, 5], ignored=0)
    loss = NLL(class_weights=[1.0, 2, 3, 4, 5], ignore_index=0)
    assert loss(scores.log_softmax(-1), target).item() == pytest.approx(expected, rel=1e-5)


def test_weighted_bce_follows_its_formula() -> None:
    output, target = sample(6, 2), torch.rand(6, 2, generator=torch.Generator().manual_seed(2))
    total, _ = Objective({"term": BCEWithLogits(pos_weight=[3.0, 0.5])})({"output": output, "target": target})
    x, y = output.double().numpy(), target.double().numpy()
    p = 1 / (1 + np.exp(-x))
    expected = -(np.array([3.0, 0.5]) * y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    assert total.item() == pytest.approx(expected, rel=1e-5)


def test_bce_of_probabilities_runs_under_autocast() -> None:
    x, y = torch.rand(6, 2), torch.rand(6, 2)
    expected = -(y.double() * x.double().log() + (1 - y.double()) * (1 - x.double()).log()).mean().item()
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            total, _ = Objective({"bce": nn.BCELoss()})({"output": x, "target": y})
        assert total.item() == pytest.approx(expected, rel=1e-5)


def test_the_total_is_the_weighted_sum_of_the_terms() -> None:
    values = {"input": sample(4, 3), "output": sample(4, CLASSES).requires_grad_(), "target": classes(4)}
    values["reconstruction"] = sample(4, 3, seed=8)
    copied = Term(loss=nn.MSELoss(), output="reconstruction", target="input", weight=2.0)
    total, parts = Objective({"cross_entropy": CrossEntropy(), "copy": copied})(values)
    assert list(parts) == ["cross_entropy", "copy"]
    torch.testing.assert_close(parts["copy"], (values["reconstruction"] - values["input"]).pow(2).mean())
    torch.testing.assert_close(total, parts["cross_entropy"] + 2.0 * parts["copy"])
    assert total.requires_grad
    assert not any(part.requires_grad for part in parts.values())
    assert total.shape == parts["copy"].shape == ()
    values = {name: value.double() for name, value in values.items() if name in ("input", "reconstruction")}
    assert Objective({"copy": copied})(values)[0].dtype == torch.float64


@pytest.mark.parametrize("loss", [nn.MSELoss(), CrossEntropy(), CrossEntropy(class_weights=[1.0, 2.0])], ids=str)
def test_the_divisor_of_a_torch_loss_reads_only_the_target(loss: nn.Module) -> None:
    class Recorded(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    read: list[str] = []
    assert Term(loss=loss).divisor(Recorded(output=torch.zeros(3, 2).bfloat16(), target=torch.ones(3).long()))
    assert read == ["target"]


def test_unknown_values_are_reported() -> None:
    term = Term(loss=nn.MSELoss(), output="reconstructoin")
    with pytest.raises(RunError) as caught:
        Objective({"copy": term})({"output": sample(1), "target": sample(1), "reconstruction": sample(1)})
    assert str(caught.value) == (
        "the output of a term is 'reconstructoin', a name that neither network nor batch returns. Known names: output, "
        "reconstruction, target. Did you mean reconstruction?"
    )
    objective = Objective({"mse": nn.MSELoss()})
    with pytest.raises(RunError, match=r"neither network nor batch returns\. Known names: mean, variance"):
        objective({"output": {"mean": sample(1), "variance": sample(1)}, "target": sample(1)})
    with pytest.raises(RunError, match="the target of a term must be a tensor, but 'target' is a list"):
        objective({"output": sample(1), "target": [1.0]})


def test_terms_have_any_name_and_no_state() -> None:
    objective = Objective({"update": BCEWithLogits(pos_weight=[2.0]), "type": nn.L1Loss()})
    values = {"output": torch.zeros(3, 1), "target": torch.ones(3, 1)}
    total, parts = objective(values)
    assert list(parts) == ["update", "type"]
    other = copy.deepcopy(objective)
    other.to(torch.float64)
    other.terms["update"].loss.pos_weight.fill_(5.0)
    assert torch.equal(objective(values)[0], total), "the copy shares its weights"
    assert other(values)[0] > total
    objective = Objective({"cross_entropy": CrossEntropy(class_weights=[1.0] * CLASSES)})
    assert objective.state_dict() == {}
    assert objective.to("meta").terms["cross_entropy"].loss.class_weights.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_outputs_use_float32(dtype: torch.dtype) -> None:
    scores, target = sample(64, CLASSES).to(dtype), classes(64)
    objective = Objective({"a": CrossEntropy(), "b": Term(loss=CrossEntropy(label_smoothing=0.5), weight=3.0)})
    with torch.autocast("cpu", dtype=dtype):
        total, parts = objective({"output": scores, "target": target})
    assert {total.dtype, *(part.dtype for part in parts.values())} == {torch.float32}
    reference, _ = objective({"output": scores.float(), "target": target})
    assert torch.equal(total, reference)


shapes = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)
ELEMENTWISE = [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss(), BCEWithLogits()]


@given(output=shapes, target=shapes, loss=st.sampled_from(ELEMENTWISE))
def test_elementwise_losses_need_equal_shapes(
    output: tuple[int, ...], target: tuple[int, ...], loss: nn.Module
) -> None:
    values = {"output": torch.zeros(output), "target": torch.zeros(target)}
    if output == target:
        assert Objective({"term": loss})(values)[0].shape == ()
    else:
        with pytest.raises(RunError, match="needs equal shapes"):
            Objective({"term": loss})(values)


@given(output=shapes, target=shapes)
def test_classes_are_on_the_last_axis(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    values = {"output": torch.zeros(output), "target": torch.zeros(target, dtype=torch.int64)}
    if len(output) > 1 and output[:-1] == target:
        assert Objective({"term": CrossEntropy()})(values)[0].shape == ()
    else:
        with pytest.raises(RunError, match="needs a target of shape"):
            Objective({"term": CrossEntropy()})(values)


@pytest.mark.parametrize(
    ("loss", "output", "target", "message"),
    [
        (nn.MSELoss(), (8, 1), (8,), "MSELoss needs equal shapes, but the output has the shape [8, 1] and the target has the shape [8]. End the model with {_target_: torch.nn.Flatten, start_dim: 0}"),
        (nn.L1Loss(), (8, 3), (8, 2), "Change the model's last layer to 2 outputs per sample"),
        (CrossEntropy(), (8, 5), (8, 1), "needs a target of shape [8] for outputs of shape [8, 5], but the target has the shape [8, 1]. Remove the target's last axis, which has length 1"),
        (CrossEntropy(), (8, 5, 7), (8, 7), "The classes seem to be on axis 1. Move this axis to the end with x.movedim(1, -1)"),
        (CrossEntropy(), (8, 7, 5), (8,), "Average them (x.mean(1)), or select one (x[:, -1])"),
    ],
)  # fmt: skip
def test_errors_of_shapes_name_a_fix(
    loss: nn.Module, output: tuple[int, ...], target: tuple[int, ...], message: str
) -> None:
    numbers = torch.zeros(target, dtype=torch.int64 if isinstance(loss, CrossEntropy) else torch.float32)
    with pytest.raises(RunError) as caught:
        Objective({"term": loss})({"output": torch.zeros(output), "target": numbers})
    assert message in str(caught.value)


def test_wrong_targets_and_losses_are_refused() -> None:
    with pytest.raises(
        RunError, match=r"CrossEntropy needs class numbers \(int64\), but the target has the dtype float32"
    ):
        Objective({"term": CrossEntropy()})({"output": torch.zeros(4, 3), "target": torch.zeros(4)})
    with pytest.raises(RunError, match=r"For class numbers, write objective=\[cross_entropy\]"):
        Objective({"term": nn.MSELoss()})({"output": torch.zeros(4, 3), "target": torch.zeros(4, dtype=torch.int64)})
    # Integers are valid targets of an elementwise loss.
    answers = torch.tensor([0, 1, 1])
    total, _ = Objective({"term": nn.BCEWithLogitsLoss()})({"output": torch.zeros(3), "target": answers})
    assert total.item() == pytest.approx(np.log(2), rel=1e-6)
    with pytest.raises(RunError, match=r"PairwiseDistance returns a tensor of shape \[4\]; expected one number"):
        Objective({"term": nn.PairwiseDistance()})({"output": torch.zeros(4, 2), "target": torch.zeros(4, 2)})
    with pytest.raises(RunError, match="the objective has no terms"):
        Objective({})
    for loss in (nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none")):
        with pytest.raises(ConfigError, match=rf"objective\.a\.reduction: .*has reduction '{loss.reduction}'"):
            Objective({"a": loss})
    with pytest.raises(
        ConfigError, match=r"objective\.a\.loss\.reduction: .*To scale the term, set objective\.a\.weight"
    ):
        Objective({"a": Term(loss=nn.MSELoss(reduction="sum"))})
    Objective({"a": nn.KLDivLoss(reduction="batchmean")})


def test_targets_of_minus_100_are_not_ignored_by_default() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        CrossEntropy()(sample(2, CLASSES), torch.tensor([1, -100]))
    CrossEntropy(ignore_index=-100)(sample(2, CLASSES), torch.tensor([1, -100]))
