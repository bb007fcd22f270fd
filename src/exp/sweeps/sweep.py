"""A sweep, `python -m exp.train -m ...`: its jobs, all checked before the first starts, and run several at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf, open_dict

from exp.check.stages import early_faults, located, refuse_nodes
from exp.config.compose import Composition, composition_of, recorded, shared_config
from exp.config.freeze import chosen_values, compared_tags, make_exclusively
from exp.config.groups import COMMAND_LINE, PRIMARY
from exp.config.hydra_adapter import fault_of, hydra_config, job_return, parse_override, run_sweeper, task_overrides
from exp.config.reading import plain_values
from exp.engine.trial_record import JOURNAL, refuse_url
from exp.errors import ConfigError, ExpError, Fault, Interrupted, RunError
from exp.files import sweep_partial_files, write_whole
from exp.launch.launcher import last_checkpoint
from exp.launch.supervision import collected_signals
from exp.output import unwritable
from exp.shared_types import Mode, Sampler, searched_tags, span_seconds
from exp.signals import heeding
from exp.spelling import among
from exp.sweeps.executor import End, Executor, Unstacked, Work
from exp.sweeps.job_queue import Queue, Running, Searched
from exp.sweeps.jobs import READ_ONCE, Check, Job, Jobs, is_of_sweep, job_faults, packed
from exp.sweeps.ledger import (
    AUTO,
    JOBS,
    SETTINGS,
    Entry,
    Ledger,
    clear_unfrozen,
    found_sweep,
    held,
    identity_of,
    sweeps_of,
    wait_for_dead,
)
from exp.sweeps.progress_table import Progress
from exp.sweeps.results import FINISHED, FOLD, NONE, NOT_STARTED, Row, best_row, print_table, write_table
from exp.sweeps.search import DEFAULT_TRIALS, Search
from exp.sweeps.space import Combination, Space, sizes, space_of
from exp.sweeps.stacking import groups, is_member
from exp.tensorboard.hparams import declaration, declare, withdraw, write_bad_end

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from exp.run_report import Report

MAX_JOBS = 10_000
ROW_FILES = ".row.*.json"
# Of fewer jobs a process each is faster.
LEAST_STACKED = 4
# What the sweep itself reads, before any job has been looked at.
READ_FIRST = ("sweep", "seed", "monitor", "mode")
# Of launchers whose jobs an Executor of exp runs.
OUR_LAUNCHERS = "hydra_plugins.exp."
# What may differ of a search that is gone on with, by its key in sweep.json; of any other key `another KEY`.
OF_SEARCH = {"axes": "other axes", "objectives": "another monitor", "config": "other settings of its jobs"}
TENSORBOARD = "exp.tensorboard.logger.TensorBoardLogger"
# Samplers that draw lists at random (Optuna 5.0).
OF_NUMBERS = ("cmaes", "qmc")
# The table of more jobs than these is written so often at most.
TABLE_SECONDS, TABLE_ROWS = 2.0, 50
# A write of ten thousand rows takes 0.3 s: no more than a twentieth of the time goes to it.
TABLE_PAUSES = 20


class Sweep:
    """A sweep as Hydra's sweeper and our launcher share it.

    Plain data, so that a launcher of other processes can carry it.

    executor: runs the jobs. check: the faults of each of several configs.
    is_dry: list and check the jobs, run none; `planned` has them.
    ended_early: why not all were run, by the sweep's own settings; empty otherwise.
    everything: where a job has faults that need no torch, look for the others, too.
    """

    def __init__(
        self,
        *,
        master: Composition,
        directory: Path,
        executor: Executor,
        check: Check,
        is_dry: bool = False,
        everything: bool = False,
    ) -> None:
        self.directory, self.executor, self.is_dry = directory, executor, is_dry
        self.monitor, self.mode = master.config.monitor, master.config.mode
        self.settings = cast(dict[str, Any], OmegaConf.to_container(master.config.sweep, resolve=True))
        self.seed = int(master.config.seed)
        self.launcher = str(master.config.hydra.launcher._target_)
        self.rows: dict[int, Row] = {}
        self.planned: list[Job] = []
        self._space = space_of(master.config, master.loader, seed=self.seed)
        over, is_pruned = self.settings["repeat_over"], self.settings["pruner"] != "none"
        if over is None and not is_pruned and any(axis.name == FOLD for axis in self._space.axes):
            self.settings["repeat_over"] = FOLD
        elif over == NONE:
            self.settings["repeat_over"] = None
        is_compared = self.is_search and self.settings["monitor"] is None
        reads = (*READ_ONCE, "monitor", "mode") if is_compared else READ_ONCE
        self.jobs = Jobs(master=master, directory=directory, check=check, everything=everything, reads=reads)
        # Of a search the identity of what all of its jobs share.
        self._shared = identity_of(plain_values(master.config)) if self.is_search else None
        typed = task_overrides(master.config)
        aside = ("sweep.resume=", "sweep.retry_failed=")
        self._typed = [text for text in typed if not text.lstrip("+").startswith(aside)]
        self._ledger = Ledger(directory)
        self._taken: set[Path] = set()
        self.ended_early = ""
        self._told: set[str] = set()
        self._home = _process()
        self._written, self._write_seconds = -math.inf, 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all ended well."""
        return all(row.status in FINISHED for row in self.rows.values())

    # --- which jobs ---

    def go_over_space(self, launcher: Launcher) -> None:
        """Run what the overrides ask for: a grid, or a search. launcher: Hydra's, where another one runs the jobs.

        Raises: ConfigError before the first job of the sweep where any has a fault; Interrupted.
        """
        if self.is_search:
            self._search(launcher)
        else:
            _refuse(self._grid_faults())
            combinations = [self._space.overrides(values) for values in self._space.grid()]
            if self.launcher.startswith(OUR_LAUNCHERS):
                self._run_all(combinations, first=0)
            else:
                launcher.launch(combinations, initial_job_idx=0)

    def launch(self, batch: Sequence[Sequence[str]], *, first: int) -> list[JobReturn]:
        """Run a batch of jobs of another sweeper, numbered from `first`.

        Returns: Hydra's JobReturn of each: its monitored value, nan where it failed.
        Raises: ConfigError before the first job of the sweep where any has a fault; Interrupted.
        """
        jobs = self._run_all(batch, first=first)
        results = []
        for job in jobs:
            row = self.rows.get(job.number)
            value, directory = (0.0, "") if row is None else (row.value, str(self.directory / row.directory))
            results.append(job_return(overrides=job.overrides, config=job.config, directory=directory, value=value))
        return results

    @property
    def is_search(self) -> bool:
        """Whether values are drawn, and not combined."""
        sampler = self.settings["sampler"]
        return sampler != "grid" and (sampler != "auto" or self._space.has_intervals)

    def _run_all(self, batch: Sequence[Sequence[str]], *, first: int) -> list[Job]:
        with collected_signals() as received:
            jobs = []
            for number, overrides in enumerate(batch, first):
                jobs.append(self._known(self.jobs.composed(number, overrides)))
                _heed(received)
            # What needs torch is looked at when the sweep might start.
            if self.rows or self.jobs.everything or not any(job.error for job in jobs):
                jobs = self.jobs.checked(jobs)
            if not self.rows and any(job.error for job in jobs):
                raise ConfigError(job_faults(jobs))
            self.planned += jobs
            if not self.is_dry:
                self._declare(jobs)
                self._work_off(Queue(self._grouped(jobs)))
        return jobs

    def _grouped(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """The jobs, those together that one process trains together; and of the others, what forbids it, in lines."""
        wanted = self.settings["stack"]
        whole = [job for job in jobs if job.error is None]
        if wanted is False or not self.executor.stacks or len(whole) < LEAST_STACKED:
            if wanted is True and whole:
                self._say_once(self._why_unstacked())
            return [[job] for job in jobs]
        left = {job.number for job in whole if self._ended_before(job) is None}
        # Of all jobs, those that have ended among them: a sweep that is gone on with divides them as it did.
        found = groups([job.plain for job in whole], most=math.ceil(len(whole) / self.executor.slots))
        reasons = Counter(reason for place, reason in found.reasons.items() if whole[place].number in left)
        for reason, count in reasons.items():
            print(f"{count} job{'s' if count > 1 else ''} side by side: {reason}")
        stacked: list[list[Job]] = []
        for places in found.stacked:
            members = [whole[place] for place in places if whole[place].number in left]
            if members := [replace(job, is_stacked=True) for job in members if not self._began_alone(job)]:
                stacked.append(members)
        together = {job.number for members in stacked for job in members}
        return [*stacked, *([job] for job in jobs if job.number not in together)]

    def _why_unstacked(self) -> str:
        """Why jobs that are asked to be trained together are not, in a line."""
        words = "sweep.stack=true: jobs run side by side, for"
        if not self.executor.stacks:
            return f"{words} this launcher starts each by itself"
        if self.is_search:
            cure = "sweep.sampler=random and qmc wait for none, and the repeats of a trial are known together"
            return f"{words} fewer than {LEAST_STACKED} are known before one of them has ended; {cure}"
        return f"{words} a stack has {LEAST_STACKED} or more"

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            print(line)
            self._told.add(line)

    def _began_alone(self, job: Job) -> bool:
        """Whether an earlier sweep has trained it in a process of its own."""
        directory = cast(Path, job.directory)
        return job.is_known and last_checkpoint(directory) is not None and not is_member(directory)

    def _search(self, launcher: Launcher) -> None:
        """Draw the jobs, each when it can be run."""
        settings = self.settings
        over = settings["repeat_over"]
        repeated = [axis for axis in self._space.axes if axis.name == over]
        drawn = replace(self._space, axes=tuple(axis for axis in self._space.axes if axis not in repeated))
        repeats = [{axis.key: text} for axis in repeated for text in axis.texts] or [{}]
        refuse_url(settings["storage"])
        _refuse(self._search_faults(drawn))
        corners = []
        with collected_signals() as received:
            for place, values in enumerate(_corners(self._space)):
                corners.append(self.jobs.composed(place, self._space.overrides(values)))
                _heed(received)
            if self.jobs.everything or not any(job.error for job in corners):
                corners = self.jobs.checked(corners)
        if any(job.error for job in corners):
            raise ConfigError(list(dict.fromkeys(map(self._as_interval, job_faults(corners)))))
        self._say_what_is_drawn_at_random(drawn)
        if self.is_dry:
            self.planned = corners
            return
        self._declare(corners)
        sampler: Sampler = "tpe" if settings["sampler"] == "auto" else settings["sampler"]
        slots = self.executor.slots
        search = Search(
            drawn,
            sampler=sampler,
            trials=settings["trials"] or DEFAULT_TRIALS,
            seed=self.seed,
            width=self._kept("width", 1 if slots == 1 else 2 * slots),
            objectives=self._objectives(),
            directory=self.directory,
            storage=settings["storage"],
        )

        def make(number: int, trial: int, values: Combination) -> Job:
            job = self.jobs.composed(number, self._space.overrides(values))
            if (config := job.config) is None:
                return job
            sweep = os.path.relpath(self.directory, job.directory)
            with open_dict(config):
                config.sweep.trial = {"number": trial, "sweep": sweep}
            return replace(job, packed=packed(config))

        def group(jobs: Sequence[Job]) -> list[list[Job]]:
            return self._grouped([self._known(job) for job in self.jobs.checked(jobs)])

        queue = Searched(search, make=make, repeats=repeats, group=group)
        if self.launcher.startswith(OUR_LAUNCHERS):
            self._work_off(queue)
            return
        while batch := [job for jobs in iter(queue.next, ()) for job in jobs]:
            launcher.launch([job.overrides for job in batch], initial_job_idx=batch[0].number)
            self.collect()
            for job in batch:
                queue.end(self.rows[job.number])

    def _say_what_is_drawn_at_random(self, drawn: Space) -> None:
        """Name the axes of which the sampler does not follow the results, or the sequence, that it is chosen for."""
        sampler = self.settings["sampler"]
        if sampler not in OF_NUMBERS:
            return
        lists = [axis.name for axis in drawn.axes if not axis.is_interval]
        if lists and not drawn.has_intervals:
            print(f"sweep.sampler={sampler} knows intervals alone: it draws these lists at random, as random does")
        elif lists:
            are = "are" if len(lists) > 1 else "is"
            print(f"sweep.sampler={sampler} knows intervals alone: {', '.join(lists)} {are} drawn at random")

    def _as_interval(self, fault: Fault) -> Fault:
        """The fault of a drawn number that is no whole one, as what is wrong with the interval."""
        axis = next((axis for axis in self._space.axes if axis.name == fault.key and axis.is_interval), None)
        if axis is None or axis.is_integer or "integer" not in fault.expected:
            return fault
        drawn = f"interval({axis.low:g},{axis.high:g})"
        drawn = f"tag(log,{drawn})" if axis.is_log else drawn
        got, cure = f"{drawn}, whose numbers have fractions", f"Write '{axis.key}=int({drawn})'"
        return replace(fault, got=got, cure=cure, source=COMMAND_LINE)

    def _grid_faults(self) -> Iterator[Fault]:
        """Yield an error for each setting that a grid cannot follow."""
        yield from self._repeat_faults()
        interval = next((axis for axis in self._space.axes if axis.is_interval), None)
        if interval is not None:
            got, expected = f"grid, where {interval.name} is an interval", "auto, or a sampler, which draws from it"
            yield Fault(key="sweep.sampler", got=got, expected=expected)
        cure = "Write sweep.sampler=random, or another, to draw from lists, too"
        trials, pruner = self.settings["trials"], self.settings["pruner"]
        if trials is not None:
            expected = "null: it has as many jobs as combinations"
            yield Fault(key="sweep.trials", got=f"{trials}, of a grid", expected=expected, cure=cure)
        if pruner != "none":
            expected = "none: only the jobs of a search are pruned"
            yield Fault(key="sweep.pruner", got=f"{pruner}, of a grid", expected=expected, cure=cure)

    def _repeat_faults(self) -> Iterator[Fault]:
        over = self.settings["repeat_over"]
        if over is not None and not any(axis.name == over for axis in self._space.axes):
            expected = "a swept key, such as seed=0,1,2"
            yield Fault(key="sweep.repeat_over", got=f"{over}, which is not swept", expected=expected)

    def _search_faults(self, drawn: Space) -> Iterator[Fault]:
        """Yield an error for each setting that a search cannot follow. drawn: the axes that the sampler draws."""
        yield from self._repeat_faults()
        if any(axis.is_interval and axis not in drawn.axes for axis in self._space.axes):
            yield Fault(key="sweep.repeat_over", got="an interval", expected="a list, such as seed=0,1,2")
        objectives, pruner = self._objectives(), self.settings["pruner"]
        if self.settings["sampler"] == "cmaes" and len(objectives) > 1:
            got, expected = "cmaes beside several tags in sweep.monitor", "one tag, or nsga2, tpe, gp or random"
            yield Fault(key="sweep.sampler", got=got, expected=expected)
        if pruner == "none":
            return
        if self.settings["repeat_over"] is not None:
            got, expected = f"{pruner} beside sweep.repeat_over", "one of the two: a mean has no steps"
            yield Fault(key="sweep.pruner", got=got, expected=expected)
        if len(objectives) > 1:
            got = f"{pruner} beside several tags in sweep.monitor"
            yield Fault(key="sweep.pruner", got=got, expected="one tag to compare")
        elif objectives != {self.monitor: self.mode}:
            ((tag, mode),) = objectives.items()
            got = f"{pruner} beside sweep.monitor={tag}, and jobs report {self.monitor} at each validation"
            cure = f"Write monitor={tag} mode={mode} in the place of sweep.monitor"
            yield Fault(key="sweep.pruner", got=got, expected="one tag to compare", cure=cure)

    def _objectives(self) -> Mapping[str, Mode]:
        """What the search looks for, by tag."""
        if named := searched_tags(self.settings["monitor"], mode=self.mode):
            return named
        if self.monitor is None:
            cure = "Write monitor=loss/val"
            raise ConfigError([Fault(key="monitor", got="null", expected="the tag that a search compares", cure=cure)])
        return {self.monitor: self.mode}

    def _declare(self, jobs: Sequence[Job]) -> None:
        """Tell TensorBoard, in the sweep's directory, what it goes over and compares; once, of sweepers that exp knows.

        jobs: of the first batch; of a search the ends of its space.
        """
        domains = {axis.name: domain for axis in self._space.axes if (domain := axis.domain()) is not None}
        if self.rows or not self._space.axes or not any(map(_has_tensorboard, jobs)):
            return
        values: dict[str, list[object]] = {}
        tags: list[str] = []
        seen = set[tuple[str, str]]()
        for job in jobs:
            # Of ten thousand jobs those that bring a value which none before has.
            if job.packed is None or seen >= job.swept.items():
                continue
            seen |= job.swept.items()
            for key, value in chosen_values(job.plain, recorded(job.overrides)).items():
                values.setdefault(key, []).append(value)
            tags += compared_tags(job.plain, is_trial=self.is_search)
        try:
            declare(self.directory, declaration(values, [*dict.fromkeys(tags)], domains=domains))
        except RunError as error:
            print(error, file=sys.stderr)

    def _end_session(self, job: Job, row: Row) -> None:
        """Show in TensorBoard how a job has ended whose own process could not say it."""
        if row.status in FINISHED or not row.directory or not _has_tensorboard(job):
            return
        directory = self.directory / row.directory
        params = chosen_values(job.plain, recorded(job.overrides))
        try:
            write_bad_end(directory, params, compared_tags(job.plain), status=row.status)
        except RunError as error:
            print(error, file=sys.stderr)

    # --- what is known of them ---

    def begin(self) -> None:
        """Keep in the sweep's directory what it was started with; of one that is gone on with, hold it against that.

        Raises: ConfigError where a search is gone on with by another one.
        """
        before, search = self._ledger.settings(), None
        if self.is_search:
            search = {name: self.settings[name] for name in ("sampler", "repeat_over")}
            search |= {"axes": [repr(axis) for axis in self._space.axes], "seed": self.seed}
            search |= {"objectives": dict(self._objectives()), "config": self._shared}
        if before is not None:
            self._ledger.refuse_lost()
            if (before["search"] is None) != (search is None):
                got = f"{'a search' if self.is_search else 'a grid'}, where a sweep of the other kind was"
                raise ConfigError([Fault(key="sweep.resume", got=got, expected="the same kind")])
            other = [key for key, value in (search or {}).items() if before["search"].get(key, value) != value]
            if other:
                # Its record would hold what came of other jobs.
                what, typed = OF_SEARCH.get(other[0], f"another {other[0]}"), " ".join(before["overrides"])
                got = f"{what} than {self.directory} was begun with: {typed}"
                expected = "the same search, of more trials if you like"
                raise ConfigError([Fault(key="sweep.resume", got=got, expected=expected)])
            search = None if search is None else {**before["search"], **search}
        self._ledger.keep_settings({"overrides": self._typed, "search": search})

    def _kept(self, key: str, value: Any) -> Any:
        """A value of the search that stays what it was when the search was begun, whatever machine goes on with it."""
        settings = dict(self._ledger.settings() or {"search": {}})
        if key not in settings["search"]:
            settings["search"][key] = value
            self._ledger.keep_settings(settings)
        return settings["search"][key]

    def _known(self, job: Job) -> Job:
        """The job, under the number and in the directory that it has from an earlier sweep of this directory."""
        if job.packed is None or not self._ledger.has_jobs:
            return job
        entry = self._ledger.claimed(identity_of(job.plain))
        if entry is None:
            if self.is_search:
                return job
            return self.jobs.composed(self._ledger.next_number(), job.overrides)
        directory = self.directory.absolute() / entry.directory
        return replace(job, number=entry.job, directory=directory, is_known=True)

    def _ended_before(self, job: Job) -> Row | None:
        """The row of a job that an earlier sweep of this directory has finished."""
        from exp.run_report import read_report

        if not job.is_known or job.directory is None or job.number in self.rows:
            return None
        directory = job.directory
        if not (directory / "config.yaml").is_file():
            return None
        wait_for_dead(directory)
        if not (directory / "report.json").is_file():
            return None
        try:
            report = read_report(directory)
        except RunError as error:
            print(f"{error}. Job {job.number} goes on from its last checkpoint", file=sys.stderr)
            return None
        if report.status == "interrupted":
            return None
        if report.status == "failed" and self.settings["retry_failed"]:
            return None
        # Where it stands now: the sweep may have been moved, or copied.
        return self._finished(job, replace(report, directory=str(directory)), seconds=report.wall_seconds)

    # --- running them ---

    def _work_off(self, queue: Queue) -> None:
        """Start jobs as places come free, until none is left or the sweep is to end.

        Raises: Interrupted behind a signal, and whatever else ends the sweep, when the running jobs have ended.
        """
        with contextlib.closing(Progress(total=queue.total)) as progress, collected_signals() as received:
            running = Running(self.executor, received)
            begun = time.monotonic()

            def ended(row: Row) -> None:
                self._record(row)
                queue.end(row)
                progress.end(row, best=best_row(list(self.rows.values())))

            try:
                while True:
                    while not received and running.works < self.executor.slots and not self._why_it_ends(begun):
                        if not self._start_next(queue, running, progress, ended):
                            break
                    if not running.jobs:
                        break
                    for job, end, seconds in running.ends():
                        if isinstance(end.outcome, Unstacked):
                            progress.say_once(f"side by side: {end.outcome}")
                            queue.again(job)
                        else:
                            told = self._row_of(job, end, seconds=seconds)
                            self._end_session(job, told)
                            ended(told)
                    progress.refresh()
                for job in queue.rest():
                    row = self._without_running(job)
                    self._record(replace(self._row(job, status=NOT_STARTED), directory="") if row is None else row)
                self._write()
                done = sum(row.status != NOT_STARTED for row in self.rows.values())
                if not received and (why := self._why_it_ends(begun)) and done < queue.total:
                    self.ended_early = f"{why}: {done} of {queue.total} jobs were run"
            except Exception:
                # The sweep itself has failed, as on a full disk. What runs saves and ends as at a signal.
                for job, end, seconds in running.ended():
                    row = self._row_of(job, end, seconds=seconds)
                    self.rows[row.job] = row
                raise
        if received:
            interrupted = Interrupted(signum=received[0], checkpoint=str(self.directory))
            interrupted.command = self._resume_command()
            raise interrupted

    def _start_next(self, queue: Queue, running: Running, progress: Progress, ended: Callable[[Row], None]) -> bool:
        """Start what the queue has next, or tell of it where it need not, or cannot, be run; whether it had any."""
        try:
            jobs = queue.next()
        except Interrupted:  # as a proposal was checked
            return False
        started, left = time.perf_counter(), []
        for job in jobs:
            row = self._without_running(job)
            if row is None:
                left.append(job)
            else:
                ended(row)
        if not left:
            return bool(jobs)
        try:
            if not running.received:
                left = [self._placed(job) for job in left]
                self._start(left)
                running.add(left, started)
        except Interrupted:  # as somebody looked for what it needs
            pass
        for job in left:
            if job.number in running.jobs:
                progress.begin(job.number, swept=job.swept, directory=self.directory / self._shown(job))
            else:
                queue.again(job)
        return True

    def _resume_command(self) -> str:
        where = f"sweep.resume={os.path.relpath(self.directory)}"
        return shlex.join(["python", "-m", "exp.train", "-m", *self._typed, where])

    def _why_it_ends(self, begun: float) -> str:
        """Why no more jobs are started; empty where they are."""
        failures, timeout = self.settings["max_failures"], self.settings["timeout"]
        if failures is not None and sum(row.status == "failed" for row in self.rows.values()) >= failures:
            return f"ended by sweep.max_failures={failures}"
        seconds = math.inf if timeout is None else span_seconds(timeout) if isinstance(timeout, str) else timeout
        return "" if time.monotonic() - begun < seconds else f"ended by sweep.timeout={timeout}"

    def last_words(self) -> list[str]:
        """What to say behind the table: why it ended early, and which jobs of before it leaves out."""
        words = [self.ended_early] if self.ended_early else []
        left = self._ledger.unclaimed
        if self.is_search:
            # Of fewer, it has not asked for them yet.
            over = self.settings["repeat_over"]
            repeats = next((len(axis.texts) for axis in self._space.axes if axis.name == over), 1)
            most = (self.settings["trials"] or DEFAULT_TRIALS) * repeats
            left = [entry for entry in left if entry.job >= most]
        if left:
            count = f"{len(left)} job{'s' if len(left) > 1 else ''} of before"
            where = among([entry.directory for entry in left])
            here = os.path.relpath(self.directory)
            words.append(f"left out   {count}, not of this command: {where}; python -m exp.report {here} has all")
        return words

    def _without_running(self, job: Job) -> Row | None:
        """The row of a job that cannot be run, or need not be; None of the others."""
        if job.packed is None:
            assert job.error is not None
            return replace(self._row(job, status="failed"), error=_first_line(job.error))
        return self._ended_before(job)

    def _start(self, jobs: Sequence[Job]) -> None:
        """Start jobs that one process runs."""
        entries = []
        for job in jobs:
            if job.is_known:
                clear_unfrozen(cast(Path, job.directory))
            else:
                entries.append(Entry(job=job.number, identity=identity_of(job.plain), directory=self._shown(job)))
        self._ledger.write(entries)
        configs = [config for job in jobs if (config := job.config) is not None]
        numbers, is_stack = tuple(job.number for job in jobs), any(job.is_stacked for job in jobs)
        self.executor.start(Work(jobs=numbers, configs=tuple(configs), is_stack=is_stack))

    def _placed(self, job: Job) -> Job:
        """A new job in another directory, where hydra.sweep.subdir gives it that of a job before."""
        if job.is_known:
            return job
        wanted = cast(Path, job.directory)
        names = itertools.chain([wanted.name], (f"{wanted.name}-{count}" for count in itertools.count(2)))
        free = next(path for path in map(wanted.with_name, names) if path not in self._taken and not path.exists())
        self._taken.add(free)
        return replace(job, directory=free)

    def _row_of(self, job: Job, end: End, *, seconds: float) -> Row:
        error = end.outcome
        if not isinstance(error, ExpError):
            return self._finished(job, error, seconds=seconds)
        status = "interrupted" if isinstance(error, Interrupted) else "failed"
        return replace(self._row(job, status=status), error=_first_line(error), seconds=seconds)

    def _row(self, job: Job, *, status: str) -> Row:
        """The row of a job without a result."""
        is_known = job.packed is not None
        monitor, mode = (job.plain["monitor"], job.plain["mode"]) if is_known else (self.monitor, self.mode)
        return Row(
            job=job.number,
            swept=job.swept,
            status=status,
            value=math.nan,
            monitor=monitor,
            mode=mode,
            directory=self._shown(job),
        )

    def _finished(self, job: Job, report: Report, *, seconds: float) -> Row:
        error = report.error["message"].strip().splitlines() if report.error else []
        return replace(
            self._row(job, status=report.status),
            value=report.monitored if report.status in FINISHED else math.nan,
            step=None if report.best is None else report.best["step"],
            metrics={**report.metrics, **report.best_metrics},
            peak_memory_mib=report.peak_memory_mib,
            directory=os.path.relpath(report.directory, self.directory),
            error=error[0] if error else "",
            seconds=seconds,
        )

    def _record(self, row: Row) -> None:
        if _process() != self._home:
            # A launcher's copy of this sweep in a process of its own, whose rows nobody sees.
            write_whole(self.directory / ROW_FILES.replace("*", str(row.job)), json.dumps(asdict(row)))
            return
        self.rows[row.job] = row
        pause = max(TABLE_SECONDS, TABLE_PAUSES * self._write_seconds)
        if time.monotonic() - self._written > pause or len(self.rows) < TABLE_ROWS:
            self._write()

    def _write(self) -> None:
        started = time.monotonic()
        if self.rows:
            write_table(self.directory, self.sorted_rows, repeat_over=self.settings["repeat_over"])
        self._written = time.monotonic()
        self._write_seconds = self._written - started

    @property
    def sorted_rows(self) -> list[Row]:
        return [self.rows[number] for number in sorted(self.rows)]

    def _shown(self, job: Job) -> str:
        """The job's directory as the table shows it: relative to the sweep's."""
        return "" if job.directory is None else os.path.relpath(job.directory, self.directory)

    # --- the jobs of a launcher that is not ours ---

    def __call__(self, config: DictConfig) -> float:
        """One job of a launcher that is not ours, such as joblib's, which has made the directory already.

        Returns: the monitored value, nan where the job failed.
        Raises: KeyboardInterrupt where the job was interrupted; its cause is what the job raised.
        """
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        directory = Path(hydra.runtime.output_dir)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
        overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        assert isinstance(overrides, list)
        (job,) = self.jobs.checked([self.jobs.composed(hydra.job.num, overrides)])
        if job.packed is not None:
            job = replace(job, directory=directory)
        try:
            self._work_off(Queue([[job]]))
        except Interrupted as error:
            # A launcher takes any Exception for a job that failed, and starts the next one.
            raise KeyboardInterrupt from error
        return self.rows[job.number].value if job.number in self.rows else math.nan

    def collect(self) -> None:
        """Take in the rows of jobs that ran in other processes, and write the table."""
        files = [*self.directory.glob(ROW_FILES)]
        for file in files:
            row = Row(**json.loads(file.read_text(encoding="utf-8")))
            self.rows[row.job] = row
        self._write()
        for file in files:
            file.unlink()


def _has_tensorboard(job: Job) -> bool:
    return job.packed is not None and any(one["_target_"] == TENSORBOARD for one in job.plain["logger"].values())


def _corners(space: Space) -> list[Combination]:
    """Combinations in which every value of every list, and both ends of every interval and range, are there once."""
    found: dict[tuple[tuple[str, str], ...], Combination] = {}
    ordered = space.by_condition()
    for varied in space.axes:
        for text in varied.ends():
            values: dict[str, str] = {}
            for axis in ordered:
                if axis is varied:
                    values[axis.key] = text
                elif space.is_there(axis, values):
                    # What the varied axis needs beside it.
                    needed = (varied.when or {}).get(axis.name, ())
                    values[axis.key] = next((one for one in axis.ends() if one in needed), axis.ends()[0])
            found.setdefault(tuple(values.items()), values)
    return list(found.values())


def _refuse(faults: Iterable[Fault]) -> None:
    if found := list(faults):
        raise ConfigError(found)


def _heed(received: Sequence[int]) -> None:
    """Raises: Interrupted where a signal has come and no job runs."""
    if received:
        raise Interrupted(signum=received[0], checkpoint=None)


def _process() -> tuple[str, int]:
    return platform.node(), os.getpid()


def _first_line(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return "; ".join(str(fault) for fault in error.faults)
    # Without the command that goes on with the run, which a table has no room for.
    lines = str(error.args[0] if isinstance(error, ExpError) else error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def refuse_size(master: Composition) -> None:
    """Reject a sweep without a job, and one of more jobs than anybody waits for, before they are listed."""
    counts = sizes(master.config, master.loader)
    if counts is None:
        return
    faults = [_no_job(key) for key, count in counts.items() if count == 0]
    jobs = math.prod(counts.values())
    key = max(counts, key=lambda key: counts[key], default="")
    if jobs > MAX_JOBS and master.config.sweep.sampler in ("auto", "grid"):
        got = f"{counts[key]:,} values, which makes {jobs:,} jobs"
        cure = (
            "Take fewer values, make several sweeps of it, or draw some of them: sweep.sampler=random sweep.trials=100"
        )
        faults.append(Fault(key=key.lstrip("+~"), got=got, expected=f"{MAX_JOBS:,} jobs at most", cure=cure))
    elif jobs > MAX_JOBS and counts[key] > MAX_JOBS:
        cure = f"Draw from all numbers between two: {key}=interval(0,1000000)"
        expected = f"{MAX_JOBS:,} at most"
        faults.append(Fault(key=key.lstrip("+~"), got=f"{counts[key]:,} values", expected=expected, cure=cure))
    _refuse(faults)


def _no_job(key: str) -> Fault:
    return Fault(key=key.lstrip("+~"), got="no value to sweep over, so no job", expected="one value or more")


def compose_sweep(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    config_name: str = PRIMARY,
    check: Callable[[DictConfig], Sequence[Fault]] = early_faults,
) -> Composition:
    """Compose what all jobs of a sweep share. check: as of exp.check.stages.compose.

    Raises: ConfigError with the faults that no job can do without, found without importing torch.
    """
    master = composition_of(overrides, config_dir=config_dir, config_name=config_name, multirun=True, check=check)
    _refuse_settings(master)
    refuse_size(master)
    return master


def _refuse_settings(master: Composition) -> None:
    """Reject settings of the sweep itself that no sweep can have, before any of them is read."""
    lines = [parse_override(text) for text in filter(is_of_sweep, task_overrides(master.config))]
    faults = [
        Fault(key=line.key_or_group, got="several values", expected="one for the whole sweep", source=COMMAND_LINE)
        for line in lines
        if line.is_sweep_override()
    ]
    for line in lines:
        if line.key_or_group == "sweep.trial" and not line.is_sweep_override() and line.value() is not None:
            text = line.get_value_string()
            cure, expected = f"Did you mean sweep.trials={text}?", "nothing: a search sets it in its jobs"
            faults.append(Fault(key="sweep.trial", got=text, expected=expected, cure=cure, source=COMMAND_LINE))
    _refuse(faults)
    config = shared_config(master)
    refuse_nodes(config, READ_FIRST)
    settings = config.sweep
    if settings.retry_failed and settings.resume is None:
        got, expected = "true, without sweep.resume", "a sweep whose failed jobs are run again"
        fault = Fault(key="sweep.retry_failed", got=got, expected=expected, cure="Add sweep.resume=auto")
        raise ConfigError(located(config, [fault]))


def sweep(master: Composition, *, executor: Executor, check: Check) -> int:
    """Run every job that the sweeper names.

    master: of `compose_sweep`. executor: runs the jobs. check: the faults of each of several configs.
    Returns: the exit status: 0 where every job ended well, else 1; 128 + n where signal n ended it.
    Raises: ConfigError before the first job, where any job of the first batch has a fault.
    """
    wanted, settings = _wanted_directory(master), master.config.sweep
    resumed = None if settings.resume is None else found_sweep(settings.resume, beside=wanted)
    if resumed is None and settings.resume == AUTO:
        print(f"sweep.resume=auto: there is no sweep in {os.path.relpath(sweeps_of(wanted))}, so one begins")
    is_ours = str(master.config.hydra.launcher._target_).startswith(OUR_LAUNCHERS)
    if resumed is not None and not is_ours:
        got, expected = f"{settings.resume}, with a launcher that knows no jobs of before", "one of exp, slurm, ray"
        raise ConfigError([Fault(key="hydra/launcher", got=got, expected=expected, cure="Leave sweep.resume out")])
    # Hydra's own sweeper composes every job for a try, and stops at the first fault.
    master.loader.tries_jobs = not is_ours
    with heeding(_leave, over=(signal.SIG_DFL, signal.default_int_handler)):
        try:
            # Fixed before the first job: with `-m name=a,b` the name is another in every job.
            directory = make_exclusively(wanted) if resumed is None else resumed
        except OSError as error:
            raise RunError(f"the sweep directory {wanted} cannot be made: {error.strerror or error}") from error
        with held(directory):
            if resumed is not None:
                # Of the sweep, of its jobs, and of what is in a job's directory.
                sweep_partial_files(directory, levels=2)
            return _run(master, directory, executor=executor, check=check)


def _leave(signum: int, frame: FrameType | None) -> None:
    # Not as an Exception, of which whoever composes and whoever draws make others.
    raise KeyboardInterrupt from Interrupted(signum=signum, checkpoint=None)


def _run(master: Composition, directory: Path, *, executor: Executor, check: Check) -> int:
    jobs: Sweep | None = None
    try:
        is_dry = master.config.sweep.dry_run
        jobs = Sweep(master=master, directory=directory, executor=executor, check=check, is_dry=is_dry)
        jobs.begin()
        run_sweeper(master.config, master.loader, jobs, directory=directory)
    except Interrupted as error:
        print(f"{error}\nthe sweep ends here", file=sys.stderr)
        status = _finish(jobs, directory, error.exit_status)
        if error.command is not None and jobs is not None and jobs.rows:
            print(f"go on      {error.command}")
        return status
    except KeyboardInterrupt as error:
        return _finish(jobs, directory, _status_of(error))
    except Exception as error:
        with contextlib.suppress(OSError):  # of which this one tells
            _finish(jobs, directory, 1)
        if isinstance(error, HydraException):
            raise ConfigError([fault_of(error)]) from error
        if isinstance(error, OSError):
            raise RunError(
                f"the sweep ended, for {unwritable(error.filename or directory, error)}, and go on with"
                f" sweep.resume={os.path.relpath(directory)}"
            ) from error
        raise
    if jobs.is_dry:
        _print_plan(jobs)
    try:
        status = _finish(jobs, directory, 0)
    except KeyboardInterrupt as error:
        print(f"interrupted as the table was shown: {os.path.relpath(directory)}/table.md has it", file=sys.stderr)
        return _status_of(error)
    if not jobs.rows and not jobs.is_dry and jobs.ended_early:
        raise RunError(f"the sweep was {jobs.ended_early}")
    if not jobs.rows and not jobs.is_dry:
        raise ConfigError([_no_job("hydra.sweeper")])
    return status


def _status_of(error: KeyboardInterrupt) -> int:
    return error.__cause__.exit_status if isinstance(error.__cause__, Interrupted) else 130


def _wanted_directory(master: Composition) -> Path:
    with hydra_config(master.config):
        return Path(master.config.hydra.sweep.dir)


def _print_plan(jobs: Sweep) -> None:
    """What a sweep would run."""
    what = "of its space the ends, all checked" if jobs.is_search else "all checked"
    for job in jobs.planned:
        print(f"job {job.number}  {' '.join(f'{key}={value}' for key, value in job.swept.items())}".rstrip())
    count = len(jobs.planned)
    print(f"{count} job{'s' if count != 1 else ''}, {what}: none was run, for sweep.dry_run=true")


def _finish(jobs: Sweep | None, directory: Path, status: int) -> int:
    if jobs is not None:
        jobs.collect()
    if jobs is None or not jobs.rows:
        _remove_unused(directory)
        return status
    print()
    print_table(directory, jobs.sorted_rows, repeat_over=jobs.settings["repeat_over"])
    for line in jobs.last_words():
        print(line)
    return status or int(not jobs.is_whole)


def _remove_unused(directory: Path) -> None:
    """Takes away the directory of a sweep of which nothing was started, and the empty ones above it."""
    if (directory / JOBS).is_file():
        return  # of an earlier sweep that this one would have gone on with
    for name in ("multirun.yaml", SETTINGS, JOURNAL):
        (directory / name).unlink(missing_ok=True)
    withdraw(directory)
    # Not empty, or gone already, where another sweep is at work beside this one.
    with contextlib.suppress(OSError):
        for path in (directory, *directory.parents):
            if path == Path.cwd():
                return
            path.rmdir()
