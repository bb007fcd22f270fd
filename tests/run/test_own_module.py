"""A user's LightningModule trains in exp as in Lightning alone, and works with exp's hooks, checkpoints and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp
from exp.data.randomness import reseed
from exp.errors import Interrupted

LIT = Path(__file__).with_name("lit.py")
QUIET = ("trainer.enable_progress_bar=false", "hooks=[]")
NET = "module={_target_: mine.LitNet}"
DATA = "data._target_=mine.LitData"
STEP = "torch.optim.lr_scheduler.StepLR"
pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule`"),
    pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`"),
]


@pytest.fixture(autouse=True)
def mine(place, tmp_path):
    """The module `mine` in a file next to the conf of a user."""
    (tmp_path / "conf" / "module").mkdir(parents=True)
    (tmp_path / "conf" / "module" / "litnet.yaml").write_text("# Mine: module=litnet\n_target_: mine.LitNet\nlr: 0.1\n")
    shutil.copy(LIT, tmp_path / "mine.py")
    import mine

    return mine


def fit(*overrides):
    return exp.fit(exp.compose([*QUIET, *overrides]))


def weights(report, name="last"):
    checkpoint = torch.load(f"{report.directory}/checkpoints/{name}.ckpt", weights_only=True)
    return checkpoint["state_dict"]


def alone(module, data, **arguments):
    """Return the weights after a run of Lightning's Trainer without exp."""
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
    """Return a module with the initial weights of a run of exp."""
    from exp.check.examination import plan
    from exp.check.resolution import resolve
    from exp.construct import build_module

    built = build_module(plan(resolve(exp.compose([*QUIET, *overrides]))).settings)
    made.load_state_dict(built.state_dict())
    return made


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("spelling", ["module=litnet", "+module=litnet", "+module={_target_: mine.LitNet, lr: 0.1}"])
def test_a_module_trains_validates_and_tests(spelling):
    report = fit(spelling, "trainer.max_epochs=1", DATA, "test=true", "monitor=val/loss")
    assert report.status == "completed"
    assert report.metrics.keys() >= {"train/loss", "train/loss_epoch", "val/loss", "test/loss"}
    assert report.best["metric"] == "val/loss"


@pytest.mark.parametrize(
    ("word", "theirs"),
    [("fp64", "64-true"), pytest.param("bf16", "bf16-mixed", marks=pytest.mark.slow)],
)
def test_its_weights_equal_those_of_lightning_alone(mine, word, theirs):
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
    assert_same(weights(report), found)
    assert report.steps == 12


def test_lightnings_ways_to_log_and_save_lead_to_the_run_directory():
    saver = "_target_: lightning.pytorch.callbacks.ModelCheckpoint, save_last: true, save_top_k: -1"
    callbacks = ["+callbacks.draws={_target_: mine.Draws}", f"+callbacks.saving={{{saver}}}"]
    report = fit("module={_target_: mine.LitDrawing}", DATA, *callbacks, "trainer.max_epochs=2", "test=false")
    assert report.metrics.items() >= {"val/a": 1.0, "val/b": 2.0, "mine": 3.0}.items()
    read = EventAccumulator(f"{report.directory}/tensorboard", size_guidance={"histograms": 0, "images": 0}).Reload()
    for found in (read.Images("pixels"), read.Histograms("weights")):
        assert [event.step for event in found] == [7, 14]
    saved = sorted(path.name for path in Path(report.directory, "checkpoints", "lightning").iterdir())
    assert saved == ["epoch=0-step=7.ckpt", "epoch=1-step=14.ckpt", "last.ckpt"]
    assert "exp_position" in torch.load(f"{report.directory}/checkpoints/last.ckpt", weights_only=True)


