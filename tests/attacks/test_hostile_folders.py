"""Folders from elsewhere that would run a program: git, .env, conf, data, run directories, checkpoints.

Each attack leaves a file, the canary, where it succeeds. What Python imports by itself:
tests/config/test_foreign_folder.py.
"""

import io
import os
import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

RUN = (
    *("model=mlp", "hooks=[]", "logger=[]", "test=false", "trainer.max_epochs=1", "trainer.limit_train_batches=2"),
    *("trainer.limit_val_batches=1", "trainer.enable_progress_bar=false"),
)


class Evil:
    """Touches the canary where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.fixture(scope="module")
def made(tmp_path_factory, commands):
    """A run directory, as somebody may send it."""
    place = tmp_path_factory.mktemp("made")
    done = commands.run(*RUN, "hydra.run.dir=outputs/train/day/time", cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "outputs" / "train" / "day" / "time"


@pytest.fixture
def folder(tmp_path, made):
    """A folder with a conf of its own and a run."""
    place = tmp_path / "received"
    (place / "conf" / "model").mkdir(parents=True)
    shutil.copytree(made, place / "outputs" / "train" / "day" / "time")
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'canary'}\n")
    script.chmod(0o755)
    return place


@pytest.fixture
def attacked(folder, tmp_path, commands):
    """A function that lives a command in the folder and requires that it ran nothing."""

    def attacked(*words: str, module: str = "exp.train") -> str:
        done = commands.run(*words, module=module, cwd=folder)
        told = done.stdout + done.stderr
        assert not (tmp_path / "canary").exists(), told
        assert done.returncode in (0, 1, 2), told
        assert "Traceback" not in told
        return told

    return attacked


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


def elsewhere(folder: Path) -> None:
    """.git is a file, which names the folder that holds the traps."""
    with_config("core.fsmonitor", "diff.external")(folder)
    (folder / ".git").rename(folder / "innocent")
    (folder / ".git").write_text("gitdir: innocent\n")


def bare(folder: Path) -> None:
    """The folder itself looks like a repository."""
    with_config("core.fsmonitor", "core.pager")(folder)
    git(folder, "config", "core.bare", "false")
    git(folder, "config", "core.worktree", str(folder))
    for path in (folder / ".git").iterdir():
        path.rename(folder / path.name)
    (folder / ".git").rmdir()


GIT = {
    "fsmonitor": with_config("core.fsmonitor"),
    "textconv": with_config("diff.evil.textconv", attributes="* diff=evil\n"),
    "command of a diff": with_config("diff.evil.command", "diff.external", attributes="* diff=evil\n"),
    "filter": with_config("filter.evil.clean", "filter.evil.smudge", attributes="* filter=evil\n"),
    "filter that is a process": with_config("filter.evil.process", attributes="* filter=evil\n"),
    "merge driver, pager, editor": with_config("merge.evil.driver", "core.pager", "core.editor", "gpg.program"),
    "a git folder elsewhere": elsewhere,
    "a folder that is a git folder": bare,
}


@pytest.mark.parametrize("name", GIT)
def test_git(name, folder, attacked):
    GIT[name](folder)
    attacked(*RUN)


@pytest.mark.parametrize(
    "line",
    [
        "LD_PRELOAD=./evil.so",
        "LD_AUDIT=./evil.so",
        "GIT_CONFIG_COUNT=1\nGIT_CONFIG_KEY_0=core.fsmonitor\nGIT_CONFIG_VALUE_0={evil}",
        "GIT_EXTERNAL_DIFF={evil}",
        "GIT_SSH_COMMAND={evil}",
        "HOME={folder}",
        "XDG_CONFIG_HOME={folder}",
        "PATH={folder}/bin",
        "PYTHONPATH={folder}/bin",
        "PYTHONSTARTUP={evil}",
        "PYTHONWARNINGS=error::evil.Warning",
        "BASH_ENV={evil}",
        "EXP_PARENT=1\nEXP_EXCHANGE={folder}",
    ],
)
def test_a_line_of_dot_env(line, folder, attacked):
    repository(folder)
    (folder / "bin").mkdir()
    shutil.copy(evil(folder), folder / "bin" / "git")
    (folder / "bin" / "evil.py").write_text(
        f"import os\nos.system({evil(folder)!r})\nclass Warning(UserWarning): pass\n"
    )
    for name in (".gitconfig", "git/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"[core]\n\tfsmonitor = {evil(folder)}\n")
    (folder / ".env").write_text(line.format(evil=evil(folder), folder=folder) + "\n")
    assert "expected" in attacked(*RUN)  # a fault


GLOBAL = "# @package _global_\n"
MODELS = {
    "a function of the system": "_target_: os.system\ncommand: {evil}\n",
    "a process": "_target_: subprocess.Popen\nargs: [{evil}]\n",
    "through another module": "_target_: torch.nn.modules.module.os.system\ncommand: {evil}\n",
    "partial": "_target_: functools.partial\n_args_: [{{_target_: os.system}}, {evil}]\n",
    "eval": "_target_: builtins.eval\n_args_: ['__import__(\"os\").system(\"{evil}\")']\n",
    "torch.load": "_target_: torch.load\nf: evil.pt\nweights_only: false\n",
    "hub": "_target_: torch.hub.load\nrepo_or_dir: .\nsource: local\nmodel: evil\n",
    "within a layer": (
        "_target_: exp.models.containers.SequentialModel\nlayers: {{a: {{_target_: os.system, command: {evil}}}}}\n"
    ),
    "as an argument": (
        "_target_: torch.nn.Linear\nin_features: {{_target_: os.system, command: {evil}}}\nout_features: 3\n"
    ),
    "a tag of YAML": "!!python/object/apply:os.system ['{evil}']\n",
    "a tag within": "_target_: torch.nn.ReLU\ninplace: !!python/object/apply:os.system ['{evil}']\n",
    "an interpolation": "_target_: torch.nn.ReLU\ninplace: ${{eval:'__import__(\"os\").system(\"{evil}\")'}}\n",
    "a program": (
        "_target_: exp.models.containers.ModuleDictModel\nlayers: {{a: {{_target_: torch.nn.ReLU}}}}\n"
        "forward: |\n  __import__('os').system('{evil}')\n  return a(x)\n"
    ),
    "a program by attributes": (
        "_target_: exp.models.containers.ModuleDictModel\nlayers: {{a: {{_target_: torch.nn.ReLU}}}}\n"
        "forward: |\n  return a(x).__class__.__base__.__subclasses__()\n"
    ),
    "hydra's callbacks": GLOBAL + "hydra: {{callbacks: {{a: {{_target_: os.system, command: {evil}}}}}}}\n",
    "hydra's logging": GLOBAL + (
        "hydra: {{job_logging: {{version: 1, handlers: {{a: {{(): os.system, command: {evil}}}}}}}}}\n"
    ),
    "hydra's environment": GLOBAL + "hydra: {{job: {{env_set: {{LD_PRELOAD: ./evil.so}}}}}}\n",
    "hydra's launcher": GLOBAL + "hydra: {{launcher: {{_target_: os.system, command: {evil}}}}}\n",
    "security": GLOBAL + (
        "security: {{allow: [subprocess]}}\nmodel: {{_target_: subprocess.Popen, args: [{evil}]}}\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_conf(name, folder, attacked):
    (folder / "conf" / "model" / "received.yaml").write_text(MODELS[name].format(evil=evil(folder)))
    (folder / "hubconf.py").write_text(f"import os\nos.system({evil(folder)!r})\n")
    torch.save(Evil(folder.parent / "canary"), folder / "evil.pt")
    told = attacked("model=received", *RUN[1:])
    assert "fault" in told


def zipped(path: Path, content: bytes) -> None:
    """As torch.save lays a file out, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")


