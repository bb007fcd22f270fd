"""Exceptions of the user's own code are told with what failed where, the user's own frames, and what to do."""

import shutil
import sys
from pathlib import Path

import pytest

import exp
from exp.errors import ExpError
from exp.run_report import read_report

LINEAR = "{_target_: torch.nn.Linear, in_features: 4, out_features: 3}"
DATA = """# Rows of the user's own
_target_: exp.data.data.Data
train: {{_target_: faulty.{kind}}}
val: {{_target_: faulty.Rows}}
input_shape: [4]
input_dtype: float32
num_classes: 3
num_outputs: 3
batch_size: 8
"""
SMALL = ["model=linear", "data=rows", "hooks=[]", "callbacks=[]", "test=false", "trainer.max_epochs=2", "metrics=[]"]


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    shutil.copy(Path(__file__).with_name("faulty.py"), tmp_path)
    for group, name, text in (
        ("data", "rows", DATA.format(kind="Rows")),
        ("data", "stream", DATA.format(kind="Stream")),
        ("data", "gathering", DATA.format(kind="Gathering")),
        ("callbacks", "faulty", "faulty: {_target_: faulty.Faulty, at: on_train_batch_end}"),
        ("metrics", "measure", "measure: {_target_: faulty.Measure}"),
        ("hooks", "watch", "watch: {_target_: faulty.Watch}"),
        ("model", "linear", f"_target_: torch.nn.Sequential\n_args_: [{LINEAR}]"),
        ("model", "layer", f"_target_: torch.nn.Sequential\n_args_: [{{_target_: faulty.Layer}}, {LINEAR}]"),
    ):
        (tmp_path / "conf" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / group / f"{name}.yaml").write_text(text if text.startswith("#") else f"# Own\n{text}\n")


TRANSFORM = "+data.transforms={t: {_target_: faulty.Transform, error: %s}}"
COLLATE = "+data.collate={_target_: faulty.Collate, error: %s}"


def callback(at):
    return "callbacks=[faulty]", f"callbacks.faulty.at={at}"


