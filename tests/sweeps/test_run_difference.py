"""python -m exp.diff: two runs, and directories that are incomplete, damaged, or no run."""

import pytest

from exp.extras.diff.diff import main
from exp.extras.diff.run_difference import changed, differences

PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-old\n+{1}\n"


@pytest.fixture
def written(tmp_path, write_run):
    """A function that writes a run below the directory of the test."""

    def write(name, *typed, git=None, versions=None, loss=0.5, **reported):
        provenance = {"git": git, "versions": versions or {"torch": "2.13.0"}, "machine": {"host": "a", "cores": 2}}
        metrics = {"loss/val": loss, "accuracy/val": 0.9, "gradients/norm/a.weight": loss}
        measured = {"steps": 40, "wall_seconds": 8.0, "peak_memory_mib": 100.0, **reported}
        return write_run(
            tmp_path / name, *typed, value=loss, curves={"a": [1.0]}, provenance=provenance, metrics=metrics, **measured
        )

    return write


@pytest.fixture
def diff(capsys):
    """A function that returns the cells of each line, by its first cell, by the title of its section."""

    def compare(*words, status=0):
        assert main([str(word) for word in words]) == status
        shown = capsys.readouterr()
        if status:
            return shown.err
        blocks = [block.splitlines() for block in shown.out.rstrip("\n").split("\n\n")[1:]]
        return {title: {cells[0]: cells[1:] for line in lines if (cells := split(line))} for title, *lines in blocks}

    def split(line):
        return [cell.strip() for cell in line.strip().split("  ") if cell.strip()]

    return compare


def test_keys_that_differ_are_shown(written, diff):
    first = written("a")
    second = written("b", "seed=3", "optimizer.lr=0.01", "hooks.memory={_target_: M}")
    assert diff(first, second)["config"] == {
        "A": ["B"],
        "seed": ["0", "3"],
        "optimizer.lr": ["0.001", "0.01"],
        "hooks": ["(not there)", "{memory: {_target_: M}}"],
    }
    assert diff(first, first)["config"] == {"the same": []}
    assert list(changed({"a": 1.0, "b": 1e-4, "c": None}, {"a": 1.0, "b": 0.0001, "c": None})) == []
    assert list(changed({"a": "1"}, {"a": 1})) == [("a", "1", 1)]
    assert list(changed({"a": {"b": 1}}, {"a": 2})) == [("a", {"b": 1}, 2)]


def test_values_of_different_types_differ(written, diff):
    first = written("a", "trainer.limit_train_batches=1", "data.parts={val: 1}", "vars.sizes=[1, 2]", "test=true")
    second = written("b", "trainer.limit_train_batches=1.0", "data.parts={val: 1.0}", "vars.sizes=[1, 2.0]", "test=1")
    rows = diff(first, second)["config"]
    assert rows["trainer.limit_train_batches"] == ["1", "1.0"]
    assert rows["data.parts.val"] == ["1", "1.0"]
    assert rows["vars.sizes"] == ["[1, 2]", "[1, 2.0]"]
    assert rows["test"] == ["true", "1"]


def test_code_and_versions_are_compared(written, diff):
    one = written("a", git={"revision": "a" * 40, "diff": PATCH.format("net.py", "new") + PATCH.format("same.py", "x")})
    second = {"revision": "b" * 40, "diff": PATCH.format("same.py", "x") + PATCH.format("data.py", "new")}
    two = written("b", git=second, versions={"torch": "2.12.1"})
    found = diff(one, two)
    assert found["code"]["git revision"] == ["a" * 12, "b" * 12]
    assert found["code"]["net.py"] == ["uncommitted changes", "as committed"]
    assert found["code"]["data.py"] == ["as committed", "uncommitted changes"]
    assert "same.py" not in found["code"]
    assert f"what was committed between them: git diff {'a' * 12} {'b' * 12}" in found["code"]
    assert found["versions"] == {"A": ["B"], "torch": ["2.13.0", "2.12.1"]}
    bare = written("c")
    assert diff(one, bare)["code"] == {"not compared: nothing of B can be read": []}
    assert diff(bare, bare)["versions"] == {"the same": []}


def test_results_are_shown_with_their_change(written, diff):
    one = written("a")
    two = written("b", loss=0.25, wall_seconds=12.0, peak_memory_mib=150.0)
    found = diff(one, two)["results"]
    assert found["best loss/val"] == ["0.5", "0.25", "-0.25, -50 %"]
    assert found["wall_seconds"] == ["8", "12", "+4, +50 %"]
    assert found["peak_memory_mib"] == ["100", "150", "+50, +50 %"]
    assert found["steps"] == ["40", "40"]
    assert found["loss/val"][2] == "-0.25, -50 %"
    assert "accuracy/val" not in found
    assert {"1 tags are equal", "1 more tags differ, of parts of the network"} <= found.keys()
    other = diff(one, written("c", "monitor=accuracy/val", "mode=max"))["results"]
    assert other["monitor"] == ["loss/val", "accuracy/val"]
    assert other["best of it"] == ["0.5", "0.5"]


@pytest.mark.parametrize("damage", ["", "{", "[1, 2]", "null", "\0", '{"metrics": 3}', '{"git": 3, "versions": []}'])
@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml", "provenance.json", "report.json"])
def test_a_damaged_file_does_not_end_the_comparison(written, name, damage):
    one, two = written("a"), written("b")
    (one / name).write_text(damage)
    for first, second in ((one, two), (two, one)):
        titles = [section.title for section in differences(first, second)]
        assert titles[-4:] == ["config", "code", "versions", "results"]


def test_missing_files_are_named(written, diff, tmp_path):
    one, two = written("a"), tmp_path / "empty"
    (two / "tensorboard").mkdir(parents=True)
    found = diff(one, two)
    missing = " ".join(found["missing"])
    assert all(f"B: {name} is not there" in missing for name in ("config.yaml", "provenance.json", "report.json"))
    assert found["config"] == {"not compared: nothing of B can be read": []}
    assert found["results"]["status"] == ["completed", "no report"]


def test_a_directory_that_is_no_run_is_refused(written, diff, tmp_path):
    one, other = written("a"), tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert diff(other, one, status=2).startswith(f"{other} holds no runs; expected a run directory, such as")
    written("sweep/10")
    job = written("sweep/9")
    (tmp_path / "sweep" / "table.csv").write_text("job\n")
    message = diff(tmp_path / "sweep", job, status=2)
    assert "holds 2 runs; expected a run directory" in message
    assert f"Did you mean {job}?" in message
    assert f"Did you mean {tmp_path / 'sweep'}?" in diff(job, tmp_path / "sweeep", status=2)
    assert "is no directory; expected a run directory, such as" in diff(job / "config.yaml", job, status=2)
