"""Hooks at modules under torch.compile, strategies, a loss scale and accumulation: the same figures, or a refusal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import exp
from exp.errors import ConfigError, RunError, UserCodeError

pytestmark = pytest.mark.numeric

PROBE = """
import torch
from exp.hooks.hook import Hook

class Probe(Hook):
    def setup(self, network):
        self.seen = {}

    def forward(self, name, module, inputs, output):
        self.seen[f"probe/forward/{name}"] = output.float().square().mean()

    def tensor_gradient(self, name, gradient):
        self.seen[f"probe/gradient/{name}"] = gradient.float().norm() / self.loss_scale

    def full_backward(self, name, module, grad_inputs, grad_outputs):
        self.seen[f"probe/backward/{name}"] = grad_inputs[0].float().norm() / self.loss_scale

    def after_step(self, step):
        # Of all ranks, whose shares of the batch are equal, as if the batch were in one place.
        count = len(step.gather(step.loss))
        found = {}
        for tag, value in self.seen.items():
            every = step.gather(value)
            # A rank's loss is the mean over its own share: gradients are so many times those of the whole batch's mean.
            found[tag] = every.mean() if "forward" in tag else (every / count).square().sum().sqrt()
        return found


class Deaf(Hook):
    transforms = True

    def full_backward(self, name, module, grad_inputs, grad_outputs):
        return grad_inputs


class Saved(Hook):
    def state_dict_save(self, name, module, state):
        pass


class Mistyped(Hook):
    needs = frozenset({"whole_parameter", "one_thread"})

    def after_step(self, step):
        pass


class Stubborn(Hook):
    needs = frozenset({"one_rank", "float32", "one_batch_a_step"})

    def after_step(self, step):
        pass


class Refusing(Hook):
    refuses = {"fsdp": "it needs whole weights", "phases": "it knows one loss"}

    def after_step(self, step):
        pass


class Typo(Hook):
    def after_stepp(self, step):
        pass


class Nothing(Hook):
    pass


class Narrow(Hook):
    def forward(self, name, module, inputs):
        pass


class InPlace(Hook):
    def forward(self, name, module, inputs, output):
        output.mul_(0.5)


class Number(Hook):
    def after_step(self, step):
        return 3.0


class Taken(Hook):
    def after_step(self, step):
        return {"loss/train": 99.0}


class Shared(Hook):
    def after_step(self, step):
        return {"gradients/norm/total": 1.0}


class Broken(Hook):
    def after_step(self, step):
        raise KeyError("mine")
