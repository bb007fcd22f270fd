"""exp.compose, exp.validate, exp.fit: the command line's behaviour, from Python."""

import json

import pytest

import exp


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("model", ["module_list", "module_dict", "parameter_list", "parameter_dict", "sequential"])
def test_every_container_learns_the_digits(model):
    report = exp.fit(
        exp.compose([f"model={model}", "trainer.enable_progress_bar=false", "monitor=accuracy/val", "mode=max"])
    )
    assert report.best["value"] >= 0.95
    assert report.metrics["accuracy/test"] >= 0.94


def test_fit_is_what_the_command_line_does():
    config = exp.compose(["trainer.max_epochs=2", "test=false", "trainer.enable_progress_bar=false"])
    exp.validate(config)
    first, second = exp.fit(config), exp.fit(config)
    assert first.directory != second.directory
    # Measured values differ from run to run; what was learnt does not.
    for tag in ("loss/train", "loss/val", "accuracy/val", "gradients/norm/total"):
        assert first.metrics[tag] == second.metrics[tag]
    assert first.monitored == first.best["value"]
    with open(f"{first.directory}/report.json") as file:
        assert json.load(file)["metrics"] == dict(first.metrics)


def test_validate_tells_all_faults_at_once():
    config = exp.compose(["data.batch_size=0", "optimizer.lr=fast"])
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(config)
    assert {fault.key for fault in caught.value.faults} >= {"data.batch_size", "optimizer.lr"}


def test_fit_checks_first_and_makes_nothing(tmp_path):
    with pytest.raises(exp.ConfigError):
        exp.fit(exp.compose(["data.batch_size=0"]))
    assert list(tmp_path.iterdir()) == []


def test_a_tuned_config_may_be_changed_in_python():
    config = exp.compose(["trainer.enable_progress_bar=false", "test=false"])
    config.trainer.max_epochs = 1
    config.optimizer.lr = 0.01
    assert exp.fit(config).steps == 20


@pytest.mark.parametrize(
    ("data", "metric", "at_least"),
    [("wine", "accuracy/test", 0.9), ("breast_cancer", "accuracy/test", 0.9)],
)
def test_tables_are_learnt(data, metric, at_least):
    report = exp.fit(exp.compose([f"data={data}", "trainer.max_epochs=10", "trainer.enable_progress_bar=false"]))
    assert report.metrics[metric] >= at_least


def test_a_regression_beats_the_mean():
    report = exp.fit(exp.compose(["data=diabetes", "trainer.max_epochs=10", "trainer.enable_progress_bar=false"]))
    # The target is standardised: predicting the mean has an error of 1.
    assert report.metrics["loss/test"] < 0.8
