"""Values that only the run would have stumbled over: told before it, at the guilty key, with nothing written."""

import functools
import re
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import exp
from exp.check.__main__ import main as check
from exp.check.rates import rate_faults
from exp.config.slots import nodes_in
from exp.errors import MissingExtraError
from exp.optim.optimizer import Optimization
from exp.precision.words import refuse_without_torchao
from exp.train import main as train

MAX_LINES = 12
SCHEDULER = "scheduler._target_=torch.optim.lr_scheduler."
CALLBACK = "+callbacks.x={_target_: lightning.pytorch.callbacks."
STOPPING = "+callbacks=early_stopping;callbacks.early_stopping."
CASES = [
    # Values that torch's and Lightning's own classes take, and that train wrongly or fail later.
    ("optimizer.weight_decay=-0.1", "optimizer.weight_decay", "0 or more"),
    ("optimizer.betas=[0.9,2]", "optimizer.betas", "0 or more and below 1"),
    ("optimizer=sgd;optimizer.momentum=5", "optimizer.momentum", "below 1"),
    ("optimizer=sgd;+optimizer.nesterov=true;optimizer.momentum=0", "optimizer.nesterov", "SGD refused its values"),
    ("scheduler=step;scheduler.step_size=0", "scheduler.step_size", "1 or more"),
    ("scheduler=plateau;+scheduler.factor=2", "scheduler.factor", "between 0 and 1"),
    (f"{SCHEDULER}LinearLR;+scheduler.end_factor=-1", "scheduler.end_factor", "between 0 and 1"),
    (f"{SCHEDULER}CosineAnnealingWarmRestarts;+scheduler.T_0=2;+scheduler.T_mult=1.5", "scheduler.T_mult", "integer"),
    (f"{SCHEDULER}CyclicLR;+scheduler.base_lr=0.1;+scheduler.max_lr=0.2;+scheduler.mode=up",
     "scheduler.mode", "one of"),
    ("scheduler=one_cycle;+scheduler.total_steps=5", "scheduler.total_steps", "the run has"),
    ("scheduler=one_cycle;+scheduler.pct_start=2", "scheduler.pct_start", "between 0 and 1"),
    (f"{SCHEDULER}CosineAnnealingLR;+scheduler.T_max=10;+scheduler.eta_min=-1", "scheduler.eta_min", "0 or more"),
    (f"{STOPPING}mode=up", "callbacks.early_stopping.mode", "one of min, max"),
    (f"{STOPPING}patience=-1", "callbacks.early_stopping.patience", "0 or more"),
    (f"{CALLBACK}Timer, duration: soon}}", "callbacks.x.duration", "refused"),
    (f"{CALLBACK}Timer, interval: up}}", "callbacks.x.interval", "step"),
    ("+metrics.x={_target_: torchmetrics.Accuracy, task: multiclass, num_classes: 10, top_k: 50}",
     "metrics.x.top_k", ""),
    ("model.layers.hidden.out_features=-3", "model.layers.hidden.out_features", "1 or more"),
    ("model.layers.hidden.out_features=0", "model.layers.hidden.out_features", "1 or more"),
    ("model.layers.activation={_target_: torch.nn.Module}", "model.layers.activation", "no forward"),
    ("data.num_classes=5", "data.num_classes", "10, which is what the data holds"),
    # Of the data, which only the data know.
    ("data.input_shape=[3,32,32]", "data.input_shape", "[1, 8, 8], which is what the data holds"),
    ("data.parts.train=5000", "data.parts", "1797"),
    ("data.input_std=[]", "data.input_std", "1 or more"),
    ("metrics.accuracy.num_classes=7", "metrics.accuracy.num_classes", "10, data.num_classes"),
    ("metrics.accuracy.average=sum", "metrics.accuracy.average", "micro, macro"),
    # Text that is none, and numbers that no machine has.
    ("tags=[2024,b]", "tags", """'tags=["2024","b"]'"""),
    ("tags=[true]", "tags", """'tags=["true"]'"""),
    ("name=1.10", "name", "text"),
    ("monitor=2024", "monitor", "text"),
    ("data_dir=5", "data_dir", "text"),
    ("trainer.limit_train_batches=inf", "trainer.limit_train_batches", "a number, 0 or more"),
    ("runtime.step_timeout=1e20", "runtime.step_timeout", "31622400"),
    ("launch.timeout_seconds=1e20", "launch.timeout_seconds", "31622400"),
    # What a class refuses, or only trains wrongly with.
    ("scheduler=step;+scheduler.last_epoch=0", "scheduler.last_epoch", "StepLR refused its values"),
    ("optimizer.differentiable=true", "optimizer.differentiable", "false"),
    ("++model.layers.activation.approximate=word", "model.layers.activation.approximate", "none, tanh"),
    ("+objective.x={_target_: exp.objectives.objective.Term, loss: []}", "objective.x.loss", "_target_ is a Module"),
    ("+objective.x={_target_: torch.nn.CrossEntropyLoss, reduction: sum}", "objective.x.reduction", "mean"),
    # What is not installed.
    ("+metrics.x={_target_: torchmetrics.image.fid.FrechetInceptionDistance}", "metrics.x._target_", "pip install"),
    # Tags that nothing gives, with those that are given.
    ("monitor=loss/train/cross_entropy", "monitor", "It is the only term: write loss/train"),
    ("+objective=jacobian;monitor=loss/train/jacobian", "monitor", "Write loss/val/jacobian"),
    ("monitor=loss/val/anything", "monitor", "a tag of this run: loss/val, "),
    ("monitor=accuracy/train", "monitor", "Add train to metric_stages"),
    ("metric_stages=[test];monitor=accuracy/val;mode=max", "monitor", "Add val to metric_stages"),
    ("trainer.limit_val_batches=0;monitor=loss/train;" f"{STOPPING}monitor=accuracy/val",
     "callbacks.early_stopping.monitor", "It never validates: trainer.limit_val_batches=0"),
    ("data.parts.val=0;monitor=loss/train;scheduler=plateau;scheduler.monitor=loss/val",
     "scheduler.monitor", "It never validates: data.parts.val=0"),
    ("scheduler=plateau;scheduler.monitor=loss/vall", "scheduler.monitor", "Did you mean loss/val?"),
    (f"{STOPPING}monitor=recall/val", "callbacks.early_stopping.monitor", "accuracy/val"),
    (f"{CALLBACK}ModelCheckpoint, monitor: loss/test}}", "callbacks.x.monitor", "test"),
    # Validation that is never due.
    ("trainer.val_check_interval=0", "trainer.val_check_interval", "1 or more"),
    ("trainer.val_check_interval=9999", "trainer.val_check_interval", "batches of an epoch"),
    # More than a machine can do.
    ("+model.layers.x={repeat: 1000000, layer: {_target_: torch.nn.ReLU}}", "model.layers.x.repeat", "10000"),
    ("strategy=ddp;launch.devices=100000", "launch.devices", "1024"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "key", "says"), CASES)