"""
RUN = [
    "model=lenet",
    "optimizer=sgd",
    "data.batch_size=32",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=4",
    "trainer.limit_val_batches=0",
    "test=false",
    "hooks=[]",
    "+hooks.probe={_target_: probe.Probe, every_n_steps: 2, modules: [conv2, Linear]}",
    "security.allow=[probe]",
    "monitor=loss/train",
]
ONE_STEP = [
    "security.allow=[probe]", "trainer.max_steps=1", "trainer.limit_val_batches=0", "test=false", "monitor=loss/train",
    "metrics=[]", "model.layers.hidden.out_features=8",
]  # fmt: skip
# What each is told beside a plain run, ranks, and how near its figures are.
SETTINGS = {
    "compile": (["runtime.compile=true", "runtime.compile_backend=aot_eager"], 1, 1e-5),
    "ddp": (["strategy=ddp"], 2, 1e-5),
    "fsdp": (["strategy=fsdp"], 2, 1e-5),
    "layer_split": (["strategy=layer_split", "launch.devices=2"], 1, 1e-5),
    "fp16": (["precision=fp16"], 1, 2e-2),
}


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "conf" / "hooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


PLAIN: dict[str, dict[str, dict[int, float]]] = {}


@pytest.mark.usefixtures("probe")
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_an_observer_sees_is_that_of_one_plain_process(ranks, setting):
    if not PLAIN:
        PLAIN.update(ranks.train(*RUN).values)
    overrides, count, tolerance = SETTINGS[setting]
    values = ranks.train(*RUN, *overrides, ranks=count).values
    tags = [tag for tag in PLAIN if tag.startswith("probe/")]
    # conv2 and three linear layers, and three methods.
    assert len(tags) == 12
    for tag in tags:
        assert values[tag].keys() == PLAIN[tag].keys() == {1, 2, 4}
        for step, value in PLAIN[tag].items():
            assert math.isclose(values[tag][step], value, rel_tol=tolerance), (tag, step)


@pytest.mark.any_processor
@pytest.mark.usefixtures("probe")
@pytest.mark.parametrize(
    ("hook", "override", "message"),
    [
        (
            "Deaf",
            "runtime.compile=true",
            "hooks.mine: a Deaf hook with runtime.compile=true; expected a run without it",
        ),
        ("Saved", "strategy=fsdp", "strategy=fsdp; expected a run without it: its checkpoints are put together"),
        ("Probe", "strategy=pipeline", "hooks.mine: a Probe hook with strategy=pipeline; expected a run without it"),
        ("Stubborn", "strategy=ddp", "expected a run without it: each of several ranks sees a part of the batch."),
        ("Stubborn", "launch.devices=2", "strategy=auto; expected a run without it: each of several ranks sees a part"),
        (
            "Mistyped",
            "seed=1",
            "hooks.mine: a Mistyped hook that needs 'whole_parameter'; expected words among whole_parameters, whole_o",
        ),
        (
            "Refusing",
            "seed=1",
            "hooks.mine: Refusing with `refuses`, which nothing reads; expected `needs`, a frozenset of words among",
        ),
        ("Stubborn", "precision=bf16", "precision=bf16; expected a run without it: it computes in half precision"),
        ("Stubborn", "trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches=2; expected a run without"),
    ],
)
def test_what_a_hook_cannot_live_with_is_one_message_before_the_run(hook, override, message):
    config = exp.compose(["hooks=[]", f"+hooks.mine={{_target_: probe.{hook}}}", "security.allow=[probe]", override])
    with pytest.raises(ConfigError) as caught:
        exp.validate(config)
    assert message in str(caught.value)
    assert len(caught.value.faults) == 1


@pytest.mark.any_processor
@pytest.mark.usefixtures("probe")
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            "Typo",
            "hooks.mine: Typo with a method after_stepp, which nothing calls; expected after_step, or",
        ),
        (
            "Nothing",
            "hooks.mine: Nothing with a class that overrides no method of Hook; expected one or more of",
        ),
        ("Narrow", "too many positional arguments; expected def forward(self, name, module, inputs, output)"),
        ("Typo, modules: []", "hooks.mine.modules: []; expected one pattern or more"),
    ],
)
def test_a_class_that_could_never_act_is_a_fault(hook, message):
    config = exp.compose([f"+hooks.mine={{_target_: probe.{hook}}}", "security.allow=[probe]"])
    with pytest.raises(ConfigError) as caught:
        exp.validate(config)
    assert message in str(caught.value)


@pytest.mark.any_processor
@pytest.mark.usefixtures("probe")
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("InPlace", "hooks.mine: InPlace.forward changed a tensor in place; an observing hook leaves what it sees"),
        ("Number", "hooks.mine: Number.after_step returned a float; expected a mapping of tags to values, or None"),
        ("Taken", "hooks.mine gives loss/train, which is the engine's own; expected a tag of its own"),
        ("Shared", "hooks.mine gives gradients/norm/total, which is given by hooks.gradients, too"),
    ],
)
def test_what_a_hook_does_wrong_in_a_step_is_one_line_with_its_name(hook, message):
    with pytest.raises(RunError) as caught:
        exp.fit(exp.compose([*ONE_STEP, f"+hooks.mine={{_target_: probe.{hook}}}"]))
    assert message in str(caught.value)


@pytest.mark.usefixtures("probe")
def test_an_error_of_a_hook_s_own_keeps_its_kind_and_names_the_hook():
    with pytest.raises(UserCodeError, match="hook mine, in after_step, failed with KeyError") as caught:
        exp.fit(exp.compose([*ONE_STEP, "+hooks.mine={_target_: probe.Broken}"]))
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.__notes__ == ["raised in hooks.mine, by Broken.after_step"]


def test_patterns_are_judged_where_other_nodes_are_wrong_too():
    config = exp.compose(["hooks.gradients.modules=[nope]", "+precision.keep.x=fp33"])
    with pytest.raises(ConfigError) as caught:
        exp.validate(config)
    assert {fault.key for fault in caught.value.faults} == {"hooks.gradients.modules", "precision.keep"}


def test_what_observers_compute_is_no_operator_of_the_network(tmp_path, monkeypatch):
    tables = []
    for hooks in ("operators", "operators,memory,activations,retain_gradients"):
        (place := tmp_path / str(len(hooks))).mkdir()
        monkeypatch.chdir(place)
        report = exp.fit(exp.compose([*ONE_STEP[1:], f"hooks=[{hooks}]"]))
        tables.append((Path(report.directory) / "operators" / "step-1.md").read_text())
    assert tables[0] == tables[1]
