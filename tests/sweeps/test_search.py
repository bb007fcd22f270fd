"""A search: what is proposed, in which order results count, and what the record holds."""

import math
import sys

import optuna
import pytest

from exp.engine.trial_record import STUDY, TrialOfJob, opened
from exp.errors import ConfigError, MissingExtraError, RunError
from exp.sweeps.search import Search
from exp.sweeps.space import Axis, Space

LR = Axis(key="optimizer.lr", low=1e-5, high=1e-1, is_log=True, is_interval=True)
WIDTH = Axis(key="+model.width", low=4, high=64, is_integer=True, is_interval=True)
KIND = Axis(key="optimizer", texts=("sgd", "adamw"))
MOMENTUM = Axis(key="optimizer.momentum", low=0.0, high=0.99, is_interval=True, when={"optimizer": ("sgd",)})
SPACE = Space(axes=(LR, WIDTH, KIND, MOMENTUM), fixed=("model=mlp",))


def search(directory, *, sampler="tpe", trials=30, width=1, space=SPACE, **other) -> Search:
    arguments = {"seed": 3, "objectives": {"loss/val": "min"}, **other}
    return Search(space, sampler=sampler, trials=trials, width=width, directory=directory, **arguments)


def loss(values) -> float:
    """Smallest for a learning rate of 1e-3 with adamw."""
    return abs(math.log10(float(values["optimizer.lr"])) + 3) + (values["optimizer"] == "sgd")


def run(found: Search, count: int | None = None) -> list[dict[str, str]]:
    """The proposals, each told as soon as it is made."""
    proposals = []
    while (count is None or len(proposals) < count) and (proposal := found.ask()) is not None:
        proposals.append(dict(proposal.values))
        found.tell(proposal.number, "completed", [loss(proposal.values)])
    return proposals


@pytest.mark.parametrize("sampler", ["random", "tpe", "qmc", "cmaes", "nsga2"])
def test_values_are_inside_their_bounds_and_conditions_and_come_again_with_the_same_seed(sampler, tmp_path):
    for place in ("a", "b", "other"):
        (tmp_path / place).mkdir()
    proposals = run(search(tmp_path / "a", sampler=sampler))
    assert len(proposals) == 30
    for values in proposals:
        assert 1e-5 <= float(values["optimizer.lr"]) <= 1e-1
        assert 4 <= int(values["+model.width"]) <= 64
        assert ("optimizer.momentum" in values) == (values["optimizer"] == "sgd")
        assert list(values) == [axis.key for axis in SPACE.axes if axis.key in values], "as they were typed"
    assert proposals == run(search(tmp_path / "b", sampler=sampler))
    assert proposals != run(search(tmp_path / "other", sampler=sampler, seed=4))


def test_a_search_finds_what_a_random_one_does_not(tmp_path):
    for place in ("tpe", "random"):
        (tmp_path / place).mkdir()
    best = {
        sampler: min(map(loss, run(search(tmp_path / sampler, sampler=sampler, trials=80))))
        for sampler in ("tpe", "random")
    }
    assert best["tpe"] < best["random"]


@pytest.mark.parametrize("killed_after", [1, 7, 19])
def test_a_search_that_was_broken_off_goes_on_with_the_proposals_that_it_would_have_made(killed_after, tmp_path):
    for place in ("whole", "broken"):
        (tmp_path / place).mkdir()
    whole = run(search(tmp_path / "whole"))
    before = run(search(tmp_path / "broken"), killed_after)
    search(tmp_path / "broken").ask()  # and another one that nobody tells
    again = search(tmp_path / "broken")
    # Its jobs are found as they ended, and told anew.
    assert run(again) == whole
    assert before == whole[:killed_after]
    study = optuna.load_study(study_name=STUDY, storage=opened(tmp_path / "broken", None))
    assert [trial.number for trial in study.trials] == list(range(30))
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}


def test_half_a_line_at_the_journal_s_end_is_taken_away(tmp_path):
    run(search(tmp_path), 5)
    with (tmp_path / "sweep.journal").open("a") as file:
        file.write('{"op_code":4,"worker_id"')
    assert len(run(search(tmp_path))) == 30
    assert len(optuna.load_study(study_name=STUDY, storage=opened(tmp_path, None)).trials) == 30


