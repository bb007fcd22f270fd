"""All hooks together do not change the results of a run by a bit, and several ranks log the values of one process."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from tensorboard.util.tensor_util import make_ndarray

import exp
from exp.check.examination import examine
from exp.check.resolution import resolve
from exp.check.signature import signature_of
from exp.config import targets

CONF = Path(exp.__file__).parent / "conf" / "hooks"
TARGETS = {path.stem: OmegaConf.load(path)[path.stem]._target_ for path in sorted(CONF.glob("*.yaml"))}
# Hooks in removed folders of src/exp/extras are left out.
CLASSES = {
    name: targets.resolve(target)
    for name, target in TARGETS.items()
    if Path(exp.__file__).parent.joinpath(*target.split(".")[1:-2], "__init__.py").is_file()
}
OBSERVING = [name for name, kind in CLASSES.items() if not kind.transforms]
# This hook refuses layers that mix the samples of a batch, such as batch norm.
WITHOUT_NORM = "per_sample_gradients"
OPTIONS = {
    "activations": ["each_layer=true"],
    "gradients": ["each_parameter=true", "clipped=each", "histogram_every_n_steps=2"],
    "memory": ["details=true"],
    # Step 3, because the other hooks are idle in it. Profiling them would take ten times as long.
    "profile": ["start_step=3", "steps=1", "warmup=0", "ranks=all"],
    "retain_gradients": ["each_module=true"],
    "samples": ["stages=[train,val,test]"],
    "throughput": ["peak_flops=1e12", "flops_per_sample=1e6"],
}
EVALUATED = ["trainer.limit_val_batches=2", "trainer.limit_test_batches=2", "test=true", "monitor=loss/val"]
# With dropout, a hook that draws random numbers changes the run. With batch norm, a hook that runs a forward does.
DROPOUT = "+model.layers.drop={_target_: torch.nn.Dropout, p: 0.3}"
NORM = "model.layers.relu3._target_=torch.nn.BatchNorm1d"
LENET = ["model=lenet", DROPOUT, "data.batch_size=32", "trainer.max_steps=4", "trainer.gradient_clip_val=1.0"]


def with_hooks(names: list[str]) -> list[str]:
    overrides = [f"hooks=[{','.join(names)}]"]
    for name in names:
        overrides += [f"hooks.{name}.{option}" for option in OPTIONS.get(name, [])]
        if "every_n_steps" in signature_of(CLASSES[name]).parameters:
            overrides.append(f"hooks.{name}.every_n_steps=2")
    return overrides


def assert_unchanged(fit, names: list[str], *run: str) -> None:
    plain, watched = fit(*run, "hooks=[]"), fit(*run, *with_hooks(names))
    for tag, values in plain.values.items():
        assert watched.values[tag] == values, tag
    expected, found = plain.checkpoint(), watched.checkpoint()
    assert all(torch.equal(tensor, found["state_dict"][name]) for name, tensor in expected["state_dict"].items())
    assert str(found["optimizer_states"]) == str(expected["optimizer_states"])


@pytest.mark.numeric
@pytest.mark.any_processor
def test_all_hooks_together_change_no_bit(fit) -> None:
    names = [name for name in OBSERVING if name != WITHOUT_NORM]
    assert_unchanged(fit, names, *LENET, NORM, *EVALUATED, "precision=fp16", "trainer.accumulate_grad_batches=2")


@pytest.mark.slow
@pytest.mark.parametrize("name", OBSERVING)
def test_each_hook_alone_changes_no_bit(fit, name: str) -> None:
    assert_unchanged(fit, [name], *LENET, *EVALUATED, *([] if name == WITHOUT_NORM else [NORM]))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "resnet", "rnn", "transformer", "gpt"])
def test_all_hooks_change_no_bit_of_any_model(fit, text, model: str) -> None:
    run = [f"model={model}", *(text if model == "gpt" else []), "data.batch_size=8", "trainer.max_steps=3"]
    assert_unchanged(fit, compatible(*run), *run, *EVALUATED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["strategy=layer_split"],
        ["phases=[body_and_head]", "precision=fp16"],
        ["runtime.compile=true", "runtime.compile_backend=aot_eager"],
    ],
)
def test_all_hooks_change_no_bit_of_other_runs(fit, more: list[str]) -> None:
    run = ["trainer.max_steps=3", *more]
    assert_unchanged(fit, compatible(*run), *run)


def compatible(*run: str) -> list[str]:
    """Return the observing hooks that the check accepts in a run."""
    errors = examine(resolve(exp.compose([*run, "launch.accelerator=cpu", *with_hooks(OBSERVING)]))).errors
    refused = {name for error in errors for name in re.findall(r"hooks\.(\w+)", str(error))}
    return [name for name in OBSERVING if name not in refused]


# float64, so that rounding in sums over ranks changes no prediction. With batches of 67, the last validation batch has
# one sample, of which the second rank gets a copy.
RUN = [
    *("model=lenet", "precision=fp64", "data.batch_size=67", "trainer.max_steps=3", "launch.accelerator=cpu"),
    *("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1", "checkpoint.save_best=false"),
    *("trainer.limit_val_batches=1.0", "metrics=[]", "monitor=loss/val", "logger=[csv,tensorboard]", "test=false"),
]


@pytest.mark.numeric
@pytest.mark.any_processor
@pytest.mark.parametrize("without", [{"operators", "profile"}, pytest.param((), marks=pytest.mark.slow)])
def test_two_ranks_log_one_process_values(fit, ranks, events, without) -> None:
    names = [name for name in OBSERVING if name not in without]
    one = fit(*RUN, *with_hooks(names))
    two = ranks.train(*RUN, *with_hooks(names), "strategy=ddp", "launch.devices=2", ranks=2)
    assert_equal_values(one, two, events)
    if "pr_curve" in names:
        curve = make_ndarray(events(two.directory).Tensors("pr_curve/val/3")[-1].tensor_proto)
        assert curve[:4].sum(0).tolist() == [269] * curve.shape[1], "each sample of the validation split counts once"
    for found, count in ((one, 1), (two, 2)):
        for step, rate in found.values["throughput/samples_per_second"].items():
            assert found.values["throughput/mfu"][step] == pytest.approx(rate * 1e6 / (count * 1e12))
    memory = [tag for tag in one.values if tag.startswith("memory/")]
    assert memory
    for tag in memory:
        for step in one.values[tag]:
            least, mean, most = (two.values[f"{tag}/{word}"][step] for word in ("min", "mean", "max"))
            assert 0 < least <= two.values[tag][step] <= most
            assert mean == pytest.approx((least + most) / 2)
    if not without:  # each rank profiles its process, and only rank 0 lists operators
        assert {path.name.split(".")[1] for path in (two.directory / "profile").iterdir()} == {"rank0", "rank1"}
        assert b"[34, 1, 8, 8]" in events(two.directory).Tensors("operators")[0].tensor_proto.string_val[0]


PARTS = [
    *("optimizer=sgd", "precision=fp64", "trainer.gradient_clip_val=0.1", "trainer.max_steps=3"),
    *("trainer.limit_val_batches=2", "test=false", "launch.accelerator=cpu"),
]


@pytest.mark.numeric
def test_shards_have_the_gradients_of_one_process(fit, ranks, events) -> None:
    run = [*PARTS, "metrics=[]", "monitor=loss/val", "logger=[csv,tensorboard]", *with_hooks(["gradients"])]
    sharded = ranks.train(*run, "strategy=fsdp", "launch.devices=2", ranks=2)
    assert_equal_values(fit(*run), sharded, events, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize(
    ("strategy", "count", "hooks"),
    [
        ("fsdp", 2, {"activations", "confusion", "gradients", "pr_curve", "retain_gradients", "throughput"}),
        ("tensor_parallel", 2, {"confusion", "gradients", "pr_curve", "throughput"}),
        ("pipeline", 2, {"gradients", "throughput"}),
        ("layer_split", 1, {"activations", "confusion", "gradients", "per_sample_gradients", "pr_curve"}),
    ],
)
def test_ranks_with_parts_log_one_process_values(ranks, events, strategy: str, count: int, hooks: set) -> None:
    run = ["model=transformer", *PARTS]
    split = [f"strategy={strategy}", "launch.devices=2"]
    names = compatible(*run, *split)
    assert hooks <= set(names)
    if strategy == "layer_split":
        names.remove("retain_gradients")  # the network itself is not called, only its parts
    one = ranks.train(*run, *with_hooks(names))
    parts = ranks.train(*run, *with_hooks(names), *split, ranks=count)
    assert_equal_values(one, parts, events, tolerance=1e-6)
    if strategy == "pipeline":
        found = {tag: steps[1] for tag, steps in parts.values.items() if tag.startswith("memory/")}
        assert found["memory/parameters_mib/min"] < found["memory/parameters_mib/max"]
        whole = one.values["memory/parameters_mib"][1]
        assert 2 * found["memory/parameters_mib/mean"] == pytest.approx(whole)
        assert not any("peak_forward_mib" in tag or "peak_backward_mib" in tag for tag in found)


def assert_equal_values(one, other, events, *, tolerance: float = 1e-9) -> None:
    """Assert that two runs logged the same values, except times and memory."""
    # The hook samples shows samples of the first rank.
    measured = ("memory/", "throughput/", "profile/", "samples/val")
    for tag, steps in one.values.items():
        if not tag.startswith(measured):
            assert other.values[tag] == pytest.approx(steps, rel=tolerance, abs=1e-12), tag
    first, second = events(one.directory), events(other.directory)
    images = [tag for tag in first.Tags()["images"] if not tag.startswith(measured)]
    assert images or not first.Tags()["images"]
    for tag in images:
        assert [event.step for event in first.Images(tag)] == [event.step for event in second.Images(tag)]
        left, right = (
            np.asarray(Image.open(io.BytesIO(read.Images(tag)[-1].encoded_image_string))).astype(int)
            for read in (first, second)
        )
        assert left.shape == right.shape, tag
        assert np.abs(left - right).max() <= 1, tag
    for tag in first.Tags()["tensors"]:
        if tag.startswith("pr_curve/"):
            left, right = (make_ndarray(read.Tensors(tag)[-1].tensor_proto) for read in (first, second))
            assert np.array_equal(left, right), tag
    assert second.Tags()["histograms"] == first.Tags()["histograms"]
    for tag in first.Tags()["histograms"]:
        if tag.endswith("key.bias"):
            continue  # it adds the same number to all scores of a query, so its gradient is only rounding
        for left, right in zip(first.Histograms(tag), second.Histograms(tag), strict=True):
            old, new = left.histogram_value, right.histogram_value
            assert (left.step, old.num) == (right.step, new.num), tag
            assert (new.min, new.max) == pytest.approx((old.min, old.max), rel=1e-6), tag
            # Rounding may move an entry at the edge of a bin to the next bin.
            moved = sum(abs(a - b) for a, b in zip(old.bucket, new.bucket, strict=True))
            assert moved <= max(2, 0.004 * old.num), tag
