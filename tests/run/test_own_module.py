"""A LightningModule of the user's own: what Lightning alone makes of it, with what a run of exp has beside it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

import exp
from exp.data.randomness import reseed

LIT = Path(__file__).with_name("lit.py")
QUIET = ("trainer.enable_progress_bar=false", "hooks=[]")
NET = "module={_target_: mine.LitNet}"
DATA = "data._target_=mine.LitData"
STEP = "torch.optim.lr_scheduler.StepLR"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule`"),
    pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`"),
]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The module `mine`, which stands beside a conf of the user's own."""
    (tmp_path / "conf" / "module").mkdir(parents=True)
    (tmp_path / "conf" / "module" / "litnet.yaml").write_text("# Mine: module=litnet\n_target_: mine.LitNet\nlr: 0.1\n")
    shutil.copy(LIT, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    import mine

    return mine


def fit(*overrides):
    return exp.fit(exp.compose([*QUIET, *overrides]))


def weights(report, name="last"):
    checkpoint = torch.load(f"{report.directory}/checkpoints/{name}.ckpt", weights_only=True)
    return checkpoint["state_dict"]


def alone(module, data, **arguments):
    """Lightning's Trainer, and nothing of exp."""
    trainer = pl.Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        num_sanity_val_steps=0,
        **arguments,
    )
    trainer.fit(module, datamodule=data)
    return module.state_dict()


def first_weights(made, overrides):
    """What a run of exp begins with."""
    from exp.check.plan import plan, resolve
    from exp.construct import build_module

    built = build_module(plan(resolve(exp.compose([*QUIET, *overrides]))).plain)
    made.load_state_dict(built.state_dict())
    return made


def same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("spelling", ["module=litnet", "+module=litnet", "+module={_target_: mine.LitNet, lr: 0.1}"])
def test_a_module_runs_as_it_is_without_leaving_anything_out(spelling):
    report = fit(spelling, "trainer.max_epochs=1", DATA, "test=true", "monitor=val/loss")
    assert report.status == "completed"
    assert report.metrics.keys() >= {"train/loss", "train/loss_epoch", "val/loss", "test/loss"}
    assert report.best["metric"] == "val/loss"


@pytest.mark.parametrize(
    ("word", "theirs"), [("fp32", "32-true"), ("fp64", "64-true"), ("bf16", "bf16-mixed"), ("bf16_true", "bf16-true")]
)
def test_its_weights_are_those_of_lightning_alone(mine, word, theirs):
    settings = ["trainer.max_epochs=3", "+data.shuffle=false", f"precision={word}", "trainer.accumulate_grad_batches=2"]
    report = fit(NET, DATA, "trainer.gradient_clip_val=0.5", *settings)
    module = first_weights(mine.LitNet(), [NET, DATA, f"precision={word}"])
    found = alone(
        module,
        mine.LitData(shuffle=False),
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        precision=theirs,
    )
    same(weights(report), found)
    assert report.steps == 12


def ddp_alone(rank, *, place, seed, name, epochs, unused):
    """One of two ranks of Lightning's own ddp, with its own sampler; what it ends with."""
    import sys

    import lightning.pytorch as pl
    import torch

    from exp.strategies.strategy import RankEnvironment

    sys.path.insert(0, place)
    import mine

    module = getattr(mine, name)()
    module.load_state_dict(torch.load(f"{place}/first.pt", weights_only=True))
    trainer = pl.Trainer(
        strategy=DDPStrategy(cluster_environment=RankEnvironment(rank), find_unused_parameters=unused),
        devices=2,
        max_epochs=epochs,
        precision="64-true",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=mine.LitData())
    return module.state_dict()


def test_two_ranks_are_those_of_lightnings_ddp(mine, tmp_path, commands, ranks):
    """Each rank takes its part by the sampler that Lightning puts into a loader of the user's own."""
    given = [NET, DATA, "precision=fp64", "trainer.max_epochs=2", "test=false", "strategy=ddp", "launch.devices=2"]
    done = commands.run(*QUIET, "launch.accelerator=cpu", "hydra.run.dir=out", *given)
    assert done.returncode == 0, done.stderr
    torch.save(first_weights(mine.LitNet(), [NET, DATA, "precision=fp64"]).state_dict(), tmp_path / "first.pt")
    found, other = ranks.call(ddp_alone, place=str(tmp_path), seed=0, name="LitNet", epochs=2, unused=False)
    same(found, other)
    saved = torch.load("out/checkpoints/last.ckpt", weights_only=True)
    same(saved["state_dict"], found)
    assert saved["global_step"] == 8
    assert saved["batches_seen"] == 8


