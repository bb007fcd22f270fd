"""What a config shows to train badly is a note of the plan, and of exp's own options there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import exp
from exp.check.plan import plan, resolve
from exp.errors import is_installed

CONF = Path(exp.__file__).parent / "conf"
SOFTMAX = "+model.layers.last={_target_: torch.nn.Softmax, dim: -1}"
FLAT = "+model.layers.flat={_target_: torch.nn.Flatten, start_dim: 1}"
TAKES = "which takes scores, and has a softmax of its own"


def notes(*overrides: str) -> tuple[str, ...]:
    return plan(resolve(exp.compose(overrides))).notes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr=0"], "optimizer.lr is 0: what it trains stays as it is. Write a rate above 0"),
        (["+optimizer.groups={head: {parameters: 'head.*', lr: 0.0}}"], "optimizer.groups.head.lr is 0"),
        (["experiment=gan", "phases.generator.optimizer.lr=0"], "phases.generator.optimizer.lr is 0"),
        (
            ["callbacks=[early_stopping]", "callbacks.early_stopping.mode=max"],
            "Write callbacks.early_stopping.mode=min",
        ),
        (
            ["callbacks=[early_stopping]", "callbacks.early_stopping.monitor=accuracy/val"],
            "callbacks.early_stopping.monitor is accuracy/val: a higher one is better",
        ),
        (["scheduler=plateau", "scheduler.mode=max"], "Write scheduler.mode=min"),
        ([SOFTMAX], f"model.layers.last ends in softmax, and objective.cross_entropy is a CrossEntropy, {TAKES}"),
        ([SOFTMAX, FLAT], "model.layers.last ends in softmax"),
        (["+model.layers.last={_target_: torch.nn.Sigmoid}"], "model.layers.last ends in sigmoid"),
        (
            ["model=rnn", "model.forward='return head(recurrent(x.flatten(1, 2))[0][:, -1]).softmax(-1)'"],
            "model ends in",
        ),
        (["objective=[nll]", SOFTMAX], "which takes log probabilities (LogSoftmax)"),
        (
            ["data=diabetes", "objective=[bce_with_logits]", "+model.layers.last={_target_: torch.nn.Sigmoid}"],
            "and has a sigmoid of its own",
        ),
        (
            ["model=resnet", "+model.freeze=['stage.*']"],
            "stage.0.norm1, stage.0.norm2, stage.1.norm1, stage.1.norm2 are",
        ),
    ],
)
def test_a_note_with_its_cure(overrides: list[str], message: str) -> None:
    (note,) = notes(*overrides)
    assert message in note


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            [f"model={path.stem}"]
            for path in sorted((CONF / "model").glob("*.yaml"))
            if path.stem not in ("gpt", "gan", "domain_adversarial")  # each needs its own data or terms
        ),
        *(
            [f"experiment={path.stem}"]
            for path in sorted((CONF / "experiment").glob("*.yaml"))
            # Of the two matrices in parameter_dict one is chosen; that the other learns nothing is noted, and right.
            if path.stem != "parameter_dict" and (path.stem != "tokenized_text" or is_installed("tokenizers"))
        ),
        *([f"data={name}"] for name in ("breast_cancer", "diabetes", "wine", "text")),
        *([f"scheduler={path.stem}"] for path in sorted((CONF / "scheduler").glob("*.yaml"))),
        ["callbacks=[early_stopping]"],
        ["callbacks=[early_stopping]", "monitor=accuracy/val", "mode=max"],
        ["objective=[nll]", "+model.layers.last={_target_: torch.nn.LogSoftmax, dim: -1}"],
        ["data=diabetes", "objective=[bce]", "+model.layers.last={_target_: torch.nn.Sigmoid}"],
        ["model=resnet", "+model.freeze=['stage.*.conv*']"],
        ["model=resnet", "+model.freeze=['norm.*']", "+model.layers.norm.momentum=0.0"],
    ],
    ids=" ".join,
)
def test_a_healthy_config_has_none(overrides: list[str]) -> None:
    assert notes(*overrides) == ()


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=digits", "model=resnet"],
        ["data=wine"],
        ["data=diabetes", "precision=bf16_true"],
        ["data=breast_cancer", "scheduler=cosine"],
        ["experiment=gan"],
        ["experiment=domain_adversarial"],
    ],
    ids=" ".join,
)
def test_a_healthy_run_logs_none(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, logger="exp"):
        exp.fit(exp.compose([*overrides, "trainer.max_epochs=1", "hooks=[]", "logger=[]", "test=false"]))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("exp")] == []


def test_notes_are_in_the_log_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exp.fit(exp.compose(["optimizer.lr=0", "trainer.max_steps=1", "hooks=[]", "logger=[]", "test=false"]))
    (path,) = tmp_path.glob("outputs/**/train.log")
    assert path.read_text().count("optimizer.lr is 0") == 1
