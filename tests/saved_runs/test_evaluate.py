"""exp.evaluate: the run's own figures again, in one process and over ranks, and figures of other data."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import exp
from exp.config.freeze import read_overrides
from exp.errors import ConfigError, RunError

SHORT = ["trainer.enable_progress_bar=false", "trainer.max_epochs=2"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(*overrides):
    return exp.fit(exp.compose([*SHORT, *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=lenet"],
        ["precision=bf16", "model=resnet", "trainer.max_steps=3"],
        ["data=diabetes", "data.batch_size=7"],
        ["callbacks=[ema]", "callbacks.ema.decay=0.5"],
        ["experiment=gan", "trainer.max_steps=4"],
        ["+model.layers.drop={_target_: torch.nn.Dropout}", "objective=[cross_entropy,jacobian]"],
    ],
    ids=" ".join,
)
def test_each_stage_gives_the_runs_own_figures_to_the_last_bit(overrides):
    report = trained("test=true", *overrides)
    run, own = exp.load(report.directory), report.metrics
    found = {**run.evaluate(stage="val", weights="last").metrics, **run.evaluate(stage="test").metrics}
    assert {tag for tag in own if "/val" in tag or "/test" in tag} == set(found)
    assert found == {tag: own[tag] for tag in found}


@pytest.mark.any_processor
@pytest.mark.numeric
def test_two_ranks_on_uneven_lengths_are_one_process_and_torch_by_hand(commands):
    # 270 samples in batches of 64 leave 14, and of 67 two: less than one for each of three ranks would be the next.
    report = trained("precision=fp64", "test=false", "data.batch_size=67")
    for ranks, batch in ((2, 64), (3, 67)):
        overrides = ["strategy=ddp", "launch.accelerator=cpu", f"launch.devices={ranks}", f"data.batch_size={batch}"]
        ended = commands.run(f"run={report.directory}", "stage=test", *overrides, module="exp.evaluate")
        assert ended.returncode == 0, ended.stderr
        place = next(line.split()[1] for line in ended.stdout.splitlines() if line.startswith("results"))
        found = json.loads((Path(place) / "report.json").read_text())
        assert found["world_size"] == ranks
        run = exp.load(report.directory)
        part = run.data.part("test")
        inputs, targets = part.gather(torch.arange(len(part)))
        with torch.no_grad():
            outputs = run.network()(inputs.double())
        loss = nn.functional.cross_entropy(outputs, targets).item()
        assert found["metrics"]["loss/test"] == pytest.approx(loss, rel=1e-13)
        assert found["metrics"]["accuracy/test"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())
        shutil.rmtree(place)


def test_the_command_prints_and_leaves_a_run_of_its_own(capsys):
    from exp.evaluate import main

    report = trained("hydra.run.dir=outputs/train/2026-01-31/12-00-00")
    before = sorted(Path(report.directory).rglob("*"))
    assert main([f"run={report.directory}", "stage=val", "weights=last"]) == 0
    assert f"{report.metrics['accuracy/val']:.4f}" in capsys.readouterr().out
    assert sorted(Path(report.directory).rglob("*")) == before
    (found,) = Path("outputs/train/evaluations").glob("*/*")
    overrides = (found / "overrides.yaml").read_text()
    assert "train=false" in overrides
    # What resume=auto looks for are trained runs.
    assert exp.fit(exp.compose([*SHORT, "resume=auto", "trainer.max_epochs=3"])).epochs == 3


def test_other_data_batches_and_metrics():
    report = trained("data=csv", *table("first.csv", seed=0))
    table("second.csv", seed=1)
    run = exp.load(report.directory)
    found = run.evaluate(
        stage="all",
        overrides=[
            "data.dataset.path=second.csv",
            "data.parts={test: 1.0}",
            "metrics=[accuracy,f1]",
            "data.batch_size=7",
        ],
    ).metrics
    # By hand: standardised by the first file's training part.
    told = torch.load(run.path_of(None), weights_only=True)["RunData"]["table"]
    rows = np.genfromtxt("second.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    values = torch.from_numpy(np.stack([rows["a"], rows["b"]], 1))
    inputs = ((values - told["means"]) / told["deviations"]).float()
    targets = torch.tensor([["cat", "dog"].index(kind) for kind in rows["kind"]])
    with torch.no_grad():
        outputs = run.network()(inputs)
    assert found["accuracy/test"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())
    assert found["loss/test"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)
    assert "f1/test" in found


def table(name, *, seed):
    draws = np.random.default_rng(seed)
    kinds = draws.integers(0, 2, 60)
    rows = [f"{draws.normal(5 * kind, 3)},{draws.normal()},{('cat', 'dog')[kind]}" for kind in kinds]
    Path(name).write_text("\n".join(["a,b,kind", *rows]) + "\n")
    return [f"data.dataset.path={name}", "data.dataset.target=kind"]


def test_a_module_of_the_users_own(monkeypatch):
    shutil.copy(Path(__file__).parents[1] / "run" / "lit.py", "lit.py")
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "lit", raising=False)
    Path("conf/model").mkdir(parents=True)
    parts = "net: {_target_: lit.SimpleNet}, optimizer: {_target_: torch.optim.Adam, _partial_: true}, scheduler: null"
    report = trained(f"module={{_target_: lit.LitClassifier, {parts}}}", "monitor=val/loss", "data.batch_size=50")
    run = exp.load(report.directory)
    found = run.evaluate(stage="val", weights="last").metrics
    assert found["val/loss"] == report.metrics["val/loss"]
    inputs, _ = run.data.part("test").gather(torch.arange(9))
    with torch.no_grad():
        expected = run.network()(inputs)
    assert np.array_equal(run.predict(inputs).outputs["output"], expected.numpy())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run: nothing; expected a run directory"),
        (["run="], "run: an empty value"),
        (["run=a", "run=b"], "and it is there twice"),
        (["rnu=a"], "Did you mean run where rnu is?"),
        (["run=a", "stage=train"], "stage: train; expected test, val, all"),
        (["run=a", "stage=tset"], "Did you mean test?"),
        (["outputs/train"], "Write run=outputs/train"),
        (["run=a", "--weights", "best"], "--weights; expected key=value"),
        (["run=a", "security.allow=mine"], "a list of packages, security.allow=[mine]"),
    ],
)
def test_a_command_that_is_wrong(arguments, message, capsys):
    from exp.evaluate import main

    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_what_an_evaluation_decides_itself():
    run = exp.load(trained("test=false").directory)
    for override in ("train=true", "resume=x", "monitor=x", "weights.from=x", "sweep.jobs=2", "predict=true"):
        key = override.lstrip("+").partition("=")[0].partition(".")[0]
        with pytest.raises(ConfigError, match=f"{key}: .*expected what it is done with"):
            run.evaluate(overrides=[override])
    with pytest.raises(ConfigError, match=r"Did you mean data\.batch_size"):
        run.evaluate(overrides=["data.batch_sise=3"])


@pytest.mark.parametrize("stage", ["vla", "TEST", "train", "", None])
def test_a_stage_that_there_is_not(stage):
    run = exp.load(trained("test=false").directory)
    with pytest.raises(ConfigError, match=r"stage: .*; expected test or val or all"):
        run.evaluate(stage=stage)


def test_a_directory_of_ones_own():
    run = exp.load(trained("test=false").directory)
    report = run.evaluate(overrides=["hydra.run.dir=outputs/mine"])
    assert report.directory == str(Path("outputs/mine").absolute())
    assert Path("outputs/mine/report.json").is_file()
    assert not Path("outputs/train/evaluations").exists()


def test_a_directory_with_a_quote_in_its_name():
    report = trained("""hydra.run.dir='outputs/it\\'s a run'""")
    run = exp.load(report.directory)
    found = run.evaluate(overrides=["data.batch_size=7"])
    assert found.metrics["accuracy/test"] == report.metrics["accuracy/test"]
    again = exp.fit(exp.compose([*SHORT, *read_overrides(found.directory)]))
    assert again.metrics == found.metrics


