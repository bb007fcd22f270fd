"""python -m exp.diff: real runs, and directories that are half written, torn or no run's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from exp.diff import main
from exp.sweeps.run_difference import changed, differences

CONFIG = {
    "name": "train",
    "seed": 0,
    "monitor": "loss/val",
    "mode": "min",
    "optimizer": {"lr": 1e-3, "betas": [0.9, 1]},
}
PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-old\n+{1}\n"


def write_run(directory, *, config=CONFIG, git=None, versions=None, loss=0.5, **report):
    directory.mkdir(parents=True)
    provenance = {"git": git, "versions": versions or {"torch": "2.13.0"}, "machine": {"host": "a", "cores": 2}}
    told = {
        "status": "completed",
        "directory": str(directory),
        "metrics": {"loss/val": loss, "accuracy/val": 0.9, "gradients/norm/a.weight": loss},
        "best": {"metric": "loss/val", "value": loss, "step": 20, "checkpoint": "best.ckpt"},
        "wall_seconds": 8.0,
        "steps": 40,
        "peak_memory_mib": 100.0,
        "tags": [],
        **report,
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "overrides.yaml").write_text("[]\n")
    (directory / "provenance.json").write_text(json.dumps(provenance))
    (directory / "report.json").write_text(json.dumps(told))
    return directory


@pytest.fixture
def diff(capsys):
    """The lines of each section, by its title, split into cells."""

    def compare(*words, status=0):
        assert main([str(word) for word in words]) == status
        told = capsys.readouterr()
        if status:
            return told.err
        blocks = [block.splitlines() for block in told.out.rstrip("\n").split("\n\n")[1:]]
        return {title: {cells[0]: cells[1:] for line in lines if (cells := split(line))} for title, *lines in blocks}

    def split(line):
        return [cell.strip() for cell in line.strip().split("  ") if cell.strip()]

    return compare


def test_only_the_keys_that_differ_are_told(tmp_path, diff):
    other = {**CONFIG, "seed": 3, "optimizer": {"lr": 0.01, "betas": [0.9, 1]}, "hooks": {"memory": {"_target_": "M"}}}
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", config=other)
    told = diff(first, second)
    assert told["config"] == {
        "A": ["B"],
        "seed": ["0", "3"],
        "optimizer.lr": ["0.001", "0.01"],
        "hooks": ["(not there)", "{memory: {_target_: M}}"],
    }
    assert diff(first, first)["config"] == {"the same": []}


def test_equal_numbers_are_one_value_and_a_text_is_none():
    assert list(changed({"a": 1, "b": 1e-4, "c": None}, {"a": 1.0, "b": 0.0001, "c": None})) == []
    assert list(changed({"a": "1"}, {"a": 1})) == [("a", "1", 1)]
    assert list(changed({"a": {"b": 1}}, {"a": 2})) == [("a", {"b": 1}, 2)]


def test_code_and_versions_are_compared(tmp_path, diff):
    first = {"revision": "a" * 40, "diff": PATCH.format("net.py", "new") + PATCH.format("same.py", "x")}
    second = {"revision": "b" * 40, "diff": PATCH.format("same.py", "x") + PATCH.format("data.py", "new")}
    one = write_run(tmp_path / "a", git=first)
    two = write_run(tmp_path / "b", git=second, versions={"torch": "2.12.1"})
    told = diff(one, two)
    assert told["code"]["git revision"] == ["a" * 12, "b" * 12]
    assert told["code"]["net.py"] == ["2 lines uncommitted", "as committed"]
    assert told["code"]["data.py"] == ["as committed", "2 lines uncommitted"]
    assert "same.py" not in told["code"]
    assert f"what was committed between them: git diff {'a' * 12} {'b' * 12}" in told["code"]
    assert told["versions"] == {"A": ["B"], "torch": ["2.13.0", "2.12.1"]}
    bare = write_run(tmp_path / "c")
    assert diff(one, bare)["code"]["net.py"] == ["2 lines uncommitted", "not known"]
    assert diff(bare, bare)["versions"] == {"the same, on the same machine": []}


def test_results_are_told_with_their_change(tmp_path, diff):
    one = write_run(tmp_path / "a")
    two = write_run(tmp_path / "b", loss=0.25, wall_seconds=12.0, steps=40, peak_memory_mib=150.0)
    told = diff(one, two)["results"]
    assert told["best loss/val"] == ["0.5", "0.25", "-0.25, -50 %"]
    assert told["wall_seconds"] == ["8", "12", "+4, +50 %"]
    assert told["peak_memory_mib"] == ["100", "150", "+50, +50 %"]
    assert told["steps"] == ["40", "40"]
    assert told["loss/val"][2] == "-0.25, -50 %"
    assert "accuracy/val" not in told
    assert {"1 tags are equal", "1 more tags differ, of parts of the network, which --all shows"} <= told.keys()
    assert diff(one, two, "--all")["results"]["gradients/norm/a.weight"][0] == "0.5"


def test_runs_that_watch_different_tags_have_no_common_best(tmp_path, diff):
    one = write_run(tmp_path / "a")
    two = write_run(tmp_path / "b", config={**CONFIG, "monitor": "accuracy/val", "mode": "max"})
    told = diff(one, two)["results"]
    assert told["monitor"] == ["loss/val", "accuracy/val"]
    assert told["best of it"] == ["0.5", "0.5"]


@pytest.mark.parametrize(
    "damage", ["", "{", "[1, 2]", "a: [", "null", "\0", '{"metrics": 3}', '{"git": 3, "versions": []}']
)
@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml", "provenance.json", "report.json"])
def test_a_damaged_file_is_told_and_ends_nothing(tmp_path, name, damage):
    one, two = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (one / name).write_text(damage)
    for first, second in ((one, two), (two, one)):
        assert [section.title for section in differences(first, second)][-4:] == [
            "config",
            "code",
            "versions",
            "results",
        ]


def test_what_is_missing_is_told(tmp_path, diff):
    one, two = write_run(tmp_path / "a"), tmp_path / "empty"
    (two / "tensorboard").mkdir(parents=True)
    told = diff(one, two)
    missing = " ".join(told["missing"])
    assert all(f"B: {name} is not there" in missing for name in ("config.yaml", "provenance.json", "report.json"))
    assert told["config"] == {"not compared: B without a config.yaml to read": []}
    assert told["results"]["status"] == ["completed", "no report"]
    (one / "report.json").unlink()
    assert diff(two, one)["results"]["status"] == ["no report", "no report"]


def test_a_directory_that_is_no_run_is_refused(tmp_path, diff):
    one, empty, other = write_run(tmp_path / "a"), tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for first, second, guilty in ((one, empty, empty), (other, one, other), (empty, empty, empty)):
        told = diff(first, second, status=2)
        assert told.startswith(f"{guilty} holds none of config.yaml, overrides.yaml, provenance.json, report.json; ")
        assert "expected a run directory, such as" in told


def test_what_is_no_run_is_refused_with_the_nearest(tmp_path, diff):
    job = write_run(tmp_path / "sweep" / "10")
    write_run(tmp_path / "sweep" / "9")
    (tmp_path / "sweep" / "table.csv").write_text("job\n")
    assert "a sweep of 2 runs; expected a run directory" in diff(tmp_path / "sweep", job, status=2)
    assert f"Did you mean {tmp_path / 'sweep' / '9'}?" in diff(tmp_path / "sweep", job, status=2)
    assert f"Did you mean {tmp_path / 'sweep'}?" in diff(job, tmp_path / "sweeep", status=2)
    assert "is a file; expected a run directory, such as" in diff(job / "config.yaml", job, status=2)
    assert diff(job, tmp_path / "sweep" / "9")["config"] == {"the same": []}


def test_torch_is_not_imported():
    code = "import exp.diff, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False).returncode == 0
