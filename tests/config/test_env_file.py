"""What a .env may set: EXP_*, and what a config reads by oc.env; every other line is a fault that names it."""

import os
from pathlib import Path

import pytest

import exp
from exp.check.__main__ import main as check
from exp.config import env_file
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
    "LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "GIT_CONFIG_COUNT", "GIT_DIR", "PYTHONPATH",
    "PYTHONSTARTUP", "PATH", "BASH_ENV", "ENV", "IFS", "HOME", "TMPDIR", "CXX", "CC", "LDFLAGS", "NCCL_NET_PLUGIN",
    "GLOO_SOCKET_IFNAME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "RANK", "MASTER_ADDR", "WORLD_SIZE", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "https_proxy",
    "SSL_CERT_FILE", "HYDRA_FULL_ERROR", "GCONV_PATH", "NODE_OPTIONS", "XDG_CONFIG_HOME", "EXP_PARENT",
    "EXP_EXCHANGE", "EXP_STORE", "EXP_SUPERVISED", "WANDB_BASE_URL", "SHELL", "EDITOR", "PERL5OPT", "RUBYOPT",
    "JAVA_TOOL_OPTIONS", "SSLKEYLOGFILE", "MPI_ROOT",
]  # fmt: skip


@pytest.mark.parametrize("name", STEERS)
def test_what_steers_processes_is_refused_even_where_a_config_reads_it(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    (found,) = faults(f"# mine\n\nEXP_FIRST=1\n{name}=./evil\n", f"tags=['${{oc.env:{name}}}']")
    assert found.key == name
    assert found.source == ".env, line 4"
    assert "steers processes" in found.got
    assert name not in os.environ
    assert "EXP_FIRST" not in os.environ, "a file with a fault sets nothing"


def test_a_name_of_ones_own_does_not_steer():
    for name in (
        "EXP_DATA_DIR",
        "EXP_FREE",
        "MY_DATA",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DATASETS",
    ):
        assert not STEERING.fullmatch(name), name


def test_what_a_config_reads_may_be_set_wherever_the_config_stands():
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/e.yaml").write_text('# @package _global_\ntags: ["${oc.env:FROM_FILE}"]\n')
    Path("more/model").mkdir(parents=True)
    Path("more/model/m.yaml").write_text("_target_: torch.nn.Identity\n# ${oc.env:FROM_DIR,x}\n")
    Path(".env").write_text("FROM_FILE=a\nFROM_DIR=b\nFROM_LINE=c\nEXP_MY_OPTS=d\n")
    config = exp.compose(["experiment=e", "name=${oc.env:FROM_LINE}"], config_dir="more")
    assert (config.tags[0], config.name) == ("a", "c")
    assert os.environ["FROM_DIR"] == "b"


def test_what_no_config_reads_is_a_fault_with_its_line():
    found = faults("EXP_A=1\nMINE=2\n\n\nOTHER=3\n")
    assert [(fault.key, fault.source) for fault in found] == [("MINE", ".env, line 2"), ("OTHER", ".env, line 5")]
    assert "${oc.env:MINE}" in found[0].cure


def test_the_command_says_it_and_ends_with_2(capsys):
    Path(".env").write_text("LD_PRELOAD=./evil.so\n")
    assert check([]) == 2
    said = capsys.readouterr().err
    assert "LD_PRELOAD" in said
    assert "[.env, line 1]" in said


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"EXP_A=1\nEXP_B=\xe9\n", 2, "not UTF-8"),
        ("EXP_A=1\n".encode("utf-16"), 1, "not UTF-8"),
        (b"EXP_A=1\nEXP_B\n", 2, "EXP_B"),
        (b"EXP_A=1\n= 3\n", 2, "= 3"),
        (b"EXP_A 2=1\n", 1, "EXP_A 2=1"),
        (b"EXP_A='x\n", 1, "EXP_A='x"),
        (b"EXP_A=a\0b\n", 1, "not a variable's name and text"),
        (b"EXP_\xc3\xa4=1\n", 1, "not a variable's name and text"),
        (b"EXP_A=${MY_SECRET}\n", 1, "does not say so"),
        (b"EXP_A=1\n" * 20_000, None, "at most"),
    ],
)
def test_a_file_that_cannot_be_read_so_is_a_fault_with_its_line(content, line, words):
    found = faults(content)[0]
    assert found.source == (".env" if line is None else f".env, line {line}")
    assert words in str(found)


def test_a_byte_order_mark_and_line_ends_of_another_system_are_right():
    Path(".env").write_bytes(b"\xef\xbb\xbfEXP_A=1\r\nexport EXP_B='two words'  # c\r\nEXP_API_KEY=${MY_TOKEN}x\r\n")
    exp.compose([])
    assert (os.environ["EXP_A"], os.environ["EXP_B"], os.environ["EXP_API_KEY"]) == ("1", "two words", "x")


def test_a_folder_or_pipe_called_env_is_not_read():
    os.mkfifo(".env")
    exp.compose([])


def test_names_read_are_found_by_text(tmp_path):
    (tmp_path / "a.yaml").write_text("a: ${oc.env:ONE}\nb: \"${oc.env:'TWO',x}\"\nc: ${oc.decode:${oc.env: THREE}}\n")
    assert names_read([tmp_path], ["x=${oc.env:FOUR}"]) == {"ONE", "TWO", "THREE", "FOUR"}


def test_the_jobs_of_a_sweep_read_it_once(monkeypatch):
    read = []
    kept = env_file.read_env_file
    monkeypatch.setattr(env_file, "read_env_file", lambda *given, **named: (read.append(1), kept(*given, **named))[1])
    Path(".env").write_text("MINE=2\n")
    for seed in range(3):
        config = exp.compose([f"seed={seed}", "name=${oc.env:MINE}"])
    assert config.name == "2"
    assert read == [1]
