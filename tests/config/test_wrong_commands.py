"""What a hurried user types, and what comes back: exit 2, at most 12 lines, the key, the cure, no traceback.

Each command runs in an empty directory, after its files were written there.
"""

import itertools
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field

import pytest
import torch

from exp.check.__main__ import main as check
from exp.train import main as train

MAX_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """argv: as the shell hands it over. says: parts of the answer, the key first. files: written before."""

    argv: list[str]
    says: list[str]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return " ".join(self.argv) + (" with " + ", ".join(self.files) if self.files else "")


def wrong(command: str, *says: str, files: dict[str, str] | None = None) -> Wrong:
    """A command without spaces in its parts."""
    return Wrong(argv=command.split(), says=list(says), files=files or {})


GROUPS_AND_OPTIONS = [
    wrong("precison=bf16", "precison", "Did you mean precision?"),
    wrong("+precison=bf16", "precison", "Did you mean precision?"),
    wrong("modle=mlp", "modle", "Did you mean model?"),
    wrong("model=sequental", "model", "Did you mean sequential?"),
    wrong("model=Sequential", "model", "Did you mean sequential?"),
    wrong("optimizer=sdg", "optimizer", "Did you mean sgd?"),
    wrong("optimizer=AdamW", "optimizer", "Did you mean adamw?"),
    wrong("optimizer=[adam,sgd]", "optimizer", "one option"),
    wrong("@model=mlp", "@model", "no key", "Did you mean model=mlp?"),
    wrong("=1", "'=1' begins with no key"),
    wrong(".seed=1", ".seed", "no key", "Did you mean seed=1?"),
    wrong("model/=mlp", "model/", "no key", "Did you mean model=mlp?"),
    wrong("data=digit", "data", "Did you mean digits?"),
    wrong("data=", "data"),
    wrong("precision=fp61", "precision", "fp16"),
    wrong("+precision=bf61", "precision", "Did you mean bf16?"),
    wrong("precision=[bf16,fp16]", "precision", "one option"),
    wrong("++precision=bf16", "precision", "Write precision=bf16"),
    wrong("hooks=[gradient,memory]", "hooks", "Did you mean gradients?"),
    wrong("hooks=null", "hooks", "hooks=[]"),
    wrong("optimizer=null", "optimizer"),
    wrong("~hooks", "hooks", "hooks=[]"),
    wrong("+model=mlp", "model", "Write model=mlp"),
    wrong("scheduler=cosin", "scheduler", "Did you mean cosine?"),
    wrong("debug=one_bach", "debug", "Did you mean one_batch?"),
    wrong("experiment=exmple", "experiment", "Did you mean example?"),
    wrong("strategy=dpp", "strategy", "Did you mean ddp?"),
    wrong("logger=tensorbord", "logger", "Did you mean tensorboard?"),
    wrong("metrics=acuracy", "metrics", "Did you mean accuracy?"),
    wrong("objective=[crossentropy]", "objective", "Did you mean cross_entropy?"),
    wrong("callbacks=earlystopping", "callbacks", "Did you mean early_stopping?"),
    wrong("model=mlp,lenet", "model", "-m"),
]
KEYS = [
    wrong("optimizer.lrr=0.1", "optimizer.lrr", "Did you mean optimizer.lr?"),
    wrong("optimiser.lr=0.1", "optimiser", "Did you mean optimizer?"),
    wrong("lr=0.1", "lr", "optimizer.lr"),
    wrong("epochs=3", "epochs", "trainer.max_epochs=3"),
    wrong("batch_size=32", "batch_size", "data.batch_size"),
    wrong("data.batchsize=32", "data.batchsize", "Did you mean data.batch_size?"),
    wrong("+data.batchsize=32", "data.batchsize", "Did you mean data.batch_size?"),
    wrong("trainer.max_epoch=3", "trainer.max_epoch", "trainer.max_epochs=3"),
    wrong("+trainer.max_epochss=3", "trainer.max_epochss", "Did you mean trainer.max_epochs?"),
    wrong("+optimizer.beta=[0.9,0.99]", "optimizer.beta", "Did you mean optimizer.betas?"),
    wrong("model.layers.hiden.out_features=3", "model.layers.hiden", "Did you mean model.layers.hidden?"),
    wrong("+model.layers.hidden.out_feature=3", "model.layers.hidden.out_feature", "model.layers.hidden.out_features?"),
    wrong("launch.device=2", "launch.device", "Did you mean launch.devices?"),
    wrong("+launch.gpus=2", "launch.gpus", "devices"),
    wrong("hooks.gradients.every_n_step=2", "hooks.gradients.every_n_step", "hooks.gradients.every_n_steps?"),
    wrong("phases=[adversarial] phases.generator.repeat=2", "phases.generator.repeat", "phases.generator.repeats?"),
    wrong("strategy=ddp strategy.static_grap=true", "strategy.static_grap", "Did you mean strategy.static_graph?"),
    wrong("data.dataset.path=my.csv", "data.dataset.path", "no parameter"),
    wrong("seeds=1", "seeds", "Did you mean seed?"),
    wrong("+precision.scale=2", "precision.scale", "Did you mean precision.scaler?"),
    wrong("~seed", "seed"),
    wrong("~optimizer._target_", "optimizer", "_target_"),
]
VALUES = [
    wrong("optimizer.lr=fast", "optimizer.lr", "a number"),
    wrong("optimizer.lr=-0.1", "optimizer.lr", "0 or more"),
    wrong("optimizer.lr=???", "optimizer.lr", "a value"),
    wrong("seed=-1", "seed", "an integer"),
    wrong("seed=abc", "seed", "an integer"),
    wrong("seed=1.0", "seed", "Write 1"),
    wrong("trainer.max_epochs=ten", "trainer.max_epochs", "an integer"),
    wrong("trainer.max_epochs=2.5", "trainer.max_epochs", "an integer"),
    wrong("trainer.max_epochs=0", "trainer.max_epochs", "1 or more"),
    wrong("trainer.max_time=tomorrow", "trainer.max_time", "DD:HH:MM:SS"),
    wrong("data.batch_size=0", "data.batch_size", "1 or more"),
    wrong("data.parts.val=1.5", "data.parts.val"),
    wrong("mode=mni", "mode", "Did you mean min?"),
    wrong("train=maybe", "train", "true or false"),
    wrong("test=1", "test", "true or false"),
    wrong("optimizer.betas=0.9", "optimizer.betas", "a list of 2 numbers"),
    wrong("optimizer.betas=[0.9]", "optimizer.betas", "a list of 2 numbers"),
    wrong("optimizer.amsgrad=yes_please", "optimizer.amsgrad", "true or false"),
    wrong("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val", "above 0"),
    wrong("+trainer.gradient_clip_algorithm=nrm", "gradient_clip_algorithm"),
    wrong("trainer.gradient_clip_algorithm=nrm", "trainer.gradient_clip_algorithm", "Did you mean norm?"),
    wrong("launch.accelerator=gpus", "launch.accelerator", "cuda"),
    wrong("launch.devices=0", "launch.devices", "1 or more"),
    wrong("precision.word=fp12", "precision.word", "Did you mean fp16?"),
    wrong("metric_stages=[validation]", "metric_stages", "val"),
    wrong("metric_stages=val", "metric_stages", "Write metric_stages=[val]"),
    wrong("metric_stages=trian", "metric_stages", "Write metric_stages=[train]"),
    wrong("tags=a", "tags", "Write tags=[a]"),
    wrong("tags=3", "tags", "Write 'tags=[\"3\"]'"),
    wrong("hooks.gradients.modules=head", "hooks.gradients.modules", "Write hooks.gradients.modules=[head]"),
    wrong("~objective.cross_entropy", "objective", "Leave ~objective.cross_entropy out"),
    wrong("objective.cross_entropy=null", "objective.cross_entropy", "~objective.cross_entropy"),
    wrong(
        "objective.cross_entropy.loss._target_=torch.nn.L1Loss",
        "objective.cross_entropy.loss._target_",
        "Write objective=[cross_entropy]",
    ),
    wrong("hooks.gradients.every_n_steps=0", "hooks.gradients.every_n_steps", "1 or more"),
    wrong("hooks.gradients=null", "hooks.gradients", "~hooks.gradients"),
    wrong("trainer.limit_train_batches=0", "trainer.limit_train_batches", "more than 0"),
    wrong("trainer.limit_val_batches=2.5", "trainer.limit_val_batches", "integer"),
    wrong("name=../elsewhere", "outputs/"),
    wrong("scheduler=one_cycle scheduler.anneal_strategy=cosine", "scheduler.anneal_strategy", "Did you mean cos?"),
]
SHELL = [
    wrong("optimizer.lr =1", "optimizer.lr", "no ="),
    wrong("optimizer.lr= 1", "'1' has no ="),
    wrong("model mlp", "model", "no ="),
    wrong("--model mlp", "--model"),
    wrong("--lr=0.1", "--lr"),
    wrong("optimizer.lr:0.1", "optimizer.lr", "no ="),
    wrong("optimizer.lr=1e-3,1e-2", "optimizer.lr", "-m"),
    wrong("seed=range(3)", "seed", "-m"),
    wrong("optimizer.betas=[0.9,0.99", "optimizer.betas", "cannot be read"),
    Wrong(argv=["optimizer.betas=[0.9, 0.99]]"], says=["optimizer.betas"]),
    Wrong(argv=["tags=[a b"], says=["tags"]),
]
HABITS = [
    wrong("ckpt_path=last.ckpt", "ckpt_path", "resume=last.ckpt"),
    wrong("trainer=gpu", "trainer", "launch.accelerator"),
    wrong("trainer=ddp", "trainer", "strategy=ddp"),
    wrong("trainer=default", "trainer", "trainer.max_epochs=5"),
    wrong("launch=local", "launch", "launch.devices=2"),
    wrong("debug=fast", "debug", "debug=one_batch"),
    wrong("debug=limit", "debug", "debug=few_batches"),
    wrong("debug=short", "debug", "debug=few_epochs"),
    wrong("debug=fdr", "debug", "debug=one_batch"),
    wrong("trainer.devices=2", "trainer.devices", "launch.devices=2"),
    wrong("+trainer.devices=2", "trainer.devices", "launch.devices=2"),
    wrong("trainer.precision=16", "trainer.precision", "precision="),
    wrong("precision=16-mixed", "precision", "precision=fp16"),
    wrong("task_name=mine", "task_name", "name=mine"),
    wrong("model.optimizer.lr=0.1", "model.optimizer.lr", "optimizer.lr=0.1"),
    wrong("data.train_val_test_split=[1,1,1]", "train_val_test_split", "data.parts"),
    wrong("callbacks=none", "callbacks", "callbacks=[]"),
]
RULES = [
    wrong("train=false", "resume", "resume=PATH"),
    wrong("train=false test=false", "train", "one of them"),
    wrong("resume=nowhere.ckpt", "resume", "a checkpoint file that is there"),
    wrong("resume=https://example.com/a.ckpt", "resume", "a file on this machine"),
    wrong("strategy=single launch.devices=2", "strategy", "strategy=ddp"),
    wrong("monitor=acuracy/val", "monitor", "Did you mean accuracy/val?"),
    wrong("monitor=accuracy", "monitor", "Did you mean accuracy/val?"),
    wrong("monitor=accuracy/test mode=max", "monitor", "val"),
    wrong("monitor=accuracy/train mode=max", "monitor", "metric_stages"),
    wrong("monitor=accuracy/val", "mode", "mode=max"),
    wrong("mode=max", "mode", "min"),
    wrong("data=diabetes metrics=[accuracy]", "metrics.accuracy._target_", "metrics=[mae]"),
    wrong("data=diabetes objective=[cross_entropy]", "objective.cross_entropy.loss._target_", "objective=[mse]"),
    wrong("objective=[mse]", "objective.mse.loss._target_", "objective=[cross_entropy]"),
    wrong("objective=[]", "objective", "at least one"),
    wrong("trainer.max_epochs=-1", "trainer.max_epochs", "a limit"),
    wrong("trainer.max_epochs=null", "trainer.max_epochs", "a limit"),
    wrong("scheduler=plateau scheduler.monitor=null", "scheduler.monitor", "the tag to watch"),
    wrong("precision.word=fp16 precision.scaler.enabled=false", "precision.scaler.enabled", "precision=fp16"),
    wrong("precision.scaler.enabled=true", "precision.scaler.enabled", "fp16"),
    wrong("optimizer.lr=${trainer.lr}", "optimizer.lr", "an interpolation that leads to a value"),
    wrong("name=${sed}", "name", "${seed}"),
    wrong("data.data_dirr=x", "data.data_dirr"),
]
TARGETS = [
    wrong("optimizer._target_=torch.optim.Adamm", "optimizer._target_", "Did you mean torch.optim.Adam?"),
    wrong("optimizer._target_=torch.nn.Linear", "optimizer._target_", "torch.optim.Optimizer"),
    wrong("model._target_=os.system", "model._target_", "allowed"),
    wrong("hooks.gradients._target_=builtins.open", "hooks.gradients._target_", "allowed"),
    wrong("+metrics.mine={_target_:torch.load}", "metrics.mine._target_", "allowed"),
    wrong("+callbacks.mine={_target_:functools.partial}", "callbacks.mine._target_", "allowed"),
    wrong("model._target_=my.Net", "model._target_", "security.allow=[my]"),
    wrong("+metrics.mine={_target_:torchmetrics.Acuracy}", "metrics.mine._target_", "torchmetrics.Accuracy"),
]
SHAPES = [
    wrong("optimizer.betas=[1,2]", "optimizer", "beta"),
    wrong("metrics.accuracy.top_k=20", "metrics.accuracy", "top_k"),
    wrong("optimizer.exempt_from_decay=[nroms]", "optimizer.exempt_from_decay", "norms"),
    wrong(
        "scheduler=cosine scheduler.warmup_steps=9 trainer.max_steps=5", "scheduler.warmup_steps", "fewer than the 5"
    ),
    wrong("model=gpt", "model.layers.tokens", "whole numbers"),
    wrong("model=transformer data=wine", "model.layers.positions.shape", "data.input_shape[1]"),
    wrong("model.layers.head.out_features=7", "model.layers.head", "10"),
    wrong("model=lenet data=wine", "model.layers"),
    wrong("model=mlp data=text", "model"),
]


