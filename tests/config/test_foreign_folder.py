"""Modules of a downloaded folder are imported only if a config names them, in the parent and in ranks."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.cli.worker import work
from exp.config.freeze import freeze
from exp.errors import ConfigError
from exp.strategies.rank import ALONE

# Modules of the standard library, installed packages, and modules that Python imports automatically. The imports of
# `python -m` (runpy, importlib) cannot be prevented, see docs/security.md.
PRESENT = (
    "sitecustomize", "usercustomize", "argparse", "json", "typing", "random", "logging", "socket", "yaml", "torch",
    "numpy", "hydra", "omegaconf", "lightning", "torchmetrics", "rich", "tensorboard", "dotenv", "annotated_types",
)  # fmt: skip
# Optional packages that torch and others try to import. They may come from a folder that a config names.
ABSENT = (
    "optree", "triton", "jsonargparse", "torch_xla", "cupy", "pandas", "transformers", "dill", "cloudpickle", "unused"
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "received"
    place.mkdir()
    for name in (*PRESENT, *ABSENT):
        (place / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    plugin = place / "hydra_plugins" / "evil"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('hydra_plugins ')\n")
    (plugin / "plugin.py").write_text((plugin / "__init__.py").read_text())
    (place / "conf" / "model").mkdir(parents=True)
    (place / "conf" / "model" / "mine.yaml").write_text("_target_: layers_of_mine.Net\n")
    (place / "conf" / "sitecustomize.py").write_text((plugin / "__init__.py").read_text())
    (place / "layers_of_mine.py").write_text(
        "import torch, json\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self): super().__init__(torch.nn.Flatten(), torch.nn.LazyLinear(3))\n"
    )
    monkeypatch.chdir(place)
    return place


def started(folder, *arguments):
    outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=outer | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False, timeout=240,
    )  # fmt: skip
    ran = folder.parent / "ran"
    return done, ran.read_text() if ran.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [("model=mine", "strategy=ddp", "launch.devices=2"), ("model=mlp",)])
def test_unnamed_modules_of_the_folder_are_not_imported(folder, ranks):
    """model=mine puts the folder on the import path of each rank."""
    for name in ABSENT if "model=mine" in ranks else ():
        (folder / f"{name}.py").unlink()
    done, ran = started(
        folder, "exp.train", "data=wine", *ranks,
        "launch.accelerator=cpu", "trainer.max_epochs=1", "trainer.enable_progress_bar=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ran == ""


def test_a_worker_imports_no_unnamed_module(folder):
    config = exp.compose(["data=wine", "model=mlp", "trainer.max_steps=1", "test=false", "hydra.run.dir=outputs/r"])
    directory = freeze(plan(resolve(config)).resolved.config)
    done, ran = started(folder, "exp.worker", str(directory))
    assert done.returncode == 0, done.stderr
    assert ran == ""


@pytest.fixture
def frozen(tmp_path, monkeypatch):
    """A run directory with a config that allows a package, which creates a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    (installed / "tracer_of_worker.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nimport torch\nclass Net(torch.nn.Identity): pass\n"
    )
    directory = freeze(
        plan(resolve(exp.compose(["data=wine", "model=mlp", "hydra.run.dir=outputs/r"]))).resolved.config
    )
    config = OmegaConf.load(directory / "config.yaml")
    config.security.allow = ["tracer_of_worker"]
    config.model = {"_target_": "tracer_of_worker.Net"}
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(config))
    yield directory
    sys.modules.pop("tracer_of_worker", None)


@pytest.mark.parametrize("allow", [(), ("timm",)])
def test_a_worker_ignores_the_allow_list(frozen, tmp_path, allow):
    with pytest.raises(ConfigError) as raised:
        work(ALONE, directory=frozen, resume=None, allow=allow)
    (error,) = raised.value.errors
    assert error.key == "security.allow"
    assert error.source == str(frozen / "config.yaml")
    assert "--allow tracer_of_worker" in error.fix
    assert not (tmp_path / "ran").exists()


def test_a_worker_trusts_its_own_command(frozen, tmp_path):
    # Building fails after the import, because the network has no parameters.
    with pytest.raises((ConfigError, RuntimeError, TypeError, ValueError)):
        work(ALONE, directory=frozen, resume=None, allow=("tracer_of_worker",))
    assert (tmp_path / "ran").exists()
