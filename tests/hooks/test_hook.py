"""Hooks of users: calls, names, and errors for mistakes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exp.errors import ConfigError, RunError, UserCodeError
from exp.hooks.hook import Hook

ALLOW = "security.allow=[own_hooks]"


@pytest.fixture
def own(monkeypatch) -> None:
    """Make own_hooks.py importable."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def hook_of(*kinds: str) -> list[str]:
    """Return overrides that add a hook per class, with the class name in lower case as its name."""
    return [ALLOW, *(f"+hooks.{kind.partition(',')[0].lower()}={{_target_: own_hooks.{kind}}}" for kind in kinds)]


# --- in runs ---

PROBED = ["model=lenet", "optimizer=sgd", "data.batch_size=32", "trainer.max_steps=4", "hooks=[]"]
PROBED += ["trainer.limit_val_batches=0", "test=false", "metrics=[]", "monitor=loss/train"]
PROBED += hook_of("Probe, every_n_steps: 2, modules: [conv2, Linear]")
# Overrides, ranks, and tolerance of the comparison with a plain run.
SETTINGS = {
    "fp16": (["precision=fp16"], 1, 2e-2),
    "compile": (["runtime.compile=true", "runtime.compile_backend=aot_eager"], 1, 1e-5),
    "ddp": (["strategy=ddp", "launch.devices=2"], 2, 1e-5),
    "fsdp": (["strategy=fsdp", "launch.devices=2"], 2, 1e-5),
    "layer_split": (["strategy=layer_split", "launch.devices=2"], 1, 1e-5),
}


def assert_probed(values: dict[str, dict[int, float]], plain: dict[str, dict[int, float]], tolerance: float) -> None:
    tags = [tag for tag in plain if tag.startswith("probe/")]
    assert len(tags) == 4 * 3, "conv2 and three linear layers, and three methods"
    for tag in tags:
        assert values[tag].keys() == plain[tag].keys() == {1, 2, 4}
        for step, value in plain[tag].items():
            assert math.isclose(values[tag][step], value, rel_tol=tolerance), (tag, step)


@pytest.mark.numeric
@pytest.mark.usefixtures("own")
def test_an_observer_sees_values_without_loss_scale(fit):
    more, _, tolerance = SETTINGS["fp16"]
    assert_probed(fit(*PROBED, *more).values, fit(*PROBED).values, tolerance)


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "fp16"])
def test_an_observer_sees_the_same_in_other_runs(fit, ranks, in_tmp, setting):
    (in_tmp / "conf").mkdir()
    shutil.copy(Path(__file__).with_name("own_hooks.py"), in_tmp)  # each rank imports from its working directory
    more, count, tolerance = SETTINGS[setting]
    assert_probed(ranks.train(*PROBED, *more, ranks=count).values, fit(*PROBED).values, tolerance)


SHORT = ["trainer.max_steps=1", "model.layers.hidden.out_features=8"]


@pytest.mark.any_processor
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("InPlace", "InPlace.forward changed a tensor in place; expected no change, because the hook only observes"),
        ("Number", "Number.after_step returned a float; expected a mapping of tags to values, or None"),
        ("Taken", "hooks.taken in after_step logs loss/train, a tag of the engine; expected a tag that is not in use"),
        ("Shared", "hooks.shared in after_step logs gradients/norm/total, a tag of hooks.gradients in after_backward;"),
        ("Twice", "hooks.twice in after_step logs twice, a tag of hooks.twice in after_backward; expected a tag"),
    ],
)
def test_a_mistake_in_a_step_names_the_hook(fit, kind, message):
    with pytest.raises(RunError) as caught:
        fit(*SHORT, *hook_of(kind))
    assert message in str(caught.value)


@pytest.mark.usefixtures("own")
def test_a_tag_of_one_evaluation_is_refused_in_another(fit):
    with pytest.raises(
        RunError, match=r"in after_evaluation of test logs same, a tag of .* in after_evaluation of val;"
    ):
        fit(*SHORT, "test=true", "trainer.limit_val_batches=1", *hook_of("TwoStages"))


@pytest.mark.usefixtures("own")
def test_an_exception_of_a_hook_keeps_its_type(fit):
    with pytest.raises(UserCodeError, match="hook broken, in after_step, failed with KeyError") as caught:
        fit(*SHORT, *hook_of("Broken"))
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.__notes__ == ["raised in hooks.broken, by Broken.after_step"]


# --- attached to a network ---