DRAWING = "module={_target_: mine.LitNet, dropout: 0.3, jitter: 0.1}"
RUNS = {
    "loaders": [DRAWING, DATA, "+data.noise=0.5"],
    "workers": [DRAWING, DATA, "+data.noise=0.5", "+data.workers=2"],
    "two_loaders": ["module={_target_: mine.LitBoth, dropout: 0.3}", "data._target_=mine.LitTwo"],
    "accumulated": [NET, DATA, "+data.noise=0.5", "trainer.accumulate_grad_batches=3"],
    "exps_data": ["module={_target_: mine.LitNet, dropout: 0.3, inputs: 64, classes: 10}", "data.batch_size=200"],
    "within_validations": [NET, DATA, "trainer.val_check_interval=3", "monitor=val/loss"],
    "renamed": ["module={_target_: mine.LitRenamed}", DATA],
    "by_hand": ["module={_target_: mine.LitGan}", DATA],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(name):
    given = [*RUNS[name], "trainer.max_epochs=3", "test=false", "checkpoint.every_n_steps=1"]
    whole = fit(*given)
    start = []
    for after in (9, 5):
        with pytest.raises(exp.RunError, match="broken off"):
            fit(*given, *start, f"+callbacks.stop={{_target_: mine.BreakOff, after: {after}}}", "hydra.run.dir=broken")
        start = [f"resume={max(Path().glob('broken*/checkpoints/last.ckpt'), key=lambda path: path.stat().st_mtime)}"]
    again = fit(*given, *start)
    assert again.steps == whole.steps
    one, other = (
        torch.load(f"{report.directory}/checkpoints/last.ckpt", weights_only=True) for report in (whole, again)
    )
    same(one["state_dict"], other["state_dict"])
    for key in ("optimizer_states", "lr_schedulers", "exp_position", "exp_best"):
        assert str(one[key]) == str(other[key])
    if name in ("loaders", "workers", "accumulated", "exps_data"):
        assert one["batches_seen"] == other["batches_seen"]
    assert {tag: value for tag, value in whole.metrics.items() if "loss" in tag} == {
        tag: value for tag, value in again.metrics.items() if "loss" in tag
    }


class Derived(pl.Callback):
    """Random numbers as a run of exp derives them."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        reseed(seed=0, rank=0, epoch=trainer.current_epoch, batch=batch_idx)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")  # of Lightning alone
def test_two_optimizers_stepped_by_hand_are_those_of_lightning_alone(mine):
    given = ["module={_target_: mine.LitGan}", DATA, "+data.shuffle=false", "precision=fp64"]
    report = fit(*given, "trainer.max_epochs=2", "hooks=[gradients]", "hooks.gradients.each_parameter=true")
    found = alone(
        first_weights(mine.LitGan(), given),
        mine.LitData(shuffle=False),
        max_epochs=2,
        precision="64-true",
        callbacks=[Derived()],
    )
    same(weights(report), found)
    # The discriminator steps twice in every second of the 14 batches.
    assert report.steps == 14 + 14 + 6
    tags = [tag for tag in report.metrics if tag.startswith("gradients/norm/") and "total" not in tag]
    assert {tag.split("/")[2].partition(".")[0]: tag.split("/")[3] for tag in tags} == {
        "generator": "0",
        "discriminator": "1",
    }
    assert report.metrics["optimizer/lr/0"] == pytest.approx(0.05 * 0.99**13)


TEMPLATE = """# As lightning-hydra-template has it: module=mnist
_target_: mine.LitClassifier
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01, weight_decay: 0.0}
scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, factor: 0.1, patience: 10}
net: {_target_: mine.SimpleNet, input_size: 64, hidden: 32, output_size: 10}
compile: false
"""


def test_a_module_of_lightning_hydra_template_trains_on_digits(tmp_path):
    (tmp_path / "conf" / "module" / "mnist.yaml").write_text(TEMPLATE)
    words = ["module=mnist", "trainer.max_epochs=3", "monitor=val/acc", "mode=max", "module.optimizer.lr=0.02"]
    report = fit(*words, "module.net.hidden=24", "callbacks=[early_stopping]")
    assert report.metrics["test/acc"] > 0.8
    assert report.best["value"] == report.metrics["val/acc_best"]
    # Behind the best epoch, an epoch of 20 batches each.
    assert report.best["step"] % 20 == 0
    checkpoint = torch.load(f"{report.directory}/checkpoints/best.ckpt", weights_only=True)
    # What is no plain value is not in a checkpoint, from which no code is read.
    assert checkpoint["hyper_parameters"] == {"compile": False}
    assert checkpoint["state_dict"]["net.model.0.weight"].shape == (24, 64)


def test_hooks_see_the_layers_and_the_gradients_of_its_step():
    hooks = "hooks=[gradients,memory,throughput,activations,dtypes]"
    report = fit(
        NET,
        DATA,
        "trainer.max_epochs=2",
        "hooks.activations.modules=[net.1]",
        "hooks.throughput.every_n_steps=1",
        *(
            "hooks.throughput.each_part=true",
            "hooks.gradients.each_parameter=true",
            "hooks.activations.each_layer=true",
        ),
        hooks,
        "trainer.gradient_clip_val=0.1",
    )
    tags = set(report.metrics)
    assert {"gradients/norm/net.1.weight", "gradients/norm/total", "memory/parameters_mib"} <= tags
    assert any(tag.startswith("activations/") and "net.1" in tag for tag in tags)
    assert report.metrics["throughput/forward_ms"] > 0
    assert report.metrics["throughput/backward_ms"] > 0


def test_its_values_are_in_tensorboard_on_lightnings_axis():
    report = fit(NET, DATA, "trainer.max_epochs=2", "hooks=[gradients]", "trainer.log_every_n_steps=1")
    found = read_scalars(Path(report.directory) / "tensorboard")
    assert sorted(found["train/loss_step"]) == sorted(found["gradients/norm/total"]) == list(range(14))
    assert sorted(found["val/loss"]) == [6, 13]
    assert found["val/loss"][13] == pytest.approx(report.metrics["val/loss"])


def read_scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def faults(*overrides):
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose([*QUIET, *overrides]))
    return {fault.key: f"{fault.got}; expected {fault.expected}. {fault.cure}" for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("words", "key", "part"),
    [
        (["model._target_=mine.LitNet"], "model._target_", "write module in the place of model"),
        ([DATA], "data._target_", "a LightningModule to take its batches"),
        ([NET, "optimizer.lr=0.1"], "optimizer.lr", "its configure_optimizers makes them"),
        ([NET, "optimizer=sgd"], "optimizer", "its configure_optimizers makes them"),
        ([NET, "objective=[mse]"], "objective", "what its training_step returns"),
        ([NET, "metrics=[f1]"], "metrics", "self.log"),
        ([NET, "scheduler=cosine"], "scheduler", "configure_optimizers"),
        ([NET, "phases=[adversarial]"], "phases", "manual optimization"),
        ([NET, "model=lenet"], "model", "module.net"),
        ([NET, "experiment=theirs"], "optimizer.lr", "its configure_optimizers makes them"),
        ([NET, "experiment=theirs"], "scheduler", "its configure_optimizers makes them"),
        ([NET, "+precision.keep={LayerNorm: fp32}"], "precision.keep", "nobody knows before its step"),
        ([NET, "precision=fp8"], "precision.word", "Write precision=bf16"),
        ([NET, "runtime.compile=true"], "runtime.compile", "torch.compile(self.net)"),
        ([NET, "runtime.non_finite=skip"], "runtime.non_finite", "stop"),
        ([NET, "freeze.parameters=[net]"], "freeze.parameters", "configure_model"),
        (["module=litnet", "module.widht=3"], "module.widht", "Did you mean module.width?"),
        ([NET, "+module.width=wide"], "module.width", "an integer"),
        ([NET, "+hooks=samples"], "hooks.samples", "self.log itself"),
        ([NET, "+hooks=nan_guard"], "hooks.nan_guard", "is run once"),
        ([NET, "+hooks=landscape"], "hooks.landscape", "within its training_step"),
        ([NET, "+hooks=gradients", "hooks.gradients.modules=[nett]"], "hooks.gradients.modules", "net"),
        ([NET, "strategy=fsdp", "launch.devices=2"], "strategy", "ddp, single or auto"),
        ([NET, "strategy=layer_split", "launch.devices=2"], "strategy", "ddp, single or auto"),
        (["module={_target_: mine.Untrained}"], "module", "Untrained without configure_optimizers"),
        (["module={_target_: mine.LitNoSuper}"], "module", "does not call super().__init__()"),
        (["module={_target_: mine.WithLoaders}"], "module", "would lose against data"),
        (["module={_target_: mine.LitGan}", "trainer.gradient_clip_val=1.0"], "trainer.gradient_clip_val", "by hand"),
        (["module={_target_: mine.SimpleNet}"], "module._target_", "LightningModule"),
        ([NET, "monitor=null"], None, None),
        ([NET, "data._target_=mine.LitNet"], "data._target_", "LightningDataModule"),
        (["monitor=null"], "monitor", "a tag of this run"),
        (["module=litnett"], "module", "Did you mean litnet?"),
    ],
)
def test_what_does_not_apply_is_a_fault_that_names_it(tmp_path, words, key, part):
    (tmp_path / "conf" / "experiment").mkdir()
    (tmp_path / "conf" / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\n# Theirs: experiment=theirs\n"
        "defaults:\n  - override /scheduler: cosine\noptimizer:\n  lr: 0.3\n"
    )
    if key is None:
        exp.validate(exp.compose([*QUIET, *words]))
    else:
        found = faults(*words)
        assert part in found[key], found


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_two_optimizers_over_two_ranks_are_those_of_lightnings_ddp(mine, tmp_path, commands, ranks):
    given = ["module={_target_: mine.LitPair}", DATA, "precision=fp64", "trainer.max_epochs=1", "test=false"]
    placed = ["strategy=ddp", "strategy.find_unused_parameters=true", "launch.devices=2", "launch.accelerator=cpu"]
    done = commands.run(*QUIET, "hydra.run.dir=out", *given, *placed)
    assert done.returncode == 0, done.stderr
    torch.save(first_weights(mine.LitPair(), given).state_dict(), tmp_path / "first.pt")
    found, _ = ranks.call(ddp_alone, place=str(tmp_path), seed=0, name="LitPair", epochs=1, unused=True)
    same(torch.load("out/checkpoints/last.ckpt", weights_only=True)["state_dict"], found)


def test_each_sample_counts_once_over_two_ranks(mine, commands):
    """exp's global batches: the last one, of 57 samples, is shared out as 29 and 28."""
    given = ["module={_target_: mine.LitNet, inputs: 64, classes: 10}", "precision=fp64", "trainer.max_epochs=1"]
    whole = fit(*given, "test=false", "data.batch_size=400")
    placed = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", "hydra.run.dir=out", "test=false"]
    done = commands.run(*QUIET, *given, *placed, "data.batch_size=400")
    assert done.returncode == 0, done.stderr
    found = torch.load("out/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_an_interrupted_run_goes_on(commands):
    given = [*QUIET, NET, DATA, "+data.noise=0.5", "test=false"]
    started = commands.start(*given, "+callbacks={stop: {_target_: mine.Interrupt, after: 5}}", "hydra.run.dir=out")
    done = started.end(seconds=200)
    assert done.returncode == 130, done.stderr
    assert "resume=out/checkpoints/last.ckpt" in done.stderr
    whole = fit(*given, "trainer.max_epochs=2")
    again = fit(*given, "trainer.max_epochs=2", "resume=out/checkpoints/last.ckpt")
    same(weights(whole), weights(again))


def test_a_sweep_compares_what_the_module_logs(commands):
    words = [*QUIET, "module=litnet", DATA, "trainer.max_epochs=1", "monitor=val/loss", "test=false"]
    done = commands.run("-m", *words, "module.lr=0.1,0.001", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    values = [json.loads(Path(f"sweep/{job}/report.json").read_text())["best"]["value"] for job in (0, 1)]
    assert f"best       job 0, val/loss {min(values):.6g}  module.lr=0.1" in done.stdout
    done = commands.run(*words, "monitor=val/lss")
    assert (done.returncode, "Did you mean val/loss?" in done.stderr) == (1, True)


def test_a_name_in_the_place_of_a_node_is_told_where_it_belongs():
    shutil.rmtree("conf/module")
    assert "Write 'module={_target_: mine.LitNet}'" in faults("module=mine.LitNet")["module"]
    assert "Write conf/module/litnet.yaml" in faults("module=litnet")["module"]


def test_a_network_of_exps_may_be_given_to_it(mine):
    report = fit("module={_target_: mine.LitGiven, net: '${model}'}", "model=lenet", "trainer.max_epochs=2")
    assert weights(report)["net.head.weight"].shape == (10, 84)
    assert report.metrics["train/loss"] < 2.3


def test_a_strategy_of_lightnings_own_and_without_validation(commands):
    """What is logged in training alone is compared at the end of each epoch."""
    words = ["strategy={_target_: lightning.pytorch.strategies.DDPStrategy, name: theirs}", "launch.devices=2"]
    given = [NET, DATA, "trainer.max_epochs=2", "trainer.limit_val_batches=0", "monitor=train/loss_epoch"]
    done = commands.run(*QUIET, *given, *words, "launch.accelerator=cpu", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    report = json.loads(Path("out/report.json").read_text())
    assert (report["strategy"], report["world_size"], report["best"]["step"]) == ("theirs", 2, 8)


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_logged_in_training_alone_is_compared_behind_a_validation(every):
    words = [NET, DATA, "test=false", f"trainer.check_val_every_n_epoch={every}", "trainer.max_epochs=4"]
    report = fit(*words, "monitor=train/loss", "mode=max")
    found = read_scalars(Path(report.directory) / "tensorboard")["train/loss_epoch"]
    best = max(found, key=lambda step: found[step])
    assert (report.best["metric"], report.best["step"]) == ("train/loss", best + 1)
    assert report.best["value"] == pytest.approx(found[best])
    assert torch.load(f"{report.directory}/checkpoints/best.ckpt", weights_only=True)["global_step"] == best + 1
    with pytest.raises(exp.RunError, match=r"monitor is train/los, which nothing gives.*Did you mean train/loss"):
        fit(*words, "monitor=train/los")


@pytest.mark.parametrize("known", ["true", "false"])
@pytest.mark.filterwarnings("ignore:Total length of")
def test_a_loader_without_a_batch_ends_badly(known):
    with pytest.raises(exp.RunError, match="the train_dataloader of LitEmpty gives no batch; expected at least one"):
        fit(NET, "data._target_=mine.LitEmpty", f"+data.known={known}", "trainer.max_epochs=1", "test=false")


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.filterwarnings("ignore:.*training_step.* returned `None`")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("LitNoOptimizer", "nothing is optimized: configure_optimizers of LitNoOptimizer returned None"),
        ("LitNoLoss", "nothing is trained: training_step of LitNoLoss returned None, and no loss, in all 7 batches"),
    ],
)
def test_a_run_that_trains_nothing_says_so_once(name, line, capsys):
    fit(f"module={{_target_: mine.{name}}}", DATA, "trainer.max_epochs=2", "test=false")
    assert capsys.readouterr().err.splitlines().count(line) == 1


def test_a_loss_that_is_not_a_number_has_cures_that_hold():
    given = ["module={_target_: mine.LitNan}", DATA, "trainer.max_epochs=1", "test=false"]
    with pytest.raises(exp.RunError, match="the loss is not a number") as caught:
        fit(*given)
    assert not any(word in str(caught.value) for word in ("optimizer.lr", "nan_guard", "non_finite"))
    assert "trainer.gradient_clip_val" in str(caught.value)
    assert "trainer.detect_anomaly=true" in str(caught.value)
    with pytest.raises(exp.RunError, match="SqrtBackward0"):
        fit(*given, "trainer.gradient_clip_val=1.0", "trainer.detect_anomaly=true")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "LitAdds",
            r"the checkpoint's mine\.net is a torch.* Have on_save_checkpoint of LitAdds add its state_dict\(\)",
        ),
        ("LitState", r"the checkpoint's state_dict\._extra_state is a torch.* Keep it out of state_dict\(\)"),
    ],
)
def test_an_object_in_a_checkpoint_is_told_where_it_was_put(name, message):
    with pytest.raises(exp.RunError, match=message):
        fit(f"module={{_target_: mine.{name}}}", DATA, "trainer.max_epochs=1", "test=false")


