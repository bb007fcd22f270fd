"""The bookkeeping of a sweep, with a run function in the place of training: which jobs, in what order, what is kept."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from exp.check.__main__ import main as check
from exp.config.compose import composition_of
from exp.config.freeze import COMPOSITION
from exp.engine.trial_record import STUDY, opened
from exp.errors import ConfigError, ExpError, Fault, Interrupted, RunError
from exp.run_report import Report, write_report
from exp.sweeps.executor import End
from exp.sweeps.jobs import Jobs
from exp.sweeps.sweep import compose_sweep, sweep

SEARCH = ("optimizer.lr=interval(0.001,0.1)", "sweep.trials=2", "hydra.sweep.dir=outputs/s")


class Runs:
    """Stands for training: makes the directory, and gives the seed for a loss."""

    slots, stacks = 1, False

    def __init__(self):
        self.configs = []
        self._ends = []

    def start(self, work):
        for number, config in zip(work.jobs, work.configs, strict=True):
            self.configs.append(config)
            try:
                self._ends.append(End(job=number, outcome=self._trained(config)))
            except ExpError as error:
                self._ends.append(End(job=number, outcome=error))

    def ends(self, timeout):
        ends, self._ends = self._ends, []
        return ends

    def end(self, signum):
        pass

    def close(self):
        pass

    def _trained(self, config):
        directory = Path(config[COMPOSITION].directory)
        directory.mkdir()
        if config.seed == 66:
            raise RunError("the loss is nan at step 3\nand more")
        if config.seed == 67:
            raise RunError("ZeroDivisionError: a bug in a layer")
        if config.seed == 68:
            return Report(status="failed", directory=str(directory), error={"type": "X", "message": "told"})
        if config.seed == 99:
            raise Interrupted(signum=15, checkpoint="last.ckpt")
        if config.seed == 98:
            signal.raise_signal(signal.SIGINT)
            raise Interrupted(signum=signal.SIGINT, checkpoint=None)
        value = config.seed / 10
        return Report(
            status="completed",
            directory=str(directory),
            metrics={"loss/val": value, "accuracy/val": 1 - value},
            best={"metric": "loss/val", "value": value, "step": 3, "checkpoint": "best.ckpt"},
        )


def valid(configs):
    error = ConfigError([Fault(key="seed", got="13", expected="another number", source="command line")])
    return [error if config.seed == 13 else None for config in configs]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_sweep(*overrides: str) -> tuple[int, Runs]:
    runs = Runs()
    return sweep(compose_sweep(overrides), executor=runs, check=valid), runs


def sweep_directories() -> list[Path]:
    return sorted(path.parent for path in Path("outputs").rglob("table.csv"))


def rows() -> list[dict[str, str]]:
    (directory,) = sweep_directories()
    return list(csv.DictReader((directory / "table.csv").read_text().splitlines()))


def test_every_combination_runs_once_in_its_own_directory_with_its_own_config(capsys):
    status, runs = run_sweep("optimizer.lr=0.1,0.2", "seed=3,1", "hooks=[memory]", "precision=bf16")
    assert status == 0
    assert [(config.optimizer.lr, config.seed) for config in runs.configs] == [(0.1, 3), (0.1, 1), (0.2, 3), (0.2, 1)]
    assert all(list(config.hooks) == ["memory"] and config.precision.word == "bf16" for config in runs.configs)
    (directory,) = sweep_directories()
    assert [config[COMPOSITION].directory for config in runs.configs] == [
        str(directory.absolute() / str(number)) for number in range(4)
    ]
    assert "best       job 1, loss/val 0.1  optimizer.lr=0.1 seed=1" in capsys.readouterr().out


def test_the_table_holds_what_differs_and_what_came_of_it():
    run_sweep("optimizer.lr=0.1", "seed=2,1", "+precision=bf16,fp16")
    table = rows()
    assert [row["seed"] for row in table] == ["2", "2", "1", "1"]
    assert [row["precision"] for row in table] == ["bf16", "fp16", "bf16", "fp16"]
    assert "optimizer.lr" not in table[0]
    assert table[2]["best loss/val"] == "0.1"
    assert table[2]["accuracy/val"] == "0.9"
    assert [row["directory"] for row in table] == ["0", "1", "2", "3"]
    page = (sweep_directories()[0] / "table.md").read_text()
    assert "Best: job 2, loss/val 0.1" in page


@pytest.mark.parametrize("before", ["optimizer.lr=0.5", "++optimizer.lr=0.5", "optimizer.lr=0.5,0.7"])
def test_a_swept_key_that_was_typed_before_has_its_column_and_no_repeats_of_others(before):
    run_sweep(before, "optimizer.lr=0.1,0.2", "seed=3,1", "sweep.repeat_over=seed")
    table = rows()
    assert [(row["optimizer.lr"], row["seed"]) for row in table] == [
        ("0.1", "3"), ("0.1", "1"), ("0.2", "3"), ("0.2", "1"),
    ]  # fmt: skip
    assert {row["n"] for row in table} == {"2"}


def test_a_failing_job_is_told_and_the_sweep_goes_on(capsys):
    status, runs = run_sweep("seed=66,67,68,99,5")
    assert status == 1
    assert [config.seed for config in runs.configs] == [66, 67, 68, 99, 5]
    table = rows()
    assert [row["status"] for row in table] == ["failed", "failed", "failed", "interrupted", "completed"]
    assert [row["error"] for row in table[:3]] == [
        "the loss is nan at step 3", "ZeroDivisionError: a bug in a layer", "told",
    ]  # fmt: skip
    shown = capsys.readouterr().out
    assert "job 1  failed  seed=67  " in shown
    assert "best       job 4" in shown


@pytest.mark.parametrize("launcher", ["exp", "basic"])
def test_a_signal_ends_the_sweep_with_its_table_written(launcher, capsys):
    done, runs = run_sweep("seed=1,98,2", f"hydra/launcher={launcher}")
    assert done == 130
    assert len(runs.configs) == 2
    table, shown = rows(), capsys.readouterr().out
    # A launcher of Hydra's own knows alone what it has not started.
    expected = [("1", "completed"), ("98", "interrupted"), ("2", "not started")]
    assert [(row["seed"], row["status"]) for row in table] == expected[: 3 if launcher == "exp" else 2]
    assert [row["best loss/val"] for row in table[:3]] == ["0.1", "", ""][: len(table)]
    assert ("not started: job 2" in shown) == (launcher == "exp")
    assert f"{len(table)} jobs" in shown
    assert "best       job 0" in shown


def test_every_job_is_checked_before_the_first_starts_and_nothing_stays_behind():
    runs = Runs()
    with pytest.raises(ConfigError) as caught:
        sweep(compose_sweep(["seed=1,13,2", "optimizer.lr=0.1,0.2"]), executor=runs, check=valid)
    assert runs.configs == []
    (fault,) = caught.value.faults
    assert fault.source == "jobs 2, 3, command line"
    assert list(Path.cwd().iterdir()) == []


def test_the_faults_of_different_jobs_are_told_with_their_overrides():
    with pytest.raises(ConfigError) as caught:
        sweep(compose_sweep(["seed=1,13", "model.layers.nope.x=1,2"]), executor=Runs(), check=valid)
    text = str(caught.value)
    assert "model.layers.nope.x" in text
    assert len(text.splitlines()) <= 12
    with pytest.raises(ConfigError) as caught:
        sweep(compose_sweep(["seed=1,13"]), executor=Runs(), check=valid)
    assert "job 1 (seed=13)" in str(caught.value)


def test_a_fault_of_the_whole_command_is_told_once_and_makes_no_directory():
    with pytest.raises(ConfigError) as caught:
        sweep(compose_sweep(["seed=1,2", "optimzer.lr=3", "optimizer=adamw,adamm"]), executor=Runs(), check=valid)
    assert [fault.key for fault in caught.value.faults] == ["optimzer.lr", "optimizer"]
    assert list(Path.cwd().iterdir()) == []


def test_the_sweep_directory_is_fixed_although_the_name_is_swept():
    _, runs = run_sweep("name=a,b", "seed=1")
    (directory,) = sweep_directories()
    assert {str(Path(config[COMPOSITION].directory).parent) for config in runs.configs} == {str(directory.absolute())}


def test_two_sweeps_never_share_a_directory():
    for _ in range(3):
        run_sweep("seed=1", "hydra.sweep.dir=outputs/mine")
    assert [path.name for path in sweep_directories()] == ["mine", "mine-2", "mine-3"]


def test_an_interpolation_is_each_jobs_own():
    _, runs = run_sweep("name=n${seed}", "seed=1,2")
    assert [config.name for config in runs.configs] == ["n1", "n2"]


def test_the_subdirectory_may_be_named_by_the_overrides_but_stays_inside():
    _, runs = run_sweep("seed=1,2", "hydra.sweep.subdir=seed_${seed}")
    assert [Path(config[COMPOSITION].directory).name for config in runs.configs] == ["seed_1", "seed_2"]
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.subdir"):
        run_sweep("seed=1,2", "hydra.sweep.subdir=../x")


def test_a_sweep_of_one_job_and_a_swept_group_of_entries():
    status, runs = run_sweep("seed=4")
    assert (status, len(runs.configs)) == (0, 1)
    _, runs = run_sweep("hooks=[memory],[gradients,throughput]", "hydra.sweep.dir=outputs/other")
    assert [sorted(config.hooks) for config in runs.configs] == [["memory"], ["gradients", "throughput"]]


def test_batches_of_the_sweeper_are_one_sweep():
    status, runs = run_sweep("seed=1,66,3,13", "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2")
    assert status == 1
    assert [config.seed for config in runs.configs] == [1, 66, 3]
    table = rows()
    assert [row["job"] for row in table] == ["0", "1", "2", "3"]
    assert "seed: 13" in table[3]["error"]


def test_a_sweep_kind_that_the_sweeper_does_not_know_is_a_fault():
    with pytest.raises(ConfigError, match="INTERVAL"):
        run_sweep("optimizer.lr=interval(0,1)", "hydra/sweeper=basic")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=range(0,100000000)"], r"seed: 100,000,000 values, which makes 100,000,000 jobs; expected 10,000 jobs"),
        (["seed=range(0,1000)", "optimizer.lr=1e-1,1e-2", "train=true,false", "data.batch_size=1,2,3"], r"12,000 jobs"),
        (["optimizer.lr=range(0,1,1e-9)"], r"optimizer.lr: 1,000,000,000 values"),
        (
            ["seed=range(0,100000000)", "sweep.sampler=random"],
            r"seed: 100,000,000 values; expected 10,000 at most. Draw .* seed=interval\(0,1000000\)",
        ),
        (["seed=range(0)"], r"seed: no value to sweep over, so no job; expected one value or more"),
        (["seed=1,2", "data.batch_size=range(8,4)"], r"data.batch_size: no value to sweep over"),
        (["model=glob(zz*)"], r"model: no value to sweep over"),
    ],
)
def test_a_sweep_of_nothing_or_of_too_much_is_a_fault_and_never_listed(overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_sweep(*overrides)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.resume=true", r"sweep\.resume: true; expected auto, a sweep's directory, or null"),
        ("sweep.resume=3", r"sweep\.resume: 3; expected auto, a sweep's directory"),
        ("sweep.resume=[a]", r"sweep\.resume: \['a'\]; expected auto, a sweep's directory"),
        ("sweep.resume=", r"sweep\.resume: ''; expected auto, a sweep's directory"),
        ("sweep.resume=''", r"sweep\.resume: ''; expected auto, a sweep's directory"),
        ("sweep.when={optimizer.lr:sgd}", r"sweep\.when: .*expected a mapping of names to a mapping"),
        ("sweep.when=3", r"sweep\.when"),
        ("sweep.trial=3", r"sweep\.trial: 3; .* Did you mean sweep\.trials=3\?"),
        ("sweep.trials=1.5", r"sweep\.trials: 1\.5; expected an integer, 1 or more"),
        ("sweep.jobs=${nowhere}", r"sweep\.jobs"),
        ("sweep.retry_failed=true", r"sweep\.retry_failed: true, without sweep\.resume; .*Add sweep\.resume=auto"),
        ("sweep.sampler=tpee", r"sweep\.sampler: 'tpee'; .*Did you mean tpe\?"),
    ],
)
def test_a_setting_that_no_sweep_can_have_is_a_fault_of_the_command_line_before_anything_is_looked_for(
    override, message
):
    with pytest.raises(ConfigError, match=message) as caught:
        run_sweep("optimizer.lr=0.1,0.2", override)
    assert [fault.source for fault in caught.value.faults] == ["command line"]
    assert list(Path.cwd().iterdir()) == []


def test_hydras_basic_launcher_runs_the_jobs_and_keeps_the_books_too(capsys):
    status, runs = run_sweep("seed=1,66,67,2", "optimizer.lr=0.1", "hydra/launcher=basic")
    assert status == 1
    assert [config.seed for config in runs.configs] == [1, 66, 67, 2]
    table = rows()
    assert [row["status"] for row in table] == ["completed", "failed", "failed", "completed"]
    assert [row["seed"] for row in table] == ["1", "66", "67", "2"]
    assert [row["directory"] for row in table][::3] == ["0", "3"]
    assert "optimizer.lr" not in table[0]
    assert "best       job 0" in capsys.readouterr().out


PLUGIN = '''
import random
from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper


class RandomSweeper(Sweeper):
    """Draws a learning rate for each trial, a batch at a time, and looks at what comes back."""

    def __init__(self, trials):
        self.trials = trials

    def setup(self, *, hydra_context, task_function, config):
        from hydra.core.plugins import Plugins

        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        values = []
        for trial in range(self.trials):
            batch = [[*arguments, f"optimizer.lr={random.uniform(0.001, 0.1)}"]]
            self.validate_batch_is_legal(batch)
            (result,) = self.launcher.launch(batch, initial_job_idx=trial)
            values.append(result.return_value)
        print("BACK", values)


ConfigStore.instance().store(
    group="hydra/sweeper", name="random",
    node={"_target_": "hydra_plugins.random_sweeper.RandomSweeper", "trials": 3}, provider="random",
)
'''
PROGRAM = """
import json, sys
from pathlib import Path
from exp.errors import RunError
from exp.run_report import Report, write_report
from exp.sweeps.executor import End
from exp.sweeps.sweep import Sweep, compose_sweep, sweep

