"""Downloaded folders that try to run a program: git, conf, data, run directories, checkpoints.

Each attack that succeeds creates a file, the canary. tests/config/test_foreign_folder.py tests modules that Python
imports automatically.
"""

import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from exp.cli.commands import COMMANDS

RUN = (
    *("model=mlp", "hooks=[]", "logger=[]", "test=false", "trainer.max_epochs=1", "trainer.limit_train_batches=2"),
    *("trainer.limit_val_batches=1", "trainer.enable_progress_bar=false"),
)
DIRECTORY = Path("outputs", "train", "day", "time")


class Evil:
    """Object that creates the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.fixture(scope="module")
def made(tmp_path_factory, commands):
    """A run directory that an attacker could send."""
    place = tmp_path_factory.mktemp("made")
    done = commands.run(*RUN, f"hydra.run.dir={DIRECTORY}", cwd=place)
    assert done.returncode == 0, done.stderr
    return place / DIRECTORY


@pytest.fixture
def folder(tmp_path, made):
    """A folder with a conf and a run."""
    place = tmp_path / "received"
    (place / "conf" / "model").mkdir(parents=True)
    shutil.copytree(made, place / DIRECTORY)
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'canary'}\n")
    script.chmod(0o755)
    return place


@pytest.fixture
def attacked(folder, tmp_path, commands):
    """A function that runs a command in the folder, asserts that no attack succeeded, and returns the output."""

    def attacked(*words: str, module: str = "exp.train") -> str:
        done = commands.run(*words, module=module, cwd=folder)
        printed = done.stdout + done.stderr
        assert [path.name for path in tmp_path.iterdir() if "canary" in path.name] == [], printed
        assert done.returncode in (0, 1, 2), printed
        assert "Traceback" not in printed
        assert "root:" not in printed  # from /etc/passwd
        return printed

    return attacked


def slow(*cases: str) -> list[object]:
    """Return the cases as parameters, all except the first with the marker slow."""
    return [cases[0], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:])]


def evil(folder: Path) -> str:
    return str(folder.parent / "evil.sh")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def repository(folder: Path) -> None:
    git(folder, "init", "-q")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", "a.txt")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    (folder / "a.txt").write_text("two\n")


def with_config(*keys: str, attributes: str = ""):
    def prepare(folder: Path) -> None:
        repository(folder)
        for key in keys:
            git(folder, "config", key, evil(folder))
        (folder / ".gitattributes").write_text(attributes)

    return prepare


# Further keys of git are in tests/config/test_revision.py.
def with_git_file(folder: Path) -> None:
    """Replace .git by a file with the path of the folder with the traps."""
    with_config("core.fsmonitor", "diff.external")(folder)
    (folder / ".git").rename(folder / "innocent")
    (folder / ".git").write_text("gitdir: innocent\n")


def with_submodule(folder: Path) -> None:
    """Add a submodule with the traps in its own .git and in its attributes."""
    repository(folder)
    (folder / "sub").mkdir()
    traps = with_config(
        "core.fsmonitor", "diff.evil.textconv", "filter.evil.clean", attributes="* diff=evil filter=evil\n"
    )
    traps(folder / "sub")
    git(folder / "sub", "config", "core.fsmonitor", evil(folder))
    git(folder, "-c", "protocol.file.allow=always", "add", "sub")
    (folder / ".gitmodules").write_text(f'[submodule "sub"]\n\tpath = sub\n\turl = ./sub\n\tupdate = !{evil(folder)}\n')


GLOBAL = "# @package _global_\n"
MODELS = {
    "a function": "_target_: os.system\ncommand: {evil}\n",
    "through another module": "_target_: torch.nn.modules.module.os.system\ncommand: {evil}\n",
    "torch.load": "_target_: torch.load\nf: evil.pt\nweights_only: false\n",
    "within a layer": (
        "_target_: exp.models.containers.SequentialModel\nlayers: {{a: {{_target_: os.system, command: {evil}}}}}\n"
    ),
    "a tag of YAML": "!!python/object/apply:os.system ['{evil}']\n",
    "an interpolation": "_target_: torch.nn.ReLU\ninplace: ${{eval:'__import__(\"os\").system(\"{evil}\")'}}\n",
    "a program": (
        "_target_: exp.models.containers.ModuleDictModel\nlayers: {{a: {{_target_: torch.nn.ReLU}}}}\n"
        "forward: |\n  __import__('os').system('{evil}')\n  return a(x)\n"
    ),
    "hydra's callbacks": GLOBAL + "hydra: {{callbacks: {{a: {{_target_: os.system, command: {evil}}}}}}}\n",
    "hydra's logging": GLOBAL + (
        "hydra: {{job_logging: {{version: 1, handlers: {{a: {{(): os.system, command: {evil}}}}}}}}}\n"
    ),
    "security": GLOBAL + (
        "security: {{allow: [subprocess]}}\nmodel: {{_target_: subprocess.Popen, args: [{evil}]}}\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow(*MODELS))
def test_a_hostile_option_of_conf_is_refused(name, folder, attacked):
    (folder / "conf" / "model" / "received.yaml").write_text(MODELS[name].format(evil=evil(folder)))
    torch.save(Evil(folder.parent / "canary"), folder / "evil.pt")
    assert "error" in attacked("model=received", *RUN[1:])


def zipped(path: Path, content: bytes) -> None:
    """Write a pickle to a file in the format of torch.save."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")