@pytest.mark.parametrize("word", ["", "_partial_: false, "])
@pytest.mark.parametrize(
    ("name", "given", "missing"),
    [("optimizer", "torch.optim.SGD, lr: 0.1", "params"), ("scheduler", f"{STEP}, step_size: 2", "optimizer")],
)
def test_an_optimizer_without_partial_is_told_to_be_one(word, name, given, missing):
    nodes = {"optimizer": "torch.optim.SGD, _partial_: true", "scheduler": f"{STEP}, _partial_: true, step_size: 1"}
    nodes[name] = f"{given}, {word}".rstrip(", ")
    parts = ", ".join(f"{one}: {{_target_: {node}}}" for one, node in nodes.items())
    found = faults(
        f"module={{_target_: mine.LitClassifier, net: {{_target_: mine.SimpleNet}}, {parts}}}", "monitor=null"
    )
    assert list(found) == [f"module.{name}.{missing}"]
    assert f"Add _partial_: true below module.{name}" in found[f"module.{name}.{missing}"]


LAZY = """
import mine
import torch
from torch import nn


class Lazy(mine.LitNet):
    def __init__(self):
        super().__init__()
        self.extra = nn.LazyLinear(3)

    def setup(self, stage):
        self.extra(torch.zeros(1, 4))
"""


def test_a_module_that_sizes_its_layers_in_setup_is_told_of_without_them(tmp_path):
    (tmp_path / "lazy.py").write_text(LAZY)
    report = fit("module={_target_: lazy.Lazy}", DATA, "trainer.max_epochs=1")
    log = (Path(report.directory) / "train.log").read_text()
    assert "trained and more, of layers without a size yet" in log
