"""Folders from elsewhere that would run a program: git, .env, conf, data, run directories, checkpoints.

Each attack leaves a file, the canary, where it succeeds. What Python imports by itself:
tests/config/test_foreign_folder.py.
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


def with_distribution(folder: Path) -> None:
    """What pip leaves, and what Python's, torch's and TensorBoard's entry points are read from."""
    (folder / "evil_plugin.py").write_text(f"import os\nos.system({evil(folder)!r})\n")
    for name in ("usercustomize", "sitecustomize"):
        shutil.copy(folder / "evil_plugin.py", folder / f"{name}.py")
    groups = (
        "exp.conf",
        "torch.backends",
        "tensorboard_plugins",
        "lightning.pytorch.callbacks_factory",
        "console_scripts",
    )
    entries = "".join(f"[{group}]\nevil = evil_plugin:evil\n" for group in groups)
    for kind, file in (("dist-info", "METADATA"), ("egg-info", "PKG-INFO")):
        place = folder / f"evil-1.0.{kind}"
        place.mkdir()
        (place / file).write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
        (place / "entry_points.txt").write_text(entries)
    (folder / "evil.pth").write_text("import evil_plugin\n")


def with_projects(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "evil"\nversion = "1"\n[project.entry-points."exp.conf"]\nevil = "evil_plugin"\n'
        '[tool.exp]\nallow = ["subprocess"]\n[build-system]\nbuild-backend = "evil_plugin"\nbackend-path = ["."]\n'
    )
    (folder / "setup.cfg").write_text("[options.entry_points]\nexp.conf = evil = evil_plugin\n")
    for name in (".netrc", ".pythonrc.py", ".pdbrc", ".condarc", "hydra.yaml"):
        (folder / name).write_text(f"macdef init\n! {evil(folder)}\nimport os; os.system({evil(folder)!r})\n")


def with_hydra_groups(folder: Path) -> None:
    node = f"_target_: os.system\ncommand: {evil(folder)}\n"
    logging = f"version: 1\nhandlers: {{a: {{(): os.system, command: {evil(folder)}}}}}\nroot: {{handlers: [a]}}\n"
    for group, text in (("launcher", node), ("sweeper", node), ("job_logging", logging), ("hydra_logging", logging)):
        place = folder / "conf" / "hydra" / group
        place.mkdir(parents=True)
        for name in ("exp", "basic", "none", "default", "evil"):
            (place / f"{name}.yaml").write_text(text)


def with_submodule(folder: Path) -> None:
    """Whose own .git holds the traps, beside attributes that name them."""
    repository(folder)
    (folder / "sub").mkdir()
    with_config("core.fsmonitor", "diff.evil.textconv", "filter.evil.clean", attributes="* diff=evil filter=evil\n")(
        folder / "sub"
    )
    git(folder / "sub", "config", "core.fsmonitor", evil(folder))
    git(folder, "-c", "protocol.file.allow=always", "add", "sub")
    (folder / ".gitmodules").write_text(f'[submodule "sub"]\n\tpath = sub\n\turl = ./sub\n\tupdate = !{evil(folder)}\n')


def with_linked_files(folder: Path) -> None:
    for name in ("last", "best"):
        path = folder / "outputs" / "train" / "day" / "time" / "checkpoints" / f"{name}.ckpt"
        path.unlink()
        path.symlink_to("/etc/passwd")


def with_archive(folder: Path) -> None:
    """Whose entries lie outside of it, and hold objects."""
    content = io.BytesIO()
    np.save(content, np.array([Evil(folder.parent / "canary")], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(folder / "data.npz", "w") as file:
        for name in (
            "inputs.npy",
            "targets.npy",
            "../canary.npy",
            f"../../{folder.parent.name}/canary",
            "/tmp/canary",
        ):
            file.writestr(name, content.getvalue())
    (folder / "data.npy").write_bytes(content.getvalue())


def with_yaml_objects(folder: Path) -> None:
    directory = folder / "outputs" / "train" / "day" / "time"
    text = f"!!python/object/apply:os.system ['{evil(folder)}']\n"
    (directory / "overrides.yaml").write_text(f"- {text}")
    (directory / "config.yaml").write_text(f"name: train\nmodel: {text}")


def with_huge_numbers(folder: Path) -> None:
    directory = folder / "outputs" / "train" / "day" / "time"
    (directory / "report.json").write_text(
        '{"status": "failed", "steps": ' + "9" * 10_000 + ', "metrics": ' + "[" * 50_000
    )
    (directory / "provenance.json").write_text("[" * 50_000)


def with_event_files(folder: Path) -> None:
    for place in ("tensorboard", "checkpoints", "."):
        path = folder / "outputs" / "train" / "day" / "time" / place
        path.mkdir(exist_ok=True)
        (path / "events.out.tfevents.9999999999.evil.1.0").write_bytes(evil_state(folder))
        (path / "projector_config.pbtxt").write_text(
            f'embeddings {{ metadata_path: "/etc/passwd" sprite {{ image_path: "{evil(folder)}" }} }}'
        )


LAST = "resume=outputs/train/day/time/checkpoints/last.ckpt"
DATA = (*RUN, "data=tensors", "data.dataset.path=data.npz")
OTHERS = {
    "projects": (with_projects, "exp.train", RUN),
    "groups of Hydra": (with_hydra_groups, "exp.train", RUN),
    "a launcher of the folder": (with_hydra_groups, "exp.train", ("-m", *RUN, "hydra/launcher=evil", "seed=1,2")),
    "submodules": (with_submodule, "exp.train", RUN),
    "a checkpoint that is a link": (with_linked_files, "exp.train", (*RUN, LAST)),
    "a run of links": (with_linked_files, "exp.resume", ("outputs/train/day/time",)),
    "an archive": (with_archive, "exp.train", DATA),
    "an array of objects": (with_archive, "exp.train", (*RUN, "data=tensors", "data.dataset.path=data.npy")),
    "an archive, looked at": (with_archive, "exp.audit", (".",)),
    "objects in the YAML of a run": (with_yaml_objects, "exp.resume", ("outputs/train/day/time",)),
    "objects in the YAML of a parent": (with_yaml_objects, "exp.fork", ("outputs/train/day/time@2",)),
    "objects in the YAML of a frozen run": (with_yaml_objects, "exp.worker", ("outputs/train/day/time",)),
    "huge numbers": (with_huge_numbers, "exp.train", (*RUN, "runtime.autoresume=true")),
    "huge numbers of a run": (with_huge_numbers, "exp.resume", ("outputs/train/day/time",)),
    "event files": (with_event_files, "exp.resume", ("outputs/train/day/time",)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_lies_in_a_folder(name, folder, attacked):
    prepare, module, words = OTHERS[name]
    prepare(folder)
    assert "root:" not in attacked(*words, module=module)
    assert [path.name for path in folder.parent.iterdir() if "canary" in path.name] == []


def test_packages_that_lie_in_a_folder_where_an_interpreter_starts(folder, tmp_path):
    """torch and TensorBoard look for plug-ins when they are imported."""
    with_distribution(folder)
    command = [sys.executable, "-m", "exp.train", *RUN]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not (tmp_path / "canary").exists(), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_the_trap_works(tmp_path):
    """Else the tests above show nothing."""
    buffer = io.BytesIO()
    torch.save(Evil(tmp_path / "canary"), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)
    assert (tmp_path / "canary").exists()
