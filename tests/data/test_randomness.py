"""Every stream is a function of its position, in any process."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from exp.data.randomness import (
    initialisation,
    permutation,
    preserve_generators,
    reseed,
    reseed_sample,
    sample_generator,
    seed_for,
)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeds_are_the_ones_that_old_checkpoints_were_written_with():
    # Literal on purpose: another value would change every resumed run.
    assert seed_for(0, "order", 1) == 7553898737722790512
    assert seed_for(np.int64(0), "order", torch.tensor(1)) == 7553898737722790512
    assert permutation(seed=3, epoch=2, length=6).tolist() == [1, 2, 4, 3, 5, 0]


def test_a_seed_does_not_depend_on_the_process():
    code = "from exp.data.randomness import seed_for; print(seed_for(7, 'x', 1))"
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another than this process's
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == seed_for(7, "x", 1)


def test_parts_are_kept_apart():
    assert len({seed_for(1, 23), seed_for(12, 3), seed_for(1, "23"), seed_for("1", 23), seed_for(123)}) == 5
    with pytest.raises(TypeError):
        seed_for(0.5)


def test_a_step_draws_the_same_whatever_was_drawn_before():
    reseed(seed=1, rank=0, epoch=2, batch=3)
    first = draws()
    torch.rand(10)
    reseed(seed=1, rank=0, epoch=2, batch=3)
    assert draws() == first


@pytest.mark.parametrize("change", [{"seed": 9}, {"rank": 9}, {"epoch": 9}, {"batch": 9}, {"stage": "val"}])
def test_another_position_draws_other_numbers(change):
    position = {"seed": 1, "rank": 0, "epoch": 2, "batch": 3}
    reseed(**position)
    first = draws()
    reseed(**{**position, **change})
    assert all(a != b for a, b in zip(first, draws(), strict=True))


def test_samples_and_initialisation_have_streams_of_their_own():
    seen = set()
    for start in (
        lambda: initialisation(5),
        lambda: reseed(seed=5, rank=0, epoch=0, batch=0),
        lambda: reseed_sample(seed=5, epoch=0, index=0),
        lambda: reseed_sample(seed=5, epoch=0, index=1),
        lambda: reseed_sample(seed=5, epoch=1, index=0),
        lambda: reseed_sample(seed=5, epoch=0, index=0, stage="val"),
        lambda: reseed_sample(seed=5, epoch=0, index=0, stage="test"),
    ):
        start()
        seen.add(draws())
    assert len(seen) == 7
    one = sample_generator(seed=5, epoch=1, index=2**33).random(3)
    assert (one == sample_generator(seed=5, epoch=1, index=2**33).random(3)).all()
    assert (one != sample_generator(seed=5, epoch=1, index=2**33 + 1).random(3)).all()


def test_reading_in_this_process_leaves_the_generators_where_they_were():
    reseed(seed=0, rank=0, epoch=0, batch=0)
    expected = draws()
    reseed(seed=0, rank=0, epoch=0, batch=0)
    with preserve_generators():
        reseed_sample(seed=1, epoch=1, index=1)
        draws()
    assert draws() == expected
