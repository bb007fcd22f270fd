"""Products of stacked matrices have the bits of each one's own, and torch's rules are back behind them."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional

from exp.sweeps.stacked_products import exact_products

pytestmark = pytest.mark.numeric
MEMBERS = 5
# Few results, which a library multiplies otherwise in a batch, and long rows, which it sums in parts.
SIZES = [
    (64, 64, 256),
    (64, 256, 128),
    (42, 128, 10),
    (64, 13, 3),
    (3, 30, 2),
    (1, 512, 512),
    (180, 30, 1),
    (7, 5, 2),
    (42, 255, 10),
    (64, 255, 2),
    (3, 30, 256),
]


def loss(weight, bias, inputs):
    return functional.linear(inputs, weight, bias).square().sum()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("batch", "inputs", "outputs"), SIZES)
def test_a_linear_layer_and_its_gradients_are_bit_for_bit_those_of_each_member(batch, inputs, outputs, is_shared):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(MEMBERS, outputs, inputs, generator=random)
    bias = torch.randn(MEMBERS, outputs, generator=random)
    data = torch.randn(MEMBERS, batch, inputs, generator=random)
    data = data[0] if is_shared else data
    axes = (0, 0, None if is_shared else 0)
    with exact_products():
        values = vmap(lambda w, b, x: functional.linear(x, w, b), axes)(weight, bias, data)
        gradients = vmap(grad(loss, argnums=(0, 1, 2)), axes)(weight, bias, data)
    for place in range(MEMBERS):
        own = [one.clone().requires_grad_() for one in (weight[place], bias[place], data if is_shared else data[place])]
        assert torch.equal(values[place], functional.linear(own[2], own[0], own[1]))
        loss(*own).backward()
        for stacked, one in zip(gradients, own, strict=True):
            assert torch.equal(stacked[place], one.grad)


def test_levels_of_vmap_factors_that_are_alike_and_factors_of_addmm_are_as_torch_has_them():
    random = torch.Generator().manual_seed(0)
    first = torch.randn(4, 3, 30, 40, generator=random, dtype=torch.float64)
    second = torch.randn(3, 40, 20, generator=random, dtype=torch.float64)
    bias = torch.randn(4, 30, 20, generator=random, dtype=torch.float64)

    def scaled(b, a, c):
        return torch.addmm(b, a, c, beta=0.5, alpha=3)

    nested = vmap(vmap(scaled, (None, 0, 0)), (0, 0, None))
    within = vmap(lambda a: a.sum() + torch.mm(second[0].T, second[1]))  # of neither factor is there one a member
    expected = nested(bias, first, second), within(first)
    with exact_products():
        found = nested(bias, first, second), within(first)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_torchs_own_rules_are_back_behind_it(monkeypatch):
    called = []
    monkeypatch.setattr(torch, "baddbmm", lambda *arguments, **named: called.append(1) or torch.zeros(2, 32, 32))
    tensors = torch.ones(2, 32), torch.ones(2, 32, 32), torch.ones(2, 32, 32)
    with exact_products():
        vmap(torch.addmm)(*tensors)
    assert called == [1]
    vmap(torch.addmm)(*tensors)
    assert called == [1]
