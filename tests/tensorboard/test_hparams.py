"""The HParams page of a sweep, read by TensorBoard's backend: domains, values, metrics, status."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from exp.check.stages import compose
from exp.extras.dashboard.dashboard import runs_below
from exp.start import fit
from exp.sweeps.space import Axis
from exp.tensorboard.hparams import declaration, declare, declared_above
from exp.tensorboard.logger import TensorBoardLogger

ENDS = Path(__file__).parents[1] / "sweeps" / "ends.py"
SMALL = ("model=mlp", "model.constants.width=8", "hooks=[]", "trainer.max_epochs=2", "launch.accelerator=cpu")


def page(directory: Path) -> tuple[Any, dict[str, Any]]:
    """Return the columns of a directory's page, and the session of each job by its number."""
    runs = EventMultiplexer()
    runs.AddRunsFromDirectory(str(directory))
    runs.Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(runs, str(directory))))
    columns = get_experiment.Handler(RequestContext(), context, "", api_pb2.GetExperimentRequest()).run()
    request = api_pb2.ListSessionGroupsRequest(slice_size=100, allowed_statuses=api_pb2.Status.values())
    found = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    return columns, {group.name.partition("/")[0]: group for group in found}


def domains(columns: Any) -> dict[str, Any]:
    found = {}
    for info in columns.hparam_infos:
        if info.HasField("domain_interval"):
            found[info.name] = (info.domain_interval.min_value, info.domain_interval.max_value)
        elif info.HasField("domain_discrete"):
            found[info.name] = list(info.domain_discrete)
    return found


def status(group: Any) -> str:
    (session,) = group.sessions
    return api_pb2.Status.Name(session.status).removeprefix("STATUS_")


def values(group: Any) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in group.hparams.items()}


def metrics(group: Any) -> dict[str, float]:
    return {value.name.tag: value.value for value in group.metric_values}


def test_values_of_an_axis_have_types():
    axis = Axis(key="+optimizer.lr", texts=("1e-3", "0.5", "2"))
    assert axis.domain() == [1e-3, 0.5, 2]
    assert Axis(key="model", texts=("mlp", "lenet")).domain() == ["mlp", "lenet"]
    assert Axis(key="data.drop_last", texts=("true", "false")).domain() == [True, False]
    assert Axis(key="hooks", texts=("[]", "[memory]", "null")).domain() == ["[]", "[memory]", "null"]
    assert Axis(key="seed", texts=("${data.batch_size}",)).domain() is None
    assert Axis(key="optimizer.lr", low=1e-5, high=0.1, is_interval=True).domain() == (1e-5, 0.1)


def test_a_job_repeats_the_declaration_of_its_sweep(tmp_path):
    found = declaration({"seed": [0, 1]}, ["loss/val"], domains={"seed": [0, 1]})
    declare(tmp_path, declaration({"seed": [0]}, []))
    declare(tmp_path, found)
    assert len(list(tmp_path.iterdir())) == 1, "a declaration must replace the earlier one"
    assert declared_above(tmp_path / "a" / "0").hparam_infos == found.hparam_infos
    assert declared_above(tmp_path.parent / "elsewhere") is None
    for name, params in (("0", {"seed": 0}), ("other", {"seed": 0, "model": "mlp"})):
        logger = TensorBoardLogger(directory=tmp_path / name)
        logger.log_hyperparams(params, metrics=["accuracy/val"])
        logger.finalize("success")
    assert domains(page(tmp_path / "0")[0]) == {"seed": [0, 1]}
    assert [info.name.tag for info in page(tmp_path / "0")[0].metric_infos] == ["loss/val"]
    assert [info.name.tag for info in page(tmp_path / "other")[0].metric_infos] == ["accuracy/val"]
    assert len(runs_below(tmp_path)) == 2, "the directory of the sweep must not be a run"
    (file,) = tmp_path.glob("events*")
    file.write_bytes(file.read_bytes()[:-20])
    assert declared_above(tmp_path / "0") is None


def test_hyperparameters_keep_their_types(tmp_path):
    logger = TensorBoardLogger(directory=tmp_path / "0")
    params = {"optimizer.lr": 0.01, "seed": 3, "data.drop_last": True, "precision.word": "bf16", "tags": ["a"]}
    logger.log_hyperparams(params, metrics=["loss/val", "accuracy/val"])
    logger.finalize("success")
    columns, jobs = page(tmp_path)
    assert values(jobs["0"]) == {**params, "tags": "['a']"}
    assert values(jobs["0"])["data.drop_last"] is True
    types = {info.name: api_pb2.DataType.Name(info.type).removeprefix("DATA_TYPE_") for info in columns.hparam_infos}
    assert types == {
        "optimizer.lr": "FLOAT64", "seed": "FLOAT64", "data.drop_last": "BOOL", "precision.word": "STRING",
        "tags": "STRING",
    }  # fmt: skip
    assert [info.name.tag for info in columns.metric_infos] == ["loss/val", "accuracy/val"]
    # The end of a stage does not end the session.
    assert status(jobs["0"]) == "UNKNOWN"
    logger.end("interrupted")
    assert status(page(tmp_path)[1]["0"]) == "FAILURE"


