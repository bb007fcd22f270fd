"""DirectStep, a fused step without the optimizer's bookkeeping, equals the optimizer's step bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from exp.optim.direct_step import DirectStep, DirectSteps, is_known

pytestmark = pytest.mark.numeric

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 1))


def grouped(module: nn.Module) -> list[dict]:
    return [
        {"params": module[0].parameters()},
        {"params": [*module[2].parameters(), *module[3].parameters()], "lr": 0.05},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_direct_step_equals_the_optimizers_step(name, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        compare_steps(name)
    finally:
        torch.set_default_dtype(before)


def compare_steps(name):
    kind, options = OPTIMIZERS[name]
    usual, direct = network(), network()
    first, second = (kind(grouped(module), fused=True, **options) for module in (usual, direct))
    schedules = [StepLR(optimizer, step_size=3, gamma=0.5) for optimizer in (first, second)]
    step = DirectStep(second)
    generator = torch.Generator().manual_seed(1)
    for number in range(12):
        inputs = torch.randn(16, 4, generator=generator)
        for module, make in ((usual, first.step), (direct, step)):
            module.zero_grad()
            if number in (2, 7):  # in these steps the last layer has no gradient
                module[:3](inputs).square().mean().backward()
            else:
                module(inputs).square().mean().backward()
            make()
        for schedule in schedules:
            schedule.step()
        if number == 5:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        if number == 9:
            first.param_groups[0]["weight_decay"] = second.param_groups[0]["weight_decay"] = 0.3
        assert all(torch.equal(a, b) for a, b in zip(usual.parameters(), direct.parameters(), strict=True))
    for a, b in zip(first.state_dict()["state"].values(), second.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a if a[key] is not None)


def test_only_observed_steps_go_through_the_optimizer():
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    calls = []
    step = DirectStep(optimizer)

    def train(count):
        for _ in range(count):
            module.zero_grad()
            module(torch.ones(2, 4)).sum().backward()
            step()

    with pytest.MonkeyPatch.context() as patch:
        inner = torch.optim.AdamW.step
        patch.setattr(torch.optim.AdamW, "step", lambda self, *args: calls.append(1) or inner(self, *args))
        train(4)
        assert len(calls) == 1
        handle = optimizer.register_step_post_hook(lambda *_: None)
        train(3)
        assert len(calls) == 4
        handle.remove()
        train(2)
        assert len(calls) == 4
        step = DirectStep(optimizer)  # as the loop does after each epoch
        train(2)
        assert len(calls) == 4


class Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Own(p, fused=True),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, fused=True),
        lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": [p[2], nn.Parameter(p[3].double())]}], fused=True),
    ],
    ids=["subclass", "not_fused", "amsgrad", "another", "two_dtypes"],
)
def test_unknown_optimizers_step_by_themselves(make):
    optimizer = make(list(network().parameters()))
    assert not is_known(optimizer)
    before = [parameter.clone() for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    DirectStep(optimizer)()
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_steps_of_several_optimizers_stay_separate():
    kinds = [*OPTIMIZERS.values(), (torch.optim.RMSprop, {"lr": 0.01})]
    pairs = []
    for kind, options in kinds:
        fused = {} if kind is torch.optim.RMSprop else {"fused": True}
        modules = network(), network()
        pairs.append((modules, [kind(grouped(module), **fused, **options) for module in modules]))
    # The order of the parameters differs from that of the groups.
    parameters = [list(reversed([*modules[1].parameters()])) for modules, _ in pairs]
    steps = DirectSteps([optimizers[1] for _, optimizers in pairs], parameters)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        inputs, gradients = torch.randn(16, 4, generator=generator), []
        for (usual, direct), (first, _) in pairs:
            usual.zero_grad()
            usual(inputs).square().mean().backward()
            first.step()
            loss = direct(inputs).square().mean()
            gradients.append(torch.autograd.grad(loss, list(reversed([*direct.parameters()]))))
        steps(gradients)
        for (usual, direct), (first, second) in pairs:
            assert all(torch.equal(a, b) for a, b in zip(usual.parameters(), direct.parameters(), strict=True))
            for a, b in zip(first.state_dict()["state"].values(), second.state_dict()["state"].values(), strict=True):
                assert all(torch.equal(a[key], b[key]) for key in a if a[key] is not None)