def yaml(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


NET = """
    # A model of one's own: model=mine
    _target_: exp.models.containers.ModuleDictModel
    layers:
      flatten: {_target_: torch.nn.Flatten}
      hidden: {_target_: torch.nn.Linear, out_features: 32}
      head: {_target_: torch.nn.Linear, out_features: "${data.num_outputs}"}
    forward: |
      x = hidden(flatten(x))
      return head(x)
"""


LAYER = "{_target_: torch.nn.Linear, out_features: 32}"
BOMB = "# Grows to 9 ** 8 nodes\na: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join(['*' + before] * 9)}]\n" for before, after in itertools.pairwise("abcdefgh")
)


def own(name: str, text: str) -> dict[str, str]:
    return {f"conf/{name}.yaml": yaml(text)}


FILES = [
    wrong("model=mine", "model.layers.hidden.out_feature", "conf/model/mine.yaml",
          files=own("model/mine", NET.replace("out_features: 32", "out_feature: 32"))),
    wrong("model=mine", "model.layers.hidden._target_", "Did you mean torch.nn.Linear?", "conf/model/mine.yaml",
          files=own("model/mine", NET.replace("Linear, out_features: 32", "Liner, out_features: 32"))),
    wrong("model=mine", "model.layers.hidden.out_features", "an integer",
          files=own("model/mine", NET.replace("out_features: 32", "out_features: wide"))),
    wrong("model=mine", "model.layers.hidden.out_features", "???",
          files=own("model/mine", NET.replace("out_features: 32", "out_features: '???'"))),
    wrong("model=mine", "model.layers.head.out_features", "${data.num_outputs}",
          files=own("model/mine", NET.replace("data.num_outputs", "data.num_output"))),
    wrong("model=mine", "model.forward", "hiden", "conf/model/mine.yaml, line 8",
          files=own("model/mine", NET.replace("x = hidden(", "x = hiden("))),
    wrong("model=mine", "model.forward", "conf/model/mine.yaml, line 8",
          files=own("model/mine", NET.replace("x = hidden(flatten(x))", "x = hidden(flatten(x)"))),
    wrong("model=mine", "model.forward", "conf/model/mine.yaml, line 8",
          files=own("model/mine", NET.replace("x = hidden(flatten(x))", "import os"))),
    wrong("model=mine", "model.layers.hidden", "repeat",
          files=own("model/mine", NET.replace(LAYER, "{repeat: 0, layer: {_target_: torch.nn.ReLU}}"))),
    wrong("model=mine", "conf/model/mine.yaml", "line",
          files=own("model/mine", "# Tabs\n_target_: x\nlayers:\n\thidden: 1\n")),
    wrong("experiment=mine", "optimiser", "Did you mean optimizer?",
          files=own("experiment/mine", "# @package _global_\n# Typo\noptimiser: {lr: 1}\n")),
    wrong("experiment=mine", "optimizer.learning_rat", "conf/experiment/mine.yaml",
          files=own("experiment/mine", "# @package _global_\n# Typo\noptimizer: {learning_rat: 1}\n")),
    wrong("experiment=mine", "adamm",
          files=own("experiment/mine", "# @package _global_\n# Typo\ndefaults:\n  - override /optimizer: adamm\n")),
    wrong("experiment=mine", "trainer.max_epochs", "conf/experiment/mine.yaml",
          files=own("experiment/mine", "# @package _global_\n# Word\ntrainer: {max_epochs: many}\n")),
    wrong("experiment=mine", "security.allow", "command line", "conf/experiment/mine.yaml",
          files=own("experiment/mine", "# @package _global_\n# Opens the wall\nsecurity: {allow: [subprocess]}\n")),
    wrong("+hooks=mine", "hooks.mine", "_target_",
          files=own("hooks/mine", "# No target\nmine: {every_n_steps: 3}\n")),
    wrong("+hooks=mine", "hooks.mine._target_", "NotHere",
          files=own("hooks/mine", "# Absent\nmine: {_target_: absent_hook.NotHere}\n") | {"absent_hook.py": "x = 1\n"}),
    wrong("+hooks=mine", "hooks.mine._target_", "ZeroDivisionError",
          files={**own("hooks/mine", "# Fails\nmine: {_target_: failing_hook.Mine}\n"), "failing_hook.py": "1 / 0\n"}),
    wrong("model=mine", "conf/model/mine.yaml",
          files=own("model/mine", BOMB)),
    wrong("data=mine", "data.batch_sizes", "Did you mean data.batch_size?", "conf/data/mine.yaml",
          files=own("data/mine", "# Two files\ndefaults: [digits, _self_]\nbatch_sizes: 3\n")),
    wrong("data=mine", "data._target_", "Did you mean exp.data.data.Data?",
          files=own("data/mine", "# Typo\ndefaults: [digits, _self_]\n_target_: exp.data.data.Date\n")),
    wrong("+hooks=mine", "hooks.g.modules", "no_such",
          files=own("hooks/mine", "# Pattern\ng: {_target_: exp.hooks.gradients.Gradients, modules: [no_such]}\n")),
]  # fmt: skip
SWEEPS = [
    wrong("-m optimizer.lr=1e-3,fast", "optimizer.lr", "job 1"),
    wrong("-m model=mlp,lenett", "model", "lenet"),
    wrong("-m optimizer.lrr=1e-3,1e-2", "optimizer.lrr", "optimizer.lr"),
    wrong("-m data.batch_size=0,16 mode=min,max", "data.batch_size", "mode"),
]

