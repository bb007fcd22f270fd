"""What exp.plan says of memory, against a step that runs: to the byte, for every model in conf/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import exp
from exp.check.plan import Plan, examine, plan, resolve
from exp.construct import (
    build_data,
    build_network,
    build_objective,
    build_optimization,
    build_run_precision,
)
from exp.engine.forward import forward_by_name
from exp.hooks.memory_peaks import HOST
from exp.hooks.saved_tensors import kept_by, storages
from exp.nested import tensors_in
from exp.plan.device_peaks import read_devices
from exp.plan.estimate import Estimator
from exp.plan.fake_step import Setting, take_step
from exp.plan.rank_memory import OptimizerState
from exp.strategies.footprint import Held
from exp.strategies.placement import Machine
from exp.strategies.units import checkpoint_activations, matched

MIB = 2**20
ONE = ("strategy=single", "launch.accelerator=cpu")
READY = sorted(path.stem for path in (Path(exp.__file__).parent / "conf" / "model").glob("*.yaml"))
# What a model needs beside its own word.
BESIDE = {
    "gpt": ("data=text", "data.dataset.files=text.txt"),
    "domain_adversarial": ("experiment=domain_adversarial",),
    "gan": ("experiment=gan",),
}
SHORT = (
    *("hooks=[memory]", "metrics=[]", "test=false", "trainer.limit_val_batches=1", "monitor=loss/train", "mode=min"),
    *("trainer.max_epochs=null", "trainer.max_steps=1", "checkpoint.save_last=false", "checkpoint.save_best=false"),
    *("launch.accelerator=cpu", "trainer.enable_progress_bar=false"),
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be, that is the question. " * 200)


def decided(*overrides: str) -> Plan:
    return plan(resolve(exp.compose(list(overrides))))


def one_step(run: Plan, *, recomputed: tuple[str, ...] = ()) -> dict[str, int]:
    """The four parts of a step by hand, with real tensors: storages, and the count of the hook memory."""
    plain, network = run.plain, build_network(run.plain, run.spec)
    precision = build_run_precision(plain, device_type="cpu")
    precision.convert_module(network)
    checkpoint_activations(matched(network, recomputed, key="").values())
    optimizer, _ = build_optimization(plain).make(network, total_steps=10, total_epochs=10)
    objective, batch = build_objective(plain), next(iter(build_data(plain).loader("train")))
    forward = forward_by_name(network, tuple(run.spec.inputs))
    losses: list[Tensor] = []

    def step() -> None:
        with precision.forward_context():
            losses.append(objective(forward(network, batch.data), batch)[0])

    kept = kept_by(step, network=network, data=batch.data)
    losses[0].backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    found = {"parameters": network.parameters(), "gradients": gradients}
    optimizer.step()
    found["optimizer"] = tensors_in(optimizer.state)
    return {**{name: sum(storages(one).values()) for name, one in found.items()}, "activations": kept.size}


def parts(run: Plan) -> dict[str, int | None]:
    return Estimator(run, device=None).estimate().places[0].parts


def assert_equal(planned: dict[str, int | None], real: dict[str, int]) -> None:
    assert {**planned, "activations": None} == {**real, "activations": None}
    assert planned["activations"] == pytest.approx(real["activations"], rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [model for model in READY if model != "gan"])
def test_the_four_parts_of_every_ready_model(model: str, precision: str) -> None:
    run = decided(*BESIDE.get(model, ()), f"model={model}", f"precision={precision}", *ONE)
    assert_equal(parts(run), one_step(run))


@pytest.mark.parametrize(
    ("model", "precision"),
    # Of every ready model one precision: what is computed again does not depend on it.
    [(model, ("fp32", "bf16")[place % 2]) for place, model in enumerate(one for one in READY if one != "gan")],
)
def test_activations_that_are_computed_again(model: str, precision: str) -> None:
    run = decided(*BESIDE.get(model, ()), f"model={model}", f"precision={precision}", *ONE)
    network = run.network
    assert network is not None
    # The outermost layers that are called, one by one.
    outer = {type(module).__name__ for module in network.children() if not isinstance(module, torch.nn.ModuleList)}
    outer |= {type(layer).__name__ for module in network.children() for layer in module.children()}
    patterns = tuple(sorted(outer - {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}))
    if not patterns:
        pytest.skip("no layer is called")
    word, samples = run.plain["precision"]["word"], run.plain["data"]["batch_size"]
    planned = take_step(run, Setting(samples=samples, word=word, recomputed=patterns))
    real = one_step(run, recomputed=patterns)
    assert planned.activations == pytest.approx(real["activations"], rel=0.01)
    assert sum(planned.gradients[0].values()) == real["gradients"]


# Muon and SparseAdam refuse a GPT's parameters; the state of LBFGS grows from step to step, which a note says.
OPTIMIZERS = {path.stem for path in (Path(exp.__file__).parent / "conf" / "optimizer").glob("*.yaml")}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS - {"muon", "sparse_adam", "lbfgs"}))
def test_the_state_of_every_optimizer(optimizer: str) -> None:
    run = decided(*BESIDE["gpt"], "model=gpt", f"optimizer={optimizer}", *ONE)
    assert_equal(parts(run), one_step(run))


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=rnn", "model.layers.recurrent._target_=torch.nn.LSTM"),
        ("model=rnn", "model.layers.recurrent._target_=torch.nn.LSTM", "precision=bf16"),
        ("model=mlp", "freeze.parameters=[stem.*]"),
        ("model=mlp", "lora.layers=[blocks.*.linear]", "lora.rank=4", "lora.trained=[head]"),
        ("model=lenet", "precision=bf16_true", "optimizer=sgd"),
        ("model=mlp", "precision=fp64"),
        ("model=mlp", "optimizer=adafactor"),
        ("model=lenet", "optimizer=adagrad", "data.batch_size=7"),
        ("data=diabetes", "model=mlp", "optimizer=rmsprop", "+precision.keep={head: fp64}"),
    ],
    ids=lambda overrides: ",".join(overrides),
)
def test_frozen_adapted_and_other_precisions_and_optimizers(overrides: tuple[str, ...]) -> None:
    run = decided(*overrides, *ONE)
    assert_equal(parts(run), one_step(run))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_network_of_two_inputs(precision: str) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        "twins.npz", left=rng.random((200, 4), "f4"), right=rng.random((200, 3, 5), "f4"), target=np.arange(200) % 2
    )
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/twins.yaml").write_text(
        "# Two towers: model=twins\n"
        "_target_: exp.models.containers.ModuleDictModel\n"
        "inputs: [left, right]\n"
        "layers:\n"
        "  first: {_target_: torch.nn.Linear, in_features: 4, out_features: 6}\n"
        "  second: {_target_: torch.nn.Linear, in_features: 15, out_features: 6}\n"
        "  head: {_target_: torch.nn.Linear, in_features: 6, out_features: 2}\n"
        "forward: return head((first(left) * second(right.flatten(1))).relu())\n"
    )
    words = ("data=npy", "data.dataset.path=twins.npz", "data.num_classes=2", "model=twins")
    run = decided(*words, f"precision={precision}", *ONE)
    assert_equal(parts(run), one_step(run))


@pytest.mark.parametrize("experiment", ["gan", "wgan_gp"])
def test_phases_count_the_largest(experiment: str) -> None:
    overrides = [f"experiment={experiment}", *SHORT, "strategy=single", "hydra.run.dir=run"]
    found = exp.fit(exp.compose(overrides)).metrics
    of_phases = {
        part: max(value for tag, value in found.items() if tag.startswith(f"memory/{part}_mib")) * MIB
        for part in ("parameters", "gradients", "optimizer", "activations")
    }
    assert parts(decided(*overrides)) == of_phases


@pytest.mark.parametrize(
    ("count", "overrides"),
    [
        (3, ("strategy=fsdp", "precision=bf16")),  # rows that do not come out even
        (2, ("strategy=tensor_parallel",)),
        (2, ("strategy=ddp", "data.batch_size=33")),
        (2, ("strategy=pipeline",)),
    ],
    ids=lambda value: str(value),
)
def test_each_rank_of_a_strategy(count: int, overrides: tuple[str, ...], ranks) -> None:
    command = [*BESIDE["gpt"], "model=gpt", *SHORT, *overrides, f"launch.devices={count}", "hooks.memory.details=true"]
    values = ranks.train(*command, ranks=count).values
    places = Estimator(decided(*command), device=None).estimate().places
    assert sum(len(place.ranks) for place in places) == count
    for part in ("parameters", "gradients", "optimizer", "activations"):
        found = [place.parts[part] for place in places]
        real = {word: values[f"memory/{part}_mib/{word}"][1] * MIB for word in ("min", "max")}
        if part == "activations":  # of the ranks that have most samples; a pipeline's are an estimate
            assert "strategy=pipeline" in overrides or max(found) == real["max"]
        else:
            assert {"min": min(found), "max": max(found)} == real, part


def test_a_parameter_without_a_gradient_has_no_state() -> None:
    run = decided("model=mlp", *ONE)
    names = [name for name, _ in run.network.named_parameters()]
    sizes = {name: parameter.shape for name, parameter in run.network.named_parameters()}
    held = {name: Held(shape=tuple(shape), stored=0, gradient=0, steps=True) for name, shape in sizes.items()}
    fake = take_step(run, Setting(samples=2, word="fp32")).fake
    assert fake is not None
    one = OptimizerState(run, fake, trained=names[:1]).of(held)
    # AdamW: two moments in float32, and a count of steps.
    assert one == 2 * 4 * sizes[names[0]].numel() + 4


def test_a_gpt_of_seven_billion_parameters_over_64_ranks() -> None:
    words = ("width=4096", "hidden=16384", "heads=32")
    overrides = [
        *BESIDE["gpt"], "model=gpt", *(f"model.constants.{word}" for word in words), "model.layers.blocks.repeat=34",
        "strategy=fsdp", "launch.devices=64", "data.batch_size=64", "precision=bf16",
    ]  # fmt: skip
    HOST.restart()
    before = HOST.since_restart()
    examined = examine(resolve(exp.compose(overrides)), machine=Machine(gpus=64))
    assert examined.plan is not None
    estimate = Estimator(examined.plan, device=read_devices("H100")[0]).estimate()
    count = sum(one.count for one in estimate.figures.parameters.values())
    assert count > 6.8e9
    # float32 in 64 shards: rows of a weight padded to equal ones.
    assert estimate.places[0].parameters == pytest.approx(4 * count / 64, rel=0.001)
    assert HOST.since_restart() - before < 2**30
