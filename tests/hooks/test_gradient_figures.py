"""The hooks gradients, retain_gradients and per_sample_gradients equal a loop by hand in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from exp.extras.research.per_sample_gradients import NoiseScale
from exp.extras.research.retain_gradients import RetainGradients

pytestmark = pytest.mark.numeric

STEPS = 2
RUN = [
    *("model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12", "data.batch_size=13"),
    *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0", "optimizer.weight_decay=0"),
    *("hooks.gradients.each_parameter=true", f"trainer.max_steps={STEPS}"),
]
HOOKS = ["retain_gradients", "per_sample_gradients"]
OPTIONS = ["hooks.retain_gradients.each_module=true", "hooks.per_sample_gradients.chunk_size=5"]
FP16 = ["precision=fp16", "precision.scaler.init_scale=65536.0"]


def by_hand(network: nn.Module, batches: Any, micro: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the values of each step by tag, and the gradients of all module outputs in the first step."""
    parameters = dict(network.named_parameters())
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, output: torch.Tensor) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:  # the output of flatten needs no gradient
            output.retain_grad()
            outputs.setdefault(name, []).append(output)

    for name, module in network.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: keep(name or "network", output))
    found, first = [], {}
    for _ in range(STEPS):
        network.zero_grad()
        window = [next(batches).data for _ in range(micro)]
        rows = []
        for inputs, target in window:
            for one, label in zip(inputs.double(), target, strict=True):
                own = torch.autograd.grad(cross_entropy(network(one[None]), label[None]), list(parameters.values()))
                rows.append(torch.cat([each.flatten() for each in own]))
        outputs.clear()
        for inputs, target in window:
            (cross_entropy(network(inputs.double()), target) / micro).backward()
        values = {f"gradients/norm/{name}": one.grad.norm().item() for name, one in parameters.items()}
        values["gradients/norm/total"] = math.hypot(*values.values())
        gradients = {name: torch.cat([one.grad.flatten() for one in several]) for name, several in outputs.items()}
        values |= {f"gradients/output_norm/{name}": one.norm().item() for name, one in gradients.items()}
        values |= noise(rows, values["gradients/norm/total"] ** 2)
        first = first or gradients
        found.append(values)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter -= 0.1 * parameter.grad
    return found, first


def noise(rows: list[torch.Tensor], whole: float) -> dict[str, float]:
    """Return the figures of McCandlish et al. (2018) for one step; `whole` is the squared norm of the mean gradient."""
    norms = [row.norm().item() for row in rows]
    count = len(rows)
    small = sum(norm**2 for norm in norms) / count
    squared_norm, trace = (count * whole - small) / (count - 1), (small - whole) / (1 - 1 / count)
    figures = {
        "norm_mean": sum(norms) / count,
        "norm_max": max(norms),
        "squared_norm": squared_norm,
        "covariance_trace": trace,
        "noise_scale": trace / squared_norm if squared_norm > 0 else math.nan,
    }
    return {f"per_sample_gradients/{name}": value for name, value in figures.items()}


def assert_values(found: dict[str, dict[int, float]], expected: list[dict[str, float]], tolerance: float) -> None:
    compared = [tag for tag in found if tag.startswith(("gradients/norm/", "gradients/output_norm/", "per_sample"))]
    assert compared
    for tag in compared:
        # The noise scale is a running mean over steps, so only its first value is compared.
        for step in found[tag] if tag.startswith("gradients/") else [1]:
            value = expected[step - 1][tag]
            assert found[tag][step] == pytest.approx(value, rel=tolerance, nan_ok=True), (tag, step)


def test_figures_under_a_loss_scale_are_true(fit, reference) -> None:
    run = [*RUN, f"hooks=[gradients,{','.join(HOOKS)}]", *OPTIONS, "trainer.accumulate_grad_batches=2"]
    expected, outputs = by_hand(*reference(*run), 2)
    trained = fit(*run, *FP16, "hooks.retain_gradients.every_n_steps=2")
    values = trained.values
    assert set(values["precision/loss_scale"].values()) == {65536.0}
    assert {tag for tag in expected[0] if tag not in values} == set()
    assert set(values["gradients/norm/total"]) == set(values["gradients/output_norm/head"]) == {1, 2}
    assert outputs.keys() == {"network", "hidden", "activation", "hidden2", "activation2", "head"}
    assert_values(values, expected, 1e-2)


