"""exp.load: the network of a run directory, of a checkpoint or of a sweep's job, loaded without running code."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp
from exp.errors import ConfigError, RunError
from exp.sweeps.jobs import Job, with_config
from exp.sweeps.stack import train

KEPT = "+callbacks.kept={_target_: kept.Kept}"
OF_EXPERIMENTS = ("gan", "domain_adversarial")
MODELS = sorted(path.stem for path in (Path(exp.__file__).parent / "conf" / "model").glob("[a-z]*.yaml"))


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype is right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def network_of(state):
    return {name.removeprefix("network."): value for name, value in state.items()}


def saved(run, word):
    return torch.load(run.directory / "checkpoints" / f"{word}.ckpt", weights_only=True)


def assert_as_trained(run):
    """Assert that the last weights equal those that the callback Kept saved at the end of training."""
    network = run.network(weights="last")
    assert same(network.state_dict(), torch.load("kept.pt", weights_only=True))
    assert not network.training
    return network


def test_a_run_is_found_from_any_directory(digits_directory, monkeypatch):
    monkeypatch.chdir(digits_directory.parent)
    run, named = exp.load(digits_directory.name), exp.load(Path(digits_directory.name) / "checkpoints" / "last.ckpt")
    monkeypatch.chdir("/")
    assert run.directory == digits_directory
    assert run.report.status == "completed"
    assert same(run.network("last").state_dict(), named.network().state_dict())


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[] if name == "lenet" else [pytest.mark.slow]) for name in MODELS]
)
def test_the_network_of_each_model_is_the_trained_one(model, text, trained):
    small = [*text, "model.constants.width=16"] if model == "gpt" else []
    choice = [f"experiment={model}"] if model in OF_EXPERIMENTS else [*small, f"model={model}"]
    assert_as_trained(trained(*choice, KEPT))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16_true", torch.bfloat16),
        pytest.param("fp64", torch.float64, marks=pytest.mark.slow),
        pytest.param("bf16", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_weights_keep_the_dtype_of_training(precision, dtype, trained):
    network = assert_as_trained(trained(f"precision={precision}", KEPT))
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}


def test_best_last_and_other_checkpoints(trained):
    run = trained("trainer.max_steps=42", "optimizer.lr=0.05")
    for word in ("best", "last"):
        path = run.directory / "checkpoints" / f"{word}.ckpt"
        expected = network_of(saved(run, word)["state_dict"])
        assert same(run.network(word).state_dict(), expected)
        assert same(exp.load(path).network().state_dict(), expected)
        assert same(run.network(path).state_dict(), expected)
    assert same(run.network().state_dict(), run.network("best").state_dict())
    with pytest.raises(RunError, match=r"first\.ckpt does not exist; expected best, last, or the path"):
        run.network("first.ckpt")
    shutil.copy(run.directory / "checkpoints" / "best.ckpt", "moved.ckpt")
    moved = exp.load("moved.ckpt")
    assert same(moved.network().state_dict(), run.network("best").state_dict())
    with pytest.raises(RunError, match=r"moved\.ckpt is not in a run directory, so that report\.json"):
        _ = moved.report


def test_averaged_weights_can_be_left_out(digits, trained):
    run = trained("callbacks=[ema]", "callbacks.ema.decay=0.5", "trainer.max_steps=5")
    state = saved(run, "last")
    for averaged, held in ((True, state["state_dict"]), (False, state["current_model_state"])):
        assert same(run.network("last", averaged=averaged).state_dict(), network_of(held))
    assert not same(run.network("last").state_dict(), run.network("last", averaged=False).state_dict())
    with pytest.raises(RunError, match="has no average of weights"):
        digits.network(averaged=False)


def test_lora_is_loaded_as_trained(trained):
    assert_as_trained(trained("lora.layers=[hidden]", "lora.rank=2", "lora.trained=[head]", KEPT))


def test_a_job_of_a_stacked_sweep_is_loaded():
    stacked = ["trainer.max_epochs=1", "hooks=[]", "trainer.enable_progress_bar=false", "sweep.stack=true"]
    jobs = []
    for seed in (0, 1):
        directory = Path(f"outputs/sweep/{seed}").absolute()
        directory.mkdir(parents=True)
        job = Job(number=seed, overrides=(*stacked, f"seed={seed}"), swept={}, packed=None)
        jobs.append(with_config(job, exp.compose([*job.overrides]), directory))
    outcomes = dict(train(jobs))
    run = exp.load("outputs/sweep/1")
    assert run.config.seed == 1
    report = run.evaluate()
    assert report.metrics["accuracy/test"] == outcomes[1].metrics["accuracy/test"]
    assert report.metrics["loss/test"] == pytest.approx(outcomes[1].metrics["loss/test"], rel=1e-6)
    with pytest.raises(RunError, match=r"sweep has no config.yaml; expected .*the directory of a job of a sweep"):
        exp.load("outputs/sweep")


def test_loading_keeps_the_random_state(digits_directory):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    run = exp.load(digits_directory)
    assert run.network() is not run.network()
    assert len(run.data.part("test")) == 270
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_config_report_data_and_history():
    short = ["trainer.enable_progress_bar=false", "trainer.max_steps=12", "hooks=[gradients]", "optimizer.lr=0.02"]
    report = exp.fit(exp.compose(short))
    run = exp.load(report.directory)
    assert run.config.optimizer.lr == 0.02
    assert run.report == replace(report, not_written=())
    assert sum(len(run.data.part(stage)) for stage in ("train", "val", "test")) == len(load_digits().target)
    events = EventAccumulator(str(Path(report.directory) / "tensorboard")).Reload()
    assert set(run.history) == set(events.Tags()["scalars"])
    for tag in ("loss/train", "loss/val", "gradients/norm/total"):
        points = events.Scalars(tag)
        assert run.history[tag].steps.tolist() == [point.step for point in points]
        assert run.history[tag].values.tolist() == [point.value for point in points]
    with pytest.raises(KeyError, match="the run did not log loss/vall"):
        run.history["loss/vall"]


def test_what_is_no_run_is_refused(digits, tmp_path):
    Path("empty").mkdir()
    Path("weights.pt").write_bytes(b"nothing")
    torch.save({"state_dict": {}}, "foreign.ckpt")
    for path, message in {
        "nowhere": "nowhere does not exist; expected a run directory",
        "empty": "empty has no config.yaml; expected a run directory",
        "weights.pt": "weights.pt",
        "foreign.ckpt": "has no config of a run",
    }.items():
        with pytest.raises(RunError, match=message):
            exp.load(path)
    with pytest.raises(RunError, match="holds no scalars: the run had no logger"):
        _ = digits.history
    copied = shutil.copytree(digits.directory, tmp_path / "copied")
    whole = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text("- a\n- b\n")
    with pytest.raises(RunError, match="was changed after exp wrote this file: the file contains no mapping"):
        exp.load(copied)
    (copied / "config.yaml").write_text(whole.replace("out_features: 128", "out_features: 64"))
    with pytest.raises(RunError, match=r"has weights of another network than its config: .*hidden2"):
        exp.load(copied).network()
    (copied / "config.yaml").write_text(whole.replace("_target_: torch.nn.Flatten", "_target_: os.system", 1))
    with pytest.raises(ConfigError, match=r"os\.system"):
        exp.load(copied).network()
    (copied / "config.yaml").write_text(whole)


def test_packages_of_a_run_must_be_allowed_again(trained):
    directory = trained("security.allow=[colorsys]", allow=("colorsys",)).directory
    for path in (directory, directory / "checkpoints" / "last.ckpt"):
        with pytest.raises(ConfigError, match="colorsys"):
            exp.load(path)
