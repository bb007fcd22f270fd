"""A member of a stack is what the same job is alone: its numbers, its files, its way on, its end."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch._dynamo.utils import counters

from exp import compose, fit
from exp.engine.checkpoint import read_checkpoint
from exp.errors import Interrupted, NonFiniteError
from exp.files import is_locked
from exp.run_report import Report, read_report
from exp.sweeps import stack
from exp.sweeps.stack import train
from exp.sweeps.stacked_network import Unstackable

QUIET = ["trainer.enable_progress_bar=false", "sweep.stack=true"]
# Figures of a process and of a clock, which are the stack's.
OF_THE_STACK = ("throughput/", "memory/host_")
HEAT_MAPS = ("gradients/norm", "gradients/update_ratio")
TIMES = ("wall_seconds", "step_ms", "peak_memory_mib", "directory")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def configs(name, shared, own):
    return [
        compose(overrides=[*QUIET, *shared, *one, f"hydra.run.dir=outputs/{name}/{place}"])
        for place, one in enumerate(own)
    ]


def stacked(shared, own, *, name="stack"):
    """The outcome of each job, trained together, in the order of the jobs."""
    found = dict(train(configs(name, shared, own)))
    assert sorted(found) == list(range(len(own)))
    return [found[place] for place in range(len(own))]


def alone(shared, own, *, name="alone"):
    return [fit(config) for config in configs(name, shared, own)]


def events(report):
    found = {}
    for path in sorted(Path(report.directory, "tensorboard").glob("events*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                scalar = value.simple_value if value.HasField("simple_value") else value.WhichOneof("value")
                found.setdefault((value.tag, event.step), []).append(scalar)
    return found


def flat(value, key=""):
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if inside is None or not value:
        yield key, value
    else:
        for name, one in inside:
            yield from flat(one, f"{key}/{name}")


def entries(report, name):
    """What a checkpoint holds, but for the manifest and the figures of the process."""
    found = read_checkpoint(Path(report.directory, "checkpoints", name))
    found.pop("exp_manifest")
    found.pop("exp_seconds")
    return {key: value for key, value in flat(found) if not any(f"/{own}" in key for own in OF_THE_STACK)}


def weights(report, name="last.ckpt"):
    return read_checkpoint(Path(report.directory, "checkpoints", name))["state_dict"]


def assert_same_weights(one, other):
    for name in ("last.ckpt", "best.ckpt"):
        first, second = weights(one, name), weights(other, name)
        assert first.keys() == second.keys()
        for key, tensor in first.items():
            assert torch.equal(tensor, second[key]), key


def largest_difference(one, other, *, tags):
    first, second = events(one), events(other)
    points = [key for key in first if key[0].startswith(tags)]
    assert len(points) > 4
    assert {key for key in second if key[0].startswith(tags)} == {*points}
    return max(abs(a - b) for key in points for a, b in zip(first[key], second[key], strict=True))


RATES = [["seed=1"], ["seed=2", "optimizer.lr=0.02"], ["seed=1", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"]]


@pytest.mark.numeric
@pytest.mark.parametrize(
    "optimizer",
    [
        ["optimizer=adamw"],
        ["optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.nesterov=true"],
    ],
)
def test_an_mlp_is_bit_for_bit_the_same_over_150_steps(optimizer):
    shared = [*optimizer, "trainer.max_epochs=8", "trainer.max_steps=150", "hooks=[]"]
    for one, other in zip(stacked(shared, RATES), alone(shared, RATES), strict=True):
        assert one.steps == other.steps == 150
        assert_same_weights(one, other)
        # Which of the weights are the best follows from the losses of validations, and these are the same bits, too.
        assert one.best["value"] == other.best["value"]
        assert one.metrics["loss/test"] == other.metrics["loss/test"]
        assert one.metrics["accuracy/test"] == other.metrics["accuracy/test"]


@pytest.mark.numeric
def test_accumulation_clipping_and_schedules_are_each_members_own():
    shared = ["trainer.max_epochs=4", "trainer.accumulate_grad_batches=3", "scheduler=cosine"]
    own = [
        ["seed=1", "trainer.gradient_clip_val=0.3", "scheduler.warmup_steps=5"],
        ["seed=2", "scheduler=one_cycle"],
        ["seed=2", "scheduler=plateau", "trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value"],
    ]
    for one, other in zip(stacked(shared, own), alone(shared, own), strict=True):
        assert_same_weights(one, other)
        assert largest_difference(one, other, tags=("optimizer/lr/",)) == 0.0
        clipped = [{tag for tag, _ in events(report) if "clipped" in tag} for report in (one, other)]
        assert clipped[0] == clipped[1]


NORMED = """
_target_: exp.models.containers.SequentialModel
layers:
  conv: {_target_: torch.nn.Conv2d, out_channels: 4, kernel_size: 3, bias: false}  # one would have no gradient
  norm: {_target_: torch.nn.BatchNorm2d}
  relu: {_target_: torch.nn.ReLU}
  drop: {_target_: torch.nn.Dropout2d, p: 0.2}
  flatten: {_target_: torch.nn.Flatten}
  drop2: {_target_: torch.nn.Dropout, p: 0.1}
  head: {_target_: torch.nn.Linear, out_features: 10}
