"""Draw the trials of a search. Optuna proposes them, and a record keeps every trial for its tools.

Proposals depend on the seed and on earlier results, never on which of two jobs ends first: a trial is proposed when all
but the last few trials before it have results, and the sampler gets the results in their order. A resumed search
therefore draws the same proposals again, and compares them with the record.

    proposals   an Optuna study in memory, which gets results in order
    record      sweep.journal in the directory of the sweep: optuna-dashboard reads it, jobs report to it, and their
                pruners look at it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exp.engine.trial_record import STUDY, open_journal, optuna_package, report_unreadable, silence_optuna
from exp.errors import RunError
from exp.shared_types import Mode, Sampler
from exp.sweeps.space import Axis, Combination, Space

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.samplers import BaseSampler
    from optuna.trial import TrialState

DEFAULT_TRIALS = 20
DIRECTIONS: Mapping[Mode, str] = {"min": "minimize", "max": "maximize"}
End = Literal["completed", "pruned", "failed"]
STATES: Mapping[End, str] = {"completed": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
# Samplers whose proposals do not depend on results, so that no trial waits for one.
BLIND = ("random", "qmc")


class Search:
    """Proposes trials, and takes their results in any order.

    Args:
        space: Axes that are drawn.
        sampler: Name of the sampler.
        trials: Number of trials.
        seed: Seed of the sampler.
        width: Number of trials that may be open at a time.
        objectives: Compared tags, with their directions.
        directory: Directory of the sweep.

    Attributes:
        is_blind: Whether proposals do not depend on results.

    Raises:
        MissingExtraError: Optuna is not installed.
        ConfigError: sweep.journal cannot be read.
    """

    def __init__(
        self,
        space: Space,
        *,
        sampler: Sampler,
        trials: int,
        seed: int,
        width: int,
        objectives: Mapping[str, Mode],
        directory: Path,
    ) -> None:
        optuna = optuna_package()
        self.space, self.trials, self.objectives = space, trials, objectives
        self.is_blind = sampler in BLIND
        self._width = trials if self.is_blind else width
        self._asked = self._passed_on = 0
        # The state, the values and the reports of each trial that was not passed on to the sampler.
        self._results: dict[int, tuple[TrialState, Sequence[float], Mapping[int, float]]] = {}
        self._open: dict[int, Trial] = {}
        directions = [DIRECTIONS[mode] for mode in objectives.values()]
        with silence_optuna():
            self._proposing = optuna.create_study(
                sampler=_sampler(sampler, seed=seed, width=width), directions=directions
            )
        with silence_optuna(), report_unreadable(directory):
            self._record = optuna.create_study(
                storage=open_journal(directory),
                study_name=STUDY,
                directions=directions,
                sampler=optuna.samplers.RandomSampler(),
                load_if_exists=True,
            )
            self._record.set_metric_names(list(objectives))
            self._recorded = self._record.get_trials(deepcopy=False)

    def ask(self) -> tuple[int, Combination] | None:
        """Return the number of the next trial, and its values by key, as text.

        Return None while it waits for results, and after the last trial.
        """
        number = self._asked
        if number >= self.trials:
            return None
        while self._passed_on <= number - self._width:
            if self._passed_on not in self._results:
                return None
            self._pass_on(self._passed_on)
            self._passed_on += 1
        values: dict[str, str] = {}
        with silence_optuna():
            trial = self._open[number] = self._proposing.ask()
            for axis in self.space.by_condition():
                if self.space.is_there(axis, values):
                    values[axis.key] = _draw(trial, axis)
        self._asked += 1
        self._write_down(trial)
        keys = [axis.key for axis in self.space.axes if axis.key in values]
        return number, {key: values[key] for key in keys}

    def tell(self, number: int, end: End, values: Sequence[float]) -> None:
        """Take the result of a trial.

        If the record has the end of the trial from before a resume, that end stays, also of a job that is run again:
        later proposals followed from it.

        Args:
            number: Number of the trial.
            end: How it ended.
            values: Values of the objectives. They count if the trial was completed.
        """
        from optuna.trial import TrialState

        state = TrialState[STATES[end]]
        recorded = self._record.get_trials(deepcopy=False)[number]
        if recorded.state.is_finished():
            state, values = recorded.state, recorded.values or values
        else:
            with silence_optuna():
                self._record.tell(number, values=list(values) if state == TrialState.COMPLETE else None, state=state)
        self._results[number] = (state, values, dict(recorded.intermediate_values))

    def _pass_on(self, number: int) -> None:
        """Pass the result of a trial to the sampler."""
        from optuna.trial import TrialState

        state, values, reported = self._results.pop(number)
        trial = self._open.pop(number)
        with silence_optuna():
            for step, value in sorted(reported.items()) if len(self.objectives) == 1 else ():
                trial.report(value, step)
            if state == TrialState.COMPLETE:
                self._proposing.tell(trial, list(values))
            else:
                is_pruned = state == TrialState.PRUNED and reported
                self._proposing.tell(trial, state=TrialState.PRUNED if is_pruned else TrialState.FAIL)

    def _write_down(self, trial: Trial) -> None:
        """Record a proposal, or compare it with its record.

        Raises:
            RunError: The record has another proposal.
        """
        from optuna.trial import TrialState, create_trial

        if trial.number >= len(self._recorded):
            self._record.add_trial(
                create_trial(state=TrialState.RUNNING, params=trial.params, distributions=trial.distributions)
            )
            return
        before = self._recorded[trial.number].params
        if before != trial.params:
            raise RunError(
                f"trial {trial.number} of the search is {trial.params} now and was {before} in sweep.journal: the "
                "space, the seed or the version of Optuna differs. Repeat the command of that sweep, or begin a new one"
            )


def _draw(trial: Trial, axis: Axis) -> str:
    """Return a value of an axis as text."""
    if not axis.is_interval:
        return str(trial.suggest_categorical(axis.name, list(axis.texts)))
    if axis.is_integer:
        return axis.text(trial.suggest_int(axis.name, int(axis.low), int(axis.high), log=axis.is_log))
    return axis.text(trial.suggest_float(axis.name, axis.low, axis.high, log=axis.is_log))


def _sampler(name: Sampler, *, seed: int, width: int) -> BaseSampler:
    from optuna import samplers

    makers: dict[Sampler, Callable[..., BaseSampler]] = {
        "random": samplers.RandomSampler,
        "qmc": partial(samplers.QMCSampler, scramble=True),
        "gp": samplers.GPSampler,
        "cmaes": partial(samplers.CmaEsSampler, warn_independent_sampling=False),
        "nsga2": samplers.NSGAIISampler,
        # Open trials count as bad ones, so that proposals that are made together differ.
        "tpe": partial(
            samplers.TPESampler,
            n_startup_trials=max(10, width),
            multivariate=True,
            group=True,
            constant_liar=width > 1,
        ),
    }
    return makers[name](seed=seed % 2**32)  # a seed of NumPy's RandomState
