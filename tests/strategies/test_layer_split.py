"""A network over several devices trains what it does on one; on a CPU, cpu:0 and cpu:1 are names for the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from exp.check.__main__ import main as check

pytestmark = pytest.mark.numeric

RUN = (
    *("optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=30", "trainer.limit_val_batches=2"),
    *("trainer.log_every_n_steps=1", "hooks=[gradients]", "trainer.gradient_clip_val=0.5"),
)


def different(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.any_processor
def test_resnet_in_two_halves(ranks):
    """PyTorch's model-parallel tutorial."""
    halves = "strategy.layers=[[stem,'stage.*'],[down,'stage2.*',norm,head]]"
    one = ranks.train("model=resnet", *RUN, "strategy=single", "precision=fp64")
    two = ranks.train("model=resnet", *RUN, "strategy=layer_split", halves, "precision=fp64")
    assert two.report["strategy"] == "layer_split"
    assert two.report["world_size"] == 1
    assert different(one.losses, two.losses) < 1e-10
    for tag in ("gradients/norm/total", "loss/val"):
        assert different(one.values[tag].values(), two.values[tag].values()) < 1e-10
    for name, value in one.checkpoint()["state_dict"].items():
        assert (two.checkpoint()["state_dict"][name] - value).abs().max() < 1e-10


@pytest.mark.any_processor
def test_two_ranks_of_two_devices_each(ranks):
    run = ("model=transformer", *RUN, "test=false", "trainer.accumulate_grad_batches=2")
    one = ranks.train(*run, "strategy=single")
    two = ranks.train(*run, "strategy=ddp", "strategy.inner=layer_split", "launch.devices=4", ranks=2)
    assert two.report["world_size"] == 2
    assert different(one.losses, two.losses) < 1e-5


PLACES = textwrap.dedent(
    """
    # Fake tensors of a device that torch does not know: only that an operator's operands lie on one device is checked.
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from exp.models.containers import ModuleDictModel
    from exp.models.partition import split
    from exp.strategies.layer_split import SplitNetwork

    torch.utils.rename_privateuse1_backend("toy")
    torch._register_device_module("toy", type("Toy", (), {
        "is_available": staticmethod(lambda: True), "device_count": staticmethod(lambda: 2),
        "current_device": staticmethod(lambda: 0), "is_initialized": staticmethod(lambda: True),
        "_is_in_bad_fork": staticmethod(lambda: False),
    }))
    devices = [torch.device("toy:0"), torch.device("toy:1")]
    # Without gradients: autograd asks the device's own code, which is not there.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layers = {name: torch.nn.Linear(6, 6, bias=False) for name in "ab"}
        network = ModuleDictModel(layers=layers, forward="y = a(x)\\nreturn b(y) + y")
        parts = split(network, count=2, layers=None, inputs=())
        for name, device in zip("ab", devices):
            layers[name].weight = torch.nn.Parameter(torch.empty(6, 6, device=device))
        x = torch.empty(3, 6, device=devices[1])
        output = SplitNetwork(network, parts, devices)(x)
        assert output.device == devices[1], output.device
        try:
            network(x)
        except RuntimeError as error:
            print("whole:", str(error).splitlines()[0])
        else:
            raise SystemExit("the whole network ran over two devices")
    print("split: right")
    """
)


@pytest.mark.any_processor
def test_values_are_moved_to_where_the_next_layers_are(tmp_path):
    done = subprocess.run([sys.executable, "-c", PLACES], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "split: right" in done.stdout
    assert "whole: Expected all tensors to be on the same device" in done.stdout


@pytest.mark.any_processor
@pytest.mark.parametrize(("command", "key", "said"), [
    ("strategy.layers=[[hidden],[nothing]]", "strategy.layers.1", "hidden2"),
    ("launch.devices=3;strategy.layers=[[hidden],[hidden2,head]]", "launch.devices", "launch.devices=2"),
    ("launch.devices=1", "launch.devices", "strategy=single"),
    ("launch.devices=4", "strategy.layers", "at most 3"),
    ("runtime.compile=true;runtime.compile_backend=aot_eager", "runtime.compile", "one by one"),
    ("+callbacks.added={_target_:lightning.pytorch.callbacks.WeightAveraging}", "callbacks.added", "callbacks=[ema]"),
    ("strategy=ddp;strategy.inner=layers", "strategy.inner", "layer_split"),
    ("strategy=ddp;strategy.inner=layer_split;launch.devices=3", "launch.devices", "multiple of 2"),
    ("strategy=ddp;strategy.layers=[[hidden],[hidden2,head]]", "strategy.layers", "strategy.inner=layer_split"),
    ("strategy=ddp;strategy.inner=layer_split;strategy.communication_hook=bf16", "strategy.communication_hook", "one"),
])  # fmt: skip
def test_what_cannot_be_split_is_said_before_it_starts(tmp_path, monkeypatch, capsys, command, key, said):
    monkeypatch.chdir(tmp_path)
    assert (
        check(["strategy=layer_split", *command.split(";")] if "strategy=ddp" not in command else command.split(";"))
        == 2
    )
    text = capsys.readouterr().err
    assert f"  {key}: " in text
    assert said in text


NETS = textwrap.dedent(
    """
    import torch
    from torch.nn import functional

    class Right(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)
            self.dropout = torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.head(self.dropout(self.hidden(x.flatten(1))))

    class Functional(Right):
        def forward(self, x):
            return self.head(functional.dropout(self.hidden(x.flatten(1)), training=self.training))
    """
)


def test_functional_dropout_of_a_network_of_ones_own_is_refused(tmp_path, monkeypatch, capsys):
    """The parts would drop in evaluation, too."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    for kind in ("Right", "Functional"):
        text = f"# A network of one's own: model={kind.lower()}\n_target_: nets_that_drop.{kind}\n"
        (tmp_path / "conf" / "model" / f"{kind.lower()}.yaml").write_text(text)
    (tmp_path / "nets_that_drop.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for strategy in ("strategy=layer_split", "strategy=pipeline"):
        assert check(["model=right", strategy, "launch.devices=2"]) == 0
        capsys.readouterr()
        assert check(["model=functional", strategy, "launch.devices=2"]) == 2
        text = capsys.readouterr().err
        assert "  strategy.name: " in text
        assert "torch.nn.Dropout as a layer" in text


def run_network_after_a_run(rank, *, directory):
    """Whether what a step calls is the network itself once the run's strategy is torn down."""
    from exp import run
    from exp.strategies.layer_split import LayerSplitStrategy

    found = []
    teardown = LayerSplitStrategy.teardown

    def watched(self):
        module = self.lightning_module
        before = type(module.run_network).__name__
        teardown(self)
        found.append((before, module.run_network is module.network))

    LayerSplitStrategy.teardown = watched
    run.run(directory, rank=rank)
    return found


def test_the_network_is_whole_again_behind_each_stage(ranks):
    directory = ranks.freeze("strategy=layer_split", "trainer.max_epochs=null", "trainer.max_steps=2", "hooks=[]")
    (found,) = ranks.call(run_network_after_a_run, ranks=1, directory=str(directory))
    # Of fit, and of test, which is over the devices again.
    assert found == [("SplitNetwork", True)] * 2
