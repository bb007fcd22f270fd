"""nan_guard: the run ends before the bad step, the module is named, the step can be run again alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import exp
from exp.check.plan import resolve
from exp.construct import build_network
from exp.errors import ConfigError, RunError
from exp.hooks import step_trace
from exp.hooks.step import Window
from exp.hooks.step_file import BuffersBefore, StepFile, put_back, tensors_of
from exp.hooks.step_trace import Trace, Tracer
from exp.precision.scaler import can_hold, hold, release
from exp.replay import main as replay
from exp.replay import read_step
from exp.replay import replay as replay_step
from exp.shared_types import DataSpec

MODEL = """# A small network with a fragile layer: model=fragile
_target_: exp.models.containers.SequentialModel
layers:
  flatten: {_target_: torch.nn.Flatten}
  hidden: {_target_: torch.nn.LazyLinear, out_features: 16}
  norm: {_target_: torch.nn.BatchNorm1d, num_features: 16}
  fragile: {_target_: fragile.Fragile, at: 4, where: forward}
  head: {_target_: torch.nn.LazyLinear, out_features: "${data.num_outputs}"}
"""
QUIET = ["trainer.enable_progress_bar=false", "logger=[]", "test=false", "model=fragile", "data.batch_size=16"]
BACKWARD = "model.layers.fragile.where=backward"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with a model of its own. One for all tests: a module is imported from one place only."""
    directory = tmp_path_factory.mktemp("fragile")
    (directory / "conf" / "model").mkdir(parents=True)
    (directory / "conf" / "model" / "fragile.yaml").write_text(MODEL)
    shutil.copy(Path(__file__).with_name("fragile.py"), directory)
    return directory


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "fragile", raising=False)


