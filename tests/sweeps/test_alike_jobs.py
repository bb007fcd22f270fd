"""Jobs that differ little from an earlier job are composed and checked faster, with the same configs and errors."""

import gc
import tracemalloc
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from exp.check.examination import check_job
from exp.check.stages import compose
from exp.config.frozen import COMPOSITION
from exp.errors import ConfigError
from exp.sweeps.jobs import Jobs
from exp.sweeps.space import space_of
from exp.sweeps.sweep import compose_sweep


def jobs_of(master):
    return Jobs(master=master, directory=Path("outputs/s").absolute(), check=lambda configs: [None] * len(configs))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mlp", "optimizer.lr=-1,1", "seed=0,-3"],
        ["tags=[a],[b]", "data.dataset.seed=1,2"],
        ["model=mlp", "model.constants.width=16,32"],  # the key also sets the width of the layers
        ["name=a,b", "hydra.sweep.subdir=s_${name}"],
        ["tags=['${hydra:job.num}']", "seed=0,1"],
        pytest.param(["model=lenet,mlp", "trainer.max_epochs=2,3", "seed=1,2"], marks=pytest.mark.slow),
        pytest.param(["scheduler=cosine", "scheduler.warmup_steps=3,-1", "seed='1',2"], marks=pytest.mark.slow),
    ],
)
def test_a_job_is_the_same_after_a_similar_one(overrides):
    master = compose_sweep(overrides)
    made = jobs_of(master)
    space = space_of(master.config, master.vocabulary)
    for number, values in enumerate(space.grid()):
        one = made.compose(number, space.overrides(values))
        other = jobs_of(master).compose(number, space.overrides(values))
        assert (one.swept, str(one.error), one.plain) == (other.swept, str(other.error), other.plain)
        if one.error is None:
            assert OmegaConf.to_container(one.new_config()) == OmegaConf.to_container(other.new_config())


SGD = ["optimizer=sgd", "scheduler=one_cycle"]


@pytest.mark.parametrize(
    ("shared", "own"),
    [
        ([], [["optimizer.betas=[0.7,0.9]"], ["optimizer.betas=[2.0,0.9]"], ["optimizer.betas=[0.1,0.1]", "seed=2"]]),
        (SGD, [["optimizer.momentum=0.5"], ["optimizer.momentum=-1.0"], ["optimizer.momentum=0.9"]]),
        (SGD, [["scheduler.pct_start=0.3"], ["scheduler.pct_start=7.0"]]),
        # These keys change other values of the config.
        ([], [["model.layers.hidden.out_features=8"], ["model.layers.hidden.out_features=9"]]),
        ([], [["optimizer=sgd"], ["optimizer=adam"]]),
        ([], [["data.batch_size=8"], ["data.batch_size=16"]]),
    ],
)
def test_a_job_has_the_same_errors_after_a_similar_one(shared, own):
    before = None
    for overrides in own:
        config = compose([*shared, *overrides])
        errors = []
        for known in (before, None):
            try:
                checked = check_job(config, known)
                errors.append(None)
            except ConfigError as error:
                errors.append([(error.key, error.got, error.expected) for error in error.errors])
        assert errors[0] == errors[1]
        before = checked


def test_ten_thousand_jobs_fit_into_memory():
    """A DictConfig takes 400 kB, so a DictConfig for each of 10,000 jobs would take 4 GB."""
    made = jobs_of(compose_sweep(["model=mlp", "seed=range(0,10000)"]))
    jobs = [made.compose(number, [f"seed={number}"]) for number in range(3)]
    tracemalloc.start()
    try:
        jobs += [made.compose(number, [f"seed={number}"]) for number in range(3, 23)]
        gc.collect()
        each = tracemalloc.get_traced_memory()[0] / 20
    finally:
        tracemalloc.stop()
    assert each < 40e3
    assert [job.new_config().seed for job in jobs[::10]] == [0, 10, 20]
    assert jobs[7].new_config()[COMPOSITION].directory == str(jobs[7].directory) != str(jobs[8].directory)
