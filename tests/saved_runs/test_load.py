"""exp.load: a run's directory, its checkpoint or a sweep's job is a network again, and safe to open."""

from __future__ import annotations

import copy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp
from exp.errors import ConfigError, RunError
from exp.sweeps.stack import train

SHORT = [
    "trainer.max_steps=2",
    "trainer.limit_val_batches=1",
    "test=false",
    "hooks=[]",
    "trainer.enable_progress_bar=false",
]
KEPT = "+callbacks.kept={_target_: kept.Kept}"
OF_EXPERIMENTS = {"gan": "gan", "domain_adversarial": "domain_adversarial"}
MODELS = sorted(path.stem for path in (Path(exp.__file__).parent / "conf" / "model").glob("[a-z]*.yaml"))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kept", raising=False)
    Path("conf/model").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("kept.py"), "kept.py")


def trained(*overrides):
    return exp.fit(exp.compose([*SHORT, *overrides]))


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype is right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_a_run_that_was_opened_by_a_relative_path_is_found_from_anywhere(tmp_path, monkeypatch):
    directory = Path(trained().directory).absolute().relative_to(Path.cwd())
    run, named = exp.load(directory), exp.load(directory / "checkpoints" / "last.ckpt")
    monkeypatch.chdir("/")
    assert run.directory == tmp_path / directory
    assert run.report.status == "completed"
    assert same(run.network("last").state_dict(), named.network().state_dict())


@pytest.mark.parametrize("model", MODELS)
def test_the_network_of_every_ready_model_is_the_one_that_trained(model, text):
    small = [*text, "model.constants.width=16"] if model == "gpt" else []
    choice = [f"experiment={OF_EXPERIMENTS[model]}"] if model in OF_EXPERIMENTS else [*small, f"model={model}"]
    report = trained(*choice, KEPT)
    network = exp.load(report.directory).network(weights="last")
    assert same(network.state_dict(), torch.load("kept.pt", weights_only=True))
    assert not network.training


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp64", torch.float64), ("bf16", torch.float32), ("bf16_true", torch.bfloat16)]
)
def test_weights_have_the_dtype_that_they_were_trained_in(precision, dtype):
    report = trained(f"precision={precision}", KEPT)
    network = exp.load(report.directory).network(weights="last")
    assert same(network.state_dict(), torch.load("kept.pt", weights_only=True))
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}


def test_best_last_and_any_other_checkpoint():
    report = trained("trainer.max_steps=60", "trainer.limit_val_batches=null", "checkpoint.keep=2", "optimizer.lr=0.05")
    run = exp.load(report.directory)
    paths = {word: Path(report.directory) / "checkpoints" / f"{word}.ckpt" for word in ("best", "last")}
    states = {word: torch.load(path, weights_only=True)["state_dict"] for word, path in paths.items()}
    for word, state in states.items():
        expected = {name.removeprefix("network."): value for name, value in state.items()}
        assert same(run.network(word).state_dict(), expected)
        assert same(exp.load(paths[word]).network().state_dict(), expected)
        assert same(run.network(paths[word]).state_dict(), expected)
    assert same(run.network().state_dict(), run.network("best").state_dict())
    with pytest.raises(RunError, match=r"first\.ckpt is not there; expected best, last, or the path"):
        run.network("first.ckpt")


def test_an_average_and_the_weights_beside_it():
    report = trained("callbacks=[ema]", "callbacks.ema.decay=0.5", "trainer.max_steps=5")
    run = exp.load(report.directory)
    state = torch.load(Path(report.directory) / "checkpoints" / "last.ckpt", weights_only=True)
    for averaged, held in ((True, state["state_dict"]), (False, state["current_model_state"])):
        expected = {name.removeprefix("network."): value for name, value in held.items()}
        assert same(run.network("last", averaged=averaged).state_dict(), expected)
    assert not same(run.network("last").state_dict(), run.network("last", averaged=False).state_dict())
    plain = exp.load(trained().directory)
    with pytest.raises(RunError, match="has no average beside its weights"):
        plain.network(averaged=False)


def test_lora_is_as_it_was_trained():
    report = trained("lora.layers=[hidden]", "lora.rank=2", "lora.trained=[head]", KEPT)
    assert same(exp.load(report.directory).network("last").state_dict(), torch.load("kept.pt", weights_only=True))


def test_a_job_of_a_stacked_sweep():
    stacked = ["trainer.max_steps=2", "hooks=[]", "trainer.enable_progress_bar=false", "sweep.stack=true"]
    configs = [exp.compose([*stacked, f"seed={seed}", f"hydra.run.dir=outputs/sweep/{seed}"]) for seed in (0, 1)]
    outcomes = dict(train(configs))
    run = exp.load("outputs/sweep/1")
    assert run.config.seed == 1
    report = run.evaluate()
    assert report.metrics["accuracy/test"] == outcomes[1].metrics["accuracy/test"]
    assert report.metrics["loss/test"] == pytest.approx(outcomes[1].metrics["loss/test"], rel=1e-6)
    with pytest.raises(RunError, match=r"sweep is a directory of 2 runs; expected one of them, such as .*sweep/0"):
        exp.load("outputs/sweep")


