"""The hook per_sample_gradients against a loop of single samples in float64, and the estimators against known noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import exp
from exp.check.plan import resolve
from exp.construct import build_data, build_network
from exp.errors import ConfigError
from exp.hooks.per_sample_gradients import NoiseScale

pytestmark = pytest.mark.numeric

NAME = "per_sample_gradients"
COMMAND = [f"hooks=[{NAME}]", f"hooks.{NAME}.chunk_size=5", "test=false", "metrics=[]", "monitor=loss/train"]
COMMAND += ["trainer.limit_val_batches=0", "checkpoint.save_best=false", "trainer.max_steps=1", "logger=[]"]
SMALL = ["model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12"]
TWO = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"]
TWICE = ["trainer.accumulate_grad_batches=2"]
KINDS: dict[str, tuple[list[str], int, float]] = {
    "fp64": ([*SMALL, "precision=fp64", "data.batch_size=22"], 1, 1e-9),
    "rnn": (["model=rnn", "data.batch_size=12"], 1, 1e-4),
    "transformer": (["model=transformer", "data.batch_size=24", "precision=bf16"], 1, 3e-2),
    # 13 a batch, so that the two ranks hold 7 and 6.
    "everything": ([*SMALL, *TWO, *TWICE, "precision=fp16", "data.batch_size=13"], 2, 1e-2),
    "compiled": (
        ["model=lenet", "data.batch_size=12", "runtime.compile=true", "runtime.compile_backend=aot_eager"], 1, 1e-4,
    ),
}  # fmt: skip


def by_loop(overrides: list[str]) -> dict[str, float]:
    """One backward a sample, and the paper's formulae with numbers."""
    config = exp.compose(overrides)
    plain = resolve(config).plain
    data = build_data(plain)
    net = build_network(plain, data.spec).double()
    loader = data.loader("train")
    loader.set_position(0, 0)
    rows, means = [], []
    for _, batch in zip(range(plain["trainer"]["accumulate_grad_batches"]), loader, strict=False):
        own = []
        for inputs, target in zip(batch.data[0].double(), batch.data[1], strict=True):
            loss = cross_entropy(net(inputs[None]), target[None])
            found = torch.autograd.grad(loss, list(net.parameters()))
            own.append(torch.cat([one.flatten() for one in found]))
        rows += own
        means.append(torch.stack(own).mean(0))
    norms = [row.norm().item() for row in rows]
    count, whole = len(rows), torch.stack(means).mean(0).square().sum().item()
    small = sum(norm**2 for norm in norms) / count
    squared_norm, trace = (count * whole - small) / (count - 1), (small - whole) / (1 - 1 / count)
    return {
        "norm_mean": sum(norms) / count,
        "norm_max": max(norms),
        "squared_norm": squared_norm,
        "covariance_trace": trace,
        "noise_scale": trace / squared_norm if squared_norm > 0 else math.nan,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_figures_are_those_of_a_loop_over_samples(ranks: Any, kind: str) -> None:
    more, count, tolerance = KINDS[kind]
    found = ranks.train(*COMMAND, *more, ranks=count).values
    expected = by_loop([*COMMAND, *more, "launch.devices=auto", "strategy=single", "precision=fp32"])
    got = {tag.removeprefix(f"{NAME}/"): value for tag, value in found.items() if tag.startswith(NAME)}
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name] == {1: pytest.approx(value, rel=tolerance, nan_ok=True)}


def test_the_estimates_are_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    size, steps = 50, 4000
    true = torch.full((size,), 0.05, dtype=torch.float64)
    sums = dict.fromkeys(("squared_norm", "covariance_trace"), 0.0)
    noise = NoiseScale(smoothing=0.0)
    for _ in range(steps):
        # Two micro-batches of 6 and of 2 samples, each with half of the weight.
        parts = [true + 0.2 * torch.randn(n, size, dtype=torch.float64, generator=generator) for n in (6, 2)]
        whole = torch.stack([part.mean(0) for part in parts]).mean(0)
        found = noise.of(squares=torch.cat(parts).square().sum(1), whole=whole.square().sum(), sizes=[6, 2])
        for name in sums:
            sums[name] += found[name].item() / steps
    assert sums["squared_norm"] == pytest.approx(true.square().sum().item(), rel=0.05)
    assert sums["covariance_trace"] == pytest.approx(size * 0.2**2, rel=0.05)


def tensors(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor(number, dtype=torch.float64) for number in numbers]


def test_the_quotient_is_of_running_means_that_a_skipped_step_leaves_alone() -> None:
    noise = NoiseScale(smoothing=0.75)
    small, big = tensors(6.0, 2.0)
    first = noise.of(squares=small[None], whole=big, sizes=[5])
    # |G|^2 = (5 * 2 - 6) / 4 = 1, tr(S) = (6 - 2) / (1 - 1/5) = 5.
    assert [first[name].item() for name in ("squared_norm", "covariance_trace", "noise_scale")] == [1.0, 5.0, 5.0]
    small, big = tensors(10.0, 6.0)
    second = noise.of(squares=small[None], whole=big, sizes=[5])
    assert second["noise_scale"].item() == pytest.approx(5.0 / (0.75 * 1.0 + 0.25 * 5.0))
    lost = noise.of(squares=small[None], whole=torch.tensor(math.inf), sizes=[5])
    assert lost["noise_scale"].item() == second["noise_scale"].item()
    small, big = tensors(100.0, 1.0)
    assert math.isnan(NoiseScale(smoothing=0.0).of(squares=small[None], whole=big, sizes=[5])["noise_scale"].item())
    assert noise.of(squares=small[None], whole=big, sizes=[1]) == {}


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "objective and network": (
        ["model=resnet", "objective.cross_entropy.loss.ignore_index=3", "+objective=[jacobian]", "data.batch_size=1"],
        [
            "BatchNorm2d, which mixes samples",
            "objective.cross_entropy: a term that divides by weights of its targets",
            "an objective that needs",
            "a step of one sample",
        ],
    ),
    "clipped by module": (["+hooks=clip_module"], ["for which each sample's would be by itself"]),
    "no batch axis": (
        ["+model.layers.all={_target_: torch.nn.Unflatten, dim: 0, unflattened_size: [1, -1]}"],
        ["makes of 2 samples a tensor of shape [1, 2, 10]"],
    ),
    "strategy": (["strategy=fsdp", "launch.devices=2", "launch.accelerator=cpu"], ["ranks hold parts of them"]),
    "chunk_size": ([f"hooks.{NAME}.chunk_size=0"], ["chunk_size: 0; expected a whole number of samples, 1 or more"]),
    "smoothing": ([f"hooks.{NAME}.smoothing=1.0"], ["smoothing: 1.0; expected a number, 0 or more and below 1"]),
}


@pytest.mark.any_processor
@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_is_told_before_the_run(tmp_path, monkeypatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    overrides, messages = WRONG[kind]
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*COMMAND, *overrides]))
    for message in messages:
        assert message in str(caught.value)