class Run:
    """A run in this process that may fail."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        self.directory = directory
        self.error: RunError | None = None
        config = exp.compose([f"hydra.run.dir={directory}", *QUIET, *overrides])
        try:
            exp.fit(config)
        except RunError as error:
            self.error = error

    def file(self, name: str = "step-4.pt") -> dict[str, Any]:
        return torch.load(self.directory / "nan_guard" / name, weights_only=True)

    def checkpoint(self) -> dict[str, Any]:
        return torch.load(self.directory / "checkpoints" / "last.ckpt", weights_only=True)

    def kept(self) -> dict[str, Any]:
        return torch.load(self.directory / "kept.pt", weights_only=True)


@pytest.fixture
def run(place: Path, request: pytest.FixtureRequest):
    """Runs a command line; each in a directory of its own."""
    count = iter(range(100))

    def run(*overrides: str) -> Run:
        name = request.node.name.translate(str.maketrans("[]-=", "____"))
        return Run(place / "outputs" / f"{name}.{next(count)}", "hooks=[nan_guard]", *overrides)

    return run


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


KEEP = "+callbacks.keeper={_target_: fragile.Keeper}"
PARAMETERS = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight", "head.bias")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_run_ends_before_the_bad_step_and_names_the_module(run, where: str, capsys) -> None:
    bad = run(f"model.layers.fragile.where={where}", "trainer.max_steps=9", KEEP)
    message = str(bad.error)
    path = (bad.directory / "nan_guard" / "step-4.pt").relative_to(Path.cwd())
    if where == "forward":
        assert "step 4: the loss is nan; the run ends before the optimizer's step" in message
        assert "The first is `fragile` (Fragile), in the forward: its output has 256 nan of 256 numbers" in message
    else:
        assert "step 4: a gradient is not finite; the run ends before the optimizer's step" in message
        assert "The first is `fragile` (Fragile), in the backward: SqrtBackward0 gave 256 infinite" in message
    assert message.endswith(f"The step is in {path}. It is run alone by\n  python -m exp.replay {path}")
    report = json.loads((bad.directory / "report.json").read_text())
    assert report["status"] == "failed"
    assert "`fragile` (Fragile)" in report["error"]["message"]
    # The weights are those of a run that ends before; of its buffers the forward of the bad step changed some.
    before = run(f"model.layers.fragile.where={where}", "trainer.max_steps=3", "hooks=[]")
    weights = {name.removeprefix("network."): one for name, one in before.checkpoint()["state_dict"].items()}
    kept, file = bad.kept(), bad.file()
    assert all(torch.equal(kept["network"][name], weights[name]) for name in PARAMETERS)
    assert equal(kept["optimizers"][0]["state"], before.checkpoint()["optimizer_states"][0]["state"])
    # The file has those from before, too.
    assert all(torch.equal(tensor, weights[name]) for name, tensor in file["network"].items())
    assert equal(file["optimizers"][0]["state"], kept["optimizers"][0]["state"])
    # It runs alone, and shows the module first.
    capsys.readouterr()
    assert replay([str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{path}: step 4, micro-batch 1 of 1, on cpu" in said
    assert said.splitlines()[5].startswith("fragile ")
    assert message.splitlines()[1] in said


@pytest.mark.parametrize("more", [[], ["precision=fp16", "trainer.gradient_clip_val=0.5"]])
def test_losses_and_weights_are_equal_bit_for_bit_with_it(run, more: list[str]) -> None:
    short = ["trainer.max_steps=8", "trainer.accumulate_grad_batches=2", "model.layers.fragile.at=99", *more]
    without, guarded = run("hooks=[]", *short).checkpoint(), run(*short).checkpoint()
    for key in ("state_dict", "optimizer_states", "exp_recording"):  # the last has the sum of the losses
        assert equal(without[key], guarded[key])


def test_of_accumulated_micro_batches_the_bad_one_is_named(run, capsys) -> None:
    bad = run("trainer.accumulate_grad_batches=3", "model.layers.fragile.at=5", "trainer.max_steps=9")
    assert isinstance(bad.error, RunError)
    assert bad.error.exit_status == 1
    assert "step 2: the loss is nan" in str(bad.error)
    assert "It is micro-batch 2 of 3." in str(bad.error)
    assert [batch["batch_idx"] for batch in bad.file("step-2.pt")["window"]["batches"]] == [3, 4, 5]
    assert replay([str(bad.directory / "nan_guard" / "step-2.pt")]) == 0
    assert "step 2, micro-batch 2 of 3" in capsys.readouterr().out


def test_of_phases_the_one_is_named_in_whose_repeat_it_is(run, capsys) -> None:
    # Forwards: head, head, body; the second step has the second repeat of head as its fifth.
    phases = ["phases=[body_and_head]", "phases.head.repeats=2", "phases.body.every_n_steps=1"]
    phases.append("phases.body.parameters=[hidden.*,norm.*]")
    bad = run(*phases, "objective=[cross_entropy]", "model.layers.fragile.at=4", BACKWARD, "trainer.max_steps=9")
    # Behind the layer there is nothing that the head trains.
    assert bad.error is None
    bad = run(*phases, "model.layers.fragile.at=4", "trainer.max_steps=9", KEEP)
    assert "step 2: the loss is nan in phase head; the run ends" in str(bad.error)
    file = bad.file("step-2.pt")
    assert (file["window"]["phase"], file["window"]["turn"]) == ("head", [])
    again = run(*phases, "model.layers.fragile.at=5", "trainer.max_steps=9", KEEP)
    assert again.file("step-2.pt")["window"]["turn"] == [0, 1]
    # Its first repeat was taken, its second was not.
    assert not equal(again.kept()["network"]["head.weight"], bad.kept()["network"]["head.weight"])
    assert equal(again.kept()["network"]["head.weight"], again.file("step-2.pt")["network"]["head.weight"])
    assert replay([str(again.directory / "nan_guard" / "step-2.pt")]) == 0
    assert "phase head" in capsys.readouterr().out


def test_a_step_that_a_loss_scale_skips_is_routine_until_the_scale_is_nothing(run) -> None:
    routine = run("precision=fp16", BACKWARD, "trainer.max_steps=6")
    assert routine.error is None
    lost = run("precision=fp16", "trainer.max_steps=9")
    assert "step 4: the loss is nan" in str(lost.error)
    assert lost.file()["scale"] == 65536.0
    assert replay([str(lost.directory / "nan_guard" / "step-4.pt")]) == 0
    # A weight that is infinite makes each step's gradients so; 2, 1, and 0.5 is below 1.
    falling = ["precision.scaler.init_scale=2", "+precision.keep={fragile: fp32}", "trainer.max_steps=9"]
    given = "+hooks.broken={_target_: fragile.Broken}"
    for_good = run("precision=fp16", *falling, "model.layers.fragile.at=99", given)
    assert "step 3: a gradient is not finite" in str(for_good.error)


@pytest.mark.parametrize("more", ["precision=bf16", "precision=fp64", "strategy=layer_split"])
def test_it_holds_under(run, more: str, capsys) -> None:
    bad = run(more, BACKWARD, "trainer.max_steps=9", "trainer.gradient_clip_val=1.0")
    assert "The first is `fragile` (Fragile), in the backward: SqrtBackward0" in str(bad.error)
    assert replay([str(bad.directory / "nan_guard" / "step-4.pt")]) == 0


def test_a_compiled_network_is_run_again_uncompiled(run) -> None:
    compiled = ["runtime.compile=true", "runtime.compile_backend=aot_eager"]
    bad = run(*compiled, "trainer.max_steps=9")
    assert "The first is `fragile` (Fragile), in the forward" in str(bad.error)
    assert torch.equal(bad.file()["network"]["fragile.seen"], torch.tensor(3))


def test_a_network_in_cuda_graphs_is_run_again_outside_them(run) -> None:
    bad = run("+callbacks.graphed={_target_: fragile.Graphed}", "trainer.max_steps=9")
    assert "The first is `fragile` (Fragile), in the forward" in str(bad.error)
    assert sys.modules["fragile"].Graphed.calls == 4


def test_a_fused_optimizer_holds_its_steps_until_the_host_looks(run) -> None:
    fused = ["optimizer.fused=true", "trainer.max_steps=12", "scheduler=cosine", "model.layers.fragile.at=5"]
    # Nothing is written between step 4 and step 8, so that the host looks two steps later.
    later = ["hooks.nan_guard._target_=fragile.Later", "hooks.nan_guard.steps_in_flight=2"]
    for more in ([], [BACKWARD]):
        bad = run(*fused, *later, KEEP, *more)
        assert "step 5: " in str(bad.error)
        assert "The first is `fragile` (Fragile)" in str(bad.error)
        before = run(*fused, *more, "hooks=[]", "+callbacks.end={_target_: fragile.End, at: 4}")
        weights = {name.removeprefix("network."): one for name, one in before.checkpoint()["state_dict"].items()}
        kept, file = bad.kept(), bad.file("step-5.pt")
        # One more step was done, and changed nothing, and another was under way.
        assert kept["step"] == 6
        assert all(torch.equal(kept["network"][name], weights[name]) for name in PARAMETERS)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in file["network"].items())
        assert equal(file["optimizers"], before.checkpoint()["optimizer_states"])
        assert replay([str(bad.directory / "nan_guard" / "step-5.pt")]) == 0


def test_one_rank_of_two_is_named_and_each_has_its_file(ranks, tmp_path) -> None:
    # One sample's sum overflows in the first layer, on the rank that gets it.
    inputs = torch.rand(64, 6, generator=torch.Generator().manual_seed(0))
    inputs[[7, 20, 40]] = 3e38
    torch.save({"input": inputs, "target": torch.arange(64) % 2}, tmp_path / "samples.pt")
    data = ["data=tensors", "data.dataset.path=samples.pt", "data.batch_size=8", f"data_dir={tmp_path}"]
    with pytest.raises(AssertionError) as caught:
        ranks.train("hooks=[nan_guard]", *data, "strategy=ddp", "launch.devices=2", "test=false", ranks=2)
    said = str(caught.value)
    (step,) = {int(path.name.split(".")[0].split("-")[1]) for path in tmp_path.rglob("step-*.pt")}
    files = [next(tmp_path.rglob(f"step-{step}.rank{rank}.pt")) for rank in (0, 1)]
    steps = [StepFile.of(torch.load(path, weights_only=True), path=path) for path in files]
    bad = [bool((one.window.batches[0][0].data[0] > 1e38).any()) for one in steps]
    assert sorted(bad) == [False, True]
    assert said.count(f"on rank {bad.index(True)} of 2; the run ends") >= 2  # both ranks end with it
    assert "The first is `hidden` (Linear), in the forward" in said
    assert [replay([str(path)]) for path in files] == [1 - int(is_bad) for is_bad in bad]


def test_a_file_that_is_not_a_steps_or_asks_for_more_is_refused(run, tmp_path, capsys) -> None:
    bad = run("trainer.max_steps=9")
    file = bad.file()

    def said(contents: Any, *more: str) -> str:
        torch.save(contents, tmp_path / "step.pt")
        assert replay([str(tmp_path / "step.pt"), *more]) == 2
        return capsys.readouterr().err

    assert "is not a step's file; expected one that hooks.nan_guard wrote" in said({"state_dict": {}})
    assert "is not whole" in said({key: value for key, value in file.items() if key != "network"})
    assert "the file's network is not that of its config" in said({**file, "network": {}})
    # Its config passes the wall that every config passes.
    opened = file["config"].replace("allow: []", "allow: [subprocess]")
    assert "security.allow: [subprocess] in a file" in said({**file, "config": opened})
    evil = file["config"].replace("fragile.Fragile", "os.system")
    assert "model.layers.fragile._target_" in said({**file, "config": evil})
    assert "expected cpu, or a GPU of this machine" in said(file, "--device", "nonsense")
    torch.save({"format": "exp step", "file": Path("x")}, tmp_path / "step.pt")
    assert replay([str(tmp_path / "step.pt")]) == 2
    assert "Only tensors and plain values are read" in capsys.readouterr().err
    # And where nothing is wrong with the step.
    file["network"]["fragile.seen"] += 1
    torch.save(file, tmp_path / "step.pt")
    assert replay([str(tmp_path / "step.pt")]) == 1
    assert "The fault does not show: loss and gradients are finite." in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["fsdp", "data_parallel"])
def test_what_it_cannot_live_with_is_refused_before_the_run(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"a NanGuard hook with strategy={strategy}"):
        exp.validate(exp.compose([*QUIET, "hooks=[nan_guard]", f"strategy={strategy}", "launch.accelerator=cpu"]))


@pytest.mark.parametrize("name", ["twice", "lbfgs"])
def test_an_optimizer_that_may_make_a_steps_gradients_again_is_refused_before_the_run(name: str, place: Path) -> None:
    target = {"twice": "fragile.Twice", "lbfgs": "torch.optim.LBFGS"}[name]
    (place / "conf" / "optimizer").mkdir(exist_ok=True)
    yaml = f"# For this test: optimizer={name}\n_target_: {target}\nlr: 0.1\n"
    (place / "conf" / "optimizer" / f"{name}.yaml").write_text(yaml)
    exp.validate(exp.compose([*QUIET, f"optimizer={name}"]))
    with pytest.raises(ConfigError, match=f"{target}, with hooks.nan_guard.*and steps by the last of them"):
        exp.validate(exp.compose([*QUIET, f"optimizer={name}", "hooks=[nan_guard]"]))


def test_the_step_alone_has_transforms_with_the_kept_loss_scale(run) -> None:
    clip = ["hooks=[nan_guard,clip_module]", "hooks.clip_module.modules=[head]", "hooks.clip_module.limit=0.01"]
    bad = run("precision=fp16", *clip, "trainer.max_steps=9")
    path = bad.directory / "nan_guard" / "step-4.pt"
    file = read_step(path)
    file.network["fragile.seen"] += 1  # else no gradient is a number
    absmax = [
        replay_step(dataclasses.replace(file, scale=scale), path=path, device="cpu").rows["head"].gradients.absmax
        for scale in (64.0, 1.0)
    ]
    assert absmax[0] == pytest.approx(64 * absmax[1], rel=1e-2)
    assert 0 < absmax[1] < 0.05  # of the loss's gradient, clipped


def test_the_step_alone_has_the_runs_memory_format_and_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = ["runtime.channels_last=true", "runtime.matmul=high"]
    config = exp.compose([*QUIET, "model=lenet", *switches])
    plain = resolve(config).plain
    file = StepFile(
        step=1,
        total_steps=1,
        rank=0,
        world_size=1,
        seed=0,
        window=Window(batches=[], epoch=0),
        scale=None,
        network=tensors_of(build_network(plain, DataSpec.of(plain["data"]))),
        objective={},
        evaluating=[],
        frozen=[],
        optimizers=[],
        config=OmegaConf.to_yaml(config),
    )
    seen: dict[str, Any] = {}

    def look(again: Any, window: Window, *, network: nn.Module, objective: nn.Module) -> Trace:
        weight = network.get_submodule("conv2").weight
        seen["is_last"] = weight.is_contiguous(memory_format=torch.channels_last)
        seen["matmul"] = torch.get_float32_matmul_precision()
        return Trace(count=0, tensors=[])

    monkeypatch.setattr(step_trace, "trace_of", look)
    replay_step(file, path=Path("step-1.pt"), device="cpu")
    assert seen == {"is_last": True, "matmul": "high"}
    assert torch.get_float32_matmul_precision() == "highest"


# --- the parts ---


class Masked(nn.Module):
    """Scores that are masked, as in attention, and a logarithm that is left out where it is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.softmax, self.log = nn.Identity(), nn.Softmax(-1), Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.softmax(self.scores(x.masked_fill(x > 0, -torch.inf)))
        return torch.where(x > 0, self.log(x.clamp(min=0)), weights)


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