def evil_state(folder: Path) -> bytes:
    return pickle.dumps({"state_dict": {"a": Evil(folder.parent / "canary")}}, protocol=2)


@pytest.mark.parametrize("kind", slow("an object in a valid one", "pickle", "zip", "torch.save"))
def test_a_hostile_checkpoint_runs_nothing(kind, folder, attacked):
    for name in ("last", "best"):
        path = folder / DIRECTORY / "checkpoints" / f"{name}.ckpt"
        if kind == "pickle":
            path.write_bytes(evil_state(folder))
        elif kind == "zip":
            zipped(path, evil_state(folder))
        elif kind == "torch.save":
            torch.save({"state_dict": {"a": Evil(folder.parent / "canary")}}, path)
        else:
            state = torch.load(path, weights_only=True)
            state["exp_best"] = Evil(folder.parent / "canary")
            torch.save(state, path)
    last = DIRECTORY / "checkpoints" / "last.ckpt"
    assert "last.ckpt" in attacked(*RUN, f"resume={last}")
    assert "last.ckpt" in attacked(*RUN, "data=tensors", f"data.dataset.path={last}")


@pytest.mark.parametrize("model", slow("a function", "torch.load", "a program"))
def test_a_hostile_run_directory_runs_nothing(model, folder, attacked):
    directory = folder / DIRECTORY
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["model"] = yaml.safe_load(MODELS[model].format(evil=evil(folder)))
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "overrides.yaml").write_text(f"- model={{_target_:os.system,command:{evil(folder)}}}\n")
    torch.save(Evil(folder.parent / "canary"), folder / "evil.pt")
    attacked(str(DIRECTORY), module="exp.worker")
    attacked(str(DIRECTORY), module="exp.resume")
    attacked(f"{DIRECTORY}@2", "optimizer.lr=0.1", module="exp.fork")
    # The folder of exp.audit may be removed.
    if "audit" in COMMANDS:
        attacked(".", module="exp.audit")


def with_packages(folder: Path) -> None:
    """Write the files of an installed package, with entry points that Python, torch and TensorBoard read."""
    (folder / "evil_plugin.py").write_text(f"import os\nos.system({evil(folder)!r})\n")
    for name in ("usercustomize", "sitecustomize"):
        shutil.copy(folder / "evil_plugin.py", folder / f"{name}.py")
    groups = (
        "exp.conf",
        "exp.commands",
        "torch.backends",
        "tensorboard_plugins",
        "lightning.pytorch.callbacks_factory",
    )
    place = folder / "evil-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text("".join(f"[{group}]\nevil = evil_plugin:evil\n" for group in groups))
    (folder / "evil.pth").write_text("import evil_plugin\n")


def with_hydra_groups(folder: Path) -> None:
    node = f"_target_: os.system\ncommand: {evil(folder)}\n"
    logging = f"version: 1\nhandlers: {{a: {{(): os.system, command: {evil(folder)}}}}}\nroot: {{handlers: [a]}}\n"
    for group, text in (("launcher", node), ("sweeper", node), ("job_logging", logging), ("hydra_logging", logging)):
        place = folder / "conf" / "hydra" / group
        place.mkdir(parents=True)
        for name in ("exp", "basic", "none", "default", "evil"):
            (place / f"{name}.yaml").write_text(text)