class Runs:
    slots, stacks = 1, False

    def start(self, work):
        (config,) = work.configs
        directory = Path(config._composition_.directory)
        directory.mkdir()
        print("RAN", config.optimizer.lr)
        done = Report(status="completed", directory=str(directory), metrics={"loss/val": config.optimizer.lr})
        self.ended = [End(job=work.jobs[0], outcome=RunError("no") if directory.name == "1" else done)]

    def ends(self, timeout):
        return self.ended

print("STATUS", sweep(compose_sweep(sys.argv[1:]), executor=Runs(), check=lambda configs: [None] * len(configs)))
"""


def test_a_stochastic_sweeper_gets_one_config_a_job_and_the_value_of_each_back(tmp_path):
    (tmp_path / "site" / "hydra_plugins").mkdir(parents=True)
    (tmp_path / "site" / "hydra_plugins" / "random_sweeper.py").write_text(PLUGIN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "hydra/sweeper=random", "hydra.sweeper.trials=3", "seed=5"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "STATUS 1" in done.stdout, done.stdout + done.stderr
    ran = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("RAN")]
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("BACK")]
    back = json.loads(told.removeprefix("BACK ").replace("nan", "NaN"))
    assert len(set(ran)) == 3
    assert [back[0], back[2]] == [ran[0], ran[2]]
    assert math.isnan(back[1])
    table = rows()
    assert [float(row["optimizer.lr"]) for row in table] == pytest.approx(ran)
    assert [row["status"] for row in table] == ["completed", "failed", "completed"]


FORKING = """
import os
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus


