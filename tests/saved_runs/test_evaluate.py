"""exp.evaluate: the metrics of a run again, in one process and with several ranks, and metrics of other data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import exp
from exp.cli.evaluate import main
from exp.config.frozen import read_overrides
from exp.errors import ConfigError, RunError

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())["evaluate"]
SHORT = ["trainer.enable_progress_bar=false", "trainer.max_epochs=1", "hooks=[]", "logger=[]"]


def fitted(*overrides):
    return exp.fit(exp.compose([*SHORT, *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["callbacks=[ema]", "callbacks.ema.decay=0.5"],
        ["+model.layers.drop={_target_: torch.nn.Dropout}", "objective=[cross_entropy,jacobian]", "precision=bf16"],
        pytest.param(["model=lenet"], marks=pytest.mark.slow),
        pytest.param(["precision=bf16", "model=resnet", "trainer.max_steps=3"], marks=pytest.mark.slow),
        pytest.param(["data=diabetes", "data.batch_size=7"], marks=pytest.mark.slow),
        pytest.param(["experiment=gan", "trainer.max_steps=4"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_stage_gives_the_metrics_of_the_run(overrides):
    report = fitted("test=true", *overrides)
    run, own = exp.load(report.directory), report.metrics
    found = {**run.evaluate(stage="val", weights="last").metrics, **run.evaluate(stage="test").metrics}
    assert {tag for tag in own if "/val" in tag or "/test" in tag} == set(found)
    assert found == {tag: own[tag] for tag in found}


@pytest.mark.any_processor
@pytest.mark.numeric
@pytest.mark.parametrize(
    # With batches of 64, the last of 270 samples are a batch of 14. With batches of 67, they are 2, fewer than 3 ranks.
    ("count", "batch"),
    [(2, 64), pytest.param(3, 67, marks=pytest.mark.slow)],
)
def test_ranks_give_the_metrics_of_one_process(count, batch, trained, commands):
    run = trained("precision=fp64")
    ranks = ["strategy=ddp", "launch.accelerator=cpu", f"launch.devices={count}", f"data.batch_size={batch}"]
    ended = commands.run(f"run={run.directory}", "stage=test", *ranks, module="exp.evaluate")
    assert ended.returncode == 0, ended.stderr
    place = next(line.split()[1] for line in ended.stdout.splitlines() if line.startswith("results"))
    found = json.loads((Path(place) / "report.json").read_text())
    assert found["world_size"] == count
    inputs, targets = run.data.part("test").gather(torch.arange(270))
    with torch.no_grad():
        outputs = run.network()(inputs.double())
    loss = nn.functional.cross_entropy(outputs, targets).item()
    assert found["metrics"]["loss/test"] == pytest.approx(loss, rel=1e-13)
    assert found["metrics"]["accuracy/test"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())


def test_the_command_leaves_a_run_directory_of_its_own(capsys, monkeypatch, tmp_path):
    report = fitted("hydra.run.dir=outputs/train/2026-01-31/12-00-00", "security.allow=[colorsys]")
    before = sorted(Path(report.directory).rglob("*"))
    command = [f"run={report.directory}", "stage=val", "weights=last"]
    assert main(command) == 2
    assert "add 'security.allow=[colorsys]' to the command" in capsys.readouterr().err
    # The user's conf is not in this directory.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([*command, "security.allow=[colorsys]"]) == 0
    assert f"{report.metrics['accuracy/val']:.4f}" in capsys.readouterr().out
    assert sorted(Path(report.directory).rglob("*")) == before
    (found,) = tmp_path.glob("**/train/evaluations/*/*")
    assert "train=false" in (found / "overrides.yaml").read_text()
    # resume=auto finds the trained run, not the evaluation.
    monkeypatch.chdir(tmp_path)
    assert fitted("resume=auto", "trainer.max_epochs=2", "security.allow=[colorsys]").epochs == 2


def test_other_data_batches_and_metrics(trained, pets, write_csv):
    first, second = ({name: pets(60, seed=seed)[name] for name in ("height", "weight", "kind")} for seed in (0, 1))
    write_csv("first.csv", first)
    write_csv("second.csv", second)
    run = trained("data=csv", "data.dataset.path=first.csv", "data.dataset.target=kind")
    other = ["data.dataset.path=second.csv", "data.parts={test: 1.0}", "metrics=[accuracy,f1]", "data.batch_size=7"]
    found = run.evaluate(stage="all", overrides=[*other, "hydra.run.dir=outputs/mine"])
    assert found.directory == str(Path("outputs/mine").absolute())
    assert Path("outputs/mine/report.json").is_file()
    # The values are standardized with the statistics of the first file's training split.
    fit = torch.load(run.path_of(None), weights_only=True)["RunData"]["table"]
    values = torch.from_numpy(np.stack([second["height"], second["weight"]], 1))
    inputs = ((values - fit["means"]) / fit["deviations"]).float()
    targets = torch.tensor([("ant", "bee", "cow").index(kind) for kind in second["kind"]])
    with torch.no_grad():
        outputs = run.network()(inputs)
    loss = nn.functional.cross_entropy(outputs, targets).item()
    assert found.metrics["accuracy/test"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())
    assert found.metrics["loss/test"] == pytest.approx(loss, rel=1e-5)
    assert "f1/test" in found.metrics


def test_a_module_of_the_user_is_evaluated():
    report = fitted("module={_target_: exported.OwnModule}", "monitor=val/loss", "data.batch_size=50")
    run = exp.load(report.directory)
    assert run.evaluate(stage="val", weights="last").metrics["val/loss"] == report.metrics["val/loss"]
    inputs, _ = run.data.part("test").gather(torch.arange(9))
    with torch.no_grad():
        expected = run.network()(inputs)
    assert np.array_equal(run.predict(inputs).outputs["output"], expected.numpy())


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_wrong_command_is_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_overrides_that_an_evaluation_sets_itself_are_refused(digits):
    for override in ("train=true", "resume=x", "monitor=x", "weights.from=x", "sweep.jobs=2", "predict=true"):
        key = override.partition("=")[0].partition(".")[0]
        with pytest.raises(ConfigError, match=f"{key}: .*expected another key"):
            digits.evaluate(overrides=[override])
    with pytest.raises(ConfigError, match=r"Did you mean data\.batch_size"):
        digits.evaluate(overrides=["data.batch_sise=3"])
    for stage in ("vla", "train", "", None):
        with pytest.raises(ConfigError, match=r"stage: .*; expected test or val or all"):
            digits.evaluate(stage=stage)


def test_a_directory_with_a_quote_in_its_name():
    report = fitted("test=true", """hydra.run.dir='outputs/it\\'s a run'""")
    found = exp.load(report.directory).evaluate(overrides=["data.batch_size=7"])
    assert found.metrics["accuracy/test"] == report.metrics["accuracy/test"]
    again = exp.fit(exp.compose([*SHORT, *read_overrides(found.directory)]))
    assert again.metrics == found.metrics


def test_a_missing_split_is_an_error(trained):
    run = trained("data.parts.test=0", "data.parts.val=0", "monitor=loss/train")
    for stage, name in (("test", "test"), ("val", "validation")):
        with pytest.raises(RunError, match=rf"(has no|needs a) {name} split"):
            run.evaluate(stage=stage)


def test_stages_that_contradict_train_are_refused():
    for overrides, message in {
        ("train=false", "test=false"): "false, and so are test, validate, predict",
        ("validate=true",): "validate: true with train=true",
        ("predict=true",): r"predict: true with train=true.*exp\.predict run=DIR",
    }.items():
        with pytest.raises(ConfigError, match=message):
            exp.fit(exp.compose(overrides))