def traced(network: nn.Module, x: torch.Tensor) -> Any:
    tracer = Tracer(network, nn.Identity())
    with tracer.forward():
        loss = network(x).sum()
    tracer.backward(loss)
    torch.autograd.grad(loss, x)
    return tracer.origin(is_lost=not loss.isfinite())


def test_infinities_that_are_meant_are_not_blamed_and_a_hidden_one_is() -> None:
    # The loss is finite; the logarithm of 0, left out in the forward, is infinite in the backward: 0 times infinity.
    x = torch.tensor([[1.0, -2.0, -3.0]], requires_grad=True)
    origin = traced(Masked(), x)
    assert (origin.direction, origin.name, origin.operator) == ("backward", "log", "LogBackward0")


def test_a_layer_in_place_and_a_residual_do_not_hide_the_origin() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.bad = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.relu(self.first(x))
            return self.bad(y) + y + (y * 0).sqrt()

    origin = traced(Net(), torch.ones(2, 3, requires_grad=True))
    assert (origin.name, origin.operator) == ("", "SqrtBackward0")  # the network's own forward


def test_a_fused_optimizer_reads_what_holds_it() -> None:
    for make in (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = make([parameter], lr=0.1, fused=True)
        parameter.grad = torch.ones(3)
        assert not can_hold(optimizer) or make is torch.optim.Adagrad  # whose state is there from the start
        optimizer.step()
        assert can_hold(optimizer)
        before, state = parameter.detach().clone(), json.dumps(_plain(optimizer.state_dict()))
        hold(optimizer, torch.ones(()))
        optimizer.step()
        assert torch.equal(parameter, before)
        assert json.dumps(_plain(optimizer.state_dict())) == state
        hold(optimizer, torch.zeros(()))
        optimizer.step()
        release(optimizer)
        assert not torch.equal(parameter, before)
        assert not can_hold(make([parameter], lr=0.1))


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {str(key): _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else str(state)


def test_buffers_are_copied_where_they_changed() -> None:
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("mask", torch.ones(20_000))
    norm.register_buffer("queue", torch.ones(20_000))
    buffers = BuffersBefore(norm)
    first = {name: copy for _, name, copy in buffers.take(all_of_them=False)}
    norm(torch.randn(5, 3))
    norm.queue[0] = 2.0
    second = buffers.take(all_of_them=False)
    assert {name: copy is not first[name] for _, name, copy in second} == {
        "running_mean": True, "running_var": True, "num_batches_tracked": True, "mask": False, "queue": True,
    }  # fmt: skip
    now = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    norm(torch.randn(5, 3))
    put_back(second)
    assert all(torch.equal(buffer, now[name]) for name, buffer in norm.named_buffers())
