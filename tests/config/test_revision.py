"""Revision and diff of the working directory equal git's, and no program that its .git names is run."""

import os
import subprocess

import pytest

from exp.config.revision import revision

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(*arguments, **options):
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, **options).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with one commit and one changed file."""
    folder = tmp_path / "received"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q")
    (folder / "a.txt").write_text("one\n")
    (folder / "b.txt").write_text("same\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "c.txt").write_text("c\n")
    git("add", ".")
    git(*IDENTITY, "commit", "-qm", "one")
    (folder / "a.txt").write_text("two\n")
    return folder


def program(tmp_path, name="evil"):
    """Write a program that creates a file, and return both paths."""
    canary = tmp_path / f"{name}.ran"
    script = tmp_path / f"{name}.sh"
    script.write_text(f"#!/bin/sh\ntouch {canary}\n")
    script.chmod(0o755)
    return script, canary


def arm(folder, script):
    """Write a program into all settings of a .git that can run one."""
    for key in (
        "core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "core.gitProxy", "core.askPass",
        "core.alternateRefsCommand", "diff.external", "diff.evil.textconv", "diff.evil.command", "credential.helper",
        "filter.evil.clean", "filter.evil.smudge", "gpg.program", "pager.rev-parse", "pager.ls-tree", "pager.ls-files",
        "pager.cat-file", "sequence.editor", "uploadpack.packObjectsHook", "remote.origin.uploadpack",
    ):  # fmt: skip
        git("config", key, str(script))
    git("config", "filter.odd=name.process", str(script))
    git("config", "filter.evil.required", "true")
    for name in ("rev-parse", "ls-tree", "ls-files", "cat-file", "diff"):
        git("config", f"alias.{name}", f"!{script}")
    hooks = folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "pre-auto-gc", "reference-transaction", "post-checkout", "fsmonitor-watchman"):
        (hooks / name).write_text(script.read_text())
        (hooks / name).chmod(0o755)
    git("config", "core.hooksPath", str(hooks))
    (folder / ".git" / "more").write_text(f"[core]\n\tfsmonitor = {script}\n")
    git("config", "include.path", "more")
    git("config", "includeIf.gitdir:/.path", "more")
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / "attributes").write_text("* filter=evil diff=evil\n")
    (folder / ".gitattributes").write_text("*.txt filter=odd=name diff=evil\n")


def test_a_received_git_folder_runs_nothing(repository, tmp_path):
    script, canary = program(tmp_path)
    arm(repository, script)
    subprocess.run(["git", "diff", "HEAD"], capture_output=True, check=False, timeout=10)
    assert canary.exists(), "the trap does not work, so the test shows nothing"
    canary.unlink()
    found = revision()
    assert not canary.exists()
    assert "-one\n+two\n" in found["diff"]


def test_a_submodule_of_a_received_folder_runs_nothing(repository, tmp_path):
    script, canary = program(tmp_path)
    git("init", "-q", "inner")
    (repository / "inner" / "x").write_text("x")
    git("add", "x", cwd="inner")
    git(*IDENTITY, "commit", "-qm", "x", cwd="inner")
    git("-c", "advice.addEmbeddedRepo=false", "add", "inner")
    git(*IDENTITY, "commit", "-qm", "inner", "inner")
    git("config", "core.fsmonitor", str(script), cwd="inner")
    found = revision()
    assert not canary.exists()
    assert "inner" not in found["diff"]


def test_a_partial_clone_fetches_nothing(repository, tmp_path):
    script, canary = program(tmp_path)
    name = git("rev-parse", "HEAD:a.txt").strip()
    (repository / ".git" / "objects" / name[:2] / name[2:]).unlink()
    for key, value in {
        "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{script}", "protocol.ext.allow": "always", "protocol.allow": "always",
        "remote.origin.uploadpack": str(script),
    }.items():  # fmt: skip
        git("config", key, value)
    subprocess.run(["git", "cat-file", "-p", name], capture_output=True, check=False, timeout=10)
    assert canary.exists(), "the trap does not work, so the test shows nothing"
    canary.unlink()
    found = revision()
    assert not canary.exists()
    assert found["revision"] == git("rev-parse", "HEAD").strip()


def test_variables_of_git_are_ignored(repository, tmp_path, monkeypatch):
    script, canary = program(tmp_path)
    head = git("rev-parse", "HEAD").strip()
    for name, value in {
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": str(script),
        "GIT_EXTERNAL_DIFF": str(script), "GIT_PAGER": str(script), "GIT_DIR": "/nowhere", "GIT_SSH": str(script),
        "GIT_INDEX_FILE": "/nowhere/index", "GIT_TRACE": str(tmp_path / "trace"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert revision()["revision"] == head
    assert not canary.exists()
    assert not (tmp_path / "trace").exists()


def test_files_outside_the_folder_are_not_shown(repository, tmp_path):
    (tmp_path / "private").write_text("private text\n")
    (repository / "b.txt").unlink()
    (repository / "b.txt").symlink_to(tmp_path / "private")
    (repository / "sub" / "c.txt").unlink()
    (repository / "sub").rmdir()
    (tmp_path / "c.txt").write_text("private text\n")
    (repository / "sub").symlink_to(tmp_path)
    assert "private text" not in revision()["diff"]
    git("config", "core.worktree", str(tmp_path))
    assert "files of this repository are in another directory" in revision()["diff"]


def test_a_repository_that_blocks_git_takes_bounded_time(repository):
    (repository / ".git" / "index").unlink()
    os.mkfifo(repository / ".git" / "index")
    assert "more than 0.5 s" in revision(seconds=0.5)["diff"]


def test_the_diff_is_that_of_git(repository):
    (repository / "b.txt").write_bytes("same\nü\u2028\x0b\nno newline".encode())
    (repository / "sub" / "c.txt").unlink()
    (repository / "new.txt").write_text("1\n2\n")
    (repository / "unknown.txt").write_text("not told\n")
    git("add", "new.txt")
    assert revision()["diff"] == git("diff", "HEAD")


def test_binary_and_large_files_are_named_only(repository):
    (repository / "a.txt").write_bytes(b"\0" * 50)
    (repository / "b.txt").write_text("x" * 1_000_001)
    found = revision()["diff"]
    assert found.count("Binary files ") == 2
    assert "xxx" not in found