"""


@pytest.mark.numeric
@pytest.mark.any_processor
def test_batch_norm_and_dropout_agree_to_1e_10_and_draw_the_same_masks():
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/normed.yaml").write_text(NORMED)
    shared = ["model=normed", "precision=fp64", "trainer.max_epochs=10", "hooks=[]"]
    own = [["seed=1"], ["seed=2", "model.layers.drop2.p=0.5"], ["seed=3", "model.layers.drop.p=0.0"]]
    for one, other in zip(stacked(shared, own), alone(shared, own), strict=True):
        assert one.steps == 200
        assert largest_difference(one, other, tags=("loss/", "accuracy/")) < 1e-6  # events are of float32
        for tag in ("loss/train", "loss/train_epoch", "loss/val", "loss/test", "accuracy/test"):
            assert math.isclose(one.metrics[tag], other.metrics[tag], rel_tol=1e-10, abs_tol=1e-10), tag
        first, second = weights(one), weights(other)
        for name, tensor in first.items():
            assert torch.allclose(tensor, second[name], rtol=1e-9, atol=1e-10), name


@pytest.mark.numeric
def test_a_compiled_stack_computes_what_an_uncompiled_one_does():
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/normed.yaml").write_text(NORMED)
    shared = ["model=normed", "trainer.max_epochs=3", "data.batch_size=512", "trainer.gradient_clip_val=0.5"]
    # aot_eager needs no C++ compiler, and runs the operators that an uncompiled step runs.
    compiled = ["runtime.compile=true", "runtime.compile_backend=aot_eager"]
    torch._dynamo.reset()
    before = counters["frames"]["ok"]
    reports = stacked([*shared, *compiled], RATES)
    # One for whole batches, one for the short last one: none again at a later step.
    assert counters["frames"]["ok"] == before + 2
    for one, other in zip(reports, stacked(shared, RATES, name="uncompiled"), strict=True):
        assert one.steps == 9
        assert_same_weights(one, other)
        assert one.metrics["loss/test"] == other.metrics["loss/test"]


# The files named, for the text alone would be the standard library's, of four million characters.
GPT = ["experiment=gpt", "data.dataset.files=text/a.txt"]


@pytest.mark.numeric
@pytest.mark.any_processor
@pytest.mark.parametrize(
    "model",
    [
        ["model=lenet"],
        [*GPT, "data.batch_size=8", "model.constants.width=16", "model.constants.hidden=32"],
    ],
)
def test_lenet_and_gpt_agree_to_1e_10(model, monkeypatch):
    Path("text").mkdir()
    Path("text/a.txt").write_text("".join(chr(97 + (7 * n * n + n // 3) % 26) for n in range(6_000)))
    # An epoch, and some of the next.
    shared = [*model, "precision=fp64", "trainer.max_epochs=2", "trainer.max_steps=22", "hooks=[]"]
    shared += ["trainer.max_time=null", "trainer.val_check_interval=null"]
    own = [["seed=1"], ["seed=2", "optimizer.lr=0.001"]]
    for one, other in zip(stacked(shared, own), alone(shared, own), strict=True):
        for tag in ("loss/train", "loss/train_epoch", "loss/val", "loss/test"):
            assert math.isclose(one.metrics[tag], other.metrics[tag], rel_tol=1e-10), tag
        assert one.best["step"] == other.best["step"]


@pytest.mark.numeric
@pytest.mark.any_processor
def test_weights_of_terms_and_label_smoothing_are_each_members_own():
    shared = ["precision=fp64", "trainer.max_epochs=2", "hooks=[]"]
    smoothed = "objective.cross_entropy.loss.label_smoothing"
    own = [["seed=1"], [f"{smoothed}=0.1"], [f"{smoothed}=0.3", "objective.cross_entropy.weight=2.0"]]
    for one, other in zip(stacked(shared, own), alone(shared, own), strict=True):
        for tag in ("loss/train", "loss/train_epoch", "loss/val", "loss/test"):
            assert math.isclose(one.metrics[tag], other.metrics[tag], rel_tol=1e-10), tag


def test_initial_values_by_names_with_dots_are_each_members_own():
    shared = ["trainer.max_steps=3", "hooks=[]"]
    own = [["+initialisation={hidden.bias:zeros,Linear.weight:xavier_uniform}"],
           ["+initialisation={hidden.bias:ones,Linear.weight:kaiming_uniform}"]]  # fmt: skip
    for one, other in zip(stacked(shared, own), alone(shared, own), strict=True):
        assert isinstance(one, Report), one
        assert_same_weights(one, other)


@pytest.mark.numeric
def test_bf16_agrees_as_far_as_bf16_rounds():
    shared = ["precision=bf16", "trainer.max_epochs=2", "hooks=[]"]
    for one, other in zip(stacked(shared, RATES), alone(shared, RATES), strict=True):
        assert math.isclose(one.metrics["loss/val"], other.metrics["loss/val"], rel_tol=0.1)


def test_a_member_leaves_the_files_of_a_run_alone():
    shared = ["trainer.max_epochs=3", "tags=[a]", "checkpoint.save_best=true"]
    own = [["seed=1"], ["seed=2", "optimizer.lr=0.01"]]
    for one, other in zip(stacked(shared, own), alone(shared, own), strict=True):
        directories = [Path(report.directory) for report in (one, other)]
        names = [
            {path.relative_to(d).parts[:2] for path in d.rglob("*") if "events" not in path.name} for d in directories
        ]
        # The pictures of a report would take a stack longer than its training.
        assert names[0] == {parts for parts in names[1] if parts[0] != "pictures"}
        for name in ("config.yaml", "overrides.yaml"):
            assert (directories[0] / name).read_text() == (directories[1] / name).read_text()
        first, second = (json.loads((d / "provenance.json").read_text()) for d in directories)
        assert {**first, "time": 0} == {**second, "time": 0, "stack": True}

        # A stack keeps the numbers of heat maps in its members' tables, and draws none.
        both = [{key for key in events(one) if not key[0].startswith(OF_THE_STACK)} for one in (one, other)]
        points = [{key for key in found if key[0] not in HEAT_MAPS} for found in both]
        assert points[0] == points[1]
        assert all(len(values) == 1 for key, values in events(one).items() if key[1])
        for key, values in events(one).items():
            if isinstance(values[0], float) and key in points[0]:
                assert math.isclose(values[0], events(other)[key][0], rel_tol=1e-6, abs_tol=1e-12), key

        for name in ("last.ckpt", "best.ckpt"):
            first, second = entries(one, name), entries(other, name)
            assert first.keys() == second.keys()
            for key, value in first.items():
                if isinstance(value, float) and "/loss/train" in key:
                    assert math.isclose(value, second[key], rel_tol=1e-6)
                elif not key.startswith("/loops/") and not isinstance(value, torch.Tensor):
                    assert value == second[key], key

        assert read_report(one.directory) == replace(one, not_written=())
        first, second = (
            json.loads((directories[0] / "report.json").read_text()),
            json.loads((directories[1] / "report.json").read_text()),
        )
        assert first.keys() == second.keys()
        for key in first.keys() - {*TIMES, "metrics", "best"}:
            assert first[key] == second[key], key
        assert first["best"]["value"] == second["best"]["value"]
        assert "completed" in (directories[0] / "report.md").read_text()
        assert "trained in a stack of 2 jobs" in (directories[0] / "train.log").read_text()


@pytest.mark.numeric
def test_an_ordinary_run_goes_on_from_a_members_checkpoint_exactly():
    own = [["seed=1"], ["seed=2", "optimizer.lr=0.01"]]
    short, long = ["trainer.max_epochs=2", "hooks=[]"], ["trainer.max_epochs=4", "hooks=[]"]
    begun = stacked(short, own)
    whole = alone(long, own)
    for place, (one, other) in enumerate(zip(begun, whole, strict=True)):
        last = Path(one.directory, "checkpoints", "last.ckpt")
        [config] = configs(f"longer{place}", long, [[*own[place], f"resume={last}"]])
        gone_on = fit(config)
        assert gone_on.steps == other.steps
        assert_same_weights(gone_on, other)


@pytest.mark.numeric
def test_a_stack_that_was_interrupted_goes_on_in_place(monkeypatch):
    shared = ["trainer.max_epochs=4", "optimizer.lr=0.01"]
    own = [["seed=1"], ["seed=2"], ["seed=3"]]
    whole = alone(shared, own)
    own_batches, seen = stack.Stack._do_batch, []

    def signalled(self, *arguments, **named):
        own_batches(self, *arguments, **named)
        seen.append(1)
        if len(seen) == 47:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(stack.Stack, "_do_batch", signalled)
    wanted = configs("stack", shared, own)
    ended = [error for _, error in train(wanted)]
    assert [type(error) for error in ended] == [Interrupted] * 3
    assert ended[0].exit_status == 143
    assert "resume=outputs/stack/0/checkpoints/last.ckpt" in str(ended[0])
    assert read_report("outputs/stack/1").status == "interrupted"
    monkeypatch.setattr(stack.Stack, "_do_batch", own_batches)
    reports = dict(train(wanted))
    for place, other in enumerate(whole):
        assert reports[place].directory == str(Path("outputs/stack", str(place)).absolute())
        assert reports[place].steps == 80
        assert_same_weights(reports[place], other)
        scalars = {key for key, values in events(other).items() if isinstance(values[0], float)}
        assert scalars >= {("loss/train", 47), ("loss/train", 48), ("loss/val", 80)}
        assert {key for key in scalars if key[0].startswith("loss")} == {
            key for key in events(reports[place]) if key[0].startswith("loss")
        }


def test_a_member_that_is_trained_is_held_as_a_run_is(monkeypatch):
    """By which exp.resume and resume=auto leave it alone, and exp.report says that it is running."""
    own_batches, held = stack.Stack._do_batch, []

    def observed(self, *arguments, **named):
        held.append([is_locked(path) for path in sorted(Path("outputs/stack").glob("*/config.yaml"))])
        own_batches(self, *arguments, **named)

    monkeypatch.setattr(stack.Stack, "_do_batch", observed)
    # The second one is lost in the first epoch, and leaves.
    own = [["optimizer.lr=0.05"], ["optimizer.lr=1e30"], ["optimizer.lr=0.02"]]
    stacked(["trainer.max_epochs=2", "optimizer=sgd", "hooks=[]"], own)
    assert held[0] == [True, True, True]
    assert held[-1] == [True, False, True]
    assert not any(is_locked(path) for path in Path("outputs/stack").glob("*/config.yaml"))


@pytest.mark.numeric
def test_a_member_that_is_lost_leaves_and_the_others_do_not_notice():
    shared = ["trainer.max_epochs=3", "optimizer=sgd", "hooks=[]"]
    own = [["optimizer.lr=0.05"], ["optimizer.lr=1e30"], ["optimizer.lr=0.02", "seed=3"]]
    first, lost, last = stacked(shared, own)
    assert isinstance(lost, NonFiniteError)
    with pytest.raises(NonFiniteError) as told:
        alone(shared, own[1:2], name="lost")
    assert str(lost) == str(told.value)
    report = read_report("outputs/stack/1")
    assert (report.status, report.error["type"]) == ("failed", "NonFiniteError")
    for one, other in zip((first, last), alone(shared, [own[0], own[2]]), strict=True):
        assert isinstance(one, Report)
        assert_same_weights(one, other)


def test_what_only_the_built_parts_tell_is_told_before_a_directory_is_made():
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/noisy.yaml").write_text(
        "_target_: exp.models.containers.SequentialModel\n"
        "layers:\n  flatten: {_target_: torch.nn.Flatten}\n  noise: {_target_: torch.nn.RReLU}\n"
        "  head: {_target_: torch.nn.Linear, out_features: 10}\n"
    )
    with pytest.raises(Unstackable, match="something beside its dropouts draws random numbers"):
        list(train(configs("noisy", ["model=noisy"], [["seed=1"], ["seed=2"]])))
    assert not Path("outputs").exists()
