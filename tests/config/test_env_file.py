"""A .env file sets EXP_* and variables that a config reads by oc.env; every other line is an error."""

import os
from pathlib import Path

import pytest

import exp
from exp.cli.check import main as check
from exp.config.env_file import STEERING, names_read
from exp.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    added = set(os.environ) - set(before)
    for name in added:
        del os.environ[name]


def faults(content, *overrides):
    Path(".env").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as raised:
        exp.compose(list(overrides))
    return raised.value.faults


STEERS = [
    "LD_PRELOAD", "GIT_DIR", "PYTHONPATH", "PATH", "HOME", "LDFLAGS", "OMP_NUM_THREADS", "https_proxy", "EXP_PARENT",
    "WANDB_BASE_URL", "JAVA_TOOL_OPTIONS",
]  # fmt: skip


@pytest.mark.parametrize("name", STEERS)
def test_a_variable_that_steers_processes_is_refused(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    (found,) = faults(f"# mine\n\nEXP_FIRST=1\n{name}=./evil\n", f"tags=['${{oc.env:{name}}}']")
    assert found.key == name
    assert found.source == ".env, line 4"
    assert "steers processes" in found.got
    assert name not in os.environ
    assert "EXP_FIRST" not in os.environ, "a file with a fault sets nothing"


def test_variables_of_users_do_not_steer_processes():
    for name in ("EXP_DATA_DIR", "MY_DATA", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATASETS"):
        assert not STEERING.fullmatch(name), name


def test_variables_that_configs_read_are_set():
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/e.yaml").write_text('# @package _global_\ntags: ["${oc.env:FROM_FILE}"]\n')
    Path("more/model").mkdir(parents=True)
    Path("more/model/m.yaml").write_text("_target_: torch.nn.Identity\n# ${oc.env:FROM_DIR,x}\n")
    Path(".env").write_text("FROM_FILE=a\nFROM_DIR=b\nFROM_LINE=c\nEXP_MY_OPTS=d\n")
    config = exp.compose(["experiment=e", "name=${oc.env:FROM_LINE}"], config_dir="more")
    assert (config.tags[0], config.name) == ("a", "c")
    assert os.environ["FROM_DIR"] == "b"


def test_unread_variables_are_reported_with_their_lines(capsys):
    found = faults("EXP_A=1\nMINE=2\n\n\nOTHER=3\n")
    assert [(fault.key, fault.source) for fault in found] == [("MINE", ".env, line 2"), ("OTHER", ".env, line 5")]
    assert "${oc.env:MINE}" in found[0].cure
    assert check([]) == 2
    assert "[.env, line 2]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"EXP_A=1\nEXP_B=\xe9\n", 2, "not UTF-8"),
        (b"EXP_A=1\nEXP_B\n", 2, "EXP_B"),
        (b"EXP_A=1\n= 3\n", 2, "= 3"),
        (b"EXP_A='x\n", 1, "EXP_A='x"),
        (b"EXP_A=a\0b\n", 1, "not a variable's name and text"),
        (b"EXP_A=${MY_SECRET}\n", 1, "does not say so"),
        (b"EXP_A=1\n" * 20_000, None, "at most"),
    ],
)
def test_a_malformed_line_is_reported(content, line, words):
    found = faults(content)[0]
    assert found.source == (".env" if line is None else f".env, line {line}")
    assert words in str(found)


def test_files_of_other_systems_are_read():
    Path(".env").write_bytes(b"\xef\xbb\xbfEXP_A=1\r\nexport EXP_B='two words'  # c\r\nEXP_API_KEY=${MY_TOKEN}x\r\n")
    exp.compose([])
    assert (os.environ["EXP_A"], os.environ["EXP_B"], os.environ["EXP_API_KEY"]) == ("1", "two words", "x")


def test_a_pipe_named_env_is_not_read():
    os.mkfifo(".env")
    exp.compose([])


def test_names_read_are_found_in_text(tmp_path):
    (tmp_path / "a.yaml").write_text("a: ${oc.env:ONE}\nb: \"${oc.env:'TWO',x}\"\nc: ${oc.decode:${oc.env: THREE}}\n")
    assert names_read([tmp_path], ["x=${oc.env:FOUR}"]) == {"ONE", "TWO", "THREE", "FOUR"}


def test_a_job_restores_no_unset_variable():
    Path(".env").write_text("MINE=2\n")
    assert exp.compose(["name=${oc.env:MINE}"]).name == "2"
    del os.environ["MINE"]
    exp.compose(["seed=1", "name=${oc.env:MINE,3}"])
    assert "MINE" not in os.environ