# Two ranks have 7 and 6 of the 13 samples of a batch.
TWO = ["launch.devices=2", "launch.accelerator=cpu"]
KINDS: dict[str, tuple[list[str], list[str], int, float]] = {
    "ddp, fp16": (["strategy=ddp", *TWO, *FP16, "optimizer.fused=true"], HOOKS, 2, 1e-2),
    "fsdp": (["strategy=fsdp", *TWO], ["retain_gradients"], 2, 1e-5),
    "fp64": (["precision=fp64"], HOOKS, 1, 1e-9),
    "compiled": (["runtime.compile=true", "runtime.compile_backend=aot_eager"], ["per_sample_gradients"], 1, 1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_the_same_in_other_runs(ranks, reference, kind: str, micro: int) -> None:
    more, hooks, count, tolerance = KINDS[kind]
    run = [*RUN, f"hooks=[gradients,{','.join(hooks)}]", f"trainer.accumulate_grad_batches={micro}"]
    run += [option for option in OPTIONS if option.split(".")[1] in hooks]
    run += ["test=false", "metrics=[]", "monitor=loss/train", "trainer.limit_val_batches=0"]
    expected, _ = by_hand(*reference(*run), micro)
    assert_values(ranks.train(*run, *more, ranks=count).values, expected, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "more", "tolerance"), [("rnn", [], 1e-4), ("transformer", ["precision=bf16"], 3e-2)])
def test_per_sample_figures_of_other_models(fit, reference, model: str, more: list[str], tolerance: float) -> None:
    run = [f"model={model}", "optimizer=sgd", "hooks=[per_sample_gradients]", "data.batch_size=12"]
    run.append(f"trainer.max_steps={STEPS}")
    network, batches = reference(*run)
    assert_values(fit(*run, *more).values, by_hand(network, batches, 1)[0], tolerance)


def test_figures_of_samples_are_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    size, steps = 50, 2000
    true = torch.full((size,), 0.05, dtype=torch.float64)
    sums = dict.fromkeys(("squared_norm", "covariance_trace"), 0.0)
    estimate = NoiseScale(smoothing=0.0)
    for _ in range(steps):
        # Two micro-batches of 6 and 2 samples have the same weight.
        parts = [true + 0.2 * torch.randn(n, size, dtype=torch.float64, generator=generator) for n in (6, 2)]
        whole = torch.stack([part.mean(0) for part in parts]).mean(0)
        found = estimate.of(squares=torch.cat(parts).square().sum(1), whole=whole.square().sum(), sizes=[6, 2])
        for name in sums:
            sums[name] += found[name].item() / steps
    assert sums["squared_norm"] == pytest.approx(true.square().sum().item(), rel=0.1)
    assert sums["covariance_trace"] == pytest.approx(size * 0.2**2, rel=0.05)


def test_the_noise_scale_divides_running_means() -> None:
    noise_scale = NoiseScale(smoothing=0.75)

    def figures(small: float, big: float, *, sizes: tuple[int, ...] = (5,), of: NoiseScale = noise_scale) -> Any:
        squares = torch.tensor([small], dtype=torch.float64)
        found = of.of(squares=squares, whole=torch.tensor(big, dtype=torch.float64), sizes=list(sizes))
        return {name: value.item() for name, value in found.items()}

    first = figures(6.0, 2.0)
    # |G|^2 = (5 * 2 - 6) / 4 = 1, tr(S) = (6 - 2) / (1 - 1/5) = 5.
    assert [first[name] for name in ("squared_norm", "covariance_trace", "noise_scale")] == [1.0, 5.0, 5.0]
    second = figures(10.0, 6.0)["noise_scale"]
    assert second == pytest.approx(5.0 / (0.75 * 1.0 + 0.25 * 5.0))
    assert figures(10.0, math.inf)["noise_scale"] == second, "a skipped step must not change the means"
    assert math.isnan(figures(100.0, 1.0, of=NoiseScale(smoothing=0.0))["noise_scale"])
    assert figures(100.0, 1.0, sizes=(1,)) == {}


def test_only_the_last_backward_of_a_repeat_counts(step) -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"used": nn.Linear(3, 2), "last": nn.Linear(2, 1), "unused": nn.Linear(3, 2)}).double()
    hook = RetainGradients(modules=["used", "unused"], each_module=True)
    hook.attach(net)
    now = step(net)
    hook.passed("batch", now)
    for repeat in range(2):
        with hook.engaged():
            hidden = net["used"](torch.full((4, 3), repeat + 1.0, dtype=torch.float64))
            output = net["last"](hidden)
            torch.autograd.grad(output.sum(), hidden, retain_graph=True)  # as in a term of the objective
        hook.passed("forward", now)
        hidden.retain_grad()
        output.square().sum().backward()
        hook.passed("backward", now)
    values = hook.after_backward(now)
    column = values.pop("gradients/output_norm")
    assert column.names == ("used",), "no gradient reaches the unused module"
    assert column.values.tolist() == pytest.approx([hidden.grad.norm().item()])
    assert values == {"gradients/output_norm/used": pytest.approx(hidden.grad.norm().item())}
