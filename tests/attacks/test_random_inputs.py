"""Commands that were mistyped at random: a legal config, or exit 2, at most 12 lines, a key of it, nothing written.

Forty; ATTACKS=2000 in the environment are as many.
"""

import os
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exp import train
from exp.check.plan import validate

LEGAL = [
    *("model=mlp", "model=lenet", "model=gpt", "data=text", "data=wine", "data=diabetes", "data=digits", "seed=3"),
    *("optimizer=sgd", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.betas=[0.9,0.99]", "name=mine"),
    *("scheduler=cosine", "scheduler=step", "scheduler.interval=step", "trainer.max_epochs=2", "trainer.max_steps=5"),
    *("trainer.gradient_clip_val=1.0", "trainer.accumulate_grad_batches=2", "trainer.limit_val_batches=0.5"),
    *("trainer.max_time=1h30m", "data.batch_size=16", "data.parts.val=0.1", "data.num_workers=0", "tags=[a,b]"),
    *("hooks=[gradients,memory]", "+hooks=activations", "hooks.gradients.every_n_steps=4", "~hooks.memory", "hooks=[]"),
    *("metrics=[accuracy,f1]", "metrics.accuracy.average=macro", "metric_stages=[train,val]", "logger=[csv]"),
    *(
        "objective=[cross_entropy]",
        "objective.cross_entropy.weight=2.0",
        "callbacks=[ema]",
        "+callbacks=early_stopping",
    ),
    *("precision=bf16", "+precision=fp16", "precision.keep={Linear:fp32}", "precision.scaler.init_scale=1024"),
    *("strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", "phases=[body_and_head]", "runtime.threads=1"),
    *("checkpoint.every_n_steps=2", "checkpoint.keep=3", "checkpoint.async=true", "runtime.non_finite=skip"),
    *("runtime.out_of_memory=halve", "monitor=accuracy/val", "mode=max", "experiment=example", "debug=one_batch"),
    *("+model.layers.more={_target_:torch.nn.Dropout,p:0.1}", "model.layers.hidden.out_features=16"),
    *("+metrics.mine={_target_:torchmetrics.MeanMetric}", "optimizer._target_=torch.optim.Adam", "test=false"),
    *("optimizer.groups={a:{parameters:'hidden.*',lr:0.1}}", "security.allow=[numpy]", "hydra.run.dir=outputs/here"),
]
VALUES = [
    *("0", "-1", "1", "1e-30", "1e400", "-inf", "nan", "inf", "99999999999999999999", "0.5", "1.5", "007", "1_000"),
    *("true", "false", "null", "None", "???", "''", "' '", "a b", "x", "[]", "[1]", "[null]", "[[[]]]", "{}", "{a:1}"),
    *("{a:{b:{c:1}}}", "${seed}", "${nothing}", "${oc.env:HOME}", "$", "{_target_:os.system}", "torch.nn.Linear"),
    *("{_target_:torch.nn.ReLU}", "../..", "/etc/passwd", "é", "日本", "\u202e", "\u0000", "\n", "\t", "'", '"', "\\"),
    *("#", "%s", "{0}", "*", "range(3)", "x" * 5000, "[" * 300, "9" * 5000, "1,2", "choice(1,2)", "glob(*)", "1h"),
    *("-5s", "@", "0x10", "!!python/none"),
]  # fmt: skip
INSERTED = st.one_of(st.sampled_from([*"=+~[]{}(),.:'\"$@/\\ -_0aZ", "é", "\u200b", "\x1b"]), st.characters())
LINES = 12


class Legal(BaseException):
    """What would have been trained."""


@st.composite
def mistyped(draw: st.DrawFn, word: str) -> str:
    """One change of a word: of its letters, its value, its key, its sign."""
    key, _, value = word.partition("=")
    place = draw(st.integers(0, len(word) - 1))
    changes = {
        "drop": lambda: word[:place] + word[place + 1 :],
        "double": lambda: word[:place] + word[place] + word[place:],
        "transpose": lambda: word[:place] + word[place : place + 2][::-1] + word[place + 2 :],
        "insert": lambda: word[:place] + draw(INSERTED) + word[place:],
        "case": lambda: word[:place] + word[place].swapcase() + word[place + 1 :],
        "value": lambda: f"{key}={draw(st.sampled_from(VALUES))}",
        "any value": lambda: f"{key}={draw(st.text(max_size=20))}",
        "number": lambda: f"{key}={draw(st.one_of(st.integers(), st.floats()))}",
        "value of another": lambda: f"{key}={draw(st.sampled_from(LEGAL)).partition('=')[2]}",
        "below another": lambda: f"{draw(st.sampled_from(LEGAL)).partition('=')[0]}.{word}",
        "without a level": lambda: word.partition(".")[2] or word,
        "end": lambda: word[:place],
        "sign": lambda: draw(st.sampled_from(["+", "++", "~", "-", "--", "@", ""])) + word.lstrip("+~"),
        "in a list": lambda: f"{key}=[{value}]",
        "in a mapping": lambda: f"{key}={{a:{value}}}",
        "twice": lambda: f"{key}={value},{value}",
        "long": lambda: f"{key * 40}={value}",
        "deep": lambda: f"{'.'.join([key] * 40)}={value}",
    }
    return changes[draw(st.sampled_from(sorted(changes)))]()


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    words = draw(st.lists(st.sampled_from(LEGAL), min_size=1, max_size=4))
    places = draw(st.sets(st.integers(0, len(words) - 1), min_size=1, max_size=2))
    # Several values are a sweep's, whose jobs are processes.
    return [draw(mistyped(word)) if place in places else word for place, word in enumerate(words)]


def fault_of(words: list[str], status: int | None, told: str) -> str | None:
    """What is wrong with an answer; status: None where the config is legal."""
    if status is None:
        return None
    if status != 2:
        return f"status {status}"
    if "Traceback" in told:
        return "a traceback"
    if len(told.splitlines()) > LINES:
        return f"{len(told.splitlines())} lines"
    # Of a long key the beginning is told.
    heads = {segment[:50] for word in words for segment in re.split(r"[=.@:]", word.lstrip("+~-"))[:3] if segment}
    if not any(head in told or repr(head)[1:-1] in told for head in heads) and "" not in words:
        return "no key"
    return None


def answered(words, monkeypatch, capfd):
    """The status, None where the config is legal, and what was said."""

    def fit(config):
        validate(config)
        raise Legal

    monkeypatch.setattr(train, "fit", fit)
    try:
        status = train.main(words)
    except Legal:
        status = None
    told = capfd.readouterr()
    return status, told.out + told.err


@settings(
    max_examples=int(os.environ.get("ATTACKS", "40")),
    deadline=None,
    derandomize="ATTACKS" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(words=commands())
def test_a_command_that_was_mistyped(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    status, told = answered(words, monkeypatch, capfd)
    assert fault_of(words, status, told) is None, f"{words}: {told}"
    made = [path for path in tmp_path.iterdir() if path.name != ".hypothesis"]
    assert not made, f"{words} makes {made}"


@pytest.mark.parametrize(("words", "is_legal"), [(["seed=3"], True), (["sed=3"], False)])
def test_both_kinds_of_answers_are_told_apart(words, is_legal, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    status, _ = answered(words, monkeypatch, capfd)
    assert (status is None) == is_legal
