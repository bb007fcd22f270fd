"""A checkpoint is held against the config that wants to go on from it, before anything is made."""

import pytest
import torch

import exp
from exp.check.plan import plan, resolve


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        report = exp.fit(exp.compose(["model=lenet", "trainer.max_epochs=2", "test=false"]))
    return f"{report.directory}/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def faults(*overrides):
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose(list(overrides)))
    return {fault.key: str(fault) for fault in caught.value.faults}


def test_another_model_is_told_with_what_the_run_was_started_with(finished):
    for stage in (["trainer.max_epochs=4"], ["train=false"]):
        told = faults(f"resume={finished}", *stage)["resume"]
        assert "another model" in told
        assert "model=lenet" in told


def test_a_new_learning_rate_is_not_ignored_in_silence(finished):
    told = faults(f"resume={finished}", "model=lenet", "optimizer.lr=0.1", "trainer.max_epochs=4")["resume"]
    assert "optimizer.lr was 0.003 and is 0.1" in told


def test_another_optimizer_is_told(finished):
    assert "another optimizer" in faults(f"resume={finished}", "model=lenet", "optimizer=sgd")["resume"]


def test_fewer_epochs_than_done_are_told(finished):
    assert "2 epochs" in faults(f"resume={finished}", "model=lenet", "trainer.max_epochs=1")["trainer.max_epochs"]


def test_a_damaged_file_is_told(tmp_path):
    (tmp_path / "garbage.ckpt").write_text("garbage")
    assert "garbage.ckpt" in faults("resume=garbage.ckpt")["resume"]


def test_what_fits_passes_and_evaluation_asks_for_the_model_alone(finished):
    exp.validate(exp.compose([f"resume={finished}", "model=lenet", "trainer.max_epochs=4", "data.batch_size=32"]))
    exp.validate(exp.compose([f"resume={finished}", "model=lenet", "train=false", "optimizer.lr=0.1"]))


def notes(*overrides):
    return plan(resolve(exp.compose(list(overrides)))).notes


def test_what_changes_the_steps_is_noted_and_what_does_not_is_not(finished):
    same = [f"resume={finished}", "model=lenet", "trainer.max_epochs=4"]
    assert not notes(*same, "data.num_workers=2", "hooks=[]", "precision.report=true")
    (note,) = notes(*same, "precision=bf16_true", "strategy=single", "seed=1")
    assert "precision.word was fp32 and is bf16_true" in note
    assert "strategy.name was auto and is single" in note
    assert "seed was 0 and is 1" in note
    assert "its losses may be others" in note
    (note,) = notes(*same, "trainer.gradient_clip_val=1", "trainer.accumulate_grad_batches=2", "data.batch_size=32")
    assert "trainer.gradient_clip_val was None and is 1" in note
    # Evaluation takes no step.
    assert not notes(f"resume={finished}", "model=lenet", "train=false", "precision=bf16")


def test_the_run_goes_on_in_another_precision_and_says_so(finished, caplog):
    same = ["model=lenet", "test=false", "trainer.limit_train_batches=2"]
    report = exp.fit(exp.compose([f"resume={finished}", *same, "trainer.max_epochs=3", "precision=bf16_true"]))
    assert "precision.word was fp32 and is bf16_true" in caplog.text
    assert (report.epochs, report.precision) == (3, "bf16_true")
    # And back: the states of float32 are made from those of bfloat16.
    last = f"{report.directory}/checkpoints/last.ckpt"
    report = exp.fit(exp.compose([f"resume={last}", *same, "trainer.max_epochs=4", "precision=fp16"]))
    assert "precision.word was bf16_true and is fp16" in caplog.text
    assert report.epochs == 4


def test_a_default_that_is_written_out_is_no_other_value(finished):
    written = ["optimizer.weight_decay=0.01", "optimizer.betas=[0.9,0.999]", "scheduler.warmup_steps=0"]
    assert not notes(f"resume={finished}", "model=lenet", "trainer.max_epochs=4", *written)
    told = faults(f"resume={finished}", "model=lenet", "trainer.max_epochs=4", "optimizer.weight_decay=0.1")["resume"]
    assert "optimizer.weight_decay was 0.01 and is 0.1" in told


