"""The bookkeeping of a sweep with simulated training: started jobs, their order, and kept files."""

import csv
import io
import math
import os
import random
import resource
import signal
import sys
import time
import types
from pathlib import Path
from typing import ClassVar

import optuna
import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from exp.config.compose import composition_of
from exp.config.frozen import COMPOSITION
from exp.engine.trial_record import STUDY, open_journal
from exp.errors import ConfigError, ErrorDetails, ExpError, Interrupted, RunError
from exp.run_report import Report, write_report
from exp.sweeps.executor import End
from exp.sweeps.jobs import Jobs, unpack
from exp.sweeps.sweep import compose_sweep, sweep

TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text())
SWEEP = Path("outputs/s")
HERE = "hydra.sweep.dir=outputs/s"
RESUME = "sweep.resume=outputs/s"
SEARCH = ("optimizer.lr=interval(0.001,0.1)", "sweep.trials=2", HERE)


class Runs:
    """Executor that simulates training: it makes the run directory and returns a loss that depends on the seed.

    Args:
        seconds: duration of each job.
        is_kept: if true, a job writes config and report, so that a later sweep finds it finished.
    """

    slots = 1

    def __init__(self, *, seconds=0.0, is_kept=False, stacks=False):
        self.seconds, self.is_kept, self.stacks = seconds, is_kept, stacks
        self.configs = []
        self._ends = []

    def start(self, jobs):
        for job in jobs:
            config = job.new_config()
            self.configs.append(config)
            try:
                self._ends.append(End(job=job.number, outcome=self._trained(config)))
            except ExpError as error:
                self._ends.append(End(job=job.number, outcome=error))

    def ends(self, timeout):
        ends, self._ends = self._ends, []
        return ends

    def end(self, signum):
        pass

    def close(self):
        pass

    def _trained(self, config):
        time.sleep(self.seconds)
        directory = Path(config[COMPOSITION].directory)
        directory.mkdir(exist_ok=True)
        if config.seed == 66:
            raise RunError("the loss is nan at step 3\nand more")
        if config.seed == 68:
            return Report(status="failed", directory=str(directory), error={"type": "X", "message": "reported"})
        if config.seed == 99:
            raise Interrupted(signum=15, checkpoint="last.ckpt")
        if config.seed == 98:
            signal.raise_signal(signal.SIGINT)
            raise Interrupted(signum=signal.SIGINT, checkpoint=None)
        if config.seed == 97:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        value = config.seed / 10
        report = Report(
            status="completed",
            directory=str(directory),
            metrics={"loss/val": value, "accuracy/val": 1 - value},
            best={"metric": "loss/val", "value": value, "step": 3, "checkpoint": "best.ckpt"},
        )
        if self.is_kept:
            (directory / "config.yaml").touch()
            write_report(report)
        return report


def valid(configs):
    error = ConfigError([ErrorDetails(key="seed", got="13", expected="another number", source="command line")])
    return [error if unpack(config).seed == 13 else None for config in configs]


def run_sweep(*overrides: str, **stand_in) -> tuple[int, Runs]:
    runs = Runs(**stand_in)
    return sweep(compose_sweep(overrides), executor=runs, check=valid), runs


def seeds(runs: Runs) -> list[int]:
    return [config.seed for config in runs.configs]


def directories() -> list[str]:
    return sorted(path.name for path in SWEEP.iterdir() if path.is_dir())


def is_untouched() -> bool:
    return list(Path.cwd().iterdir()) == []


def test_every_combination_runs_in_its_own_directory(capsys, table):
    status, runs = run_sweep("optimizer.lr=0.1,0.2", "seed=3,1", "hooks=[memory]", "+precision=bf16", "name=n${seed}")
    assert status == 0
    assert [(config.optimizer.lr, config.seed) for config in runs.configs] == [(0.1, 3), (0.1, 1), (0.2, 3), (0.2, 1)]
    assert [config.name for config in runs.configs] == ["n3", "n1", "n3", "n1"]
    assert all(list(config.hooks) == ["memory"] and config.precision.word == "bf16" for config in runs.configs)
    (directory,) = Path("outputs").glob("*/sweeps/*/*")
    assert [config[COMPOSITION].directory for config in runs.configs] == [
        str(directory.absolute() / str(number)) for number in range(4)
    ]
    assert "best       job 1, loss/val 0.1  optimizer.lr=0.1 seed=1" in capsys.readouterr().out
    rows = table()
    assert [row["seed"] for row in rows] == ["3", "1", "3", "1"]
    assert (rows[1]["best loss/val"], rows[1]["accuracy/val"]) == ("0.1", "0.9")
    assert [row["directory"] for row in rows] == ["0", "1", "2", "3"]
    assert "precision" not in rows[0]
    assert "Best: job 1, loss/val 0.1" in (directory / "table.md").read_text()


