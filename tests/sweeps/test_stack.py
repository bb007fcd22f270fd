"""A member of a stack equals the same job alone: values, files, checkpoints and status."""

import itertools
import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from exp import compose, fit
from exp.config.frozen import COMPOSITION
from exp.engine.checkpoint import read_checkpoint
from exp.engine.checkpointing import BEST
from exp.engine.recording import is_written
from exp.errors import Interrupted, NonFiniteError
from exp.files import is_locked
from exp.run_report import Report, read_report
from exp.sweeps import member, stack
from exp.sweeps.executor import Unstacked
from exp.sweeps.jobs import Job, with_config
from exp.sweeps.local import outcomes
from exp.sweeps.stack import train
from exp.sweeps.stacked_network import Unstackable

pytestmark = pytest.mark.usefixtures("ends")

QUIET = ["trainer.enable_progress_bar=false", "sweep.stack=true"]
# Measurements of time and memory, which are those of the whole stack.
OF_THE_STACK = ("throughput/", "memory/host_")
# Heat maps and other values of gradients than norms, which a stack leaves out.
LEFT_OUT = ("gradients/histogram/", "gradients/update_ratio")
TIMES = ("wall_seconds", "step_ms", "peak_memory_mib", "directory")


def configs(name, shared, own):
    return [
        compose(overrides=[*QUIET, *shared, *one, f"hydra.run.dir=outputs/{name}/{place}"])
        for place, one in enumerate(own)
    ]


def jobs_of(name, shared, own):
    jobs = []
    for place, config in enumerate(configs(name, shared, own)):
        directory = Path(config[COMPOSITION].directory)
        directory.mkdir(parents=True)
        job = Job(number=place, overrides=(*QUIET, *shared, *own[place]), swept={}, packed=None)
        jobs.append(with_config(job, config, directory))
    return jobs


def stacked(shared, own, *, name="stack"):
    """Train jobs together, and return their outcomes in the order of the jobs."""
    found = dict(train(jobs_of(name, shared, own)))
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


def scalars(report, *tags):
    """Return the values of tags that start with one of `tags`, by tag and step."""
    return {key: values for key, values in events(report).items() if key[0].startswith(tags)}


def weights(report):
    return read_checkpoint(Path(report.directory, "checkpoints", "last.ckpt"))["state_dict"]


def assert_close(one, other):
    """Assert that two jobs in float64 are equal up to differences in the order of summation."""
    assert isinstance(one, Report), one
    assert one.steps == other.steps
    assert one.best["step"] == other.best["step"]
    for tag in ("loss/train", "loss/train_epoch", "loss/val", "loss/test"):
        assert math.isclose(one.metrics[tag], other.metrics[tag], rel_tol=1e-9, abs_tol=1e-12), tag
    first, second = weights(one), weights(other)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.numeric
@pytest.mark.any_processor
def test_stacked_jobs_equal_single_ones_in_float64():
    shared = [
        *("model=normed", "precision=fp64", "trainer.max_epochs=3"),
        *("data.batch_size=384", "hooks=[]", "scheduler=cosine"),
    ]
    own = [
        ["seed=1", "trainer.gradient_clip_val=0.3", "scheduler.warmup_steps=2", "model.layers.drop2.p=0.5"],
        ["seed=2", "scheduler=one_cycle", "model.layers.drop.p=0.0"],
        ["seed=2", "trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value"],
        ["+initialisation={head.bias:ones,Linear.weight:kaiming_uniform}"],
    ]
    for one, other in zip(stacked(shared, own), alone(shared, own), strict=True):
        assert_close(one, other)
        rates = scalars(one, "optimizer/lr/")
        assert len(rates) >= 4
        assert rates == scalars(other, "optimizer/lr/")


