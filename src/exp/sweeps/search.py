"""Draw the jobs of a search: Optuna proposes, behind a record of every trial that its own tools read.

What is proposed depends on the seed and on the results before, never on which of two jobs ended first: a trial is
proposed once all but the last few before it are told, and their results come to the sampler in their order. So a search
that was killed goes on with the proposals that it would have made; it draws them all again and finds them as recorded.

    proposals   an Optuna study in memory, which sees results in order
    record      sweep.journal in the sweep's directory, or any storage of Optuna's: optuna-dashboard reads it, the jobs
                report to it, and their pruners look at it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exp.engine.trial_record import opened, optuna_package, quiet, readable, study_name
from exp.errors import RunError
from exp.shared_types import Mode, Sampler
from exp.sweeps.space import Axis, Combination, Space

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.samplers import BaseSampler

DEFAULT_TRIALS = 20
DIRECTIONS: Mapping[Mode, str] = {"min": "minimize", "max": "maximize"}
End = Literal["completed", "pruned", "failed"]
# What these samplers propose does not depend on results, so that no trial waits for one.
BLIND = ("random", "qmc")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """number: of the trial. values: of the space's axes, as overrides end."""

    number: int
    values: Combination


class Search:
    """Propose trials, and be told what came of them, in any order.

    width: how many trials are open at a time; a trial is proposed when that many before it may still be open.
    directory: of the sweep. storage: a URL of Optuna's; None is the journal in the directory.
    objectives: the tags whose values come back, and whether the smallest or the largest is the best.

    is_blind: whether no proposal waits for a result.
    Raises: MissingExtraError without Optuna; ConfigError where the storage cannot be opened, or read.
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
        storage: str | None = None,
    ) -> None:
        optuna = optuna_package()
        self.space, self.trials, self.objectives = space, trials, objectives
        self.is_blind = sampler in BLIND
        self._width = trials if self.is_blind else width
        self._asked = self._passed_on = 0
        # By number of the trial: how it ended, its values, and what its job reported on the way.
        self._results: dict[int, tuple[End, Sequence[float], Mapping[int, float]]] = {}
        self._open: dict[int, Any] = {}
        directions = [DIRECTIONS[mode] for mode in objectives.values()]
        with quiet():
            self._proposing = optuna.create_study(
                sampler=_sampler(sampler, seed=seed, width=width), directions=directions
            )
        with quiet(), readable(directory, storage):
            self._record = optuna.create_study(
                storage=opened(directory, storage),
                study_name=study_name(directory, storage),
                directions=directions,
                sampler=optuna.samplers.RandomSampler(),
                load_if_exists=True,
            )
            self._record.set_metric_names(list(objectives))
            self._recorded = self._record.get_trials(deepcopy=False)

    def ask(self) -> Proposal | None:
        """The next trial; None where it waits for results, or where there is none left: see `is_exhausted`."""
        if self.is_exhausted:
            return None
        number = self._asked
        while self._passed_on <= number - self._width:
            if self._passed_on not in self._results:
                return None
            self._pass_on(self._passed_on)
            self._passed_on += 1
        values: dict[str, str] = {}
        with quiet():
            trial = self._open[number] = self._proposing.ask()
            for axis in self.space.by_condition():
                if self.space.is_there(axis, values):
                    values[axis.key] = _drawn(trial, axis)
        self._asked += 1
        self._write_down(trial)
        return Proposal(
            number=number, values={axis.key: values[axis.key] for axis in self.space.axes if axis.key in values}
        )

    @property
    def is_exhausted(self) -> bool:
        """Whether every trial was proposed."""
        return self._asked >= self.trials

    def tell(self, number: int, end: End, values: Sequence[float]) -> None:
        """What came of a trial. values: of the objectives; of a trial that was not completed none are read.

        Where the record knows the end already, of before a resume, it stays, of a job that is retried, too: what was
        proposed behind it followed from it.
        """
        from optuna.trial import TrialState

        states: Mapping[End, TrialState] = {
            "completed": TrialState.COMPLETE,
            "pruned": TrialState.PRUNED,
            "failed": TrialState.FAIL,
        }
        recorded = self._record.get_trials(deepcopy=False)[number]
        if recorded.state.is_finished():
            end = next(word for word, state in states.items() if state == recorded.state)
            values = recorded.values or values
        else:
            with quiet():
                told = list(values) if end == "completed" else None
                self._record.tell(number, values=told, state=states[end])
        self._results[number] = (end, values, dict(recorded.intermediate_values))

    def _pass_on(self, number: int) -> None:
        """Tell the sampler the result of a trial, whose turn it is."""
        from optuna.trial import TrialState

        end, values, reported = self._results.pop(number)
        trial = self._open.pop(number)
        with quiet():
            for step, value in sorted(reported.items()):
                if len(self.objectives) == 1:
                    trial.report(value, step)
            if end == "completed":
                self._proposing.tell(trial, list(values))
            elif end == "pruned" and reported:
                self._proposing.tell(trial, state=TrialState.PRUNED)
            else:
                self._proposing.tell(trial, state=TrialState.FAIL)

    def _write_down(self, trial: Trial) -> None:
        """Record a proposal, or find it as it was recorded."""
        from optuna.trial import TrialState, create_trial

        if trial.number >= len(self._recorded):
            self._record.add_trial(
                create_trial(state=TrialState.RUNNING, params=trial.params, distributions=trial.distributions)
            )
            return
        before = self._recorded[trial.number].params
        if before != trial.params:
            raise RunError(
                f"trial {trial.number} of the search was recorded with {before}, and drawn again it is {trial.params}: "
                "the space, the seed or Optuna is another. Repeat the command of that sweep, or begin a new one"
            )


def _drawn(trial: Trial, axis: Axis) -> str:
    """A value of an axis, as an override ends."""
    if not axis.is_interval:
        return str(trial.suggest_categorical(axis.name, list(axis.texts)))
    if axis.is_integer:
        return axis.text(trial.suggest_int(axis.name, int(axis.low), int(axis.high), log=axis.is_log))
    return axis.text(trial.suggest_float(axis.name, axis.low, axis.high, log=axis.is_log))


def _sampler(name: Sampler, *, seed: int, width: int) -> BaseSampler:
    from optuna import samplers

    # A seed of NumPy's RandomState.
    seed %= 2**32
    startup = max(10, width)
    if name == "random":
        return samplers.RandomSampler(seed=seed)
    if name == "qmc":
        return samplers.QMCSampler(seed=seed, scramble=True)
    if name == "gp":
        return samplers.GPSampler(seed=seed)
    if name == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if name == "nsga2":
        return samplers.NSGAIISampler(seed=seed)
    # Trials that are open count as bad ones, so that those proposed beside each other are not all the same.
    return samplers.TPESampler(
        seed=seed, n_startup_trials=startup, multivariate=True, group=True, constant_liar=width > 1
    )
