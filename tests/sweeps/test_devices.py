"""Number of jobs that run at a time on a machine, and visible devices of each job."""

import pytest

from exp.errors import ConfigError
from exp.strategies.placement import Demand, Dimensions, Machine
from exp.sweeps.devices import Devices, Need, need, slots, threads, visible_gpus

CPU = Machine(gpus=0, cores=8)
FOUR = Machine(gpus=4, cores=16)
AUTO = Demand(cpu_devices=1, adapts=True)
DDP = Demand()
SINGLE = Demand(rest=None)
LAUNCH = {"devices": "auto", "nodes": 1, "accelerator": "auto", "backend": "auto"}


def asked(demand=AUTO, *, machine, per_job="auto", **launch):
    return need("words", {**LAUNCH, **launch}, demand=demand, devices_per_job=per_job, machine=machine)


@pytest.mark.parametrize(
    ("machine", "demand", "per_job", "launch", "expected", "at_once"),
    [
        (CPU, AUTO, "auto", {}, Need(ranks=1), 8),
        (CPU, DDP, "auto", {}, Need(ranks=2), 4),
        (CPU, DDP, "auto", {"devices": 3}, Need(ranks=3), 2),
        (FOUR, AUTO, "auto", {"accelerator": "cpu"}, Need(ranks=1), 16),
        # With strategy=auto a job would use all four GPUs, so it gets one.
        (FOUR, AUTO, "auto", {}, Need(gpus=1), 4),
        (FOUR, AUTO, "auto", {"devices": 2}, Need(ranks=2, gpus=2), 2),
        (FOUR, DDP, "auto", {}, Need(ranks=4, gpus=4), 1),
        (FOUR, DDP, "auto", {"devices": 3}, Need(ranks=3, gpus=3), 1),
        (FOUR, AUTO, 2, {}, Need(ranks=2, gpus=2), 2),
        (FOUR, DDP, 2, {}, Need(ranks=2, gpus=2), 2),
        (FOUR, SINGLE, 2, {}, Need(ranks=1, gpus=2), 2),
        (FOUR, AUTO, 0.5, {}, Need(gpus=0.5), 8),
        (FOUR, AUTO, 1 / 3, {}, Need(gpus=1 / 3), 12),
        (FOUR, AUTO, 0.4, {}, Need(gpus=0.4), 8),
        (FOUR, DDP, "auto", {"devices": [0, 2]}, Need(ranks=2, gpus=2, is_alone=True), 1),
        # Tensor parallel over two devices uses two of three GPUs.
        (Machine(gpus=3), Demand(dimensions=Dimensions(tensor=2)), 2, {}, Need(ranks=2, gpus=2), 1),
        (Machine(gpus=0, mps=True, cores=8), AUTO, "auto", {}, Need(is_alone=True), 1),
    ],
)
def test_what_a_job_needs_and_how_many_fit(machine, demand, per_job, launch, expected, at_once):
    found = asked(demand, machine=machine, per_job=per_job, **launch)
    assert found == expected
    assert slots([found], jobs="auto", machine=machine) == at_once
    assert slots([found], jobs=3, machine=machine) == 3, "sweep.jobs must take precedence"


def test_the_largest_jobs_decide_how_many_fit():
    needs = [asked(machine=CPU), asked(DDP, machine=CPU)]
    assert slots(needs, jobs="auto", machine=CPU) == 4
    assert slots([], jobs="auto", machine=CPU) == 1


@pytest.mark.parametrize(
    ("machine", "per_job", "launch", "words"),
    [
        (CPU, 1, {}, "1 on a machine with 0 GPUs"),
        (FOUR, 0.5, {"accelerator": "cpu"}, "and launch.accelerator=cpu; expected auto"),
        (FOUR, 5, {}, "5 on a machine with 4 GPUs"),
        (FOUR, 1, {"devices": 2}, "with launch.devices=2"),
        (FOUR, 0.5, {"devices": 2}, "with launch.devices=2"),
        (FOUR, 2, {"devices": [0, 1]}, "with launch.devices=[0, 1]"),
    ],
)
def test_an_impossible_share_of_the_machine_is_refused(machine, per_job, launch, words):
    with pytest.raises(ConfigError) as raised:
        asked(machine=machine, per_job=per_job, **launch)
    (error,) = raised.value.errors
    assert error.key == "sweep.devices_per_job"
    assert words in str(error)


def test_each_job_sees_its_own_gpus():
    devices, one, two, half = Devices(["0", "1", "2", "3"]), Need(gpus=1), Need(gpus=2), Need(gpus=0.5)
    assert visible_gpus(devices.take(one)) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert visible_gpus(devices.take(two)) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert devices.take(half) == devices.take(half) == ("3",), "two jobs with half a GPU must share one"
    devices.release(("0",), one)
    devices.release(("3",), half)
    assert [devices.take(half) for _ in range(3)] == [("0",), ("0",), ("3",)]
    # More jobs than GPUs share them evenly.
    devices = Devices(["0", "1"])
    assert sorted(devices.take(Need(gpus=1)) for _ in range(4)) == [("0",), ("0",), ("1",), ("1",)]
    # A job that needs no GPU or selects its GPUs sees all of them.
    assert visible_gpus(devices.take(Need())) == visible_gpus(devices.take(Need(gpus=2, is_alone=True))) == {}


def test_gpus_keep_the_names_of_the_environment():
    named = {"CUDA_VISIBLE_DEVICES": "GPU-8a,GPU-17"}
    devices = Devices.of(Machine(gpus=2), named)
    assert devices.take(Need(gpus=2)) == ("GPU-8a", "GPU-17")
    # torch ignores all indices after one that does not exist.
    assert Devices.of(Machine(gpus=1), {"CUDA_VISIBLE_DEVICES": "3,-1,2"}).take(Need(gpus=1)) == ("3",)
    assert Devices.of(Machine(gpus=2), {}).take(Need(gpus=2)) == ("0", "1")


@pytest.mark.parametrize(("ranks", "at_once", "each"), [(1, 1, 8), (1, 3, 2), (1, 20, 1), (2, 2, 2), (16, 1, 1)])
def test_the_cores_are_divided_by_jobs_and_ranks(ranks, at_once, each):
    assert threads(Need(ranks=ranks), slots=at_once, machine=CPU) == each
