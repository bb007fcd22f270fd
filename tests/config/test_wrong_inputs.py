"""A wrong command line is an error before training, with the key and a fix that works.

wrong_inputs.txt has the command lines, and wrong_inputs.yaml the files that they need.
"""

import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from exp.check.stages import NOTE
from exp.cli.check import main as check
from exp.cli.train import main as train
from exp.errors import ConfigError, MissingExtraError
from exp.precision.words import refuse_without_torchao
from exp.strategies.placement import Machine, placement

HERE = Path(__file__).parent
PASTING = runpy.run_path(str(HERE / "pasting.py"))
answer, fixed = PASTING["answer"], PASTING["fixed"]
FAST, SLOW = (
    [line.split(" | ") for line in part.splitlines() if not line.startswith("#")]
    for part in (HERE / "wrong_inputs.txt").read_text().split("## Only in the slow suite\n")
)
FILES = OmegaConf.to_container(OmegaConf.load(HERE / "wrong_inputs.yaml"))
IN_A_TEST = 6
MAX_LINES = 12


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the files of wrong_inputs.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return tmp_path


def assert_fixes_work(argv, errors, *, rounds=3):
    """Assert that each fix removes its error, and that new errors also have fixes that work."""
    assert rounds or not errors, (argv, [str(error) for error in errors])
    known = {(error.key, error.got) for error in errors}
    for error in errors:
        for command in fixed(argv, error):
            left = answer(command)
            assert (error.key, error.got) not in {(one.key, one.got) for one in left}, (argv, error.fix, command)
            assert_fixes_work(command, [one for one in left if (one.key, one.got) not in known], rounds=rounds - 1)


@pytest.mark.parametrize("first", range(0, len(FAST), IN_A_TEST))
def test_a_wrong_input_is_answered_with_a_fix_that_works(first, place):
    for typed, key, *parts in FAST[first : first + IN_A_TEST]:
        argv = shlex.split(typed)
        errors = answer(argv)
        text = next((str(error) for error in errors if error.key == key), None)
        assert text is not None, (typed, [str(error) for error in errors])
        assert [part for part in parts if part not in text] == [], (typed, text)
        assert len(str(ConfigError(errors)).splitlines()) <= MAX_LINES, typed
        assert_fixes_work(argv, errors)
    assert not (place / "outputs").exists()


def assert_refused(argv, key, output, status):
    assert status == 2, (argv, output)
    assert key in output, (argv, output)
    assert "Traceback" not in output, (argv, output)
    assert len(output.splitlines()) <= MAX_LINES, (argv, output)


@pytest.mark.slow
def test_other_wrong_inputs_are_refused(share, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for typed, key in share.of(SLOW):
        status = train(shlex.split(typed))
        assert_refused(typed, key, "".join(capfd.readouterr()), status)
        assert list(tmp_path.iterdir()) == [], typed


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        ("precison=bf16", ["precison", "Did you mean precision?"]),
        ("trainer.max_epochs=0 seed=-3", ["2 errors", "trainer.max_epochs", "  seed: "]),
        ("model=unknown_layer", ["model.forward", "conf/model/unknown_layer.yaml, line 8"]),
        ("metrics.accuracy.top_k=20", ["metrics.accuracy", "top_k"]),
        ("-m optimizer.lrr=1e-3,1e-2", ["optimizer.lrr", "optimizer.lr"]),
        ("-m optimizer.lr=1e-3,fast", ["optimizer.lr", "job 1"]),
    ],
)
def test_a_command_exits_with_2_and_writes_nothing(typed, parts, place, capfd):
    argv, before = typed.split(), sorted(place.rglob("*.yaml"))
    status = train(argv)
    captured = capfd.readouterr()
    assert_refused(argv, parts[0], captured.out + captured.err, status)
    assert [part for part in parts if part not in captured.err] == []
    assert sorted(place.rglob("*.yaml")) == before
    assert not (place / "outputs").exists()
    assert check(argv) == 2
    lines = [line for line in captured.err.splitlines() if line != NOTE]
    assert capfd.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("argv", [["modle=x", "optimizer.lr=fast"], ["-m", "sede=1,2"]])