def test_each_rank_takes_its_half_of_the_users_loader(commands):
    """Lightning adds its sampler to the loader of a user. 50 samples are 4 batches of 8 on each of two ranks."""
    given = [NET, DATA, "trainer.max_epochs=2", "test=false", "strategy=ddp", "launch.devices=2"]
    done = commands.run(*QUIET, "launch.accelerator=cpu", "hydra.run.dir=out", *given)
    assert done.returncode == 0, done.stderr
    saved = torch.load("out/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == saved["batches_seen"] == 8


DRAWING = "module={_target_: mine.LitNet, dropout: 0.3, jitter: 0.1}"
RUNS = {
    "loaders": [DRAWING, DATA, "+data.noise=0.5"],
    "workers": [DRAWING, DATA, "+data.noise=0.5", "+data.workers=2"],
    "accumulated": [NET, DATA, "+data.noise=0.5", "trainer.accumulate_grad_batches=3"],
    "exps_data": ["module={_target_: mine.LitNet, dropout: 0.3, inputs: 64, classes: 10}", "data.batch_size=200"],
    "within_validations": [NET, DATA, "trainer.val_check_interval=3", "monitor=val/loss"],
    "renamed": ["module={_target_: mine.LitRenamed}", DATA],
    "by_hand": ["module={_target_: mine.LitGan}", DATA],
}


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("loaders", "by_hand") else pytest.mark.slow) for name in RUNS]
)
def test_a_run_that_failed_twice_resumes_exactly(name):
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
    assert_same(one["state_dict"], other["state_dict"])
    for key in ("optimizer_states", "lr_schedulers", "exp_position", "exp_best"):
        assert str(one[key]) == str(other[key])
    if name in ("loaders", "workers", "accumulated", "exps_data"):
        assert one["batches_seen"] == other["batches_seen"]
    assert {tag: value for tag, value in whole.metrics.items() if "loss" in tag} == {
        tag: value for tag, value in again.metrics.items() if "loss" in tag
    }