# What a hand may do to a checkpoint whose file stays sound, and how it is told.
EDITS = {
    "no_optimizer": (lambda held: held.update(optimizer_states=[]), "optimizer_states is [] and was a list of 1"),
    "no_momenta": (
        lambda held: held["optimizer_states"][0].update(state={}),
        "optimizer_states.0.state is a mapping of 0 and was a mapping of 10",
    ),
    "no_callbacks": (lambda held: held.update(callbacks={}), "callbacks is a mapping of 0 and was a mapping of 1"),
    "no_schedule": (lambda held: held.pop("lr_schedulers"), "lr_schedulers is not there and was a list of 1"),
    "another_rate": (
        lambda held: held["optimizer_states"][0]["param_groups"][0].update(lr=1.0),
        "optimizer_states.0.param_groups.0.lr is 1.0 and was",
    ),
    "half": (
        lambda held: held.update(state_dict={name: value.half() for name, value in held["state_dict"].items()}),
        "state_dict.network.conv1.weight is float16[6, 1, 5, 5] and was float32[6, 1, 5, 5]",
    ),
    "fewer_weights": (
        lambda held: held["state_dict"].pop("network.head.bias"),
        "state_dict.network.head.bias is not there and was float32[10]",
    ),
    "another_shape": (
        lambda held: held["state_dict"].update({"network.head.bias": torch.zeros(11)}),
        "state_dict.network.head.bias is float32[11] and was float32[10]",
    ),
    "other_numbers": (
        lambda held: held["state_dict"]["network.conv1.weight"][0, 0, 0].add_(1e-3),
        "state_dict.network.conv1.weight holds other numbers",
    ),
    "another_order": (
        lambda held: held["state_dict"].update({"network.head.bias": held["state_dict"]["network.head.bias"].flip(0)}),
        "state_dict.network.head.bias holds other numbers",
    ),
    "another_ones_momenta": (
        lambda held: held["optimizer_states"][0]["state"][1].update(exp_avg=torch.zeros(6)),
        "optimizer_states.0.state.1.exp_avg holds other numbers",
    ),
    "no_average": (
        lambda held: held["callbacks"].pop("ExponentialMovingAverage"),
        "callbacks is a mapping of 0",
    ),
    "before_the_start": (lambda held: held["exp_position"].update(step=-1), "exp_position.step is -1 and was 40"),
    "no_checksums": (lambda held: held["exp_manifest"].pop("checksums"), "its exp_manifest is no manifest"),
    "more": (lambda held: held.update(mine=1), "mine is 1 and was not there"),
    "elsewhere": (lambda held: held["exp_position"].update(step=99), "exp_position.step is 99 and was 40"),
    "another_config": (lambda held: held.update(exp_config=held["exp_config"] + "#"), "exp_config is 'name: train"),
    "future": (
        lambda held: held["exp_manifest"].update(format=7),
        "is of format 7, and this exp reads",
    ),
    "no_manifest": (lambda held: held.update(exp_manifest=None), "its exp_manifest is no manifest"),
    # Of an exp from before manifests.
    "old_and_empty": (
        lambda held: (held.pop("exp_manifest"), held.update(optimizer_states=[])),
        "whose optimizer_states is []",
    ),
    "old_and_other": (
        lambda held: (held.pop("exp_manifest"), held["state_dict"].pop("network.head.bias")),
        "where network.head.bias is not there",
    ),
    "old_and_in_between": (
        lambda held: (held.pop("exp_manifest"), held["exp_position"].pop("epoch")),
        "whose exp_position is {'batch': 0",
    ),
    "old_with_a_number_for_a_weight": (
        lambda held: (held.pop("exp_manifest"), held["state_dict"].update({"network.head.bias": 3})),
        "whose state_dict is ",
    ),
    "old_with_no_version": (
        lambda held: (held.pop("exp_manifest"), held.update({"pytorch-lightning_version": "mine"})),
        "whose pytorch-lightning_version is 'mine'",
    ),
    "old_without_config": (
        lambda held: (held.pop("exp_manifest"), held.update(exp_config="model: 3")),
        "whose exp_config is 'model: 3'; expected the config of its run",
    ),
    "newer_lightning": (
        lambda held: (held.pop("exp_manifest"), held.update({"pytorch-lightning_version": "99.0"})),
        "written with Lightning 99.0",
    ),
}


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory):
    ema = "+callbacks.ema={_target_: exp.engine.ema.ExponentialMovingAverage}"
    words = ["model=lenet", "scheduler=cosine", ema, "trainer.limit_val_batches=1", "test=false", "hooks=[]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("scheduled"))
        report = exp.fit(exp.compose([*words, "trainer.max_epochs=2"]))
    return f"{report.directory}/checkpoints/last.ckpt", words


@pytest.mark.parametrize("edit", EDITS)
def test_a_checkpoint_that_was_changed_by_hand_is_told(scheduled, edit):
    path, words = scheduled
    held = torch.load(path, weights_only=True)
    change, said = EDITS[edit]
    change(held)
    torch.save(held, "edited.ckpt")
    assert said in faults("resume=edited.ckpt", *words, "trainer.max_epochs=4")["resume"]


def test_a_checkpoint_that_does_not_say_what_it_held_is_noted(finished):
    held = torch.load(finished, weights_only=True)
    held.pop("exp_manifest")
    torch.save(held, "older.ckpt")
    (note,) = notes("resume=older.ckpt", "model=lenet", "trainer.max_epochs=4")
    assert "older.ckpt does not say what it held" in note


def test_what_a_hand_changed_on_purpose_is_taken_without_its_manifest(scheduled):
    path, words = scheduled
    held = torch.load(path, weights_only=True)
    held["state_dict"]["network.head.bias"].zero_()
    torch.save(held, "edited.ckpt")
    told = faults("resume=edited.ckpt", *words, "trainer.max_epochs=4")["resume"]
    assert "If it was you, and it is meant: delete its exp_manifest" in told
    held.pop("exp_manifest")
    torch.save(held, "edited.ckpt")
    (note,) = notes("resume=edited.ckpt", *words, "trainer.max_epochs=4")
    assert "edited.ckpt does not say what it held" in note


def test_a_checkpoint_of_before_there_were_checksums_is_read(finished):
    held = torch.load(finished, weights_only=True)
    held["exp_manifest"] = {"format": 1, "entries": held["exp_manifest"]["entries"]}
    torch.save(held, "older.ckpt")
    assert not notes("resume=older.ckpt", "model=lenet", "trainer.max_epochs=4")


@pytest.mark.parametrize("train", ["true", "false"])
def test_weights_alone_are_no_checkpoint_to_go_on_from(train):
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, "weights.ckpt")
    told = faults("resume=weights.ckpt", f"train={train}")["resume"]
    assert (
        "weights.ckpt, which holds state_dict and no pytorch-lightning_version; expected a last.ckpt or best.ckpt"
        in told
    )
