"""A config that resumes is compared with its checkpoint before anything is created."""

import pytest
import torch

import exp
from exp.check.examination import examine
from exp.check.resolution import resolve


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        report = exp.fit(exp.compose(["model=lenet", "trainer.max_epochs=2", "test=false", "hooks=[]"]))
    return f"{report.directory}/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def errors(*overrides):
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose(list(overrides)))
    return {error.key: str(error) for error in caught.value.errors}


@pytest.mark.parametrize(
    ("overrides", "key", "messages"),
    [
        (["trainer.max_epochs=4"], "resume", ["another model", "model=lenet"]),
        (["train=false"], "resume", ["another model", "model=lenet"]),
        (["model=lenet", "optimizer.lr=0.1"], "resume", ["optimizer.lr was 0.003 and is now 0.1"]),
        (["model=lenet", "optimizer=sgd"], "resume", ["another optimizer"]),
        (["model=lenet", "trainer.max_epochs=1"], "trainer.max_epochs", ["at least 2"]),
        (["model=lenet", "optimizer.weight_decay=0.1"], "resume", ["optimizer.weight_decay was 0.01 and is now 0.1"]),
    ],
)
def test_another_config_is_an_error(finished, overrides, key, messages):
    message = errors(f"resume={finished}", "trainer.max_epochs=4", *overrides)[key]
    assert all(words in message for words in messages), message


def test_a_damaged_file_is_an_error(tmp_path):
    (tmp_path / "garbage.ckpt").write_text("garbage")
    assert "garbage.ckpt" in errors("resume=garbage.ckpt")["resume"]


def test_evaluation_needs_only_the_model(finished):
    exp.validate(exp.compose([f"resume={finished}", "model=lenet", "train=false", "optimizer.lr=0.1"]))


def notes(*overrides):
    return examine(resolve(exp.compose(list(overrides)))).notes


def test_only_what_changes_steps_is_noted(finished):
    same = [f"resume={finished}", "model=lenet", "trainer.max_epochs=4"]
    assert not notes(*same, "data.num_workers=2", "hooks=[]", "optimizer.weight_decay=0.01", "scheduler.warmup_steps=0")
    (note,) = notes(*same, "precision=bf16_true", "strategy=single", "seed=1")
    assert "precision.word was fp32 and is now bf16_true" in note
    assert "strategy.name was auto and is now single" in note
    assert "seed was 0 and is now 1" in note
    assert "its losses may differ" in note
    (note,) = notes(*same, "trainer.gradient_clip_val=1", "trainer.accumulate_grad_batches=2", "data.batch_size=32")
    assert "trainer.gradient_clip_val was None and is now 1" in note
    # An evaluation makes no steps, so the precision of training does not matter.
    assert not notes(f"resume={finished}", "model=lenet", "train=false", "precision=bf16")


def test_other_batches_need_a_checkpoint_of_an_epochs_end(finished, tmp_path):
    same = ["model=lenet", "hooks=[]", "trainer.max_epochs=4"]
    within = exp.fit(exp.compose([*same, "test=false", "trainer.max_steps=3", f"hydra.run.dir={tmp_path}/run"]))
    last = f"{within.directory}/checkpoints/last.ckpt"
    told = errors(f"resume={last}", *same, "data.batch_size=32")["resume"]
    assert "a checkpoint within epoch 0, whose batches differ: data.batch_size was" in told
    exp.validate(exp.compose([f"resume={last}", *same]))
    exp.validate(exp.compose([f"resume={finished}", *same, "data.batch_size=32"]))


def test_a_position_of_an_earlier_version_is_read(finished):
    held = torch.load(finished, weights_only=True)
    held["exp_position"]["samples"] = 0
    torch.save(held, "older.ckpt")
    assert exp.fit(exp.compose(["resume=older.ckpt", "model=lenet", "trainer.max_epochs=3", "test=false"])).epochs == 3


def test_a_run_resumes_in_another_precision(finished, caplog):
    same = ["model=lenet", "test=false", "trainer.limit_train_batches=2"]
    report = exp.fit(exp.compose([f"resume={finished}", *same, "trainer.max_epochs=3", "precision=bf16_true"]))
    assert "precision.word was fp32 and is now bf16_true" in caplog.text
    assert (report.epochs, report.precision) == (3, "bf16_true")
    # Back to float32 weights: the optimizer state is converted from bfloat16.
    last = f"{report.directory}/checkpoints/last.ckpt"
    report = exp.fit(exp.compose([f"resume={last}", *same, "trainer.max_epochs=4", "precision=fp16"]))
    assert "precision.word was bf16_true and is now fp16" in caplog.text
    assert report.epochs == 4


# Edits of a checkpoint that can still be read, and the error message.
EDITS = {
    "no_optimizer": (lambda held: held.update(optimizer_states=[]), "whose entry optimizer_states is []"),
    "fewer_weights": (
        lambda held: held["state_dict"].pop("network.head.bias"),
        "where network.head.bias is missing",
    ),
    "future": (
        lambda held: held["exp_manifest"].update(format=7),
        "was written by a newer version of exp, in format 7",
    ),
    "a_number_for_a_weight": (
        lambda held: held["state_dict"].update({"network.head.bias": 3}),
        "whose entry state_dict is ",
    ),
    "newer_lightning": (
        lambda held: held.update({"pytorch-lightning_version": "99.0"}),
        "which Lightning 99.0 wrote",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_checkpoint_is_an_error(finished, edit):
    held = torch.load(finished, weights_only=True)
    change, message = EDITS[edit]
    change(held)
    torch.save(held, "edited.ckpt")
    assert message in errors("resume=edited.ckpt", "model=lenet", "trainer.max_epochs=4")["resume"]


@pytest.mark.parametrize(
    "manifest", [{"format": 2, "entries": {}, "checksums": {}}, {"format": 1, "entries": {}}, None]
)
def test_a_checkpoint_of_an_earlier_format_is_read(finished, manifest):
    held = torch.load(finished, weights_only=True)
    held["exp_manifest"] = manifest
    torch.save(held, "older.ckpt")
    assert not notes("resume=older.ckpt", "model=lenet", "trainer.max_epochs=4")


def test_weights_alone_cannot_be_resumed():
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, "weights.ckpt")
    message = "which contains the entries state_dict, but no entry pytorch-lightning_version; expected an unchanged"
    for train in ("true", "false"):
        assert message in errors("resume=weights.ckpt", f"train={train}")["resume"]