TABLE = [
    *GROUPS_AND_OPTIONS, *KEYS, *VALUES, *SHELL, *HABITS, *RULES, *TARGETS, *SHAPES, *FILES, *SWEEPS,
]  # fmt: skip


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def write(directory, files):
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def assert_told(case: Wrong, status: int, text: str) -> None:
    assert status == 2, text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= MAX_LINES, text
    for part in case.says:
        assert part in text, f"{part!r} is not in:\n{text}"


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.title)
def test_a_wrong_command_is_told(case, empty, capfd):
    write(empty, case.files)
    before = sorted(empty.rglob("*.yaml"))
    status = train(case.argv)
    captured = capfd.readouterr()
    assert_told(case, status, captured.err + captured.out)
    assert sorted(empty.rglob("*.yaml")) == before
    assert not (empty / "outputs").exists(), "a directory was made"


def test_the_table_is_long():
    assert len(TABLE) >= 60
    assert len({case.title for case in TABLE}) >= len(TABLE) - len(FILES)


@pytest.mark.parametrize(
    "case", [*TABLE[:3], *RULES[:2], *SHAPES[:1], *FILES[:2], *SWEEPS], ids=lambda case: case.title
)
def test_exp_check_says_the_same(case, empty, capfd):
    write(empty, case.files)
    assert check(case.argv) == 2
    checked = capfd.readouterr()
    train(case.argv)
    assert capfd.readouterr().err == checked.err
    assert checked.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command", ["launch.accelerator=cuda", "strategy=ddp launch.accelerator=cuda launch.devices=8"]
)
def test_a_gpu_that_is_not_there(command, empty, capfd):
    status = train(command.split())
    assert_told(wrong(command, "launch.accelerator", "cuda", "cpu"), status, capfd.readouterr().err)


def test_all_faults_come_at_once(empty, capfd):
    command = "optimizer.lr=fast trainer.max_epochs=0 seed=-3 monitor=los/val model.layers.head.out_features=wide"
    assert train(command.split()) == 2
    early = capfd.readouterr().err
    assert early.startswith("4 faults in the config; nothing was started.")
    assert early.rstrip().endswith("python -m exp.check --all looks at everything at once.")
    assert check(["--all", *command.split()]) == 2
    text = capfd.readouterr().err
    assert text.startswith("5 faults in the config; nothing was started.")
    for key in ("optimizer.lr", "trainer.max_epochs", "seed", "monitor", "model.layers.head.out_features"):
        assert f"  {key}: " in text


# One with the start of Python, which costs seconds; the tests above give the same function the same words.
def test_as_a_command_of_the_shell(empty):
    case = SHAPES[0]
    done = subprocess.run([sys.executable, "-m", "exp.train", *case.argv], capture_output=True, text=True, check=False)
    assert_told(case, done.returncode, done.stdout + done.stderr)


def test_a_sweep_as_a_command(empty, commands):
    done = commands.run(*SWEEPS[0].argv, cwd=empty)
    assert_told(SWEEPS[0], done.returncode, done.stdout + done.stderr)