@dataclass
class Conf:
    _target_: str = "hydra_plugins.forking.ForkingLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="forking", node=Conf, provider="forking")


class ForkingLauncher(BasicLauncher):
    def launch(self, job_overrides, initial_job_idx):
        child = os.fork()
        if not child:
            super().launch(job_overrides, initial_job_idx)
            os._exit(0)
        os.waitpid(child, 0)
        returned = JobReturn(status=JobStatus.COMPLETED)
        returned.return_value = 1.0
        return [returned for _ in job_overrides]
"""


def test_jobs_in_other_processes_have_their_rows_in_the_table(tmp_path):
    (tmp_path / "site" / "hydra_plugins").mkdir(parents=True)
    (tmp_path / "site" / "hydra_plugins" / "forking.py").write_text(FORKING)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "hydra/launcher=forking", "optimizer.lr=0.3,0.2,0.1"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "STATUS 1" in done.stdout, done.stdout + done.stderr
    assert "best       job 2, loss/val 0.1" in done.stdout
    assert [(row["job"], row["status"]) for row in rows()] == [("0", "completed"), ("1", "failed"), ("2", "completed")]
    assert list(sweep_directories()[0].glob(".*")) == []


def test_a_job_may_not_open_the_wall_that_the_command_line_did_not():
    with pytest.raises(ConfigError, match=r"security\.allow: \['json'\] in a job; expected one value"):
        run_sweep("seed=0,1", "security.allow=[json],[csv]")
    status, runs = run_sweep("seed=0,1", "security.allow=[json,csv]")
    assert status == 0
    assert [list(config.security.allow) for config in runs.configs] == [["json", "csv"]] * 2


def test_overrides_of_a_sweeper_that_name_security_are_refused_where_they_were_not_typed(tmp_path):
    master = composition_of(["seed=0,1", "security.allow=[json]"], multirun=True)
    jobs = Jobs(master=master, directory=tmp_path / "sweep", check=valid)
    values = ("[json]", "[subprocess]", "[json,os]")
    right, *wrong = [jobs.composed(0, ["seed=0", f"security.allow={value}"]) for value in values]
    assert right.error is None
    assert [job.error.faults[0].key for job in wrong] == ["security.allow"] * 2
    assert "os" in str(wrong[1].error)


def test_a_job_whose_process_was_killed_before_it_froze_its_config_begins_again_in_its_own_directory():
    run_sweep("seed=1,2", "hydra.sweep.dir=outputs/s")
    # As a kill in the middle of writing leaves it; this stand-in for training freezes nothing.
    for name in ("output.log", ".config.yaml.7.7.partial"):
        Path(f"outputs/s/1/{name}").touch()
    status, runs = run_sweep("seed=1,2", "sweep.resume=outputs/s")
    assert status == 0
    assert len(runs.configs) == 2
    assert [row["directory"] for row in rows()] == ["0", "1"]
    assert sorted(path.name for path in Path("outputs/s").iterdir() if path.is_dir()) == ["0", "1"]


def test_a_wider_grid_runs_what_is_new_wherever_its_directory_was_moved_and_however_it_is_called():
    run_sweep("seed=1,2", "optimizer.lr=0.1", "hydra.sweep.dir=outputs/s")
    for number in range(2):
        # As a run leaves it; this stand-in for training writes neither.
        directory = Path(f"outputs/s/{number}")
        (directory / "config.yaml").touch()
        write_report(Report(status="completed", directory=str(directory), metrics={"loss/val": number}))
    Path("outputs/s").rename("moved")
    status, runs = run_sweep(
        "seed=3,2,1", "optimizer.lr=0.1", "name=other", "sweep.jobs=2", "sweep.resume=moved", "sweep.timeout=1h"
    )
    assert status == 0
    assert [config.seed for config in runs.configs] == [3]
    (directory,) = Path.cwd().rglob("table.csv")
    table = list(csv.DictReader(directory.read_text().splitlines()))
    assert [(row["job"], row["seed"], row["directory"]) for row in table] == [
        ("0", "1", "0"), ("1", "2", "1"), ("2", "3", "2"),
    ]  # fmt: skip


def leave(number: int) -> None:
    """As a run leaves its directory; the stand-in for training writes neither file."""
    directory = Path(f"outputs/s/{number}")
    (directory / "config.yaml").touch()
    write_report(Report(status="completed", directory=str(directory), metrics={"loss/val": number}))


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"status": "completed"', "{}", "null", '{"status":"done","directory":"x","metrics":{}}',
     '{"status":"completed","directory":"x","metrics":{},"best":{"metric":"loss/val","value":"x","step":1}}',
     '{"status":"completed","directory":"x","metrics":{},"wall_seconds":"long"}',
     '{"status":"completed","directory":"x","metrics":3}'],
)  # fmt: skip
def test_a_job_whose_report_is_damaged_is_run_again_and_a_line_says_so(text, capsys):
    run_sweep("seed=1,2", "hydra.sweep.dir=outputs/s")
    for number in range(2):
        leave(number)
    Path("outputs/s/1/report.json").write_text(text)
    status, runs = resumed("seed=1,2")
    assert status == 0
    assert [config.seed for config in runs.configs] == [2]
    told = capsys.readouterr().err
    assert "1/report.json is not as a run wrote it: " in told
    assert "Job 1 goes on from its last checkpoint" in told
    assert [row["directory"] for row in rows()] == ["0", "1"]


def resumed(*overrides: str) -> tuple[int, Runs]:
    """Go on with outputs/s, with jobs that find their directories there."""
    runs = Runs()
    trained = runs._trained

    def again(config):
        directory = Path(config[COMPOSITION].directory)
        if directory.is_dir():
            directory.rename(directory.with_name(f"{directory.name}.before"))
        return trained(config)

    runs._trained = again
    return sweep(compose_sweep([*overrides, "sweep.resume=outputs/s"]), executor=runs, check=valid), runs


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sweep.json", "[]"),
        ("sweep.json", "{}"),
        ("sweep.json", '{"overrides": 3, "search": null}'),
        ("sweep.json", '{"overrides": [], "search": 7}'),
        ("sweep.json", "\0"),
        ("jobs.jsonl", "[1]\n"),
        ("jobs.jsonl", '{"job": 0}\n'),
        ("jobs.jsonl", '{"job": "0", "identity": "x", "directory": "0"}\n'),
        ("jobs.jsonl", '{"job": 0, "identity": "x", "directory": "../other"}\n'),
    ],
)
def test_a_damaged_file_of_a_sweep_to_go_on_with_is_a_fault_with_a_cure(name, text):
    run_sweep("seed=1,2", "hydra.sweep.dir=outputs/s")
    Path("outputs/s", name).write_text(text)
    with pytest.raises(ConfigError, match=rf"sweep\.resume: outputs/s/{name}: .*Put a whole one back, or begin a new"):
        run_sweep("seed=1,2", "sweep.resume=outputs/s")


@pytest.mark.parametrize(("kept", "lost"), [(0, "0, 1"), (1, "1")])
def test_runs_of_which_jobs_jsonl_has_no_line_are_not_run_again_beside_themselves(kept, lost):
    run_sweep("seed=1,2", "hydra.sweep.dir=outputs/s")
    for number in range(2):
        leave(number)
    # What an evaluation leaves in a run is no job.
    Path("outputs/s/0/evaluations/1").mkdir(parents=True)
    Path("outputs/s/0/evaluations/1/config.yaml").touch()
    jobs = Path("outputs/s/jobs.jsonl")
    jobs.write_text("".join(jobs.read_text().splitlines(keepends=True)[:kept]))
    with pytest.raises(ConfigError, match=rf"sweep\.resume: .*jobs\.jsonl, which has no line of {lost}, where"):
        run_sweep("seed=1,2", "sweep.resume=outputs/s")
    jobs.unlink()
    with pytest.raises(ConfigError, match="which has no line of 0, 1"):
        run_sweep("seed=1,2", "sweep.resume=outputs/s")
    assert sorted(path.name for path in Path("outputs/s").iterdir() if path.is_dir()) == ["0", "1"]


def test_a_journal_that_somebody_wrote_in_is_a_fault():
    run_sweep(*SEARCH)
    for garbage in (b"\xff\xfe\n", b"garbage\n", b"[]\n"):
        Path("outputs/s/sweep.journal").write_bytes(garbage)
        with pytest.raises(ConfigError, match=r"sweep\.resume: outputs/s/sweep\.journal: .*Put a whole one back"):
            run_sweep(*SEARCH, "sweep.resume=outputs/s")


def test_jobs_of_before_that_the_command_leaves_out_are_told_behind_the_table(capsys):
    run_sweep("seed=1,2,3", "hydra.sweep.dir=outputs/s")
    for number in range(3):
        leave(number)
    run_sweep("seed=3,1,2", "sweep.resume=outputs/s")
    assert "left out" not in capsys.readouterr().out
    run_sweep("seed=2", "sweep.resume=outputs/s")
    told = capsys.readouterr().out
    assert "left out   2 jobs of before, not of this command: 0, 2; python -m exp.report outputs/s has all" in told
    # Another base key, too.
    resumed("seed=2", "trainer.max_epochs=7")
    assert "left out   3 jobs of before, not of this command: 0, 1, 2" in capsys.readouterr().out


def test_trials_of_before_that_fewer_trials_leave_out_are_told(capsys):
    run_sweep(*SEARCH, "sweep.trials=3")
    for number in range(3):
        leave(number)
    run_sweep(*SEARCH, "sweep.trials=1", "sweep.resume=outputs/s")
    assert "left out   2 jobs of before, not of this command: 1, 2" in capsys.readouterr().out


def test_a_launcher_that_knows_no_jobs_of_before_does_not_go_on_with_a_sweep():
    run_sweep("seed=1", "hydra.sweep.dir=outputs/s")
    with pytest.raises(ConfigError, match=r"hydra/launcher: outputs/s, with a launcher that knows no jobs of before"):
        run_sweep("seed=1", "sweep.resume=outputs/s", "hydra/launcher=basic")


def test_a_storage_that_nothing_can_open_is_a_fault_of_the_dry_run_too():
    for url in ("foo", "nosuch://x"):
        with pytest.raises(ConfigError, match=rf"sweep\.storage: {url}: .*expected a storage that Optuna can open"):
            run_sweep(*SEARCH, f"sweep.storage={url}", "sweep.dry_run=true")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*SEARCH, "sweep.timeout=0.3"], "ended by sweep.timeout=0.3: 1 of 2 jobs were run"),
        (["seed=66,1,2", "sweep.max_failures=1"], "ended by sweep.max_failures=1: 1 of 3 jobs were run"),
    ],
)
def test_a_sweep_that_was_cut_says_so_behind_its_table(overrides, words, capsys, monkeypatch):
    trained = Runs._trained

    def slow(self, config):
        time.sleep(0.3)
        return trained(self, config)

    monkeypatch.setattr(Runs, "_trained", slow)
    run_sweep(*overrides)
    assert words in capsys.readouterr().out.splitlines()[-1]


def test_a_search_that_was_cut_before_its_first_job_says_so():
    with pytest.raises(RunError, match=r"the sweep was ended by sweep\.timeout=1e-09: 0 of 2 jobs were run"):
        run_sweep(*SEARCH, "sweep.timeout=1e-9")
    assert list(Path.cwd().iterdir()) == []


def test_the_command_that_goes_on_is_the_last_line(capsys):
    run_sweep("seed=1,98,2", "hydra.sweep.dir=outputs/s")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "go on      python -m exp.train -m seed=1,98,2 sweep.resume=outputs/s"


def test_a_sweep_elsewhere_than_below_the_working_directory_is_not_gone_on_with(tmp_path, monkeypatch):
    run_sweep("seed=1", "hydra.sweep.dir=outputs/s")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"sweep\.resume: .*/outputs/s; expected a directory below the working"):
        run_sweep("seed=1", "sweep.resume=../outputs/s")


def test_auto_begins_a_sweep_where_there_is_none_and_says_so(capsys):
    status, _ = run_sweep("seed=1", "sweep.resume=auto")
    assert status == 0
    assert "sweep.resume=auto: there is no sweep in outputs/train/sweeps, so one begins" in capsys.readouterr().out
    run_sweep("seed=1", "sweep.resume=auto")
    assert "no sweep" not in capsys.readouterr().out
    assert len(sweep_directories()) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["monitor=accuracy/val", "mode=max"], "another monitor than"),
        (["trainer.max_epochs=3"], "other settings of its jobs than"),
        (["seed=4"], "another seed than"),
        (["data.batch_size=8,16"], "other axes than"),
    ],
)
def test_a_search_is_gone_on_with_as_the_search_that_it_was(overrides, words):
    run_sweep(*SEARCH, "name=one")
    status, _ = run_sweep(*SEARCH, "name=two", "sweep.trials=3", "sweep.resume=outputs/s")
    assert status == 0
    with pytest.raises(ConfigError, match=rf"sweep\.resume: {words} .*; expected the same search, of more trials"):
        run_sweep(*SEARCH, *overrides, "sweep.resume=outputs/s")


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
)  # fmt: skip
def test_a_search_looks_for_a_tag_in_the_run_s_direction_or_for_several_with_their_own(overrides, directions):
    status, _ = run_sweep(*SEARCH, *overrides)
    study = optuna.load_study(study_name=STUDY, storage=opened(Path("outputs/s"), None))
    assert status == 0
    assert dict(zip(study.metric_names, [one.name for one in study.directions], strict=True)) == directions


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sweep.monitor={loss/vall:min}"], r"sweep\.monitor: 'loss/vall'; .*Did you mean loss/val\?"),
        (["sweep.monitor={acuracy/vall:max}"], r"sweep\.monitor: 'acuracy/vall'; .*Did you mean accuracy/val\?"),
        (["sweep.monitor=loss"], r"sweep\.monitor: 'loss'; expected a tag of this run: .*Did you mean loss/val\?"),
        (["sweep.monitor={troughput/step_ms:min}"], r"sweep\.monitor: 'troughput/step_ms'; expected a tag of this run"),
        (
            ["sweep.monitor={throughput/step_ms:min}", "hooks=[]"],
            r"sweep\.monitor: 'throughput/step_ms'; expected a tag",
        ),
        (["sweep.monitor={accuracy/test:max}", "test=false"], r"sweep\.monitor: 'accuracy/test'; expected a tag"),
        (
            ["sweep.monitor=[loss/val,accuracy/val]"],
            r"monitor: .*; expected a tag, or tags with a direction each",
        ),
        (["sweep.monitor=3"], r"sweep\.monitor: 3; expected a tag, or tags with a direction each"),
        (["sweep.monitor={}"], r"sweep\.monitor: {}; expected a tag, or tags with a direction each"),
        (["sweep.monitor={loss/val:max}"], r"sweep\.monitor: loss/val: max; expected min: loss/val is a loss"),
        (
            ["sweep.monitor={accuracy/val:max}", "sweep.pruner=median"],
            r"median beside sweep\.monitor=accuracy/val, and jobs report loss/val.*Write monitor=accuracy/val mode=max",
        ),
    ],
)
def test_what_a_search_cannot_look_for_is_a_fault_before_its_first_job(overrides, message):
    for dry in ("false", "true"):
        with pytest.raises(ConfigError, match=message):
            run_sweep(*SEARCH, *overrides, f"sweep.dry_run={dry}")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model=mlp,lenet", "sweep.sampler=cmaes"], "cmaes knows intervals alone: it draws these lists at random"),
        (
            [SEARCH[0], "model=mlp,lenet", "sweep.sampler=cmaes"],
            "cmaes knows intervals alone: model is drawn at random",
        ),
        ([SEARCH[0], "model=mlp,lenet", "seed=1,2", "sweep.sampler=qmc"], ": model, seed are drawn at random"),
        ([SEARCH[0], "seed=1,2", "sweep.sampler=qmc", "sweep.repeat_over=seed"], None),
        ([SEARCH[0], "model=mlp,lenet", "sweep.sampler=tpe"], None),
    ],
)
def test_a_sampler_that_draws_lists_at_random_says_so(overrides, line, capsys):
    run_sweep(*overrides, "sweep.trials=2", "sweep.dry_run=true")
    told = capsys.readouterr().out
    assert ("at random" in told) == (line is not None)
    assert line is None or line in told


def test_cma_es_takes_one_objective():
    with pytest.raises(ConfigError, match=r"sweep\.sampler: cmaes beside several tags in sweep\.monitor"):
        run_sweep(*SEARCH, "sweep.sampler=cmaes", "sweep.monitor={loss/val:min,accuracy/val:max}")


@pytest.mark.parametrize(
    ("overrides", "stacks", "words"),
    [
        (["seed=1,2"], True, "for a stack has 4 or more"),
        (SEARCH, True, "for fewer than 4 are known before one of them has ended"),
        (["seed=1,2,3,4"], False, "for this launcher starts each by itself"),
    ],
)
def test_a_stack_that_was_asked_for_and_does_not_come_is_told_once(overrides, stacks, words, capsys, monkeypatch):
    monkeypatch.setattr(Runs, "stacks", stacks)
    for wanted in ("true", "auto"):
        run_sweep(*overrides, f"sweep.stack={wanted}", f"hydra.sweep.dir=outputs/{wanted}")
        told = capsys.readouterr().out
        assert told.count(f"sweep.stack=true: jobs run side by side, {words}") == (wanted == "true")


def test_a_swept_interpolation_is_shown_as_it_was_typed():
    run_sweep("optimizer.lr=${seed},2", "seed=1,3", "name=a\\,b")
    assert [row["optimizer.lr"] for row in rows()] == ["${seed}", "${seed}", "2", "2"]


def test_a_search_in_the_wrong_direction_of_a_metric_is_a_fault(capfd):
    assert check(["-m", *SEARCH[:2], "sweep.monitor=accuracy/val"]) == 2
    told = capfd.readouterr().err
    assert "sweep.monitor: accuracy/val: min; expected max: a higher accuracy/val is better" in told


def test_a_sweep_that_runs_is_refused_to_another_one_even_where_its_settings_were_written_anew():
    refused = []

    def check(configs):
        with pytest.raises(ConfigError, match="where a sweep is still going on") as caught:
            sweep(compose_sweep([*SEARCH, "sweep.resume=outputs/s"]), executor=Runs(), check=valid)
        refused.append(caught.value)
        return [None for _ in configs]

    # Before the search has written down what it depends on, and behind that.
    assert sweep(compose_sweep(SEARCH), executor=Runs(), check=check) == 0
    assert len(refused) == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_as_the_table_is_shown_has_its_status_and_the_table_is_whole(signum, monkeypatch, capsys):
    monkeypatch.setattr("exp.sweeps.sweep.print_table", lambda *_, **__: signal.raise_signal(signum))
    status, _ = run_sweep("seed=1,2", "hydra.sweep.dir=outputs/s")
    assert status == 128 + signum
    assert [row["status"] for row in rows()] == ["completed"] * 2
    assert "interrupted as the table was shown: outputs/s/table.md has it" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("overrides", [("seed=range(0,50)",), SEARCH])
def test_a_signal_as_jobs_are_composed_ends_it_behind_the_next_one_and_leaves_nothing(
    overrides, signum, monkeypatch, capsys
):
    composed, numbers = Jobs.composed, []

    def interrupted(self, number, overrides):
        numbers.append(number)
        if number == 1:
            signal.raise_signal(signum)
            signal.raise_signal(signum)
        return composed(self, number, overrides)

    monkeypatch.setattr(Jobs, "composed", interrupted)
    status, runs = run_sweep(*overrides)
    assert status == 128 + signum
    assert (numbers, runs.configs) == ([0, 1], [])
    assert list(Path.cwd().iterdir()) == []
    assert f"interrupted by signal {signum:d}" in capsys.readouterr().err


def test_a_search_of_100_million_combinations_checks_the_ends_of_ranges_and_begins_at_once():
    composed = []

    def check(configs):
        composed.append(len(configs))
        return [None for _ in configs]

    runs = Runs()
    grid = ("seed=range(0,10000)", "data.batch_size=range(1,10001)", "sweep.sampler=random", "sweep.trials=2")
    assert sweep(compose_sweep(grid), executor=runs, check=check) == 0
    assert (composed, len(runs.configs)) == ([3, 2], 2)
