"""strategy=fsdp: sharded units, layers that keep a dtype, and the command."""

from __future__ import annotations

import pytest
from torch import nn

from exp.errors import ConfigError
from exp.models.matching import find_modules
from exp.strategies.units import choose_units, split_by_dtype


def test_units_of_a_repeat(build_model):
    network = build_model("transformer")
    assert list(choose_units(network, "auto", key="k")) == ["blocks.0", "blocks.1"]
    assert list(choose_units(network, ["blocks.*.query", "LayerNorm"], key="k")) == [
        "blocks.0.norm1", "blocks.0.query", "blocks.0.norm2",
        "blocks.1.norm1", "blocks.1.query", "blocks.1.norm2", "norm",
    ]  # fmt: skip


def test_a_type_means_what_it_means_to_hooks_and_to_precision():
    class Wide(nn.Linear):
        pass

    network = nn.ModuleDict({"plain": nn.Linear(2, 2), "wide": Wide(2, 2), "heads": nn.MultiheadAttention(4, 2)})
    # heads.out_proj is no unit, because MultiheadAttention reads the weights of this Linear without a call.
    for word in ("Linear", "torch.nn.Linear"):
        assert list(choose_units(network, [word], key="k")) == ["plain", "wide"]
        assert list(find_modules(network, [word], key="k")) == ["plain", "wide", "heads.out_proj"]
    with pytest.raises(ConfigError, match=r"k: 'Multi\*', which matches no layer"):
        choose_units(network, ["Multi*"], key="k")


def test_a_pattern_that_matches_nothing(build_model):
    with pytest.raises(ConfigError, match=r"k: 'block\.\*', which matches no layer"):
        choose_units(build_model("transformer"), ["block.*"], key="k")


def test_a_unit_has_one_dtype(build_model):
    network = build_model("transformer")
    network.blocks[1].norm2.double()
    network.norm.double()
    chosen = choose_units(network, "auto", key="k")
    assert list(split_by_dtype(network, chosen)) == ["blocks.0", "blocks.1", "blocks.1.norm2", "norm"]
    # embedding and head become units, because the rest of the network, with the parameter positions, is float16.
    network.half().embedding.float()
    network.head.float()
    assert list(split_by_dtype(network, chosen)) == ["embedding", "blocks.0", "blocks.1", "head"]


@pytest.mark.slow
def test_layers_keep_a_dtype_in_shards(ranks, run, alone):
    """The tolerance is that of float32, because ranks sum halves of the batch."""
    keep = "+precision.keep.LayerNorm=fp32"
    parts = ranks.train(*run, keep, "strategy=fsdp", ranks=2)
    assert parts.losses == pytest.approx(alone(*run, keep).losses, rel=0, abs=1e-6)


@pytest.mark.slow
def test_the_command_ends_well(tmp_path, commands):
    command = ["strategy=fsdp", "model=transformer", "debug=one_batch", "launch.accelerator=cpu", "launch.devices=2"]
    done = commands.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert list(tmp_path.rglob("last.ckpt"))