PLACES = [
    # overrides, what is told of the place, the exception
    (["data.train.error=value"], "reading sample 40 of train", "ValueError: not a picture"),
    (["data.train.error=missing"], "reading sample 40 of train", "No such file or directory: 'images/40.png'"),
    (["data.train.error=missing", "data.num_workers=1"], "reading sample 40 of train", "FileNotFoundError"),
    (["data.train.error=denied"], "reading sample 40 of train", "PermissionError"),
    (["data.train.error=full"], "reading sample 40 of train", "No space left on device: 'cache/40.png'"),
    (["data.train.error=stop"], "reading sample 40 of train", "StopIteration"),
    (["data.train.error=stop", "data.num_workers=2"], "reading sample 40 of train", "StopIteration"),
    (["data.train.error=custom", "data.num_workers=1"], "reading sample 40 of train", "Corrupted: number 40: a header"),
    (["data.val.error=key"], "reading sample 40 of val", "KeyError: 'width'"),
    (["data=stream", "data.train.error=end"], "reading sample 40 of train", "EOFError: of a compressed file"),
    (["data=stream", "data.train.error=stop"], "reading sample 40 of train", "generator raised StopIteration"),
    (["data=stream", "data.train.error=key", "data.num_workers=2"], "reading sample 40 of train", "KeyError"),
    (["data=gathering"], "gathering sample", "ValueError: not a picture"),
    ([TRANSFORM % "value"], "reading sample", "ValueError: not a picture"),
    ([TRANSFORM % "stop"], "reading sample", "StopIteration"),
    (["data=stream", TRANSFORM % "stop"], "transforming sample", "StopIteration"),
    ([COLLATE % "value"], "making a batch of 8 samples, from sample", "ValueError: not a picture"),
    ([COLLATE % "stop", "data.num_workers=1"], "making a batch of 8 samples, from sample", "StopIteration"),
    (["callbacks=[faulty]"], "callback Faulty, in on_train_batch_end", "ValueError: not a picture"),
    (["callbacks=[faulty]", "callbacks.faulty.error=missing"], "callback Faulty", "FileNotFoundError"),
    (["callbacks=[faulty]", "callbacks.faulty.error=stop"], "a step of training", "StopIteration"),
    (["callbacks=[faulty]", "callbacks.faulty.at=on_validation_epoch_end"], "callback Faulty", "ValueError"),
    (["metrics=[measure]"], "metric Measure, in update", "ValueError: not a picture"),
    (["hooks=[watch]"], "hook watch, in after_step", "ValueError: not a picture"),
    (["model=layer"], "layer 0 (Layer) in forward", "ValueError: not a picture"),
    (["model=layer", "+model._args_.0.error=stop"], "a step of training", "StopIteration"),
    (["data.train.error=exit"], "reading sample 40 of train", "SystemExit: 3"),
    (["data.train.error=exit", "data.num_workers=1"], "reading sample 40 of train", "SystemExit: 3"),
    (["data.train.error=closed"], "reading sample 40 of train", "GeneratorExit"),
    (["data.train.error=interrupt", "data.num_workers=1"], "reading sample 40 of train", "KeyboardInterrupt"),
    (["data.train.error=base"], "reading sample 40 of train", "BaseException: of no kind"),
    (["data.train.error=mute"], "reading sample 40 of train", "Mute: (its __str__ failed with RuntimeError)"),
    (["data.train.error=group"], "reading sample 40 of train", "ExceptionGroup: many"),
    (["data.train.error=length"], "the length of the data set Rows", "ValueError: not a picture"),
    (
        [*callback("on_train_batch_end"), "callbacks.faulty.error=base"],
        "callback Faulty, in on_train_batch_end",
        "Base",
    ),
    (
        [*callback("on_train_batch_end"), "callbacks.faulty.error=mute"],
        "callback Faulty, in on_train_batch_end",
        "Mute",
    ),
    ([*callback("on_exception"), "data.train.error=key"], "reading sample 40 of train", "KeyError: 'width'"),
    ([*callback("state_dict")], "callback Faulty, in state_dict", "ValueError"),
    *(
        ([*callback(place), "callbacks.faulty.error=stop"], f"callback Faulty, in {place}", "StopIteration")
        for place in (
            "on_train_epoch_start",
            "on_train_epoch_end",
            "on_validation_start",
            "on_validation_batch_start",
            "on_validation_batch_end",
            "on_validation_epoch_end",
        )
    ),
    (["metrics=[measure]", "metrics.measure.at=compute"], "metric Measure, in compute", "ValueError"),
    (
        ["metrics=[measure]", "metrics.measure.at=compute", "metrics.measure.error=stop"],
        "metric Measure, in compute",
        "StopIteration",
    ),
]


@pytest.mark.parametrize(("overrides", "place", "cause"), PLACES)
def test_what_failed_where_and_the_users_own_frames(overrides, place, cause, commands):
    if any("num_workers" in override for override in overrides):
        # Workers are forked, which the threads of this process might not outlive.
        done = commands.run(*SMALL, *overrides, seconds=120)
        assert done.returncode == 1
        told = done.stderr
    else:
        with pytest.raises(ExpError) as caught:
            exp.fit(exp.compose([*SMALL, *overrides]))
        told = str(caught.value)
    assert place in told
    assert cause in told
    assert 'faulty.py", line' in told
    assert "raise ERRORS[error]()" in told
    frames = [line for line in told.splitlines() if line.startswith("  File ")]
    assert all("faulty.py" in line for line in frames), told
    assert "room" not in told.lower()
    assert "mend it there" in told
    (report,) = Path("outputs").rglob("report.json")
    assert read_report(report.parent).status == "failed"


def test_a_worker_that_the_system_kills_is_named_with_the_likely_cause(commands):
    done = commands.run(*SMALL, "data.train.error=killed", "data.num_workers=1", seconds=120)
    assert done.returncode == 1
    assert "DataLoader worker" in done.stderr
    assert "when the memory is used up" in done.stderr
    (report,) = Path("outputs").rglob("report.json")
    assert read_report(report.parent).status == "failed"