def test_what_is_proposed_does_not_depend_on_which_of_several_ends_first(tmp_path):
    def drawn(place: str, newest_first: bool) -> list[dict[str, str]]:
        (tmp_path / place).mkdir()
        found, proposals, running = search(tmp_path / place, width=4), [], []
        while True:
            while (proposal := found.ask()) is not None:
                proposals.append(dict(proposal.values))
                running.append(proposal)
            if not running:
                return proposals
            ended = running.pop(-1 if newest_first else 0)
            found.tell(ended.number, "completed", [loss(ended.values)])

    oldest, newest = drawn("oldest", False), drawn("newest", True)
    assert len(oldest) == 30
    assert oldest == newest


def test_a_trial_that_failed_and_is_retried_leaves_the_proposals_behind_it_as_they_were(tmp_path):
    found = search(tmp_path, trials=14)
    for _ in range(14):
        proposal = found.ask()
        found.tell(proposal.number, "failed" if proposal.number == 2 else "completed", [loss(proposal.values)])
    again = search(tmp_path, trials=16)
    assert len(run(again)) == 16
    study = optuna.load_study(study_name=STUDY, storage=opened(tmp_path, None))
    assert [trial.number for trial in study.trials if trial.state.name == "FAIL"] == [2]


def test_another_space_than_the_record_s_is_told(tmp_path):
    run(search(tmp_path), 12)
    with pytest.raises(RunError, match="trial 0 of the search was recorded with"):
        search(tmp_path, seed=4).ask()


def test_failed_and_pruned_trials_are_recorded_as_such_and_the_search_goes_on(tmp_path):
    found = search(tmp_path, trials=6)
    for end in ("failed", "pruned", "completed", "completed", "failed", "completed"):
        proposal = found.ask()
        found.tell(proposal.number, end, [1.0])
    assert found.ask() is None
    study = optuna.load_study(study_name=STUDY, storage=opened(tmp_path, None))
    assert [trial.state.name for trial in study.trials] == [
        "FAIL",
        "PRUNED",
        "COMPLETE",
        "COMPLETE",
        "FAIL",
        "COMPLETE",
    ]


def test_several_objectives_have_a_front(tmp_path):
    found = search(tmp_path, trials=12, objectives={"loss/val": "min", "accuracy/val": "max"})
    while (proposal := found.ask()) is not None:
        found.tell(proposal.number, "completed", [loss(proposal.values), float(proposal.values["optimizer.lr"])])
    study = optuna.load_study(study_name=STUDY, storage=opened(tmp_path, None))
    assert study.metric_names == ["loss/val", "accuracy/val"]
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert 0 < len(study.best_trials) < 12


def test_any_storage_of_optuna_s_by_its_url_keeps_the_record(tmp_path):
    url = f"sqlite:///{tmp_path}/trials.db"
    assert len(run(search(tmp_path, storage=url, trials=4))) == 4
    (name,) = optuna.get_all_study_names(storage=url)
    assert len(optuna.load_study(study_name=name, storage=url).trials) == 4
    with pytest.raises(ConfigError, match=r"sweep\.storage: nosuch://x"):
        search(tmp_path, storage="nosuch://x")


def test_a_job_reports_and_is_pruned_where_it_falls_behind_and_what_is_recorded_stays(tmp_path):
    found = search(tmp_path, trials=8, sampler="random")
    proposals = [found.ask() for _ in range(8)]

    def job(number: int) -> TrialOfJob:
        return TrialOfJob(number, directory=tmp_path, storage=None, pruner="median", epochs=3)

    for proposal in proposals[:6]:
        trial = job(proposal.number)
        assert not any(trial.report(1.0 / step, step=step) for step in (1, 2, 3))
        found.tell(proposal.number, "completed", [1.0 / 3])
    good, bad = job(6), job(7)
    assert not any(good.report(0.5 / step, step=step) for step in (1, 2, 3))
    assert not bad.report(9.0, step=1), "the first report is warm-up"
    assert bad.report(9.0, step=2)
    # Of a process that was killed then, the next one finds its reports, and that it was pruned.
    again = job(7)
    assert again.pruned_at == 2
    assert not again.report(0.0, step=1)
    assert again.report(0.0, step=2)
    study = optuna.load_study(study_name=STUDY, storage=opened(tmp_path, None))
    assert study.trials[7].intermediate_values == {1: 9.0, 2: 9.0}


def test_without_optuna_a_search_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        MissingExtraError, match=r"a sweep that searches needs .* pip install 'exp-framework\[search\]'"
    ):
        search(tmp_path)