class Derived(pl.Callback):
    """Callback that seeds each batch as a run of exp does."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        reseed(seed=0, rank=0, epoch=trainer.current_epoch, batch=batch_idx)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")  # a warning of the run with Lightning alone
def test_manual_optimization_equals_lightning_alone(mine):
    given = ["module={_target_: mine.LitGan}", DATA, "+data.shuffle=false", "precision=fp64"]
    report = fit(*given, "trainer.max_epochs=2", "hooks=[gradients]", "hooks.gradients.each_parameter=true")
    found = alone(
        first_weights(mine.LitGan(), given),
        mine.LitData(shuffle=False),
        max_epochs=2,
        precision="64-true",
        callbacks=[Derived()],
    )
    assert_same(weights(report), found)
    # 14 steps of each optimizer, and 6 additional steps of the discriminator, which steps twice in every second batch.
    assert report.steps == 14 + 14 + 6
    tags = [tag for tag in report.metrics if tag.startswith("gradients/norm/") and "total" not in tag]
    assert {tag.split("/")[2].partition(".")[0]: tag.split("/")[3] for tag in tags} == {
        "generator": "0",
        "discriminator": "1",
    }
    assert report.metrics["optimizer/lr/0"] == pytest.approx(0.05 * 0.99**13)


TEMPLATE = """# In the style of lightning-hydra-template: module=mnist
_target_: mine.LitClassifier
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01, weight_decay: 0.0}
scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, factor: 0.1, patience: 10}
net: {_target_: mine.SimpleNet, input_size: 64, hidden: 32, output_size: 10}
compile: false
"""


def test_a_module_of_lightning_hydra_template_trains(tmp_path):
    (tmp_path / "conf" / "module" / "mnist.yaml").write_text(TEMPLATE)
    words = ["module=mnist", "trainer.max_epochs=3", "monitor=val/acc", "mode=max", "module.optimizer.lr=0.02"]
    report = fit(*words, "module.net.hidden=24", "callbacks=[early_stopping]")
    assert report.metrics["test/acc"] > 0.8
    assert report.best["value"] == report.metrics["val/acc_best"]
    # An epoch has 20 batches.
    assert report.best["step"] % 20 == 0
    checkpoint = torch.load(f"{report.directory}/checkpoints/best.ckpt", weights_only=True)
    # A checkpoint has only plain values, because reading other objects could run code.
    assert checkpoint["hyper_parameters"] == {"compile": False}
    assert checkpoint["state_dict"]["net.model.0.weight"].shape == (24, 64)


def test_hooks_and_tensorboard_see_its_layers_and_values():
    names = "hooks=[gradients,memory,throughput,activations,dtypes]"
    each = [
        "hooks.throughput.each_part=true",
        "hooks.gradients.each_parameter=true",
        "hooks.activations.each_layer=true",
    ]
    settings = ["hooks.activations.modules=[net.1]", "hooks.throughput.every_n_steps=1", *each]
    report = fit(
        NET,
        DATA,
        names,
        *settings,
        "trainer.max_epochs=2",
        "trainer.gradient_clip_val=0.1",
        "trainer.log_every_n_steps=1",
    )
    tags = set(report.metrics)
    assert {"gradients/norm/net.1.weight", "gradients/norm/total", "memory/parameters_mib"} <= tags
    assert any(tag.startswith("activations/") and "net.1" in tag for tag in tags)
    assert report.metrics["throughput/forward_ms"] > 0
    assert report.metrics["throughput/backward_ms"] > 0
    found = read_scalars(Path(report.directory) / "tensorboard")
    assert sorted(found["train/loss_step"]) == sorted(found["gradients/norm/total"]) == list(range(14))
    assert sorted(found["val/loss"]) == [6, 13]
    assert found["val/loss"][13] == pytest.approx(report.metrics["val/loss"])


def read_scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def errors_of(*overrides):
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose([*QUIET, *overrides]))
    return {error.key: f"{error.got}; expected {error.expected}. {error.fix}" for error in caught.value.errors}


@pytest.mark.parametrize(
    ("words", "key", "part"),
    [
        (["model._target_=mine.LitNet"], "model._target_", "Move its YAML file from conf/model to conf/module"),
        ([DATA], "data._target_", "a LightningModule to take its batches"),
        ([NET, "optimizer.lr=0.1"], "optimizer.lr", "configure_optimizers makes the"),
        ([NET, "objective=[mse]"], "objective", "the training_step of the module returns the loss"),
        ([NET, "metrics=[f1]"], "metrics", "self.log"),
        ([NET, "scheduler=cosine"], "scheduler", "configure_optimizers"),
        ([NET, "phases=[adversarial]"], "phases", "manual optimization"),
        ([NET, "model=lenet"], "model", "module.net"),
        ([NET, "experiment=theirs"], "scheduler", "configure_optimizers makes the"),
        ([NET, "+precision.keep={LayerNorm: fp32}"], "precision.keep", "unknown before its step"),
        ([NET, "precision=fp8"], "precision.word", "Write precision=bf16"),
        ([NET, "runtime.compile=true"], "runtime.compile", "torch.compile(self.net)"),
        ([NET, "runtime.non_finite=skip"], "runtime.non_finite", "stop"),
        ([NET, "freeze.parameters=[net]"], "freeze.parameters", "configure_model"),
        (["module=litnet", "module.widht=3"], "module.widht", "Did you mean module.width?"),
        ([NET, "+hooks=samples"], "hooks.samples", "exp does not know its values"),
        ([NET, "+hooks=gradients", "hooks.gradients.modules=[nett]"], "hooks.gradients.modules", "net"),
        ([NET, "strategy=fsdp", "launch.devices=2"], "strategy", "Write strategy=ddp"),
        (["module={_target_: mine.Untrained}"], "module", "Untrained, which has no configure_optimizers"),
        (["module={_target_: mine.LitNoSuper}"], "module", "does not call super().__init__()"),
        (["module={_target_: mine.WithLoaders}"], "module", "which the loaders of data would replace"),
        (
            ["module={_target_: mine.LitGan}", "trainer.gradient_clip_val=1.0"],
            "trainer.gradient_clip_val",
            "manual",
        ),
        (["module={_target_: mine.SimpleNet}"], "module._target_", "LightningModule"),
        ([NET, "data._target_=mine.LitNet"], "data._target_", "LightningDataModule"),
        (["monitor=null"], "monitor", "a tag of this run"),
    ],
)
def test_a_key_that_does_not_apply_is_refused(tmp_path, words, key, part):
    (tmp_path / "conf" / "experiment").mkdir()
    (tmp_path / "conf" / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\n# Theirs: experiment=theirs\n"
        "defaults:\n  - override /scheduler: cosine\noptimizer:\n  lr: 0.3\n"
    )
    found = errors_of(*words)
    assert part in found.get(key, ""), found


def test_each_sample_counts_once_over_two_ranks(mine, commands):
    """The last global batch has 57 samples, which are divided into 29 and 28."""
    given = ["module={_target_: mine.LitNet, inputs: 64, classes: 10}", "precision=fp64", "trainer.max_epochs=1"]
    whole = fit(*given, "test=false", "data.batch_size=400")
    placed = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", "hydra.run.dir=out", "test=false"]
    done = commands.run(*QUIET, *given, *placed, "data.batch_size=400")
    assert done.returncode == 0, done.stderr
    found = torch.load("out/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_an_interrupted_run_resumes_exactly():
    given = [NET, DATA, "+data.noise=0.5", "test=false"]
    with pytest.raises(Interrupted, match=r"resume=out/checkpoints/last\.ckpt") as caught:
        fit(*given, "+callbacks={stop: {_target_: mine.Interrupt, after: 5}}", "hydra.run.dir=out")
    assert caught.value.exit_status == 130
    whole = fit(*given, "trainer.max_epochs=2")
    again = fit(*given, "trainer.max_epochs=2", "resume=out/checkpoints/last.ckpt")
    assert_same(weights(whole), weights(again))


def test_a_sweep_compares_values_that_the_module_logs(commands):
    words = [*QUIET, "module=litnet", DATA, "trainer.max_epochs=1", "monitor=val/loss", "test=false"]
    done = commands.run("-m", *words, "module.lr=0.1,0.001", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    values = [json.loads(Path(f"sweep/{job}/report.json").read_text())["best"]["value"] for job in (0, 1)]
    assert f"best       job 0, val/loss {min(values):.6g}  module.lr=0.1" in done.stdout


def test_a_class_name_instead_of_a_node_is_refused():
    shutil.rmtree("conf/module")
    assert "Write 'module={_target_: mine.LitNet}'" in errors_of("module=mine.LitNet")["module"]
    assert "Create conf/module/litnet.yaml" in errors_of("module=litnet")["module"]


def test_a_module_can_take_a_model_of_exp(mine):
    report = fit("module={_target_: mine.LitGiven, net: '${model}'}", "model=lenet", "trainer.max_epochs=2")
    assert weights(report)["net.head.weight"].shape == (10, 84)
    assert report.metrics["train/loss"] < 2.3


@pytest.mark.parametrize("every", [1, 2])
def test_a_training_value_is_compared_after_each_validation(every):
    words = [NET, DATA, "test=false", f"trainer.check_val_every_n_epoch={every}", "trainer.max_epochs=4"]
    report = fit(*words, "monitor=train/loss", "mode=max")
    found = read_scalars(Path(report.directory) / "tensorboard")["train/loss_epoch"]
    best = max(found, key=lambda step: found[step])
    assert (report.best["metric"], report.best["step"]) == ("train/loss", best + 1)
    assert report.best["value"] == pytest.approx(found[best])
    assert torch.load(f"{report.directory}/checkpoints/best.ckpt", weights_only=True)["global_step"] == best + 1
    with pytest.raises(exp.RunError, match=r"monitor is train/los, which nothing logs.*Did you mean train/loss"):
        fit(*words, "monitor=train/los")


@pytest.mark.filterwarnings("ignore:Total length of")
def test_a_loader_without_a_batch_is_an_error():
    with pytest.raises(exp.RunError, match="the train_dataloader of the data returned no batch; expected one or more"):
        fit(NET, "data._target_=mine.LitEmpty", "trainer.max_epochs=1", "test=false")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("LitNoOptimizer", "`LightningModule.configure_optimizers` returned `None`"),
        ("LitNoLoss", "`training_step` returned `None`"),
    ],
)
def test_the_log_warns_of_a_run_that_trains_nothing(name, line):
    report = fit(f"module={{_target_: mine.{name}}}", DATA, "trainer.max_epochs=2", "test=false")
    assert (Path(report.directory) / "train.log").read_text().count(line) == 1


def test_the_error_of_a_nan_loss_names_fixes_that_apply():
    given = ["module={_target_: mine.LitNan}", DATA, "trainer.max_epochs=1", "test=false"]
    with pytest.raises(exp.RunError, match="the loss is not a number") as caught:
        fit(*given)
    assert not any(word in str(caught.value) for word in ("optimizer.lr", "nan_guard", "non_finite"))
    assert "trainer.gradient_clip_val" in str(caught.value)
    assert "trainer.detect_anomaly=true" in str(caught.value)
    with pytest.raises(exp.RunError, match="SqrtBackward0"):
        fit(*given, "trainer.gradient_clip_val=1.0", "trainer.detect_anomaly=true")


def test_an_object_in_a_checkpoint_is_refused():
    message = (
        r"the entry mine\.net of the checkpoint is a torch.* Have on_save_checkpoint of LitAdds add its state_dict"
    )
    with pytest.raises(exp.RunError, match=message):
        fit("module={_target_: mine.LitAdds}", DATA, "trainer.max_epochs=1", "test=false")


def test_an_optimizer_without_partial_is_refused():
    parts = f"optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}, scheduler: {{_target_: {STEP}, step_size: 2}}"
    found = errors_of(
        f"module={{_target_: mine.LitClassifier, net: {{_target_: mine.SimpleNet}}, {parts}}}", "monitor=null"
    )
    assert list(found) == ["module.optimizer.params", "module.scheduler.optimizer"]
    assert "Add _partial_: true below module.optimizer" in found["module.optimizer.params"]
