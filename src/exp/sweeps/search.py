"""The search of a sweep: Optuna proposes trials, and a file records every trial for Optuna's tools.

Proposals depend on the seed and on the results of earlier trials, but not on the order in which jobs end. Trial n is
proposed when all trials up to n - `width` have results. The sampler receives results in the order of trial numbers. A
resumed search therefore makes the same proposals again, and compares them with the recorded proposals.

    proposals   an Optuna study in memory, which receives results in the order of trial numbers
    record      sweep.journal in the directory of the sweep; jobs write their values to this file, and pruners and
                optuna-dashboard read it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exp.engine.trial_record import STUDY, open_journal, optuna_package, report_unreadable
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
# Samplers that ignore results. All trials of such a sampler are proposed at once.
BLIND = ("random", "qmc")


class Search:
    """Search that proposes the trials of a sweep, and accepts the results of trials in any order.

    Args:
        space: Swept keys for which the sampler draws values.
        sampler: Name of the sampler.
        trials: Number of trials.
        seed: Seed of the sampler.
        width: Largest number of proposed trials without a result. The limit does not apply to samplers in BLIND.
        objectives: Tags that the search optimizes, each with its direction.
        directory: Directory of the sweep.

    Attributes:
        is_blind: Whether the sampler ignores results.

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
        # State, values and reported values of each trial that ended but was not yet passed to the sampler.
        self._results: dict[int, tuple[TrialState, Sequence[float], Mapping[int, float]]] = {}
        self._open: dict[int, Trial] = {}
        directions = [DIRECTIONS[mode] for mode in objectives.values()]
        self._proposing = optuna.create_study(sampler=_sampler(sampler, seed=seed, width=width), directions=directions)
        with report_unreadable(directory):
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
        """Return the next trial.

        Returns:
            The number of the trial, and its values as text by key. None if the search waits for results, or has no more
            trials.
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
        trial = self._open[number] = self._proposing.ask()
        for axis in self.space.by_condition():
            if self.space.is_there(axis, values):
                values[axis.key] = _draw(trial, axis)
        self._asked += 1
        self._write_down(trial)
        keys = [axis.key for axis in self.space.axes if axis.key in values]
        return number, {key: values[key] for key in keys}

    def tell(self, number: int, end: End, values: Sequence[float]) -> None:
        """Store the result of a trial.

        If an earlier sweep already recorded a result of the trial, the recorded result is used, because later proposals
        depended on it. The result is used even if the job of the trial runs again.

        Args:
            number: Number of the trial.
            end: Status of the trial at its end.
            values: Values of the objectives. They are used only if the trial was completed.
        """
        from optuna.trial import TrialState

        state = TrialState[STATES[end]]
        recorded = self._record.get_trials(deepcopy=False)[number]
        if recorded.state.is_finished():
            state, values = recorded.state, recorded.values or values
        else:
            self._record.tell(number, values=list(values) if state == TrialState.COMPLETE else None, state=state)
        self._results[number] = (state, values, dict(recorded.intermediate_values))

    def _pass_on(self, number: int) -> None:
        """Pass the stored result of a trial to the sampler."""
        from optuna.trial import TrialState

        state, values, reported = self._results.pop(number)
        trial = self._open.pop(number)
        for step, value in sorted(reported.items()) if len(self.objectives) == 1 else ():
            trial.report(value, step)
        if state == TrialState.COMPLETE:
            self._proposing.tell(trial, list(values))
        else:
            is_pruned = state == TrialState.PRUNED and reported
            self._proposing.tell(trial, state=TrialState.PRUNED if is_pruned else TrialState.FAIL)

    def _write_down(self, trial: Trial) -> None:
        """Record the values of a trial. If an earlier sweep recorded the trial, compare the values instead.

        Raises:
            RunError: The recorded values differ.
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
                f"trial {trial.number} of the search has the values {trial.params}, but sweep.journal has {before}. "
                "The swept keys, the seed or the version of Optuna changed. Repeat the "
                "earlier command, or start a new sweep"
            )


def _draw(trial: Trial, axis: Axis) -> str:
    """Let the sampler draw a value of a swept key, and return the value as text."""
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
        # constant_liar treats trials without results as bad, so that simultaneous proposals differ.
        "tpe": partial(
            samplers.TPESampler,
            n_startup_trials=max(10, width),
            multivariate=True,
            group=True,
            constant_liar=width > 1,
        ),
    }
    return makers[name](seed=seed % 2**32)  # NumPy's RandomState needs a seed below 2**32
