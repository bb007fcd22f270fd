"""strategy=fsdp: units, options, what is refused, and what a rank's memory holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exp
from exp.errors import ConfigError
from exp.models.matching import matching
from exp.strategies.units import uniform, units

pytestmark = pytest.mark.numeric

# Batches of 100: the last of an epoch is short.
STEPS = ("trainer.max_epochs=null", "trainer.max_steps=30", "test=false", "data.batch_size=100", "logger=[]")


def faults_of(*overrides):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose(["strategy=fsdp", "launch.devices=2", "launch.accelerator=cpu", *overrides]))
    return {fault.key: f"{fault.got} | {fault.expected} | {fault.cure}" for fault in caught.value.faults}


# --- units ---


def test_units_of_a_repeat(build_model):
    network = build_model("transformer")
    assert list(units(network, "auto", min_parameters=0, key="k")) == ["blocks.0", "blocks.1"]
    assert list(units(network, ["blocks.*.query", "LayerNorm"], min_parameters=0, key="k")) == [
        "blocks.0.norm1", "blocks.0.query", "blocks.0.norm2",
        "blocks.1.norm1", "blocks.1.query", "blocks.1.norm2", "norm",
    ]  # fmt: skip


def test_a_type_means_what_it_means_to_hooks_and_to_precision():
    class Wide(nn.Linear):
        pass

    network = nn.ModuleDict({"plain": nn.Linear(2, 2), "wide": Wide(2, 2), "heads": nn.MultiheadAttention(4, 2)})
    # Not heads.out_proj: MultiheadAttention reads the weights of that Linear and never calls it.
    for word in ("Linear", "torch.nn.Linear"):
        assert list(units(network, [word], min_parameters=0, key="k")) == ["plain", "wide"]
        assert list(matching(network, [word], key="k")) == ["plain", "wide", "heads.out_proj"]
    with pytest.raises(ConfigError, match=r"k: 'Multi\*', which matches no layer"):
        units(network, ["Multi*"], min_parameters=0, key="k")


def test_units_by_size():
    network = nn.Sequential(
        nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 10)), nn.ModuleList([nn.Linear(2, 2)])
    )
    # 110, 44 and 50 parameters: the small ones together reach 80, each of them does not.
    assert list(units(network, "auto", min_parameters=80, key="k")) == ["0", "1"]
    assert list(units(network, "auto", min_parameters=45, key="k")) == ["0", "1.1"]


def test_a_pattern_that_matches_nothing(build_model):
    with pytest.raises(ConfigError, match=r"k: 'block\.\*', which matches no layer"):
        units(build_model("transformer"), ["block.*"], min_parameters=0, key="k")


def test_a_unit_has_one_dtype(build_model):
    network = build_model("transformer")
    network.blocks[1].norm2.double()
    network.norm.double()
    chosen = units(network, "auto", min_parameters=0, key="k")
    assert list(uniform(network, chosen)) == ["blocks.0", "blocks.1", "blocks.1.norm2", "norm"]


# --- runs ---


def thirty_steps(ranks, count):
    """Require that so many ranks have the losses of one process."""
    # By SGD: AdamW makes a step of a rounding error where a gradient is next to nothing.
    command = ("model=transformer", "optimizer=sgd", "trainer.gradient_clip_val=1.0", *STEPS)
    one = ranks.train(*command, "strategy=single")
    parts = ranks.train(*command, "strategy=fsdp", f"launch.devices={count}", ranks=count)
    assert len(parts.losses) == 30
    assert parts.losses == pytest.approx(one.losses, abs=1e-5)
    assert parts.report["strategy"] == "fsdp"


def test_thirty_steps_in_fp32(ranks):
    thirty_steps(ranks, 2)


@pytest.mark.any_processor
def test_thirty_steps_in_fp32_over_four(ranks):
    thirty_steps(ranks, 4)


EXACT = ("model=transformer", *STEPS, "trainer.max_steps=6", "precision=fp64", "trainer.accumulate_grad_batches=2")


@pytest.mark.any_processor
def test_options_change_no_number(ranks):
    frozen = ("+model.freeze=['blocks.0.*',positions]", "optimizer.exempt_from_decay=[norms,biases]")
    one = ranks.train(*EXACT, *frozen, "strategy=single")
    for options in (
        ["strategy.shard=[Linear]", "strategy.activation_checkpointing=['blocks.*']"],
        ["strategy.min_parameters=3000", "strategy.reshard_after_forward=false", "strategy.no_sync=true"],
    ):  # fmt: skip
        parts = ranks.train(*EXACT, *frozen, "strategy=fsdp", *options, ranks=2)
        assert parts.losses == pytest.approx(one.losses, abs=1e-10), options


@pytest.mark.parametrize("model", ["rnn", "parameter_list"])
@pytest.mark.any_processor
def test_parameters_that_a_program_uses_itself(ranks, model):
    command = (f"model={model}", *STEPS, "trainer.max_steps=4", "precision=fp64")
    one = ranks.train(*command, "strategy=single")
    assert ranks.train(*command, "strategy=fsdp", ranks=2).losses == pytest.approx(one.losses, abs=1e-10)


@pytest.mark.any_processor
def test_batch_normalisation_over_the_global_batch(ranks):
    command = ("model=resnet", *STEPS, "trainer.max_steps=3", "trainer.limit_val_batches=2", "precision=fp64")
    one = ranks.train(*command, "strategy=single")
    parts = ranks.train(*command, "strategy=fsdp", "strategy.sync_batchnorm=true", ranks=2)
    assert parts.losses == pytest.approx(one.losses, abs=1e-10)
    for name, value in one.checkpoint()["state_dict"].items():
        torch.testing.assert_close(parts.checkpoint()["state_dict"][name], value, rtol=0, atol=1e-10)


def test_layers_that_keep_a_dtype(ranks):
    command = ("model=transformer", *STEPS, "trainer.max_steps=4", "precision=fp64", "+precision.keep.LayerNorm=fp32")
    one = ranks.train(*command, "strategy=single")
    parts = ranks.train(*command, "strategy=fsdp", ranks=2)
    assert parts.losses == pytest.approx(one.losses, abs=1e-6)


def test_ranks_skip_a_step_together(ranks):
    # So large a scale that the first steps overflow in the shards of some rank.
    command = ("model=transformer", *STEPS, "trainer.max_steps=12", "precision=fp16", "precision.scaler.init_scale=1e6")
    one = ranks.train(*command, "strategy=single", "trainer.log_every_n_steps=1")
    parts = ranks.train(*command, "strategy=fsdp", "trainer.log_every_n_steps=1", ranks=2)
    assert 0 < one.values["precision/skipped_steps"][12] < 12
    for tag in ("precision/skipped_steps", "precision/loss_scale"):
        assert parts.values[tag] == one.values[tag]
    assert parts.losses == pytest.approx(one.losses, abs=1e-2)


@pytest.mark.any_processor
def test_memory_of_a_rank(ranks):
    """The same at 31.6 million parameters: benchmarks/fsdp_memory.py."""
    command = (
        "model=transformer", "model.constants.width=128", "model.constants.hidden=512", *STEPS, "trainer.max_steps=2",
        "hooks=[memory]",
    )  # fmt: skip
    one = ranks.train(*command, "strategy=single")
    parts = ranks.train(*command, "strategy=fsdp", "launch.devices=4", ranks=4)
    for part in ("parameters", "gradients", "optimizer"):
        share = parts.values[f"memory/{part}_mib"][1] / one.values[f"memory/{part}_mib"][1]
        assert 0.25 <= share < 0.27, part
    # Weights that are gathered for the forward are no activations: of a quarter of the batch there are a quarter.
    share = parts.values["memory/activations_mib"][1] / one.values["memory/activations_mib"][1]
    assert 0.2 < share < 0.3


@pytest.mark.any_processor
def test_the_command(tmp_path, commands):
    command = ["strategy=fsdp", "model=transformer", "debug=one_batch", "launch.accelerator=cpu", "launch.devices=2"]
    done = commands.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    (path,) = tmp_path.rglob("last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["state_dict"]["network.blocks.1.query.weight"].shape == (64, 64)


# --- refused ---


def test_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = faults_of(
        "strategy.shard=[Conv2d]", "strategy.cpu_offload=true", "strategy.activation_checkpointing=[hiden]",
        "runtime.compile=true", "optimizer=sgd", "optimizer.fused=true",
    )  # fmt: skip
    assert found.keys() == {
        "strategy.shard", "strategy.cpu_offload", "strategy.activation_checkpointing", "runtime.compile",
        "optimizer.fused",
    }  # fmt: skip
    assert "Did you mean hidden?" in found["strategy.activation_checkpointing"]
    assert "strategy=ddp" in found["runtime.compile"]


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["optimizer._target_=torch.optim.LBFGS", "~optimizer.betas"], "optimizer", "LBFGS"),
        (["+objective=r1"], "objective", "input_gradients"),
        (["strategy.min_parameters=-1"], "strategy.min_parameters", "0 or more"),
    ],
)
def test_refused_one_by_one(tmp_path, monkeypatch, overrides, key, words):
    monkeypatch.chdir(tmp_path)
    found = faults_of(*overrides)
    assert any(name.startswith(key) and words in told for name, told in found.items()), found