@pytest.mark.parametrize(
    ("listed", "shown"),
    [([1, 1.0], ["1", "1.0"]), ([True, 1], ["true", "1"]), ([1, 0.5], [1, 0.5]), ([2, "a"], ["2", "a"])],
)
def test_equal_numbers_of_different_types_differ(tmp_path, listed, shown):
    declare(tmp_path, declaration({"vars.n": listed}, ["loss/val"], domains={"vars.n": listed}))
    for job, value in enumerate(listed):
        logger = TensorBoardLogger(directory=tmp_path / str(job))
        logger.log_hyperparams({"vars.n": value}, metrics=["loss/val"])
        logger.finalize("success")
    columns, jobs = page(tmp_path)
    assert domains(columns)["vars.n"] == shown
    assert [values(jobs[str(job)])["vars.n"] for job in range(2)] == shown


def test_the_first_columns_are_the_best_value_and_its_step(tmp_path):
    """The learning rate grows by a factor of 30 per epoch, so that the last value is not the best one."""
    growing = "scheduler={_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 30.0, interval: epoch}"
    words = ("+hooks=samples", "+hooks=confusion", "trainer.max_epochs=3", "data.batch_size=256", "model=mlp")
    report = fit(compose([growing, *words, f"hydra.run.dir={tmp_path / '0'}"]))
    columns, jobs = page(tmp_path)
    assert [info.name.tag for info in columns.metric_infos][:3] == ["monitor/best", "monitor/best_step", "loss/val"]
    shown = metrics(jobs["0"])
    assert shown["monitor/best"] == pytest.approx(report.best["value"], rel=1e-6)
    assert shown["monitor/best_step"] == report.best["step"]
    assert shown["loss/val"] > 2 * shown["monitor/best"]
    assert values(jobs["0"])["hooks"] == "samples, confusion"


@pytest.mark.slow
def test_the_page_of_a_grid(commands, tmp_path):
    shutil.copy(ENDS, tmp_path)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "ends.yaml").write_text("# Ends\nends: {_target_: ends.Ends, how: well}\n")
    swept = ("callbacks.ends.how=well,raises,killed", "optimizer.lr=1e-3,0.01")
    done = commands.run("-m", "callbacks=[ends]", *SMALL, *swept, "hydra.sweep.dir=outputs/s", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    columns, jobs = page(tmp_path / "outputs" / "s")
    assert domains(columns) == {"callbacks.ends.how": ["well", "raises", "killed"], "optimizer.lr": [0.001, 0.01]}
    assert [info.name for info in columns.hparam_infos][:2] == ["callbacks.ends.how", "optimizer.lr"]
    assert [info.name.tag for info in columns.metric_infos] == [
        "monitor/best", "monitor/best_step", "loss/val", "accuracy/val", "accuracy/test",
    ]  # fmt: skip
    assert sorted(jobs) == ["0", "1", "2", "3", "4", "5"]
    for number, group in enumerate(jobs[str(number)] for number in range(6)):
        how = ("well", "raises", "killed")[number // 2]
        assert values(group)["callbacks.ends.how"] == how
        assert values(group)["optimizer.lr"] == (0.001, 0.01)[number % 2]
        assert status(group) == {"well": "SUCCESS", "raises": "FAILURE", "killed": "UNKNOWN"}[how]
        expected = {"monitor/best", "monitor/best_step", "loss/val", "accuracy/val", "accuracy/test"}
        assert set(metrics(group)) == (expected if how == "well" else set())


@pytest.mark.slow
def test_the_page_of_a_search(commands, tmp_path):
    swept = ("optimizer.lr=tag(log,interval(1e-5,1e-1))", "data.batch_size=int(interval(32,256))", "seed=0,1")
    search = ("sweep.sampler=random", "sweep.trials=8", "sweep.pruner=median", "sweep.jobs=1", "trainer.max_epochs=4")
    done = commands.run("-m", *SMALL, *search, *swept, "test=false", "hydra.sweep.dir=outputs/s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    columns, jobs = page(tmp_path / "outputs" / "s")
    assert domains(columns) == {"optimizer.lr": (1e-5, 1e-1), "data.batch_size": (32, 256), "seed": [0, 1]}
    assert "sweep/pruned" in [info.name.tag for info in columns.metric_infos]
    lines = (tmp_path / "outputs" / "s" / "table.csv").read_text().splitlines()[1:]
    ends = {line.split(",")[0]: line.split(",")[1] for line in lines}
    assert set(ends.values()) == {"completed", "pruned"}
    assert jobs.keys() == ends.keys()
    for number, group in jobs.items():
        assert status(group) == "SUCCESS"
        assert metrics(group)["sweep/pruned"] == (ends[number] == "pruned")
        assert 1e-5 <= values(group)["optimizer.lr"] <= 1e-1