def test_groups_and_entries_can_be_swept(table):
    _, runs = run_sweep("seed=2", "+precision=bf16,fp16", "hooks=[memory],[gradients,throughput]")
    assert [sorted(config.hooks) for config in runs.configs] == [["memory"], ["gradients", "throughput"]] * 2
    assert [row["precision"] for row in table()] == ["bf16", "bf16", "fp16", "fp16"]


def test_a_swept_key_given_twice_keeps_its_column(table):
    run_sweep("++optimizer.lr=0.5", "optimizer.lr=0.1,0.2", "seed=3,1", "sweep.repeat_over=seed")
    pairs = [(row["optimizer.lr"], row["seed"]) for row in table()]
    assert pairs == [("0.1", "3"), ("0.1", "1"), ("0.2", "3"), ("0.2", "1")]


def test_a_swept_interpolation_is_shown_as_typed(table):
    run_sweep("optimizer.lr=${seed},2", "seed=1,3", "name=a\\,b")
    assert [row["optimizer.lr"] for row in table()] == ["${seed}", "${seed}", "2", "2"]


def test_a_failed_job_does_not_end_the_sweep(capsys, table):
    status, runs = run_sweep("seed=66,68,99,5", "optimizer.lr=0.1")
    assert status == 1
    assert seeds(runs) == [66, 68, 99, 5]
    rows = table()
    assert [row["status"] for row in rows] == ["failed", "failed", "interrupted", "completed"]
    assert [row["error"] for row in rows[:2]] == ["the loss is nan at step 3", "reported"]
    assert [row["directory"] for row in rows][::3] == ["0", "3"]
    assert "optimizer.lr" not in rows[0]
    shown = capsys.readouterr().out
    assert "best       job 3" in shown
    assert "job 3  completed  loss/val " in shown


def test_a_signal_ends_the_sweep_with_its_table(capsys, table):
    status, runs = run_sweep("seed=1,98,2", HERE)
    assert status == 130
    assert seeds(runs) == [1, 98]
    rows = [(row["seed"], row["status"], row["best loss/val"]) for row in table()]
    assert rows == [("1", "completed", "0.1"), ("98", "interrupted", ""), ("2", "not started", "")]
    shown = capsys.readouterr().out
    assert "best       job 0" in shown
    assert shown.splitlines()[-1] == "resume     python -m exp.train -m seed=1,98,2 sweep.resume=outputs/s"


