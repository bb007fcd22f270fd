"""exp.audit reports the dangers of a downloaded folder without running its code."""

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.config.freeze import freeze
from exp.config.search_path import OWN_CONF
from exp.extras.audit.audit import audit, main

BARE = "a pickle that is not in torch's zip format, which can run any code when it is loaded"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "got").mkdir()
    yield tmp_path / "got"
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, function=os.system, *arguments):
        self.call = function, arguments or ("touch ran",)

    def __reduce__(self):
        return self.call


def outside(path, **options):
    return {(finding.kind, finding.what) for finding in audit(path, **options) if finding.is_outside}


def yaml(place, text, name="e.yaml"):
    (place / name).write_text(text)
    return place / name


def test_the_configs_of_exp_are_clean():
    assert [finding for finding in audit(OWN_CONF) if finding.is_outside and finding.kind != "hydra"] == []


def test_a_clean_config_lists_calls_and_variables(place, capsys):
    file = yaml(place, "model: {_target_: torch.nn.Linear, in_features: 3}\ndata_dir: ${oc.env:EXP_DATA_DIR,data}\n")
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"          calls      torch.nn.Linear  [{file}, model._target_]",
        f"          reads      EXP_DATA_DIR  [{file}, data_dir]",
    ]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("a: {_target_: os.system}", ("calls", "os.system")),
        ("security: {allow: [subprocess]}", ("allows", "subprocess")),
        ("a: '${oc.env:AWS_SECRET_ACCESS_KEY}'", ("reads", "AWS_SECRET_ACCESS_KEY")),
        ("a: 'x${oc.decode:${oc.env:MY_TOKEN}}'", ("reads", "MY_TOKEN")),
        ("a: '${oc.env:${which}}'", ("reads", "a variable by ${oc.env:${which}}")),
        ("resume: /etc/passwd", ("path", "/etc/passwd")),
        ("logger: {x: {uri: 'https://evil.example'}}", ("path", "https://evil.example")),
        (
            "hydra: {callbacks: {x: {_target_: torch.nn.Linear}}}",
            ("hydra", "hydra.callbacks.x: a class that would run before the check"),
        ),
        (
            "defaults: [{override /hydra/job_logging: x}]",
            ("hydra", "hydra/job_logging: x: a group that exp does not use"),
        ),
    ],
)
def test_what_a_config_reaches_outside_is_reported(place, text, finding, capsys):
    file = yaml(place, text + "\n")
    assert main([str(place)]) == 1
    assert finding in outside(file)
    assert "OUTSIDE" in capsys.readouterr().out


def test_unreadable_files_are_reported(place, capsys):
    for text in ("a: !!python/object/apply:os.system ['touch ran']", "a: [", "a: &a [*a]"):
        assert main([str(yaml(place, text))]) == 2
    (place / "e.yaml").unlink()
    with zipfile.ZipFile(place / "script.pt", "w") as archive:
        archive.writestr("m/code/__torch__.py", "def forward(self): pass\n")
    assert main([str(place)]) == 1
    assert ("calls", "a program of TorchScript") in outside(place)
    capsys.readouterr()
    assert main(["nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().out


def test_modules_of_the_folder_are_not_imported(place):
    (place / "layers.py").write_text("open('ran', 'w')\n")
    (place / "conf" / "model").mkdir(parents=True)
    yaml(place / "conf" / "model", "_target_: layers.Net\n")
    ((kind, what),) = outside(place)
    assert (kind, what) == ("calls", f"layers.Net, code of {place / 'layers.py'}")
    assert outside(place, allow=["layers"]) == set()


@pytest.mark.parametrize("name", ["model.pt", "model.pkl", "model.joblib", ".metadata", "cut.ckpt"])
def test_a_pickle_is_outside_and_not_run(place, name):
    (place / name).write_bytes(pickle.dumps(Evil())[: 20 if name == "cut.ckpt" else None])
    assert outside(place) == {("calls", BARE)}


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (b"cos\nsystem\nX\x09\x00\x00\x00touch ran\x85R.", ("calls", "os.system")),
        (pickle.dumps(Evil(), protocol=4), ("unreadable", "torch cannot read the checkpoint: ")),
        (b"cos\nsystem\n", ("unreadable", "torch cannot read the checkpoint: ")),
    ],
)
def test_a_hostile_checkpoint_is_read_and_not_run(place, content, finding):
    torch.save({}, place / "right.ckpt")
    with zipfile.ZipFile(place / "right.ckpt") as right, zipfile.ZipFile(place / "wrong.ckpt", "w") as wrong:
        for member in right.infolist():
            wrong.writestr(member.filename, content if member.filename.endswith(".pkl") else right.read(member))
    ((kind, what),) = outside(place)
    assert (kind, what[: len(finding[1])]) == finding


def test_foreign_names_in_checkpoints_are_reported(place):
    state = {"w": torch.nn.Linear(2, 2).state_dict(), "b": torch.zeros(2, dtype=torch.bfloat16), "n": {"a": [1]}}
    torch.save(state, place / "right.ckpt")
    np.save(place / "array.npy", np.zeros(3))
    np.savez(place / "arrays.npz", a=np.zeros(3), b=np.zeros(2, dtype=[("x", "i4")]))
    assert outside(place) == set()
    assert main([str(place / "right.ckpt")]) == 0
    torch.save({"state": Evil()}, place / "wrong.ckpt")
    torch.save(state, place / "legacy.pt", _use_new_zipfile_serialization=False)
    np.save(place / "objects.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez(place / "objects.npz", a=np.array([Evil()], dtype=object))
    hidden = (place / "objects.npy").read_bytes().replace(b"'|O'", b"'\\117'")
    (place / "hidden.npy").write_bytes(hidden)
    found = {Path(finding.where.partition(",")[0]).name for finding in audit(place) if finding.is_outside}
    assert found == {"wrong.ckpt", "legacy.pt", "objects.npy", "objects.npz", "hidden.npy"}
    assert outside(place) == {("calls", "posix.system"), ("calls", BARE)}


def test_a_run_directory_is_clean(place):
    directory = freeze(
        plan(resolve(exp.compose(["data=wine", "model=mlp", "hydra.run.dir=outputs/r"]))).resolved.config
    )
    torch.save({"epoch": 1}, directory / "last.ckpt")
    assert main([str(directory)]) == 0
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace("torch.nn.Flatten", "torch.hub.load"))
    assert ("calls", "torch.hub.load") in outside(directory)


def test_environments_pipes_and_links_are_reported(place):
    os.mkfifo(place / "pipe.ckpt")
    (place / "away.yaml").symlink_to("/etc/passwd")
    found = outside(place)
    assert {what for kind, what in found if kind == "path"} == {
        "a pipe, a socket or a device", "a link to /etc/passwd"
    }  # fmt: skip


def test_control_characters_are_not_printed(place, capsys):
    yaml(place, 'a: {_target_: "x\\n  calls      torch.nn.Linear\\e[2J"}\n')
    assert main([str(place)]) == 1
    assert "\x1b" not in capsys.readouterr().out
