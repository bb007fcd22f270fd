"""An exception in code of a user is reported with the place, the frames of the user's files, and a fix."""

import shutil
import sys
from pathlib import Path

import pytest

import exp
from exp.errors import ExpError
from exp.run_report import read_report

LINEAR = "{_target_: torch.nn.Linear, in_features: 4, out_features: 3}"
DATA = """
_target_: exp.data.data.Data
train: {{_target_: faulty.{kind}}}
val: {{_target_: faulty.Rows}}
input_shape: [4]
input_dtype: float32
num_classes: 3
num_outputs: 3
batch_size: 8
"""
CONF = {
    "data/rows": DATA.format(kind="Rows"),
    "data/stream": DATA.format(kind="Stream"),
    "data/gathering": DATA.format(kind="Gathering"),
    "callbacks/faulty": "faulty: {_target_: faulty.Faulty}",
    "metrics/measure": "measure: {_target_: faulty.Measure}",
    "hooks/watch": "watch: {_target_: faulty.Watch}",
    "model/linear": f"_target_: torch.nn.Sequential\n_args_: [{LINEAR}]",
    "model/layer": f"_target_: torch.nn.Sequential\n_args_: [{{_target_: faulty.Layer}}, {LINEAR}]",
}
SMALL = ["model=linear", "data=rows", "hooks=[]", "callbacks=[]", "test=false", "trainer.max_epochs=2", "metrics=[]"]


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    shutil.copy(Path(__file__).with_name("faulty.py"), tmp_path)
    for name, text in CONF.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# For tests\n{text}\n")


ROW = "data.train.error="
IN_A_WORKER = "data.num_workers=1 data.train.error="
STREAM = "data=stream data.train.error="
TRANSFORM = "+data.transforms={t:{_target_:faulty.Transform,error:%s}}"
COLLATE = "+data.collate={_target_:faulty.Collate,error:%s}"
CALLBACK = "callbacks=[faulty] callbacks.faulty."
COMPUTE = "metrics=[measure] metrics.measure.at=compute"
# Overrides, place in the message, exception.
PLACES = [
    (f"{ROW}missing", "reading sample 40 of train", "No such file or directory: 'images/40.png'"),
    (f"{IN_A_WORKER}custom", "reading sample 40 of train", "Corrupted: number 40: a header"),
    ("data.val.error=key", "reading sample 40 of val", "KeyError: 'width'"),
    (f"{STREAM}stop", "reading sample 40 of train", "generator raised StopIteration"),
    ("data=gathering", "gathering sample", "ValueError: not a picture"),
    (TRANSFORM % "value", "reading sample", "ValueError: not a picture"),
    (f"data=stream {TRANSFORM % 'stop'}", "transforming sample", "StopIteration"),
    (COLLATE % "value", "making a batch of 8 samples, from sample", "ValueError: not a picture"),
    (f"{CALLBACK}error=value", "callback Faulty, in on_train_batch_end", "ValueError: not a picture"),
    (f"{CALLBACK}error=stop", "a step of training", "StopIteration"),
    (f"{CALLBACK}at=state_dict", "callback Faulty, in state_dict", "ValueError"),
    ("metrics=[measure]", "metric Measure, in update", "ValueError: not a picture"),
    (COMPUTE, "metric Measure, in compute", "ValueError"),
    ("hooks=[watch]", "hook watch, in after_step", "ValueError: not a picture"),
    ("model=layer", "layer 0 (Layer) in forward", "ValueError: not a picture"),
    (f"{ROW}exit", "reading sample 40 of train", "SystemExit: 3"),
    (f"{ROW}mute", "reading sample 40 of train", "Mute: (the __str__ of the exception failed with RuntimeError)"),
    (f"{ROW}length", "the length of the data set Rows", "ValueError: not a picture"),
]
OTHER_ERRORS = [
    (f"{ROW}full", "reading sample 40 of train", "No space left on device: 'cache/40.png'"),
    (f"{ROW}stop", "reading sample 40 of train", "StopIteration"),
    (f"{ROW}closed", "reading sample 40 of train", "GeneratorExit"),
    (f"{ROW}base", "reading sample 40 of train", "BaseException: of no kind"),
    (f"{ROW}group", "reading sample 40 of train", "ExceptionGroup: many"),
    (f"{IN_A_WORKER}missing", "reading sample 40 of train", "FileNotFoundError"),
    (f"{IN_A_WORKER}stop", "reading sample 40 of train", "StopIteration"),
    (f"{IN_A_WORKER}exit", "reading sample 40 of train", "SystemExit: 3"),
    (f"{IN_A_WORKER}interrupt", "reading sample 40 of train", "KeyboardInterrupt"),
    (f"{STREAM}key data.num_workers=2", "reading sample 40 of train", "KeyError"),
    (TRANSFORM % "stop", "reading sample", "StopIteration"),
    (f"{COLLATE % 'stop'} data.num_workers=1", "making a batch of 8 samples, from sample", "StopIteration"),
    (f"{CALLBACK}error=base", "callback Faulty, in on_train_batch_end", "Base"),
    (f"{CALLBACK}error=mute", "callback Faulty, in on_train_batch_end", "Mute"),
    ("model=layer +model._args_.0.error=stop", "a step of training", "StopIteration"),
    (f"{COMPUTE} metrics.measure.error=stop", "metric Measure, in compute", "StopIteration"),
    *(
        (f"{CALLBACK}at={name} callbacks.faulty.error=stop", f"callback Faulty, in {name}", "StopIteration")
        for name in (
            "on_train_epoch_start",
            "on_train_epoch_end",
            "on_validation_start",
            "on_validation_batch_start",
            "on_validation_batch_end",
            "on_validation_epoch_end",
        )
    ),
]


def failed_run(overrides, commands):
    """Run, and return the error message; workers are forked, so a run with workers needs a process without threads."""
    if "num_workers" in overrides:
        done = commands.run(*SMALL, *overrides.split())
        assert done.returncode == 1
        message = done.stderr
    else:
        with pytest.raises(ExpError) as caught:
            exp.fit(exp.compose([*SMALL, *overrides.split()]))
        message = str(caught.value)
    (report,) = Path("outputs").rglob("report.json")
    assert read_report(report.parent).status == "failed"
    return message


@pytest.mark.parametrize(
    ("overrides", "place", "error"),
    [*PLACES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_ERRORS)],
)
def test_the_message_names_the_place_and_the_users_frames(overrides, place, error, commands):
    message = failed_run(overrides, commands)
    assert place in message
    assert error in message
    assert "raise ERRORS[error]()" in message
    frames = [line for line in message.splitlines() if line.startswith("  File ")]
    assert frames, message
    assert all("faulty.py" in line for line in frames), message
    assert "Fix the error in your code or data" in message
    # An OSError in code of a user does not get exp's advice about a full disk.
    assert "room" not in message.lower()


def test_a_killed_worker_is_reported_with_the_likely_cause(commands):
    message = failed_run(f"{IN_A_WORKER}killed", commands)
    assert "DataLoader worker" in message
    assert "because the memory was full" in message
