"""FLOPs counted on the meta device equal formulas, and equal the count of the same operators on the CPU."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import exp
from exp.check.resolution import resolve
from exp.check.step_flops import flops_of_a_sample
from exp.construct import build_data, build_network, build_objective, build_phases
from exp.hooks.utilisation import arithmetic, listed_peak, measured_peak
from exp.models.flop_count import count_flops
from exp.objectives.objective import Objective


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parts_of(*overrides: str):
    settings = resolve(exp.compose(list(overrides))).settings
    data = build_data(settings)
    batch = next(iter(data.loader("train", rank=0, world_size=1))).data
    return settings, data.spec, batch


def counting(*overrides: str):
    settings, spec, batch = parts_of(*overrides)
    return functools.partial(
        flops_of_a_sample,
        batch,
        network=build_network(settings, spec, device="meta"),
        objective=build_objective(settings),
        phases=build_phases(settings),
    )


def count(*overrides: str):
    return counting(*overrides)()


def test_a_gpt_equals_the_formula_of_palm(text):
    """The formula of Chowdhery et al. 2022, appendix B, is 6 N + 12 L H Q T per token, where H Q is the width."""
    run = [*text, "model.constants.width=96", "data.batch_size=3"]
    settings, spec, _ = parts_of(*run)
    network = build_network(settings, spec)
    multiplying = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear))
    layers, width, length = 2, settings.model["constants"]["width"], spec.input_shape[0]
    found = count(*run)
    assert found.total == length * (6 * multiplying + 12 * layers * width * length)
    assert found.backward == 2 * found.forward
    assert not found.is_estimated


def test_a_lenet_equals_a_count_by_hand():
    convolutions = 2 * (8 * 8 * 6 * 25 * 1 + 4 * 4 * 16 * 25 * 6)
    linears = 2 * (64 * 120 + 120 * 84 + 84 * 10)
    found = count("model=lenet")
    assert found.forward == convolutions + linears
    # The backward has twice the FLOPs of the forward, minus those of the gradient with respect to the pictures.
    assert found.backward == 2 * (convolutions + linears) - 2 * 8 * 8 * 6 * 25


@pytest.mark.parametrize(
    "model", ["resnet", *(pytest.param(one, marks=pytest.mark.slow) for one in ("rnn", "parameter_list"))]
)
def test_the_count_equals_one_with_numbers(model):
    settings, spec, batch = parts_of(f"model={model}", "data.batch_size=16")
    network = build_network(settings, spec)
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        # torch warns about a missing device when oneDNN's recurrent layers are switched off.
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            functional.cross_entropy(network(batch[0]), batch[1]).backward()
    assert count(f"model={model}", "data.batch_size=16").total * 16 == counter.get_total_flops()


def test_attention_counts_two_products_and_four_backward():
    heads, length, size = 3, 10, 8
    q, k, v = (torch.empty(2, heads, length, size, device="meta", requires_grad=True) for _ in range(3))
    output, forward = count_flops(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    _, backward = count_flops(output.sum().backward)
    assert forward.total() == 2 * heads * 2 * (2 * length * length * size)
    assert backward.total() == 2 * forward.total()


def test_products_with_vectors_count():
    matrix, vector = torch.empty(3, 5, device="meta"), torch.empty(5, device="meta")
    assert count_flops(lambda: matrix @ vector)[1].total() == 2 * 3 * 5
    assert count_flops(lambda: vector @ vector)[1].total() == 2 * 5
    assert count_flops(lambda: functional.linear(vector, matrix, torch.empty(3, device="meta")))[1].total() == 2 * 3 * 5


def test_extra_passes_of_terms_count():
    plain = count("objective=[cross_entropy]")
    assert count("+objective=consistency").forward == 2 * plain.forward
    # The penalty on the Jacobian adds gradients with respect to the inputs, and the gradients of these gradients.
    assert count("+objective=jacobian").total > plain.total + plain.backward


def test_a_phase_counts_for_each_repeat():
    first = next(iter(exp.compose(["experiment=gan"]).phases))
    once = count("experiment=gan")
    twice = count("experiment=gan", f"++phases.{first}.repeats=2")
    half = count("experiment=gan", f"++phases.{first}.every_n_steps=2")
    assert twice.total - once.total == pytest.approx(2 * (once.total - half.total))
    assert half.total < once.total < twice.total


def test_counting_draws_no_random_numbers():
    counted_later = counting("model=lenet")  # building the first network of a process draws random numbers
    before = torch.get_rng_state()
    counted_later()
    assert torch.equal(torch.get_rng_state(), before)


class Stubborn(torch.autograd.Function):
    """Function that fails in its backward on the meta device."""

    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


class StubbornNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return Stubborn.apply(self.linear(x))


def test_an_uncountable_backward_is_twice_the_forward():
    found = flops_of_a_sample(
        (torch.zeros(5, 6), torch.zeros(5, dtype=torch.long)),
        network=StubbornNet().to("meta"),
        objective=Objective({"ce": nn.CrossEntropyLoss()}),
    )
    assert found.is_estimated
    assert (found.forward, found.backward) == (2 * 6 * 4, 2 * 2 * 6 * 4)
    assert found.by_operator == {"addmm": 3 * 2 * 6 * 4}


# Peak in teraflops; None for an unlisted variant of a card, or for a precision that the card does not support.
PEAKS = {
    ("NVIDIA H200", "bf16"): 989.5,
    ("NVIDIA H100 80GB HBM3", "fp16_true"): 989.5,
    ("NVIDIA H100 PCIe", "fp8"): 1513,
    ("NVIDIA A100-SXM4-80GB", "bf16_true"): 312,
    ("NVIDIA A100 80GB PCIe", "tf32"): 156,
    ("Tesla V100-SXM2-16GB", "fp16"): 125,
    ("Tesla T4", "fp32"): 8.1,
    ("NVIDIA GeForce RTX 4090", "bf16"): 165.2,
    ("NVIDIA B200", "fp8"): 4500,
    ("NVIDIA H20", "bf16"): None,
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"): None,
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"): None,
    ("NVIDIA GeForce RTX 3090 Ti", "bf16"): None,
    ("NVIDIA L40", "bf16"): None,
    ("Tesla T4", "bf16"): None,
    ("NVIDIA A100-SXM4-80GB", "fp8"): None,
}


@pytest.mark.parametrize(("name", "word"), PEAKS)
def test_peaks_are_listed_by_card_and_precision(name, word):
    tera = PEAKS[name, word]
    assert listed_peak(name, word) == (None if tera is None else tera * 1e12)


def test_float32_is_tf32_if_torch_may_use_it(monkeypatch):
    assert arithmetic("fp32") == "fp32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert arithmetic("fp32") == "tf32"
    assert listed_peak("NVIDIA H200", "fp32") == 494.5e12


def test_a_measured_peak_draws_no_random_numbers():
    before = torch.get_rng_state()
    peak = measured_peak(torch.device("cpu"), "fp32", seconds=0.001)
    assert peak is not None
    assert 1e8 < peak < 1e15
    assert torch.equal(torch.get_rng_state(), before)
    assert measured_peak(torch.device("cpu"), "fp8") is None
