"""Random typing errors in a command: it stays valid, or ends with exit status 2, a key and at most 12 lines."""

import re
import sys

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from exp.cli.check import main as check

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
    *("checkpoint.every_n_steps=2", "checkpoint.async=true", "runtime.non_finite=skip"),
    *("monitor=accuracy/val", "mode=max", "experiment=example", "debug=one_batch"),
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
MAX_LINES = 12


@st.composite
def mistyped(draw: st.DrawFn, word: str) -> str:
    """Return a word with one change of its letters, its value, its key or its sign."""
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
    return [draw(mistyped(word)) if place in places else word for place, word in enumerate(words)]


def names_a_key(words: list[str], said: str) -> bool:
    """Return True if a message contains a word of the command, or the start of a long word."""
    heads = {part[:50] for word in words for part in re.split(r"[=.@:]", word.lstrip("+~-"))[:3] if part}
    return "" in words or any(head in said or repr(head)[1:-1] in said for head in heads)


# An example takes 0.15 s, so a quarter of them keeps the test below the time limit of the fast suite.
@hypothesis.settings(max_examples=max(1, hypothesis.settings().max_examples // 4))
@given(words=commands())
@hypothesis.example(words=["seed=3"])
@hypothesis.example(words=["sed=3"])
def test_a_mistyped_command_is_valid_or_refused(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    status = check(words)
    captured = capfd.readouterr()
    said = captured.out + captured.err
    assert status in (0, 2), (words, said)
    assert "Traceback" not in said, (words, said)
    assert status == 0 or len(said.splitlines()) <= MAX_LINES, (words, said)
    assert status == 0 or names_a_key(words, said), (words, said)
    assert [path for path in tmp_path.iterdir() if path.name != ".hypothesis"] == [], words
