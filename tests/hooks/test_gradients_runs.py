"""What the hook `gradients` logs in whole runs: true gradients under a loss scale, whole ones of networks in parts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import exp
from exp.construct import build_data, build_network, plain_config
from exp.engine.compilation import forget_compiled

pytestmark = pytest.mark.numeric

STEPS = 3
EACH = "hooks.gradients.each_parameter=true"
SHORT = (
    *("model=sequential", "model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=8"),
    *(
        "hooks=[gradients]",
        EACH,
        "metrics=[]",
        "test=false",
        "trainer.limit_val_batches=0",
        "monitor=loss/train",
    ),
    *("trainer.max_epochs=null", f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1"),
    *("checkpoint.save_last=false", "checkpoint.save_best=false", "launch.accelerator=cpu"),
)


def reference(*overrides: str, accumulate: int = 1) -> list[dict[str, float]]:
    """Of each step, the norm of each parameter's gradient, in float64, by a loop by hand over the run's own batches."""
    plain = plain_config(exp.compose([*SHORT, *overrides]))
    data = build_data(plain)
    network = build_network(plain, data.spec).double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    batches, found = iter(data.loader("train")), []
    for _ in range(STEPS):
        for _ in range(accumulate):
            inputs, target = next(batches).data
            (nn.functional.cross_entropy(network(inputs.double()), target) / accumulate).backward()
        found.append({name: parameter.grad.norm().item() for name, parameter in network.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("ranks_of_run", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("fused", ["true", "false"])
def test_norms_under_a_loss_scale_are_those_of_a_float64_reference(ranks, fused, accumulate, ranks_of_run):
    values = ranks.train(
        *SHORT,
        *("precision=fp16", "precision.scaler.init_scale=65536.0", f"optimizer.fused={fused}"),
        *(f"trainer.accumulate_grad_batches={accumulate}", *(["strategy=ddp"] if ranks_of_run > 1 else [])),
        ranks=ranks_of_run,
    ).values
    assert set(values["precision/loss_scale"].values()) == {65536.0}
    assert set(values["precision/skipped_steps"].values()) == {0.0}
    for step, norms in enumerate(reference(accumulate=accumulate), start=1):
        for name, norm in norms.items():
            assert values[f"gradients/norm/{name}"][step] == pytest.approx(norm, rel=1e-2), (name, step)
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        assert values["gradients/norm/total"][step] == pytest.approx(total, rel=1e-2)


# --- networks in parts ---

IN_PARTS = (
    *("model=transformer", "optimizer=sgd", "hooks=[gradients]", EACH, "metrics=[]", "test=false", "precision=fp64"),
    *("trainer.limit_val_batches=0", "monitor=loss/train", "trainer.max_epochs=null", "trainer.max_steps=2"),
    *("trainer.log_every_n_steps=1", "trainer.gradient_clip_val=0.1", "hooks.gradients.clipped=each"),
    *("checkpoint.save_last=false", "checkpoint.save_best=false", "launch.accelerator=cpu"),
    # Of three ranks one has nothing of so small a parameter, or all of it.
    *("hooks.gradients.histogram_every_n_steps=2", "hooks.gradients.shares_every_n_steps=2"),
)
WHOLE: dict[str, object] = {}


def histograms(directory: Path) -> dict[str, dict[int, tuple[float, ...]]]:
    """By tag and step: the limits of the bins that hold something, and how many each holds."""
    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    return {
        tag: {
            event.step: (event.histogram_value.min, event.histogram_value.max, *event.histogram_value.bucket)
            for event in events.Histograms(tag)
        }
        for tag in events.Tags()["histograms"]
    }


@pytest.mark.parametrize(
    ("strategy", "count"), [("fsdp", 2), ("tensor_parallel", 2), ("pipeline", 2), ("layer_split", 1)]
)
def test_what_ranks_find_in_their_parts_is_that_of_whole_gradients(ranks, strategy, count):
    if not WHOLE:
        alone = ranks.train(*IN_PARTS)
        WHOLE.update(values=alone.values, histograms=histograms(alone.directory))
    devices = "launch.devices=2"
    found = ranks.train(*IN_PARTS, f"strategy={strategy}", devices, ranks=count)
    tags = {tag for tag in WHOLE["values"] if tag.startswith("gradients/")}
    kinds = {tag.split("/")[1] for tag in tags}
    assert kinds == {"norm", "norm_clipped", "update_ratio", "zeros", "non_finite"}
    assert tags == {tag for tag in found.values if tag.startswith("gradients/")}
    for tag in tags:
        assert found.values[tag] == pytest.approx(WHOLE["values"][tag], rel=1e-6, abs=1e-12), tag
    drawn = histograms(found.directory)
    assert drawn.keys() == WHOLE["histograms"].keys()
    assert drawn
    for tag, steps in WHOLE["histograms"].items():
        if tag.endswith("key.bias"):
            continue  # which shifts every score of a query alike: its gradient is what rounding leaves
        assert drawn[tag].keys() == steps.keys() == {1, 2}
        for step, expected in steps.items():
            # An entry at the edge of a bin may fall on its other side.
            assert drawn[tag][step][:2] == pytest.approx(expected[:2], rel=1e-6)
            moved = sum(abs(a - b) for a, b in zip(drawn[tag][step][2:], expected[2:], strict=True))
            assert moved <= 2 * 0.002 * sum(expected[2:]), (tag, step)


def test_a_compiled_network_has_the_same_tags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = [*SHORT, "hooks=[gradients,memory]", "trainer.gradient_clip_val=0.1"]
    plain = exp.fit(exp.compose([*run, "hydra.run.dir=plain"])).metrics
    compiled = ["runtime.compile=true", "runtime.compile_backend=aot_eager"]
    found = exp.fit(exp.compose([*run, *compiled, "hydra.run.dir=compiled"])).metrics
    forget_compiled()
    assert found.keys() == plain.keys()
    for tag in (tag for tag in plain if tag.startswith("gradients/")):
        assert found[tag] == pytest.approx(plain[tag], rel=1e-4), tag
    for part in ("parameters", "gradients", "optimizer"):
        assert found[f"memory/{part}_mib"] == plain[f"memory/{part}_mib"]
    # What a compiled backward needs need not be what each layer would keep.
    assert 0 < found["memory/activations_mib"] < 2 * plain["memory/activations_mib"]