class Double(Hook):
    transforms = True

    def forward(self, name, module, inputs, output):
        return 2 * output


class Names(Hook):
    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.seen: list[str] = []

    def forward(self, name, module, inputs, output):
        self.seen.append(name)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))


def test_a_transform_replaces_outputs_until_it_is_detached():
    net, inputs = network(), torch.randn(5, 4)
    plain = net(inputs)
    hook = Double(modules=["2"])
    hook.attach(net)
    assert torch.equal(net(inputs), 2 * plain)
    hook.detach()
    hook.detach()
    assert torch.equal(net(inputs), plain)


@pytest.mark.parametrize(
    ("modules", "seen"),
    [(["2.*", "1"], ["1", "2.0", "2.1"]), (["torch.nn.Linear", "ReLU"], ["0", "1", "2.0", "2.1"])],
)
def test_an_engaged_observer_sees_modules_that_match(modules, seen):
    net = network()
    hook = Names(modules=modules)
    hook.attach(net)
    net(torch.randn(1, 4))
    assert hook.seen == []
    with hook.engaged():
        net(torch.randn(1, 4))
    net(torch.randn(1, 4))
    assert hook.seen == seen


def test_an_observer_must_not_return_a_value():
    class Forgetful(Hook):
        def forward(self, name, module, inputs, output):
            return 2 * output

    hook, net = Forgetful(modules=["1"]), network()
    hook.attach(net, name="mine")
    message = r"hooks.mine: Forgetful.forward returned a Tensor.*transforms = True"
    with hook.engaged(), pytest.raises(RunError, match=message):
        net(torch.randn(1, 4))


class Gradients(Hook):
    """Hook that records all gradients in the backward."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.of_outputs: dict[str, torch.Tensor] = {}
        self.of_inputs: dict[str, torch.Tensor] = {}
        self.of_parameters: dict[str, torch.Tensor] = {}

    def tensor_gradient(self, name, gradient):
        self.of_outputs[name] = gradient.clone()

    def full_backward(self, name, module, grad_inputs, grad_outputs):
        self.of_inputs[name] = grad_inputs[0].clone()

    def post_accumulate_grad(self, name, parameter):
        self.of_parameters[name] = parameter.grad.clone()


def test_gradients_at_modules_equal_those_of_autograd():
    net, inputs = network(), torch.randn(5, 4)
    hook = Gradients(modules=["2"])
    hook.attach(net)
    with hook.engaged():
        output = net[2](net[1](net[0](inputs)))
    output.square().sum().backward()
    hook.disengage()
    seen = dict(hook.of_outputs), dict(hook.of_inputs), dict(hook.of_parameters)
    net.zero_grad()
    hidden = net[1](net[0](inputs)).detach().requires_grad_()
    output = net[2](hidden)
    output.retain_grad()
    output.square().sum().backward()
    assert torch.equal(seen[0]["2"], output.grad)
    assert torch.equal(seen[1]["2"], hidden.grad)
    assert seen[2].keys() == {"2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"}
    assert torch.equal(seen[2]["2.1.weight"], net[2][1].weight.grad)
    assert (hook.of_outputs, hook.of_inputs, hook.of_parameters) == seen, (
        "the hook must record nothing after it is disengaged"
    )


def test_a_pattern_without_a_module_names_the_modules():
    with pytest.raises(ConfigError) as caught:
        Names(modules=["encoder.*", "0", "decoder"]).attach(network(), name="mine")
    message = str(caught.value)
    assert [error.key for error in caught.value.errors] == ["hooks.mine.modules"] * 2
    assert "'encoder.*'" in message
    assert "'decoder'" in message
    assert "there are 0, 1, 2, 2.0, 2.1" in message


def test_only_overridden_methods_are_overrides():
    assert Double().overrides("forward")
    assert not Double().overrides("after_step")
    assert not Hook().overrides("forward")


@given(period=st.integers(1, 100), index=st.integers(1, 10_000))
def test_a_hook_is_due_first_and_at_multiples(period, index):
    assert Hook(every_n_steps=period).due(index) == (index == 1 or index % period == 0)
    with pytest.raises(ValueError, match="every_n_steps is 0; expected a whole number of steps, 1 or more"):
        Hook(every_n_steps=0)


def test_a_hook_is_torn_down_once():
    class Once(Hook):
        def teardown(self):
            ended.append(self)

    ended: list[Hook] = []
    hook = Once()
    hook.detach()
    assert ended == []
    hook.attach(network())
    hook.detach()
    hook.detach()
    assert ended == [hook]
