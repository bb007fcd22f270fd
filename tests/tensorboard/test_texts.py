"""Command and revision in the Text tab."""

from __future__ import annotations

import json

import pytest

from exp.config.frozen import read_overrides
from exp.loggers.run_logger import MAX_DIFF_CHARACTERS, fence, texts


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "overrides.yaml").write_text("- seed=0\n- name=two words\n")
    return tmp_path


def provenance(directory, git) -> None:
    values = {"working_directory": "/home/me", "versions": {"torch": "2.13"}, "git": git}
    (directory / "provenance.json").write_text(json.dumps(values))


def test_the_command_can_be_repeated(directory):
    provenance(directory, None)
    found = texts(directory, overrides=read_overrides(directory))
    assert list(found) == ["config", "command"]
    assert "python -m exp.train seed=0 'name=two words'\n" in found["command"]
    assert "in `/home/me`" in found["command"]
    assert "| torch | 2.13 |" in found["command"]
    assert found["config"] == "```yaml\nseed: 0\n\n```"


@pytest.mark.parametrize(
    ("diff", "expected"),
    [
        ("", "Revision `abc`\n\nNo changes since then."),
        ("+a\n", "Revision `abc`\n\n```diff\n+a\n\n```"),
        ("+```\n", "Revision `abc`\n\n````diff\n+```\n\n````"),
    ],
)
def test_the_revision_has_the_changes(directory, diff, expected):
    provenance(directory, {"revision": "abc", "diff": diff})
    assert texts(directory, overrides=read_overrides(directory))["git"] == expected


def test_a_long_diff_is_cut(directory):
    provenance(directory, {"revision": "abc", "diff": "+" * (2 * MAX_DIFF_CHARACTERS)})
    shown = texts(directory, overrides=read_overrides(directory))["git"]
    assert len(shown) < MAX_DIFF_CHARACTERS + 200
    assert "cut here; provenance.json has the whole diff" in shown


def test_a_fence_is_longer_than_any_in_the_text():
    assert fence("`````").splitlines() == ["``````", "`````", "``````"]
