"""The run directory is created exclusively and records command, revision and environment of the run."""

import json
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from omegaconf import OmegaConf

from exp import compose
from exp.check.stages import early_errors
from exp.config.freeze import freeze, make_exclusively, provenance, shared_origin, take_directory, write_frozen
from exp.config.frozen import COMPOSITION, frozen_yaml, read_frozen, read_overrides
from exp.config.yaml_files import parse_yaml, yaml_text
from exp.errors import RunError


def composed(directory):
    return OmegaConf.create(
        {
            "name": "train",
            "data": {"num_classes": 10},
            "model": {"out_features": "${data.num_classes}"},
            "_composition_": {"overrides": ["optimizer.lr=0.1"], "directory": str(directory)},
        }
    )


def test_concurrent_runs_get_different_directories(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: make_exclusively(tmp_path / "a" / "12-00-00"), range(8)))
    assert len({path.name for path in made}) == 8
    assert {path.name for path in made} == {"12-00-00", *(f"12-00-00-{count}" for count in range(2, 9))}


def test_a_frozen_config_is_resolved(tmp_path):
    directory = freeze(composed(tmp_path / "run"))
    text = (directory / "config.yaml").read_text()
    assert "${" not in text
    assert "_composition_" not in text
    assert read_frozen(directory).model.out_features == 10
    assert read_overrides(directory) == ["optimizer.lr=0.1"]


def test_a_config_of_an_earlier_version_passes_the_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = freeze(compose([]))
    path = directory / "config.yaml"
    content = parse_yaml(path.read_text(), name="config.yaml")
    del content["vars"], content["resolvers"]
    content["runtime"] |= {"warm": "auto", "cuda_graph": False}
    del content["runtime"]["compile_mode"]
    path.write_text(yaml_text(content))
    assert early_errors(read_frozen(directory)) == []
    # The file of a damaged config lacks keys that all versions have.
    del content["launch"]
    path.write_text(yaml_text(content))
    assert [error.key for error in early_errors(read_frozen(directory))] == ["launch"]


@pytest.mark.parametrize("blocked", ["overrides.yaml", "provenance.json"])
def test_config_yaml_is_written_last(blocked, tmp_path):
    (tmp_path / "run" / blocked).mkdir(parents=True)
    config = composed(tmp_path / "run")
    take_directory(config, tmp_path / "run")
    with pytest.raises(RunError, match="cannot be written"):
        freeze(config)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_unusable_directories_are_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot be written.*hydra\.run\.dir"):
        freeze(composed(tmp_path / "file" / "run"))
    with pytest.raises(RunError, match=r"config\.yaml does not exist"):
        read_frozen(tmp_path)


def test_provenance_holds_the_revision_and_the_diff(tmp_path, monkeypatch):
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


def test_yaml_text_equals_that_of_omegaconf():
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


def test_jobs_of_a_sweep_record_their_overrides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose(overrides=["seed=5", "hydra.run.dir=shared"])
    origin = {**shared_origin(), "time": "then"}
    directory = tmp_path / "shared"
    directory.mkdir()
    overrides = list(config[COMPOSITION].overrides)
    write_frozen(directory, text=frozen_yaml(config), overrides=overrides, origin=origin, is_synced=False)
    written = json.loads((directory / "provenance.json").read_text())
    assert written == {**origin, "overrides": ["seed=5"]}
    assert read_frozen(directory).seed == 5
    assert not list(directory.glob(".*"))
