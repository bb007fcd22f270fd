"""A secret from the environment reaches the object that uses it, and appears in no file and no output."""

import json
import os
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import exp
from exp.cli.train import main as train
from exp.config.freeze import freeze
from exp.config.frozen import read_frozen
from exp.construct import plain_config
from exp.launch.failure import failure_of
from exp.redaction import forget, is_secret, redact, reveal

CANARY = "c4n4ry-s3cr3t-value"
NAME = "MY_API_TOKEN"
KEPT = "${oc.env:MY_API_TOKEN}"

# A user's callback and logger that use the secret.
MODULE = """
import logging
from pathlib import Path
import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

class Uploads(pl.Callback):
    def __init__(self, token, address, fails="never"):
        Path("given.txt").write_text(f"{token} {address}")
        self.token, self.fails = token, fails
        if fails == "built":
            raise ValueError(f"the token {token} is not known")

    def on_train_start(self, trainer, module):
        logging.getLogger("exp.uploads").warning("connected with %s", self.token)
        if self.fails == "run":
            raise RuntimeError(f"401: {self.token} has no rights")

class Keeps(Logger):
    "Keeps the config that it gets, as wandb and mlflow do."
    def __init__(self, token):
        self.told = []
    name = property(lambda self: "keeps")
    version = property(lambda self: "0")
    def log_metrics(self, metrics, step=None): pass
    def log_hyperparams(self, params, *args, **kwargs):
        with open("told.txt", "a") as file:
            file.write(repr(params))
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(NAME, CANARY)
    name = f"uploads_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "uploads.yaml").write_text(
        f"uploads: {{_target_: {name}.Uploads, token: '{KEPT}', address: 'https://${{name}}:{KEPT}@host'}}\n"
    )
    (tmp_path / "conf" / "logger").mkdir()
    (tmp_path / "conf" / "logger" / "keeps.yaml").write_text(f"keeps: {{_target_: {name}.Keeps, token: '{KEPT}'}}\n")
    yield tmp_path
    forget()


SMALL = (
    "data=wine", "model=mlp", "trainer.max_epochs=1", "trainer.enable_progress_bar=false", "+callbacks=uploads",
    "logger=[tensorboard,keeps]", "hydra.run.dir=outputs/run", f"tags=['{KEPT}']", "print_config=true",
)  # fmt: skip


def places_of(text: str, root: Path) -> list[str]:
    """Return the files with a text in their content or name, except given.txt, which the callback writes."""
    found = []
    for path in root.rglob("*"):
        is_own = path.name == "given.txt"
        if text in path.name or (path.is_file() and not is_own and text.encode() in path.read_bytes()):
            found.append(str(path.relative_to(root)))
    return found


def test_a_run_with_a_secret_writes_it_nowhere(place, capfd):
    assert train(list(SMALL)) == 0
    assert (place / "given.txt").read_text() == f"{CANARY} https://train:{CANARY}@host"
    screen = capfd.readouterr()
    run = place / "outputs" / "run"
    written = {
        "config.yaml", "overrides.yaml", "provenance.json", "report.json", "report.md", "train.log",
    }  # fmt: skip
    assert written <= {path.name for path in run.iterdir()}
    assert places_of(CANARY, place) == []
    assert CANARY not in screen.out + screen.err
    assert read_frozen(run).callbacks.uploads.token == KEPT
    # The files contain the interpolation instead of the secret.
    assert KEPT in (run / "config.yaml").read_text()
    assert f"https://train:{KEPT}@host" in (run / "config.yaml").read_text()
    assert "connected with ${oc.env:MY_API_TOKEN}" in (run / "train.log").read_text()
    assert KEPT in (place / "told.txt").read_text()
    assert KEPT in screen.out


def test_a_failing_run_names_the_secret(place, capfd):
    assert train([*SMALL, "callbacks.uploads.fails=run"]) == 1
    run = place / "outputs" / "run"
    screen = capfd.readouterr()
    assert CANARY not in screen.out + screen.err
    assert f"RuntimeError: 401: {KEPT} has no rights" in screen.err
    assert "in on_train_start, failed" in screen.err
    assert places_of(CANARY, place) == []
    assert f"401: {KEPT} has no rights" in json.loads((run / "report.json").read_text())["error"]["message"]
    assert "has no rights" in (run / "report.md").read_text()


def test_a_failing_constructor_prints_no_secret(place, capfd):
    assert train([*SMALL, "callbacks.uploads.fails=built"]) == 2
    screen = capfd.readouterr()
    assert f"the token {KEPT} is not known" in screen.err
    assert CANARY not in screen.out + screen.err
    assert places_of(CANARY, place) == []


@pytest.mark.parametrize("flags", [("--cfg", "job", "--resolve"), ("--cfg", "all", "--resolve")])
def test_a_printed_config_shows_the_interpolation(flags, capfd):
    assert train([*flags, *SMALL]) == 0
    screen = capfd.readouterr()
    assert CANARY not in screen.out + screen.err
    assert KEPT in screen.out


def test_a_secret_in_a_folder_name_is_refused(capfd, place):
    for word in (f"name='{KEPT}'", f"name='a_{KEPT}_b'", f"hydra.run.dir='outputs/{KEPT}'", "name='${data_dir}'"):
        assert train([word, f"data_dir='{KEPT}'"]) == 2
        screen = capfd.readouterr().err
        assert "in the path of a directory" in screen
        assert CANARY not in screen
    assert train(["-m", "seed=0,1", f"hydra.sweep.subdir='{KEPT}'"]) == 2
    assert CANARY not in capfd.readouterr().err
    assert not (place / "outputs").exists()


@pytest.mark.parametrize("override", ["model='{}'", "trainer.max_epochs='{}'", "resume='{}'", "'{}'"])
def test_an_error_at_a_secret_shows_its_name(override, capfd):
    assert train([override.format(KEPT)]) == 2
    assert CANARY not in capfd.readouterr().err


def test_a_rank_reads_its_own_environment(place, monkeypatch):
    plain = plain_config(exp.compose(SMALL))
    token = plain["callbacks"]["uploads"]["token"]
    assert token == KEPT
    monkeypatch.setenv(NAME, "4n0ther-s3cr3t")
    assert reveal(token) == "4n0ther-s3cr3t"
    monkeypatch.delenv(NAME)
    with pytest.raises(LookupError, match="MY_API_TOKEN is not set"):
        reveal(KEPT)


def test_the_name_of_a_variable_tells_a_secret():
    for name in ("HF_TOKEN", "apiKey", "AWS_SECRET_ACCESS_KEY", "DB-PASSWORD", "passwd", "GCP_CREDENTIALS",
                 "ApiTokenV2", "WANDB_API_KEY", "APIKEY"):  # fmt: skip
        assert is_secret(name), name
    for name in ("EXP_DATA_DIR", "TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME", "USER", "SECRETARY"):
        assert not is_secret(name), name
    config = OmegaConf.create(
        {"a": "${oc.env:NOT_SET_TOKEN,7}", "b": "${oc.env:NOT_SET_TOKEN,null}", "c": "${oc.env:HOME}"}
    )
    assert plain_config(config) == {"a": "7", "b": None, "c": os.environ["HOME"]}


def test_short_values_and_other_configs_are_not_redacted(monkeypatch):
    assert OmegaConf.create({"a": KEPT}).a == CANARY
    monkeypatch.setenv(NAME, "lr")
    assert reveal(KEPT) == "lr"
    assert redact("optimizer.lr") == "optimizer.lr"


@pytest.mark.slow
def test_a_sweep_with_a_secret_writes_it_nowhere(place, capfd):
    command = [word for word in SMALL if not word.startswith("hydra.run.dir")]
    assert train(["-m", *command, f"callbacks.uploads.address='{KEPT}','x'"]) == 0
    screen = capfd.readouterr()
    assert places_of(CANARY, place) == []
    assert CANARY not in screen.out + screen.err
    assert KEPT in next(place.rglob("table.csv")).read_text()


def test_the_error_of_a_rank_holds_no_secret():
    reveal(KEPT)
    failure = failure_of(RuntimeError(f"401: {CANARY}"), rank=1)
    assert CANARY not in repr(failure)
    assert KEPT in failure.reason


@pytest.mark.parametrize("command", ["tags=[{}]", "-m tags=[{}],[b]", "{}=1", "[{}"])
def test_a_secret_expanded_by_the_shell_is_refused(command, place, capfd):
    assert train(command.format(CANARY).split()) == 2
    told = capfd.readouterr().err
    assert f"the value of {NAME}" in told
    assert CANARY not in told
    assert not (place / "outputs").exists()


def test_provenance_redacts_the_command(place, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", f"--token={CANARY}"])
    directory = freeze(exp.compose(list(SMALL)))
    written = (directory / "provenance.json").read_text()
    assert CANARY not in written
    assert f"--token={KEPT}" in written