def test_a_full_disk_ends_the_sweep_with_one_line():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RunError, match=r"File too large\. .*Resume it with sweep\.resume=outputs/s"):
            run_sweep("seed=1,97,2", HERE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_all_jobs_are_checked_before_the_first_starts():
    runs = Runs()
    with pytest.raises(ConfigError) as caught:
        sweep(compose_sweep(["seed=1,13,2", "optimizer.lr=0.1,0.2"]), executor=runs, check=valid)
    assert runs.configs == []
    (error,) = caught.value.errors
    assert error.source == "jobs 2, 3, command line"
    assert is_untouched()


@pytest.mark.parametrize(("overrides", "words"), TABLES["sweeps"])
def test_a_wrong_sweep_is_refused_and_leaves_nothing(overrides, words):
    with pytest.raises(ConfigError) as caught:
        run_sweep(*overrides.split())
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert len(text.splitlines()) <= 12
    assert is_untouched()


def test_a_sweep_directory_does_not_follow_a_swept_name():
    _, runs = run_sweep("name=a,b", "hydra.sweep.subdir=seed_${seed}_${name}")
    paths = [Path(config[COMPOSITION].directory) for config in runs.configs]
    assert len({path.parent for path in paths}) == 1
    assert [path.name for path in paths] == ["seed_0_a", "seed_0_b"]


def test_jobs_are_named_by_their_own_overrides():
    added = ("+hooks=memory", "+hooks=nan_guard", "+precision=bf16")
    subdir = "hydra.sweep.subdir=${hydra.job.override_dirname}"
    _, runs = run_sweep("seed=1,2", "optimizer.lr=0.1,0.01", *added, subdir, HERE)
    ends = [f"optimizer.lr={lr},seed={seed}" for lr in ("0.01", "0.1") for seed in (1, 2)]
    assert directories() == [",".join([*added, end]) for end in ends]
    assert {"memory", "nan_guard"} <= set(runs.configs[0].hooks)


def test_a_swept_option_does_not_set_the_sweep():
    Path("conf/experiment").mkdir(parents=True)
    files = {
        "slow": "hydra: {sweeper: {params: {optimizer.lr: '0.01,0.02'}}}",
        "few": "defaults: [slow]\nsweep: {trials: 2}",
        "plain": "seed: 3",
        "best": "{monitor: accuracy/val, mode: max}",
    }
    for name, text in files.items():
        Path(f"conf/experiment/{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    lr, trials = "hydra.sweeper.params.optimizer.lr", "sweep.trials"
    for names, keys in (("slow,plain", [lr]), ("few,slow", [trials, lr]), ("few,plain sweep.trials=2", [lr])):
        with pytest.raises(ConfigError) as caught:
            run_sweep("sweep.sampler=random", *f"experiment={names}".split())
        assert [error.key for error in caught.value.errors] == keys
    assert caught.value.errors[0].fix == "Start one sweep for each option"
    assert "conf/experiment/slow.yaml, line 2" in caught.value.errors[0].source
    with pytest.raises(ConfigError, match="monitor: accuracy/val with a swept option of this job; expected 'loss/val'"):
        run_sweep("sweep.sampler=random", "experiment=best,plain")
    assert len(run_sweep("experiment=best,plain")[1].configs) == 2
    assert len(run_sweep("experiment=slow")[1].configs) == 2


def test_a_key_of_some_swept_options_names_its_fix():
    _, runs = run_sweep("model=mlp,parameter_dict", "model.constants.width=8")
    assert [config.model.constants.width for config in runs.configs] == [8, 8]
    for sign in ("", "+"):
        with pytest.raises(ConfigError) as caught:
            run_sweep("model=mlp,lenet", f"{sign}model.constants.width=8")
        (error,) = caught.value.errors
        assert error.fix == "Write ++model.constants.width=8, which sets or adds it"
    _, runs = run_sweep("model=mlp,lenet", "++model.constants.width=8")
    assert [config.model.constants.width for config in runs.configs] == [8, 8]


def test_two_sweeps_never_share_a_directory():
    for _ in range(3):
        run_sweep("seed=1", "hydra.sweep.dir=outputs/mine")
    assert sorted(path.name for path in Path("outputs").iterdir()) == ["mine", "mine-2", "mine-3"]


def test_batches_of_a_hydra_sweeper_are_one_sweep(table):
    status, runs = run_sweep("seed=1,66,3,13", "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2")
    assert status == 1
    assert seeds(runs) == [1, 66, 3]
    rows = table()
    assert [row["job"] for row in rows] == ["0", "1", "2", "3"]
    assert "seed: 13" in rows[3]["error"]


class RandomSweeper(Sweeper):
    """Sweeper of a user that draws a learning rate for each trial, and keeps the value of each job."""

    __module__ = "hydra_plugins.own"
    values: ClassVar[list[float]] = []

    def setup(self, *, hydra_context, task_function, config):
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        self.values.clear()
        for trial, seed in enumerate((1, 66, 3)):
            batch = [[*arguments, f"optimizer.lr={random.uniform(0.001, 0.1)}", f"seed={seed}"]]
            self.validate_batch_is_legal(batch)
            (result,) = self.launcher.launch(batch, initial_job_idx=trial)
            self.values.append(result.return_value)


@pytest.fixture
def own_sweeper(monkeypatch):
    """Make the option hydra/sweeper=own available."""
    module = types.ModuleType("hydra_plugins.own")
    module.RandomSweeper = RandomSweeper
    Plugins.instance().register(RandomSweeper)
    store = ConfigStore.instance()
    node = {"_target_": "hydra_plugins.own.RandomSweeper"}
    store.store(group="hydra/sweeper", name="own", node=node, provider="own")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    store.repo["hydra"]["sweeper"].pop("own.yaml")


def test_a_users_sweeper_gets_the_value_of_each_job(own_sweeper, table):
    status, runs = run_sweep("hydra/sweeper=own")
    assert status == 1
    ran = [config.optimizer.lr for config in runs.configs]
    assert len(set(ran)) == 3
    assert RandomSweeper.values == [0.1, pytest.approx(math.nan, nan_ok=True), 0.3]
    assert [float(row["optimizer.lr"]) for row in table()] == pytest.approx(ran)
    assert [row["status"] for row in table()] == ["completed", "failed", "completed"]


def test_a_sweeper_cannot_allow_packages(tmp_path):
    status, runs = run_sweep("seed=0,1", "security.allow=[json,csv]")
    assert status == 0
    assert [list(config.security.allow) for config in runs.configs] == [["json", "csv"]] * 2
    master = composition_of(["seed=0,1", "security.allow=[json]"], multirun=True)
    jobs = Jobs(master=master, directory=tmp_path / "sweep", check=valid)
    values = ("[json]", "[subprocess]", "[json,os]")
    right, *wrong = [jobs.compose(0, ["seed=0", f"security.allow={value}"]) for value in values]
    assert right.error is None
    assert [job.error.errors[0].key for job in wrong] == ["security.allow"] * 2


def test_a_job_without_a_frozen_config_starts_again(table):
    run_sweep("seed=1,2", HERE)
    # A kill during a write leaves these files.
    for name in ("output.log", ".config.yaml.7.7.partial"):
        (SWEEP / "1" / name).touch()
    status, runs = run_sweep("seed=1,2", RESUME)
    assert (status, seeds(runs)) == (0, [1, 2])
    assert [row["directory"] for row in table()] == ["0", "1"] == directories()


def test_a_wider_grid_of_a_moved_sweep_runs_new_jobs():
    place = "+vars.log=${hydra:runtime.output_dir}/log"
    run_sweep("seed=1,2", "optimizer.lr=0.1", place, HERE, is_kept=True)
    SWEEP.rename("moved")
    wider = ("seed=3,2,1", "optimizer.lr=0.1", place, "name=other", "sweep.jobs=2", "sweep.timeout=1h")
    status, runs = run_sweep(*wider, "sweep.resume=moved")
    assert (status, seeds(runs)) == (0, [3])
    (path,) = Path.cwd().rglob("table.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["job"], row["seed"], row["directory"]) for row in rows] == [
        ("0", "1", "0"), ("1", "2", "1"), ("2", "3", "2"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{}", '{"status":"completed","directory":"x","metrics":3}'])
def test_a_job_with_a_damaged_report_runs_again(text, capsys, table):
    run_sweep("seed=1,2", HERE, is_kept=True)
    (SWEEP / "1" / "report.json").write_text(text)
    status, runs = run_sweep("seed=1,2", RESUME)
    assert (status, seeds(runs)) == (0, [2])
    warning = capsys.readouterr().err
    assert "1/report.json is damaged: " in warning
    assert "Job 1 therefore resumes from the last checkpoint" in warning
    assert [row["directory"] for row in table()] == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sweep.json", b'{"overrides": 3, "search": null}'),
        ("sweep.json", b"\0"),
        ("jobs.jsonl", b"[1]\n"),
        ("jobs.jsonl", b'{"job": 0, "identity": "x", "directory": "../other"}\n'),
        ("sweep.journal", b"\xff\xfe\n"),
        ("sweep.journal", b"[]\n"),
    ],
)
def test_a_damaged_file_of_a_sweep_is_refused(name, content):
    overrides = SEARCH[:2] if name == "sweep.journal" else ("seed=1,2",)
    run_sweep(*overrides, HERE)
    (SWEEP / name).write_bytes(content)
    words = rf"sweep\.resume: outputs/s/{name}.*; expected .*\. Restore .*or start a new sweep"
    with pytest.raises(ConfigError, match=words):
        run_sweep(*overrides, RESUME)


def test_a_sweep_is_not_resumed_from_elsewhere(tmp_path, monkeypatch):
    run_sweep("seed=1", HERE)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"sweep\.resume: .*/outputs/s; expected a directory below the working"):
        run_sweep("seed=1", "sweep.resume=../outputs/s")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*SEARCH, "sweep.timeout=0.2"], "ended by sweep.timeout=0.2: 1 of 2 jobs were run"),
        (["seed=66,1,2", "sweep.max_failures=1"], "ended by sweep.max_failures=1: 1 of 3 jobs were run"),
    ],
)
def test_a_sweep_that_ends_early_says_why(overrides, words, capsys):
    run_sweep(*overrides, seconds=0.25)
    assert words in capsys.readouterr().out.splitlines()[-1]


