"""A search: its proposals, the order of results, and its record."""

import math
import sys

import optuna
import pytest

from exp.engine.trial_record import STUDY, TrialOfJob, open_journal
from exp.errors import MissingExtraError, RunError
from exp.sweeps.search import Search
from exp.sweeps.space import Axis, Space

LR = Axis(key="optimizer.lr", low=1e-5, high=1e-1, is_log=True, is_interval=True)
WIDTH = Axis(key="+model.width", low=4, high=64, is_integer=True, is_interval=True)
KIND = Axis(key="optimizer", texts=("sgd", "adamw"))
MOMENTUM = Axis(key="optimizer.momentum", low=0.0, high=0.99, is_interval=True, when={"optimizer": ("sgd",)})
SPACE = Space(axes=(LR, WIDTH, KIND, MOMENTUM), fixed=("model=mlp",))


@pytest.fixture
def search(tmp_path):
    """A function that opens a search in a subfolder of the test's directory."""

    def open_search(name="", *, sampler="tpe", trials=20, width=1, **other) -> Search:
        (tmp_path / name).mkdir(exist_ok=True)
        arguments = {"seed": 3, "objectives": {"loss/val": "min"}, **other}
        return Search(SPACE, sampler=sampler, trials=trials, width=width, directory=tmp_path / name, **arguments)

    return open_search


def study(directory) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=open_journal(directory))


def loss(values) -> float:
    """Return a loss that is smallest for a learning rate of 1e-3 with adamw."""
    return abs(math.log10(float(values["optimizer.lr"])) + 3) + (values["optimizer"] == "sgd")


def run(found: Search, count: int | None = None, ends: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Return the proposals of a search, each reported as completed, or with the status in `ends`."""
    proposals = []
    while (count is None or len(proposals) < count) and (proposal := found.ask()) is not None:
        end = ends[len(proposals)] if ends else "completed"
        proposals.append(dict(proposal[1]))
        found.tell(proposal[0], end, [loss(proposal[1])])
    return proposals


@pytest.mark.parametrize("sampler", ["random", "tpe", "qmc", "cmaes", "nsga2"])
def test_proposals_lie_in_the_space_and_follow_the_seed(sampler, search):
    proposals = run(search("a", sampler=sampler, trials=15))
    assert len(proposals) == 15
    for values in proposals:
        assert 1e-5 <= float(values["optimizer.lr"]) <= 1e-1
        assert 4 <= int(values["+model.width"]) <= 64
        assert ("optimizer.momentum" in values) == (values["optimizer"] == "sgd")
        assert list(values) == [axis.key for axis in SPACE.axes if axis.key in values], (
            "keys must have the order of the command line"
        )
    assert proposals == run(search("b", sampler=sampler, trials=15))
    assert proposals != run(search("other", sampler=sampler, trials=15, seed=4))


@pytest.mark.parametrize("killed_after", [1, 12, pytest.param(7, marks=pytest.mark.slow)])
def test_a_killed_search_continues_with_the_same_proposals(killed_after, search, tmp_path):
    whole = run(search("whole"))
    before = run(search("broken"), killed_after)
    search("broken").ask()  # a proposal without a result
    with (tmp_path / "broken" / "sweep.journal").open("a") as file:
        file.write('{"op_code":4,"worker_id"')  # an incomplete line
    # The search proposes and gets the finished jobs again.
    assert run(search("broken")) == whole
    assert before == whole[:killed_after]
    trials = study(tmp_path / "broken").trials
    assert [trial.number for trial in trials] == list(range(20))
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    with pytest.raises(RunError, match=r"trial 0 of the search has .*, but sweep\.journal has"):
        search("broken", seed=4).ask()


def test_proposals_do_not_depend_on_which_job_ends_first(search):
    def drawn(place: str, newest_first: bool) -> list[dict[str, str]]:
        found, proposals, running = search(place, width=4), [], []
        while True:
            while (proposal := found.ask()) is not None:
                proposals.append(dict(proposal[1]))
                running.append(proposal)
            if not running:
                return proposals
            ended = running.pop(-1 if newest_first else 0)
            found.tell(ended[0], "completed", [loss(ended[1])])

    oldest, newest = drawn("oldest", False), drawn("newest", True)
    assert len(oldest) == 20
    assert oldest == newest


def test_failed_and_pruned_trials_are_recorded(search, tmp_path):
    ends = ("failed", "pruned", "completed", "completed", "failed", "completed")
    states = {"failed": "FAIL", "pruned": "PRUNED", "completed": "COMPLETE"}
    run(search(trials=6), ends=ends)
    assert [trial.state.name for trial in study(tmp_path).trials] == [states[end] for end in ends]
    # A retry does not change the records of failed trials and the later proposals.
    assert len(run(search(trials=8))) == 8
    assert [trial.number for trial in study(tmp_path).trials if trial.state.name == "FAIL"] == [0, 4]


def test_several_objectives_have_a_front(search, tmp_path):
    found = search(trials=12, objectives={"loss/val": "min", "accuracy/val": "max"})
    while (proposal := found.ask()) is not None:
        found.tell(proposal[0], "completed", [loss(proposal[1]), float(proposal[1]["optimizer.lr"])])
    record = study(tmp_path)
    assert record.metric_names == ["loss/val", "accuracy/val"]
    assert [direction.name for direction in record.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert 0 < len(record.best_trials) < 12


def test_a_job_that_falls_behind_is_pruned(search, tmp_path):
    found = search(trials=8, sampler="random")
    proposals = [found.ask() for _ in range(8)]

    def job(number: int) -> TrialOfJob:
        return TrialOfJob(number, directory=tmp_path, pruner="median", epochs=3)

    for proposal in proposals[:6]:
        trial = job(proposal[0])
        assert not any(trial.report(1.0 / step, step=step) for step in (1, 2, 3))
        found.tell(proposal[0], "completed", [1.0 / 3])
    good, bad = job(6), job(7)
    assert not any(good.report(0.5 / step, step=step) for step in (1, 2, 3))
    assert not bad.report(9.0, step=1), "the first report must not prune, because it is warm-up"
    assert bad.report(9.0, step=2)
    # After a kill, the next process finds the reports of the trial and that it was pruned.
    again = job(7)
    assert again.pruned_at == 2
    assert not again.report(0.0, step=1)
    assert again.report(0.0, step=2)
    assert study(tmp_path).trials[7].intermediate_values == {1: 9.0, 2: 9.0}


def test_a_search_without_optuna_names_the_extra(search, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    message = r"a sweep that searches needs .* pip install 'exp-framework\[search\]'"
    with pytest.raises(MissingExtraError, match=message):
        search()