def with_linked_checkpoints(folder: Path) -> None:
    for name in ("last", "best"):
        path = folder / DIRECTORY / "checkpoints" / f"{name}.ckpt"
        path.unlink()
        path.symlink_to("/etc/passwd")


def with_archive(folder: Path) -> None:
    """Write pickled objects to a .npy file and to an .npz file, which has entries with paths outside the archive."""
    content = io.BytesIO()
    np.save(content, np.array([Evil(folder.parent / "canary")], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(folder / "data.npz", "w") as file:
        for name in ("inputs.npy", "targets.npy", "../canary.npy", f"../../{folder.parent.name}/canary"):
            file.writestr(name, content.getvalue())
    (folder / "data.npy").write_bytes(content.getvalue())


def with_yaml_objects(folder: Path) -> None:
    text = f"!!python/object/apply:os.system ['{evil(folder)}']\n"
    (folder / DIRECTORY / "overrides.yaml").write_text(f"- {text}")
    (folder / DIRECTORY / "config.yaml").write_text(f"name: train\nmodel: {text}")


def with_huge_numbers(folder: Path) -> None:
    report = '{"status": "failed", "steps": ' + "9" * 10_000 + ', "metrics": ' + "[" * 50_000
    (folder / DIRECTORY / "report.json").write_text(report)
    (folder / DIRECTORY / "provenance.json").write_text("[" * 50_000)


RESUME = ("exp.resume", (str(DIRECTORY),))
OTHERS = {
    "git's fsmonitor": (with_config("core.fsmonitor"), "exp.train", RUN),
    "git's filter process": (with_config("filter.evil.process", attributes="* filter=evil\n"), "exp.train", RUN),
    "a file .git": (with_git_file, "exp.train", RUN),
    "submodules": (with_submodule, "exp.train", RUN),
    "groups of Hydra": (with_hydra_groups, "exp.train", RUN),
    "a launcher": (with_hydra_groups, "exp.train", ("-m", *RUN, "hydra/launcher=evil", "seed=1,2")),
    "a checkpoint that is a link": (
        with_linked_checkpoints, "exp.train", (*RUN, f"resume={DIRECTORY}/checkpoints/last.ckpt"),
    ),
    "a run of links": (with_linked_checkpoints, *RESUME),
    "an archive": (with_archive, "exp.train", (*RUN, "data=tensors", "data.dataset.path=data.npz")),
    "an array of objects": (with_archive, "exp.train", (*RUN, "data=tensors", "data.dataset.path=data.npy")),
    "an audited archive": (with_archive, "exp.audit", (".",)),
    "objects in the YAML of a run": (with_yaml_objects, *RESUME),
    "objects in the YAML of a parent": (with_yaml_objects, "exp.fork", (f"{DIRECTORY}@2",)),
    "objects in the YAML of a worker": (with_yaml_objects, "exp.worker", (str(DIRECTORY),)),
    "huge numbers": (with_huge_numbers, "exp.train", (*RUN, "runtime.autoresume=true")),
    "huge numbers of a run": (with_huge_numbers, *RESUME),
}  # fmt: skip


@pytest.mark.parametrize("name", slow(*OTHERS))
def test_hostile_files_of_a_folder_run_nothing(name, folder, attacked):
    prepare, module, words = OTHERS[name]
    prepare(folder)
    attacked(*words, module=module)


@pytest.mark.slow
def test_hostile_packages_of_a_folder_run_nothing(folder, tmp_path):
    """A new interpreter is needed, because torch and TensorBoard search for plug-ins during their import."""
    with_packages(folder)
    command = [sys.executable, "-m", "exp.train", *RUN]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not (tmp_path / "canary").exists(), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_the_trap_works(tmp_path):
    """The canary appears without the protection, so its absence in the other tests is meaningful."""
    buffer = io.BytesIO()
    torch.save(Evil(tmp_path / "canary"), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)
    assert (tmp_path / "canary").exists()
