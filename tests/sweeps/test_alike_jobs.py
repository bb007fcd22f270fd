"""Jobs that are like one before are composed and checked in a part of the time, with the same configs and faults."""

import gc
import tracemalloc
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from exp.check import plan
from exp.check.plan import check_job
from exp.check.stages import compose
from exp.config.freeze import COMPOSITION
from exp.errors import ConfigError
from exp.sweeps.jobs import Jobs
from exp.sweeps.space import space_of
from exp.sweeps.sweep import compose_sweep


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def maker(master):
    return Jobs(master=master, directory=Path("outputs/s").absolute(), check=lambda configs: [None] * len(configs))


@pytest.mark.parametrize(
    ("overrides", "quick"),
    [
        (["model=mlp", "optimizer.lr=1e-3,2e-3", "seed=range(0,4)"], 7),
        (["model=lenet,mlp", "trainer.max_epochs=2,3", "seed=1,2"], 6),
        (["optimizer.lr=-1,1,nan", "seed=0,-3,1"], 5),
        (["model=gpt", "data=text", "data.batch_size=8,16"], 1),
        (["tags=[a],[b]", "seed=0,1", "data.dataset.seed=1,2"], 6),
        (["scheduler=cosine", "scheduler.warmup_steps=3,4,-1", "optimizer.lr=1e-3,null"], 5),
        (["model=mlp", "model.constants.width=16,32"], 0),  # layers are as wide
        (["name=a,b", "hydra.sweep.subdir=s_${name}"], 0),
        (["tags=['${hydra:job.num}']", "seed=0,1"], 0),
        (["monitor=loss/val,accuracy/val", "mode=min,max", "seed='1',2", "~hooks.memory"], 6),
    ],
)
def test_a_job_made_from_the_one_before_is_the_one_that_is_composed(overrides, quick, monkeypatch):
    master = compose_sweep(overrides)
    made = maker(master)
    taken, by_pattern = [], Jobs._by_pattern

    def counted(self, job, lines):
        taken.append(True)
        found = by_pattern(self, job, lines)
        taken[-1] = found is not None
        return found

    space = space_of(master.config, master.loader, seed=0)
    for number, values in enumerate(space.grid()):
        with monkeypatch.context() as patched:
            patched.setattr(Jobs, "_by_pattern", counted)
            one = made.composed(number, space.overrides(values))
        other = maker(master).composed(number, space.overrides(values))
        assert (one.swept, str(one.error), one.plain) == (other.swept, str(other.error), other.plain)
        if one.config is not None:
            assert OmegaConf.to_container(one.config) == OmegaConf.to_container(other.config)
    assert sum(taken) == quick


LR, BETAS = "optimizer.lr", "optimizer.betas"
SGD = ["optimizer=sgd", "scheduler=one_cycle"]


@pytest.mark.parametrize(
    ("shared", "own", "quick"),
    [
        (["model=mlp"], [["seed=1"], ["seed=2"], ["seed=3"]], 2),
        ([], [["seed=1", f"{LR}=0.1", f"{BETAS}=[0.8,0.9]"], [f"{LR}=0.2", f"{BETAS}=[0.7,0.9]"]], 1),
        ([], [[f"{LR}=0.2", f"{BETAS}=[0.7,0.9]"], [f"{LR}=0.2", f"{BETAS}=[2.0,0.9]"], [f"{BETAS}=[0.1,0.1]"]], 2),
        (SGD, [["optimizer.momentum=0.5"], ["optimizer.momentum=-1.0"], ["optimizer.momentum=0.9"]], 2),
        (SGD, [["scheduler.pct_start=0.3"], ["scheduler.pct_start=7.0"]], 1),
        (["scheduler=cosine"], [["scheduler.warmup_steps=1"], ["scheduler.warmup_steps=10000000"]], 1),
        # What more follows from: a network, a switch, a word, data of one's own.
        ([], [["model.layers.hidden.out_features=8"], ["model.layers.hidden.out_features=9"]], 0),
        ([], [["optimizer.fused=true"], ["optimizer.fused=false"]], 0),
        ([], [["optimizer=sgd"], ["optimizer=adam"]], 0),
        ([], [["data.batch_size=8"], ["data.batch_size=16"]], 0),
    ],
)
def test_a_job_checked_beside_another_has_the_faults_that_it_has_alone(shared, own, quick, monkeypatch):
    taken = []
    refused = plan.refuse_changed
    monkeypatch.setattr(plan, "refuse_changed", lambda *given, **named: (taken.append(1), refused(*given, **named)))
    before = None
    for overrides in own:
        config = compose([*shared, *overrides])
        faults = []
        for known in (before, None):
            try:
                checked = check_job(config, known)
                faults.append(None)
            except ConfigError as error:
                faults.append([(fault.key, fault.got, fault.expected) for fault in error.faults])
        assert faults[0] == faults[1]
        before = checked
    assert len(taken) == quick


def test_ten_thousand_jobs_fit_into_memory():
    """A DictConfig of a job takes 400 kB, and 10,000 of them took 5 GB in one process."""
    made = maker(compose_sweep(["model=mlp", "seed=range(0,10000)"]))
    jobs = [made.composed(number, [f"seed={number}"]) for number in range(5)]
    tracemalloc.start()
    try:
        jobs += [made.composed(number, [f"seed={number}"]) for number in range(5, 105)]
        gc.collect()  # what was composed in between is garbage
        each = tracemalloc.get_traced_memory()[0] / 100
    finally:
        tracemalloc.stop()
    assert each < 40e3
    assert [job.config.seed for job in jobs[::50]] == [0, 50, 100]
    assert jobs[7].config[COMPOSITION].directory == str(jobs[7].directory) != str(jobs[8].directory)