def test_the_guilty_key_is_told_before_anything_is_written(tmp_path, monkeypatch, capfd, command, key, says):
    monkeypatch.chdir(tmp_path)
    assert train(command.split(";")) == 2
    text = capfd.readouterr().err
    assert f"  {key}: " in text
    assert text.startswith("1 fault")
    assert says in text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= MAX_LINES
    assert not list(Path().iterdir())


@pytest.mark.parametrize("command", [
    "trainer.val_check_interval=20", "scheduler=step;scheduler.step_size=1",
    "scheduler=one_cycle;+scheduler.total_steps=5000",
    f"{SCHEDULER}ExponentialLR;+scheduler.gamma=1.1", "optimizer=sgd;optimizer.momentum=0;optimizer.lr=0",
    f"{STOPPING}patience=0;callbacks.early_stopping.monitor=accuracy/val;"
    "callbacks.early_stopping.mode=max", f"{CALLBACK}ModelCheckpoint}}",
    "tags=['2024',b];name=3", "scheduler=plateau;scheduler.monitor=loss/train",
    "+objective=jacobian;monitor=loss/val/jacobian", "metric_stages=[train];monitor=accuracy/train;mode=max",
])  # fmt: skip
def test_what_is_right_is_none(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert check(command.split(";")) == 0


# What asks for each extra.
PACKAGES = {"parquet": "pyarrow", "hf": "datasets", "vision": "torchvision"}
# FILE is one that is there.
EXTRAS = {
    "wandb": ["logger=wandb", "+logger.x={_target_: lightning.pytorch.loggers.WandbLogger}"],
    "mlflow": ["logger=mlflow", "+logger.x={_target_: lightning.pytorch.loggers.MLFlowLogger}"],
    "deepspeed": ["strategy=deepspeed"],
    "parquet": ["data=parquet data.dataset.path=FILE data.dataset.target=kind"],
    "hf": ["data=hf data.dataset.path=FILE data.dataset.target=kind"],
    "vision": ["data.tv_tensors={input: image}"],
    "safetensors": ["weights.from=FILE"],
    "tokenizers": ["data=tokens", "data=token_file data.dataset.path=FILE data.dataset.tokenizer=FILE"],
    "search": [],  # of sweeps alone, as the next two
    "slurm": [],
    "ray": [],
    "report": [],  # of exp.report, which says so in a line and goes on
    "export": [],  # of exp.export and exp.serve, which name it
    "serve": [],
    "fp8": [],  # its device is told first
    "env": [],  # needs a file .env
    "dev": [],
    "docs": [],
}


def test_every_option_whose_package_is_missing_says_so_and_names_the_extra(tmp_path, monkeypatch, capfd):
    """A folder of the package's name, such as the one that W&B leaves where it ran, is no package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exp.errors, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    for module in ("exp.loggers.wandb_run", "exp.loggers.mlflow_store"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)  # which is imported where it is needed, without a look before
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"].keys() == EXTRAS.keys()
    file = tmp_path.parent / f"{tmp_path.name}.safetensors"
    file.touch()
    for extra, commands in EXTRAS.items():
        for command in commands:
            words = [command] if "{" in command else command.split()
            assert train([word.replace("FILE", str(file)) for word in words]) == 2
            text = capfd.readouterr().err
            assert f"pip install 'exp-framework[{extra}]'" in text
            assert f"the package {PACKAGES.get(extra, extra)}" in text
    with pytest.raises(MissingExtraError, match=r"exp-framework\[fp8\]"):
        refuse_without_torchao()
    assert not list(Path().iterdir())


def test_every_option_that_names_an_extra_is_among_them():
    named = set()
    for path in (Path(exp.__file__).parent / "conf").glob("*/*.yaml"):
        for _, node in nodes_in(OmegaConf.to_container(OmegaConf.load(path))):
            file = Path(exp.__file__).parents[1] / f"{node['_target_'].rpartition('.')[0].replace('.', '/')}.py"
            if file.is_file() and re.search(r"is_installed\(|require_extra\(", file.read_text(encoding="utf-8")):
                named.add(f"{path.parent.name}={path.stem}")
    choices = {command.split()[0] for commands in EXTRAS.values() for command in commands if "{" not in command}
    assert named == choices - {"weights.from=FILE"}


class Falling(LambdaLR):
    """A schedule of somebody's own, whose rate falls by a constant and does not stop at 0."""

    def __init__(self, optimizer, *, slope):
        super().__init__(optimizer, lambda done: 1 - slope * done)


@pytest.mark.parametrize(
    ("factory", "steps", "key", "says"),
    [
        (functools.partial(Falling, slope=0.1), 9, None, None),
        (functools.partial(Falling, slope=0.1), 20, "scheduler", "the learning rate is -0.0001 at step 11"),
        (functools.partial(StepLR, step_size=0), 9, "scheduler.step_size", "ZeroDivisionError"),
        (functools.partial(OneCycleLR, max_lr=1e-3, total_steps=5), 9, "scheduler.total_steps", "the run has 9"),
    ],
)
def test_a_schedule_that_fails_on_its_way_is_told_at_the_parameter_that_makes_it_so(factory, steps, key, says):
    network = nn.Linear(2, 2)
    optimization = Optimization(
        optimizer_factory=functools.partial(SGD, lr=1e-3, momentum=0.9), schedule_factory=factory
    )
    optimizer, _ = optimization.make(network, total_steps=steps)
    found = list(rate_faults(optimization, optimizer, key="scheduler", steps=lambda: steps, epochs=None))
    assert [fault.key for fault in found] == ([] if key is None else [key])
    assert all(says in fault.got for fault in found)


def test_a_faulty_word_is_told_without_torch(tmp_path):
    program = (
        "import sys, time; from exp.train import main; status = main(sys.argv[1:]); "
        "print(status, 'torch' in sys.modules, 'lightning' in sys.modules)"
    )
    for command in (
        ["modle=x"],
        ["modle=x", "model.layers.head.out_features=wide"],
        ["optimizer.lr=fast"],
        ["-m", "sede=1,2"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *command], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert done.stdout.split() == ["2", "False", "False"], done.stderr
    assert not list(tmp_path.iterdir())