def test_what_a_run_trusts_is_named_again_by_the_command_and_its_config_is_enough(capsys, monkeypatch, tmp_path):
    from exp.evaluate import main

    report = trained("security.allow=[colorsys]")
    assert main([f"run={report.directory}"]) == 2
    assert "add 'security.allow=[colorsys]' to the command" in capsys.readouterr().err
    # Elsewhere, where nothing of the run's YAML is.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([f"run={report.directory}", "security.allow=[colorsys]"]) == 0
    assert f"{report.metrics['accuracy/test']:.4f}" in capsys.readouterr().out


def test_a_part_that_is_not_there():
    run = exp.load(trained("data.parts.test=0").directory)
    with pytest.raises(RunError, match="has no test part"):
        run.evaluate()
    without = exp.load(trained("data.parts.val=0", "monitor=loss/train").directory)
    with pytest.raises(RunError, match="has no val part"):
        without.evaluate(stage="val")


def test_train_false_does_what_it_is_asked_for():
    with pytest.raises(ConfigError, match="false, and so are test, validate, predict"):
        exp.fit(exp.compose(["train=false", "test=false"]))
    with pytest.raises(ConfigError, match="validate: true with train=true"):
        exp.fit(exp.compose(["validate=true"]))
    with pytest.raises(ConfigError, match=r"predict: true with train=true.*exp\.predict run=DIR"):
        exp.fit(exp.compose(["predict=true"]))
