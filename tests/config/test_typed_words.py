"""Values of Hydra and Lightning that exp accepts: directories on other disks, a mode, gpu, numbers."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import exp
from exp.check.examination import plan
from exp.check.plan import read_resolved
from exp.check.resolution import resolve
from exp.cli.check import main as check
from exp.config.compose import composition_of
from exp.config.freeze import freeze
from exp.config.frozen import COMPOSITION


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working directory `work`, and a folder `disk` next to it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "disk"))
    return tmp_path


def errors(*overrides, multirun=False):
    try:
        composition_of(overrides, multirun=multirun)
    except exp.ConfigError as error:
        return {error.key: error for error in error.errors}
    return {}


@pytest.mark.parametrize("typed", [
    "{place}/disk/run", "../disk/run", "'{place}/disk/${{name}}'", "${{oc.env:SCRATCH}}/${{name}}/${{seed}}",
])  # fmt: skip
def test_results_go_where_the_command_line_says(place, typed):
    config = exp.compose([f"hydra.run.dir={typed.format(place=place)}"])
    assert Path(config[COMPOSITION].directory).is_relative_to(place / "disk")
    assert freeze(plan(resolve(config)).resolved.config).is_relative_to(place / "disk")
    assert not errors(f"hydra.sweep.dir={typed.format(place=place)}", "seed=1,2", multirun=True)


@pytest.mark.parametrize("typed", [
    ".", "..", "/", "''", "${{data_dir}}", "outputs/../..", "'{place}/disk/${{data_dir}}'",
    "'../disk/${{oc.env:NOT_SET,../../x}}'",
])  # fmt: skip
def test_results_go_to_no_place_that_a_file_leads_them_to_nor_into_the_place_itself(place, typed):
    Path("conf/local").mkdir(parents=True)
    Path("conf/local/default.yaml").write_text(f"# @package _global_\ndata_dir: ../../{'../' * 9}etc\n")
    assert "hydra.run.dir" in errors(f"hydra.run.dir={typed.format(place=place)}")


def test_a_file_and_a_recorded_command_lead_results_nowhere_else(place):
    run = freeze(plan(resolve(exp.compose([]))).resolved.config)
    # An attacker could write this into a run directory.
    (run / "overrides.yaml").write_text(f"- hydra.run.dir={place}/disk/x\n- hydra/launcher=slurm\n")
    config = exp.compose([f"from_run={run}"])
    assert Path(config[COMPOSITION].directory).is_relative_to(place / "work")
    Path("conf/local").mkdir(parents=True)
    Path("conf/local/default.yaml").write_text("# @package _global_\nhydra: {run: {dir: ../disk/x}}\n")
    assert errors()["hydra.run.dir"].fix.startswith("Write hydra.run.dir=../disk/x on the command line")
    assert not errors("hydra.run.dir=../disk/x")


def test_the_mode_of_a_file_is_an_error(capsys):
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/search.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    assert check(["experiment=search", "model=mlp"]) == 2
    assert "hydra.mode: " in (text := capsys.readouterr().err)
    assert "-m" in text


def test_overfitting_keeps_the_batches_unless_somebody_shuffles_them():
    def shuffled(*overrides):
        data = resolve(exp.compose(list(overrides))).plain["data"]
        return data.get("shuffle", "as the class has it")

    assert shuffled() == "as the class has it"
    assert shuffled("trainer.overfit_batches=3") is False
    assert shuffled("trainer.overfit_batches=0.1", "data.shuffle=true") is True
    directory = freeze(plan(resolve(exp.compose(["trainer.overfit_batches=3"]))).resolved.config)
    assert read_resolved(directory).plain["data"]["shuffle"] is False


@pytest.mark.parametrize(("typed", "key", "value"), [
    ("trainer.max_epochs=1e2", "trainer.max_epochs", 100), ("data.batch_size=1_000", "data.batch_size", 1000),
    ("checkpoint.every_n_steps=1.5e3", "checkpoint.every_n_steps", 1500), ("seed=1e3", "seed", 1000),
    ("trainer.limit_train_batches=1e1", "trainer.limit_train_batches", 10), ("optimizer.lr=1e1", "optimizer.lr", 10.0),
    # For Lightning's limits, 1.0 means all batches, and 1 means one batch.
    ("trainer.limit_train_batches=1e0", "trainer.limit_train_batches", 1.0), ("optimizer.lr=.5", "optimizer.lr", 0.5),
])  # fmt: skip
def test_a_number_is_whole_where_one_stands(typed, key, value):
    found = OmegaConf.select(exp.compose([typed]), key)
    assert (found, type(found)) == (value, type(value))