def test_a_search_without_time_for_a_job_fails():
    with pytest.raises(RunError, match=r"the sweep was ended by sweep\.timeout=1e-09: 0 of 2 jobs were run"):
        run_sweep(*SEARCH, "sweep.timeout=1e-9")
    assert is_untouched()


def test_resume_auto_starts_a_first_sweep(capsys):
    for _ in range(2):
        status, _ = run_sweep("seed=1", "sweep.resume=auto")
        assert status == 0
    shown = capsys.readouterr().out
    assert shown.count("sweep.resume=auto: there is no sweep in outputs/train/sweeps, so a new sweep starts") == 1
    assert len(list(Path("outputs").rglob("table.csv"))) == 1


def test_a_search_resumes_only_as_the_same_search():
    run_sweep(*SEARCH, "name=one")
    status, _ = run_sweep(*SEARCH, "name=two", "sweep.trials=3", RESUME)
    assert status == 0
    for overrides, words in {
        ("monitor=accuracy/val", "mode=max"): "that differs in objectives",
        ("trainer.max_epochs=3",): "that differs in config",
        ("seed=4",): "that differs in seed",
        ("data.batch_size=8,16",): "that differs in axes",
    }.items():
        with pytest.raises(ConfigError, match=rf"sweep\.resume: a search {words}.*; expected the same search; only"):
            run_sweep(*SEARCH, *overrides, RESUME)


