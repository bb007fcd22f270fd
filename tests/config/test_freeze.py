"""The run directory is made once, alone, and says where the run came from."""

import contextlib
import json
import math
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from omegaconf import OmegaConf

from exp import compose
from exp.check.stages import early_faults
from exp.config.freeze import (
    freeze,
    frozen_yaml,
    make_exclusively,
    provenance,
    read_frozen,
    read_overrides,
    shared_origin,
)
from exp.config.yaml_files import parse_yaml, yaml_text
from exp.errors import RunError
from exp.files import write_whole


def composed(directory):
    return OmegaConf.create(
        {
            "name": "train",
            "data": {"num_classes": 10},
            "model": {"out_features": "${data.num_classes}"},
            "_composition_": {"overrides": ["optimizer.lr=0.1"], "directory": str(directory)},
        }
    )


def test_two_at_once_never_share_a_directory(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_exclusively(tmp_path / "a" / "12-00-00"), range(16)))
    assert len({path.name for path in made}) == 16
    assert {path.name for path in made} == {"12-00-00", *(f"12-00-00-{count}" for count in range(2, 17))}


def test_the_frozen_config_is_resolved_and_read_back(tmp_path):
    directory = freeze(composed(tmp_path / "run"))
    text = (directory / "config.yaml").read_text()
    assert "${" not in text
    assert "_composition_" not in text
    assert read_frozen(directory).model.out_features == 10
    assert read_overrides(directory) == ["optimizer.lr=0.1"]


def test_a_run_of_before_the_keys_for_values_of_ones_own_can_still_be_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = freeze(compose([]))
    path = directory / "config.yaml"
    content = parse_yaml(path.read_text(), name="config.yaml")
    del content["vars"], content["resolvers"]
    path.write_text(yaml_text(content))
    assert early_faults(read_frozen(directory)) == []
    # One that is cut is no older one.
    del content["launch"]
    path.write_text(yaml_text(content))
    assert [fault.key for fault in early_faults(read_frozen(directory))] == ["launch"]


@pytest.mark.parametrize("made", [0, 1, 2])
def test_where_freezing_is_killed_no_config_yaml_stands_without_the_others(made, tmp_path, monkeypatch):
    written = []

    def killed(path, content, *, is_synced):
        if len(written) == made:
            raise KeyboardInterrupt
        written.append(path.name)
        write_whole(path, content, is_synced=is_synced)

    monkeypatch.setattr("exp.config.freeze.write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        freeze(composed(tmp_path / "run"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == set(written) <= {"overrides.yaml", "provenance.json"}


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot be written.*hydra\.run\.dir"):
        freeze(composed(tmp_path / "file" / "run"))


def test_a_directory_that_is_no_run_is_told(tmp_path):
    with pytest.raises(RunError, match=r"config\.yaml is not there"):
        read_frozen(tmp_path)


def test_provenance_holds_the_revision_and_what_was_not_committed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "a.txt").write_text("one\n")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "a.txt"], check=True)
    subprocess.run(["git", *identity, "commit", "-qm", "one"], check=True)
    (tmp_path / "a.txt").write_text("two\n")
    found = provenance(["seed=1"])
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert found["git"]["revision"] == revision
    assert "+two" in found["git"]["diff"]
    assert found["overrides"] == ["seed=1"]
    assert json.loads(json.dumps(found)) == found


def test_outside_a_repository_there_is_no_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance([])["git"] is None


def test_a_parent_that_another_program_takes_away_meanwhile_is_made_again(tmp_path):
    stop = threading.Event()

    def take_away():
        while not stop.wait(0.0003):
            with contextlib.suppress(OSError):
                (tmp_path / "day").rmdir()

    taker = threading.Thread(target=take_away)
    taker.start()
    try:
        for _ in range(200):
            make_exclusively(tmp_path / "day" / "12-00-00").rmdir()
    finally:
        stop.set()
        taker.join()


def test_a_file_in_the_place_of_the_parent_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        make_exclusively(tmp_path / "file" / "run")


def test_yaml_text_is_what_omegaconf_writes_and_reads_back():
    config = compose(overrides=["experiment=gpt"])
    plain = OmegaConf.to_container(config, resolve=False)
    assert OmegaConf.to_container(OmegaConf.create(yaml_text(plain))) == plain
    plain = OmegaConf.to_container(compose(), resolve=True)
    assert yaml_text(plain) == OmegaConf.to_yaml(OmegaConf.create(plain))
    odd = {"a": "1e-3", "b": "yes", "c": "null", "d": "", "e": "12:30:00", "f": " lead", "g": "a: b", "h": "é ✓"}
    odd |= {"i": "x" * 300, "j": "line\nline2\n", "k": ["1", True, None, 1e-8, math.inf], "l": {}, "m": "2020-01-01"}
    odd |= {"n": "0x1f", "o": "it's", "p": "~", "q": "#x", "r": "[a]", "s": "\ttab", "t": "=", "u": "1_000", "v": "-"}
    assert yaml_text(odd) == OmegaConf.to_yaml(OmegaConf.create(odd))
    twice = [1]
    assert OmegaConf.to_container(OmegaConf.create(yaml_text({"a": twice, "b": twice}))) == {"a": [1], "b": [1]}
    assert "&" not in yaml_text({"a": twice, "b": twice})


def test_runs_that_share_their_origin_have_overrides_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose(overrides=["seed=5", "hydra.run.dir=outputs/shared"])
    origin = {**shared_origin(), "time": "then"}
    directory = freeze(config, text=frozen_yaml(config), origin=origin, is_synced=False)
    written = json.loads((directory / "provenance.json").read_text())
    assert written == {**origin, "overrides": ["seed=5"]}
    assert read_frozen(directory).seed == 5
    assert not list(directory.glob(".*"))
