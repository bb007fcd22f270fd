"""exp.compose, exp.validate and exp.fit do the same in Python as the command line."""

import json

import pytest

import exp

QUIET = "trainer.enable_progress_bar=false"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["module_list", "module_dict", "parameter_list", "parameter_dict", "sequential"])
def test_every_container_learns_the_digits(model):
    report = exp.fit(exp.compose([f"model={model}", QUIET, "monitor=accuracy/val", "mode=max"]))
    assert report.best["value"] >= 0.95
    assert report.metrics["accuracy/test"] >= 0.94


def test_two_runs_of_a_config_learn_the_same():
    config = exp.compose(["trainer.max_epochs=2", "test=false", "trainer.enable_progress_bar=false"])
    exp.validate(config)
    first, second = exp.fit(config), exp.fit(config)
    assert first.directory != second.directory
    for tag in ("loss/train", "loss/val", "accuracy/val", "gradients/norm/total"):
        assert first.metrics[tag] == second.metrics[tag]
    assert first.monitored == first.best["value"]
    with open(f"{first.directory}/report.json") as file:
        assert json.load(file)["metrics"] == dict(first.metrics)


def test_validate_reports_all_errors_together():
    config = exp.compose(["data.batch_size=0", "optimizer.lr=fast"])
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(config)
    assert {error.key for error in caught.value.errors} >= {"data.batch_size", "optimizer.lr"}


def test_fit_checks_before_it_writes(tmp_path):
    with pytest.raises(exp.ConfigError):
        exp.fit(exp.compose(["data.batch_size=0"]))
    assert list(tmp_path.iterdir()) == []


def test_a_composed_config_can_be_changed_in_python():
    config = exp.compose(["trainer.enable_progress_bar=false", "test=false"])
    config.trainer.max_epochs = 1
    config.optimizer.lr = 0.01
    assert exp.fit(config).steps == 20


def test_a_model_learns_a_table():
    assert exp.fit(exp.compose(["data=wine", "trainer.max_epochs=10", QUIET])).metrics["accuracy/test"] >= 0.9