def test_a_wrong_word_is_answered_without_importing_torch(argv, tmp_path):
    program = (
        "import sys; from exp.cli.train import main; status = main(sys.argv[1:]);"
        "print(status, 'torch' in sys.modules, 'lightning' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["2", "False", "False"], done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_check_reports_every_error_at_once(place, capfd):
    command = "optimizer.lr=fast trainer.max_epochs=0 seed=-3 monitor=los/val model.layers.head.out_features=wide"
    assert train(command.split()) == 2
    early = capfd.readouterr().err
    assert early.startswith("4 errors in the config; nothing was started.")
    assert early.rstrip().endswith("Checks that need torch did not run: python -m exp.check runs all checks.")
    assert check(command.split()) == 2
    text = capfd.readouterr().err
    assert text.startswith("5 errors in the config; nothing was started.")
    for key in ("optimizer.lr", "trainer.max_epochs", "seed", "monitor", "model.layers.head.out_features"):
        assert f"  {key}: " in text


@pytest.mark.parametrize(
    "typed",
    [
        "trainer.val_check_interval=20",
        "scheduler=one_cycle +scheduler.total_steps=5000",
        "optimizer=sgd optimizer.momentum=0 optimizer.lr=0",
        "'+callbacks.x={_target_: lightning.pytorch.callbacks.ModelCheckpoint}' \"tags=['2024',b]\" name=3",
        "+objective=jacobian monitor=loss/val/jacobian",
        "metric_stages=[train] monitor=accuracy/train mode=max",
    ],
)
def test_values_at_a_bound_are_accepted(typed, place):
    assert answer(shlex.split(typed)) == []


def test_a_missing_gpu_is_reported(place):
    (error,) = answer(["strategy=ddp", "launch.devices=8", "launch.accelerator=cuda"])
    assert (error.key, error.got) == ("launch.accelerator", "'cuda'")
    assert "cpu" in str(error)


def test_more_devices_than_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"launch\.devices: 8 with cuda; expected GPUs of this machine, which has 2"):
        placement("ddp", devices=8, machine=Machine(gpus=2))


# Overrides that need an extra, where FILE is an existing file. Other commands name the extras without overrides.
EXTRAS = {
    "wandb": ["logger=wandb", "'+logger.x={_target_: lightning.pytorch.loggers.WandbLogger}'"],
    "mlflow": ["logger=mlflow", "'+logger.x={_target_: lightning.pytorch.loggers.MLFlowLogger}'"],
    "deepspeed": ["strategy=deepspeed"],
    "parquet": ["data=parquet data.dataset.path=rows.parquet data.dataset.target=kind"],
    "hf": ["data=hf data.dataset.path=FILE data.dataset.target=kind"],
    "safetensors": ["weights.from=FILE"],
    "tokenizers": ["data=tokens", "data=token_file data.dataset.path=FILE data.dataset.tokenizer=FILE"],
    **dict.fromkeys(("search", "slurm", "ray", "report", "export", "serve", "fp8", "vision", "dev", "docs"), ()),
}
PACKAGES = {"parquet": "pyarrow", "hf": "datasets"}


class Folders:
    """Import finder that returns an empty folder for the package of each extra, such as the folder wandb/ of W&B."""

    def find_spec(self, name, path=None, target=None):
        is_of_an_extra = name in {PACKAGES.get(extra, extra) for extra in EXTRAS} | {"torchao"}
        return ModuleSpec(name, None, is_package=True) if is_of_an_extra else None


def test_a_missing_package_is_reported_with_its_extra(tmp_path, monkeypatch):
    file = tmp_path / "weights.safetensors"
    file.touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").touch()
    monkeypatch.setattr(sys, "meta_path", [Folders(), *sys.meta_path])
    for extra in EXTRAS:
        monkeypatch.delitem(sys.modules, PACKAGES.get(extra, extra), raising=False)
    for module in ("exp.extras.wandb.wandb_run", "exp.extras.mlflow.mlflow_store"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"].keys() == EXTRAS.keys()
    for extra, commands in EXTRAS.items():
        for command in commands:
            text = " ".join(map(str, answer(shlex.split(command.replace("FILE", str(file))))))
            assert f"pip install 'exp-framework[{extra}]'" in text, command
            assert f"the package {PACKAGES.get(extra, extra)}" in text, command
    with pytest.raises(MissingExtraError, match=r"exp-framework\[fp8\]"):
        refuse_without_torchao()