# A short text, because the default text has four million characters.
GPT = ["experiment=gpt", "data.dataset.files=text/a.txt"]
GPT += ["model.constants.width=16", "model.constants.hidden=32"]
GPT += ["trainer.max_time=null", "trainer.max_steps=-1", "trainer.val_check_interval=null"]
OPTIMIZERS = [
    ["optimizer=adamw"],
    ["optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.nesterov=true"],
    ["optimizer=adam"],
    # With the default rate of 0.01, the first steps of LeNet increase the loss and rounding errors tenfold.
    ["optimizer=rmsprop", "optimizer.lr=0.0005"],
]
NORMED = (["model=mlp"], ["model=normed"])
# vmap of torch 2.13 cannot differentiate a LayerNorm with bfloat16 inputs and float32 weights. Such jobs run alone.
CASES = [
    [*model, *optimizer, f"precision={precision}"]
    for model, optimizer, precision in itertools.product((*NORMED, ["model=lenet"], GPT), OPTIMIZERS, ("fp64", "bf16"))
    if precision == "fp64" or model not in NORMED
]


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.any_processor
def test_every_model_optimizer_and_precision_can_be_stacked(share):
    Path("text").mkdir()
    Path("text/a.txt").write_text("".join(chr(97 + (7 * n * n + n // 3) % 26) for n in range(6_000)))
    for number, case in enumerate(share.of(CASES)):
        # Training amplifies rounding errors. After five steps in bfloat16, losses differ by at most 1e-3.
        epochs = 2 if "precision=fp64" in case else 1
        size = 16 if GPT[0] in case else 256
        shared = [*case, f"trainer.max_epochs={epochs}", f"data.batch_size={size}", "hooks=[]"]
        own = [["seed=1"], ["seed=2", "optimizer.lr=0.0003"]]
        results = stacked(shared, own, name=f"stack{number}"), alone(shared, own, name=f"alone{number}")
        for one, other in zip(*results, strict=True):
            if "precision=fp64" in case:
                assert_close(one, other)
            else:
                assert math.isclose(one.metrics["loss/val"], other.metrics["loss/val"], rel_tol=1e-2), case


def test_a_member_leaves_the_files_of_a_single_run():
    shared = ["precision=fp64", "trainer.max_epochs=2", "data.batch_size=256", "tags=[a]"]
    own = [["seed=2", "optimizer.lr=0.01"], ["seed=1"]]
    for one, other in zip(stacked(shared, own)[:1], alone(shared, own[:1]), strict=True):
        directories = [Path(report.directory) for report in (one, other)]
        names = [
            {path.relative_to(d).parts[:2] for path in d.rglob("*") if "events" not in path.name} for d in directories
        ]
        assert names[0] == {parts for parts in names[1] if parts[0] not in ("pictures", "table.csv")}
        for name in ("config.yaml", "overrides.yaml"):
            assert (directories[0] / name).read_text() == (directories[1] / name).read_text()
        first, second = (json.loads((d / "provenance.json").read_text()) for d in directories)
        assert {**first, "time": 0} == {**second, "time": 0}

        both = [{key for key in events(one) if not key[0].startswith(OF_THE_STACK)} for one in (one, other)]
        points = [{key for key in found if key[0] != "gradients/norm"} for found in both]
        assert points[0] == {key for key in points[1] if not key[0].startswith(LEFT_OUT)}
        assert all(len(values) == 1 for key, values in events(one).items() if key[1])
        for key, values in events(one).items():
            if isinstance(values[0], float) and key in points[0]:
                assert math.isclose(values[0], events(other)[key][0], rel_tol=1e-6, abs_tol=1e-12), key

        for name in ("last.ckpt", "best.ckpt"):
            first, second = (read_checkpoint(directory / "checkpoints" / name) for directory in directories)
            assert first.keys() == second.keys()
            assert first["state_dict"].keys() == second["state_dict"].keys()

        assert read_report(one.directory) == replace(one, not_written=())
        first, second = (json.loads((d / "report.json").read_text()) for d in directories)
        assert first.keys() == second.keys()
        for key in first.keys() - {*TIMES, "metrics", "best", "best_metrics"}:
            assert first[key] == second[key], key
        assert first["best_metrics"] == pytest.approx(second["best_metrics"], rel=1e-6)
        assert "completed" in (directories[0] / "report.md").read_text()
        assert "trained in a stack of 2 jobs" in (directories[0] / "train.log").read_text()


def test_an_unchanged_best_is_written_once(monkeypatch):
    # Save all members after each epoch.
    monkeypatch.setattr(stack, "SAVE_SECONDS", 0.0)
    saved, copied = Mock(wraps=member.IO.save_checkpoint), Mock(wraps=member.checkpoint.copy_checkpoint)
    monkeypatch.setattr(member.IO, "save_checkpoint", saved)
    monkeypatch.setattr(member.checkpoint, "copy_checkpoint", copied)
    growing = "scheduler={_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 30.0, interval: epoch}"
    shared = ["trainer.max_epochs=3", "data.batch_size=256", "hooks=[]", growing]
    reports = stacked(shared, [["seed=1"], ["seed=2"]])
    assert [3 * report.best["step"] for report in reports] == [report.steps for report in reports]
    names = [call.args[1].name for call in saved.call_args_list]
    assert names.count("best.ckpt") == copied.call_count == 2
    assert names.count("last.ckpt") >= 4


@pytest.mark.numeric
@pytest.mark.any_processor
def test_a_single_run_resumes_from_a_members_checkpoint():
    own = [["seed=1"], ["seed=2", "optimizer.lr=0.01"]]
    short, long = (["precision=fp64", f"trainer.max_epochs={epochs}", "hooks=[]"] for epochs in (1, 2))
    begun, whole = stacked(short, own), alone(long, own)
    for place, (one, other) in enumerate(zip(begun, whole, strict=True)):
        last = Path(one.directory, "checkpoints", "last.ckpt")
        [config] = configs(f"longer{place}", long, [[*own[place], f"resume={last}"]])
        assert_close(fit(config), other)


@pytest.mark.numeric
@pytest.mark.any_processor
def test_a_stack_loses_a_member_is_interrupted_and_resumes(monkeypatch):
    """A member diverges in the first epoch. The other members then get a signal, save, and resume."""

    def interrupts(index, **options):
        if index == 7:
            signal.raise_signal(signal.SIGTERM)
        return is_written(index, **options)

    monkeypatch.setattr(stack, "is_written", interrupts)
    shared = ["precision=fp64", "trainer.max_epochs=2", "trainer.log_every_n_steps=3", "optimizer=sgd", "hooks=[]"]
    own = [["optimizer.lr=0.05"], ["optimizer.lr=1e30"], ["optimizer.lr=0.02", "seed=3"]]
    jobs, ended = jobs_of("stack", shared, own), {}
    for place, outcome in train(jobs):
        if not ended:
            assert [is_locked(path) for path in sorted(Path("outputs/stack").glob("*/config.yaml"))] == [
                True, False, True,
            ]  # fmt: skip
        ended[place] = outcome
    assert not any(is_locked(path) for path in Path("outputs/stack").glob("*/config.yaml"))
    assert isinstance(ended[1], NonFiniteError)
    report = read_report("outputs/stack/1")
    assert (report.status, report.error["type"]) == ("failed", "NonFiniteError")
    with pytest.raises(NonFiniteError) as raised:
        alone(shared, own[1:2], name="lost")
    assert str(ended[1]) == str(raised.value)

    left = [0, 2]
    assert [type(ended[place]) for place in left] == [Interrupted] * 2
    assert ended[0].exit_status == 143
    assert "resume=outputs/stack/0/checkpoints/last.ckpt" in str(ended[0])
    report = read_report("outputs/stack/2")
    assert report.status == "interrupted"
    assert 0 < report.steps < 20, "interrupted within the first epoch"
    resumed = dict(train([jobs[place] for place in left]))
    for place, other in zip((0, 1), alone(shared, [own[place] for place in left]), strict=True):
        assert resumed[place].directory == str(Path("outputs/stack", str(left[place])).absolute())
        assert_close(resumed[place], other)
        points = scalars(other, "loss")
        assert {("loss/train", 18), ("loss/train", 21), ("loss/val", 40)} <= points.keys()
        assert scalars(resumed[place], "loss").keys() == points.keys()


def test_a_stack_finds_the_best_state_in_last_ckpt_after_a_kill():
    """A run writes last.ckpt and then copies it to best.ckpt. A kill between both leaves an old best.ckpt or none."""
    shared = ["trainer.max_epochs=1", "data.batch_size=256", "hooks=[]"]
    jobs = jobs_of("stack", shared, [["seed=1"], ["seed=2"]])
    before = [report for _, report in sorted(dict(train(jobs)).items())]
    paths = [Path(report.directory, "checkpoints", "best.ckpt") for report in before]
    paths[0].unlink()
    old = read_checkpoint(paths[1])
    paths[1].unlink()
    member.IO.save_checkpoint({**old, BEST: {**old[BEST], "step": 1}}, paths[1])
    for (_, report), one, path in zip(sorted(dict(train(jobs)).items()), before, paths, strict=True):
        assert report.best["step"] == one.best["step"] == read_checkpoint(path)[BEST]["step"]
        assert report.best_metrics["loss/test"] == one.best_metrics["loss/test"]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("model=noisy", "random numbers are drawn outside of its dropout layers"),
        ("model=keeping", "model cannot be stacked: a training step changes running.calls, running.mean"),
        ("objective=keeping", "objective.keeping cannot be stacked: a training step changes loss.steps"),
    ],
)
def test_jobs_that_cannot_be_stacked_are_not_frozen(choice, reason):
    with pytest.raises(Unstackable, match=reason):
        list(train(jobs_of("unstacked", [choice, "security.allow=[ends]"], [["seed=1"], ["seed=2"]])))
    assert not list(Path("outputs").rglob("config.yaml"))


def test_a_late_refusal_unstacks_the_jobs_without_an_outcome(monkeypatch):
    def late(jobs):
        yield 1, NonFiniteError("a loss")
        raise Unstackable("a reason")

    monkeypatch.setattr("exp.sweeps.stack.train", late)
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    stacked = Job(number=0, overrides=(), swept={}, packed=None, is_stacked=True)
    found = [(place, type(outcome)) for place, outcome in outcomes([stacked] * 3, threads, fit)]
    assert found == [(1, NonFiniteError), (0, Unstacked), (2, Unstacked)]