def test_loading_draws_nothing_from_the_generators():
    report = trained()
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    run = exp.load(report.directory)
    assert run.network() is not run.network()
    assert len(run.data.part("test")) == 270
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_config_report_data_and_history(tmp_path):
    report = trained("trainer.max_steps=12", "hooks=[gradients]", "optimizer.lr=0.02", "test=true")
    run = exp.load(report.directory)
    assert run.config.optimizer.lr == 0.02
    assert run.report == replace(report, not_written=())
    # The parts are those of scikit-learn's 1,797 digits.
    parts = [run.data.part(stage) for stage in ("train", "val", "test")]
    assert sum(map(len, parts)) == len(load_digits().target)
    events = EventAccumulator(str(Path(report.directory) / "tensorboard")).Reload()
    assert set(run.history) == set(events.Tags()["scalars"])
    for tag in ("loss/train", "loss/val", "gradients/norm/total"):
        points = events.Scalars(tag)
        assert run.history[tag].steps.tolist() == [point.step for point in points]
        assert run.history[tag].values.tolist() == [point.value for point in points]
    table = run.history.table()
    assert table["step"].tolist() == list(range(1, 13))
    assert np.isnan(table["loss/val"][:-1]).all()
    assert table["loss/val"][-1] == run.history["loss/val"].values[-1]
    run.history.to_csv(tmp_path / "history.csv")
    first, second, *rest = (tmp_path / "history.csv").read_text().splitlines()
    assert first.split(",")[0] == "step"
    assert second.split(",")[list(table).index("loss/val")] == ""
    assert len(rest) == 11
    with pytest.raises(KeyError, match="the run logged no loss/vall"):
        run.history["loss/vall"]


def test_a_checkpoint_that_was_moved_brings_its_config():
    report = trained()
    shutil.copy(Path(report.directory) / "checkpoints" / "best.ckpt", "moved.ckpt")
    run = exp.load("moved.ckpt")
    assert same(run.network().state_dict(), exp.load(report.directory).network("best").state_dict())
    with pytest.raises(RunError, match=r"moved\.ckpt lies outside of its run directory, where report\.json would be"):
        _ = run.report


def test_what_is_no_run():
    report = trained("logger=[]")
    Path("empty").mkdir()
    Path("weights.pt").write_bytes(b"nothing")
    torch.save({"state_dict": {}}, "foreign.ckpt")
    for path, message in {
        "nowhere": "nowhere is not there; expected a run directory",
        "empty": "empty holds no config.yaml; expected a run directory",
        "weights.pt": "weights.pt",
        "foreign.ckpt": "says nothing of its run",
    }.items():
        with pytest.raises(RunError, match=message):
            exp.load(path)
    with pytest.raises(RunError, match="holds no scalars: the run had no logger"):
        _ = exp.load(report.directory).history
    damaged = Path(report.directory) / "config.yaml"
    whole = damaged.read_text()
    damaged.write_text("- a\n- b\n")
    with pytest.raises(RunError, match="is not as exp wrote it: it holds no mapping"):
        exp.load(report.directory)
    for cut in (whole[: whole.index("\n", 1500)], whole[: whole.index("\nmodel:")], whole[: whole.index("\nweights:")]):
        damaged.write_text(cut)
        with pytest.raises(RunError, match=r"config\.yaml has no .*: a part of it is lost\. Take the file"):
            exp.load(report.directory)
    damaged.write_text(whole.replace("out_features: 128", "out_features: 64"))
    with pytest.raises(RunError, match=r"has other weights than the network of its config: .*hidden2"):
        exp.load(report.directory).network()


def test_a_package_that_the_run_trusts_is_not_trusted_for_that():
    report = trained("security.allow=[colorsys]")
    with pytest.raises(ConfigError) as caught:
        exp.load(report.directory)
    assert "colorsys" in str(caught.value)
    assert exp.load(report.directory, allow=["colorsys"]).network() is not None
    with pytest.raises(ConfigError):
        exp.load(Path(report.directory) / "checkpoints" / "last.ckpt")


def test_a_target_that_is_not_allowed_is_not_called():
    report = trained()
    config = Path(report.directory) / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("_target_: torch.nn.Flatten", "_target_: os.system", 1))
    with pytest.raises(ConfigError, match=r"os\.system"):
        exp.load(report.directory).network()


def test_a_changed_number_in_the_weights_is_seen():
    report = trained()
    path = Path(report.directory) / "checkpoints" / "best.ckpt"
    state = torch.load(path, weights_only=True)
    changed = copy.deepcopy(state)
    changed["state_dict"]["network.head.bias"][0] += 1.0
    torch.save(changed, path)
    with pytest.raises(RunError, match=r"state_dict\.network\.head\.bias"):
        exp.load(report.directory).network("best")