@pytest.mark.parametrize(
    ("overrides", "directions"),
    [
        (["sweep.monitor=loss/val"], {"loss/val": "MINIMIZE"}),
        (["sweep.monitor=accuracy/val", "monitor=accuracy/val", "mode=max"], {"accuracy/val": "MAXIMIZE"}),
        (
            ["sweep.monitor={loss/val:min,throughput/step_ms:min}"],
            {"loss/val": "MINIMIZE", "throughput/step_ms": "MINIMIZE"},
        ),
        (["sweep.monitor={accuracy/test:max}", "test=true"], {"accuracy/test": "MAXIMIZE"}),
    ],
)
def test_a_search_optimizes_each_tag_in_its_direction(overrides, directions):
    status, _ = run_sweep(*SEARCH, *overrides)
    study = optuna.load_study(study_name=STUDY, storage=open_journal(SWEEP))
    assert status == 0
    assert dict(zip(study.metric_names, [one.name for one in study.directions], strict=True)) == directions


@pytest.mark.parametrize(("overrides", "message"), TABLES["searches"])
def test_a_wrong_search_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_sweep(*SEARCH, *overrides.split(), "sweep.dry_run=true")


@pytest.mark.parametrize(("overrides", "stacks"), [(["seed=1,2"], True), (SEARCH, True), (["seed=1,2,3,4"], False)])
def test_a_stack_that_is_impossible_is_explained(overrides, stacks, capsys):
    run_sweep(*overrides, "sweep.stack=true", stacks=stacks)
    assert capsys.readouterr().out.count("sweep.stack=true: jobs run in separate processes, because fewer than 4") == 1


def test_a_running_sweep_refuses_another_one():
    refused = []

    def check(configs):
        with pytest.raises(ConfigError, match="whose sweep is still running") as caught:
            run_sweep(*SEARCH, RESUME)
        refused.append(caught.value)
        return [None for _ in configs]

    # The resume is refused before and after the search writes its settings.
    assert sweep(compose_sweep(SEARCH), executor=Runs(), check=check) == 0
    assert len(refused) == 3


class Terminal(io.StringIO):
    """Standard output that raises a signal when the best job is printed."""

    def write(self, text):
        if text.startswith("best"):
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


def test_a_signal_while_the_table_is_shown_keeps_the_table(monkeypatch, table):
    monkeypatch.setattr(sys, "stdout", Terminal())
    status, _ = run_sweep("seed=1,2", HERE)
    assert status == 128 + signal.SIGTERM
    assert [row["status"] for row in table()] == ["completed"] * 2


@pytest.mark.parametrize(("overrides", "signum"), [(("seed=range(0,50)",), signal.SIGINT), (SEARCH, signal.SIGTERM)])
def test_a_signal_while_jobs_are_composed_leaves_nothing(overrides, signum, monkeypatch, capsys):
    composed, numbers = Jobs.compose, []

    def interrupted(self, number, overrides):
        numbers.append(number)
        if number == 1:
            os.kill(os.getpid(), signum)
            os.kill(os.getpid(), signum)
        return composed(self, number, overrides)

    monkeypatch.setattr(Jobs, "compose", interrupted)
    status, runs = run_sweep(*overrides)
    assert status == 128 + signum
    assert (numbers, runs.configs) == ([0, 1], [])
    assert is_untouched()
    assert f"interrupted by signal {signum:d}" in capsys.readouterr().err


def test_a_search_of_a_million_combinations_starts_at_once():
    composed = []

    def check(configs):
        composed.append(len(configs))
        return [None for _ in configs]

    runs = Runs()
    grid = ("seed=range(0,1000)", "data.batch_size=range(1,1001)", "sweep.sampler=random", "sweep.trials=2")
    assert sweep(compose_sweep(grid), executor=runs, check=check) == 0
    assert (composed, len(runs.configs)) == ([3, 2], 2)