def evil_state(folder: Path) -> bytes:
    return pickle.dumps({"state_dict": {"a": Evil(folder.parent / "canary")}}, protocol=2)


@pytest.mark.parametrize("kind", ["pickle", "zip", "torch.save", "an object in a true one"])
@pytest.mark.parametrize(
    "words",
    [
        ("resume=outputs/train/day/time/checkpoints/last.ckpt",),
        ("resume=outputs/train/day/time/checkpoints/last.ckpt", "train=false", "test=true"),
        ("resume=auto",),
        ("data=tensors", "data.dataset.path=outputs/train/day/time/checkpoints/last.ckpt"),
    ],
    ids=["resume", "evaluate", "auto", "data"],
)
def test_a_checkpoint_and_a_file_of_data(kind, words, folder, attacked):
    for name in ("last", "best"):
        path = folder / "outputs" / "train" / "day" / "time" / "checkpoints" / f"{name}.ckpt"
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
    keys = {word.split("=")[0] for word in words}
    told = attacked(*(word for word in RUN if word.split("=")[0] not in keys), *words)
    assert "last.ckpt" in told or words == ("resume=auto",)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("exp.worker", ("outputs/train/day/time",)),
        ("exp.resume", ("outputs/train/day/time",)),
        ("exp.resume", ("outputs/train/day/time", "--verify")),
        ("exp.fork", ("outputs/train/day/time@2", "optimizer.lr=0.1")),
        ("exp.audit", (".",)),
    ],
)
@pytest.mark.parametrize("model", ["a function of the system", "a process", "torch.load", "a program"])
def test_a_run_directory(module, words, model, folder, attacked):
    directory = folder / "outputs" / "train" / "day" / "time"
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["model"] = yaml.safe_load(MODELS[model].format(evil=evil(folder)))
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "overrides.yaml").write_text(f"- model={{_target_:os.system,command:{evil(folder)}}}\n")
    torch.save(Evil(folder.parent / "canary"), folder / "evil.pt")
    attacked(*words, module=module)


def test_a_kept_step(folder, attacked):
    for name, content in (("pickle", evil_state(folder)), ("zip", None)):
        path = folder / f"step-{name}.pt"
        if content is None:
            zipped(path, evil_state(folder))
        else:
            path.write_bytes(content)
        attacked(str(path), module="exp.replay")


def test_the_trap_works(tmp_path):
    """Else the tests above show nothing."""
    buffer = io.BytesIO()
    torch.save(Evil(tmp_path / "canary"), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)
    assert (tmp_path / "canary").exists()
