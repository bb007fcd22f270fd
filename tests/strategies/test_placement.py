"""The placement of ranks for a table of machines and requests."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exp.errors import ConfigError
from exp.strategies.auto import Auto
from exp.strategies.placement import (
    DEFAULT_DEMAND,
    Demand,
    Dimensions,
    Machine,
    Placement,
    adopt_placement,
    placement,
)
from exp.strategies.rank import ALONE, Rank
from exp.strategies.single import Single

LAPTOP, FOUR_GPUS, MAC = Machine(gpus=0), Machine(gpus=4), Machine(gpus=0, mps=True)
MACHINES = {"laptop": LAPTOP, "one": Machine(gpus=1), "four": FOUR_GPUS, "mac": MAC}
TABLES = yaml.safe_load(Path(__file__).with_name("placements.yaml").read_text())
DEMANDS = {"auto": Auto(name="auto").demand, "single": Single(name="single").demand}


def summary(placed: Placement) -> tuple[str, str, str | None, int]:
    return placed.strategy, placed.accelerator, placed.backend, placed.world_size


@pytest.mark.parametrize(("machine", "strategy", "devices", "expected"), TABLES["placed"])
def test_a_strategy_takes_the_devices_of_the_machine(machine, strategy, devices, expected):
    demand = DEMANDS.get(strategy, DEFAULT_DEMAND)
    placed = placement(strategy, devices=devices, machine=MACHINES[machine], demand=demand)
    assert list(summary(placed)) == expected


def test_the_config_chooses_accelerator_and_order_of_gpus():
    assert summary(placement("ddp", accelerator="cpu", machine=FOUR_GPUS)) == ("ddp", "cpu", "gloo", 2)
    placed = placement("ddp", devices=[3, 1], machine=FOUR_GPUS)
    assert [placed.device(0), placed.device(1)] == ["cuda:3", "cuda:1"]


@pytest.mark.parametrize(("machine", "request_", "key", "fix"), TABLES["refused"])
def test_an_impossible_request_names_key_and_fix(machine, request_, key, fix):
    with pytest.raises(ConfigError) as caught:
        placement("ddp", **request_, machine=MACHINES[machine])
    assert any(error.key == key and fix in (error.fix or "") for error in caught.value.errors)


def test_the_cores_limit_the_ranks_of_a_cpu():
    for cores, most in ((1, 16), (2, 16), (8, 32)):
        machine = Machine(gpus=0, cores=cores)
        assert placement("ddp", devices=most, machine=machine).world_size == most
        with pytest.raises(ConfigError, match=f"at most {most} on this machine, which has {cores} core") as caught:
            placement("ddp", devices=most + 1, machine=machine)
        assert [error.key for error in caught.value.errors] == ["launch.devices"]
    assert placement("ddp", devices=64, machine=Machine(gpus=64, cores=2)).world_size == 64
    # On a CPU, layers on 64 devices are one rank.
    assert placement("layer_split", devices=64, demand=Demand(rest="layers"), machine=Machine(gpus=0, cores=2))


def test_ranks_of_one_model_are_neighbors():
    mesh = Dimensions(replicate=2, tensor=2)
    assert (mesh.world_size, mesh.data_ranks, mesh.model_ranks) == (4, 2, 2)
    assert (mesh.models(), mesh.peers()) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])


@pytest.mark.parametrize(
    "strategy", [Single(name="single"), Single(name="mine"), type("Mine", (Single,), {})(name="other")]
)
def test_single_by_any_name_takes_one_device(strategy):
    assert summary(placement("mine", machine=FOUR_GPUS, demand=strategy.demand)) == ("mine", "cuda", None, 1)
    assert placement("mine", machine=MAC, demand=strategy.demand).accelerator == "mps"
    with pytest.raises(ConfigError, match=r"with 2 ranks; expected one device\. Write strategy=ddp"):
        placement("mine", devices=2, machine=LAPTOP, demand=strategy.demand)


def test_all_errors_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        placement("ddp", devices=[0, 1], accelerator="mps", backend="nccl", machine=LAPTOP)
    found = [error.key for error in caught.value.errors]
    assert found == ["launch.devices", "launch.backend", "launch.accelerator", "launch.accelerator"]


@given(
    strategy=st.sampled_from(["auto", "single", "ddp", "mine"]),
    devices=st.one_of(st.just("auto"), st.integers(1, 9), st.lists(st.integers(0, 9))),
    nodes=st.integers(1, 3),
    accelerator=st.sampled_from(["auto", "cpu", "cuda", "mps"]),
    machine=st.builds(Machine, gpus=st.integers(0, 8), mps=st.booleans()),
)
def test_any_request_is_placed_or_refused(strategy, devices, nodes, accelerator, machine):
    try:
        placed = placement(
            strategy,
            devices=devices,
            nodes=nodes,
            accelerator=accelerator,
            machine=machine,
            demand=DEMANDS.get(strategy, DEFAULT_DEMAND),
        )
    except ConfigError as error:
        keys = {error.key for error in error.errors}
        placed = None
    if placed is None:
        assert keys <= {"launch.devices", "launch.nodes", "launch.accelerator", "strategy.name"}
        return
    assert placed.world_size == placed.nodes * placed.ranks_per_node >= 1
    assert (placed.backend is None) == (placed.world_size == 1)
    assert len(placed.device_indices) == (placed.ranks_per_node if placed.accelerator == "cuda" else 0)
    assert all(0 <= index < machine.gpus for index in placed.device_indices)
    assert devices == "auto" or placed.ranks_per_node == (devices if isinstance(devices, int) else len(devices))


def test_a_rank_adopts_the_placement_of_its_launcher():
    rank = Rank(global_rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)
    assert summary(adopt_placement(rank, "auto", machine=LAPTOP, demand=DEMANDS["auto"])) == ("ddp", "cpu", "gloo", 8)
    assert adopt_placement(rank, "ddp", machine=LAPTOP).nodes == 2
    assert summary(adopt_placement(ALONE, "auto", machine=FOUR_GPUS, demand=DEMANDS["auto"])) == (
        "single",
        "cuda",
        None,
        1,
    )


@pytest.mark.parametrize("wish", [{"devices": 2}, {"devices": 4, "nodes": 3}, {"devices": [0, 1]}])
def test_a_rank_refuses_other_numbers_than_started(wish):
    rank = Rank(global_rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)
    with pytest.raises(ConfigError, match="were started: 4 on each of 2 nodes"):
        adopt_placement(rank, "ddp", **wish, machine=FOUR_GPUS)


CONFINED = Rank(global_rank=6, local_rank=0, world_size=8, local_world_size=1, node_rank=6, is_confined=True)


@pytest.mark.parametrize("asked", [{}, {"devices": 4, "nodes": 2}, {"devices": 4}, {"nodes": 2}])
def test_a_rank_takes_the_one_gpu_it_sees(asked):
    placed = adopt_placement(CONFINED, "ddp", machine=Machine(gpus=1), **asked)
    assert (placed.world_size, placed.device(CONFINED.local_rank), placed.backend) == (8, "cuda:0", "nccl")


def test_another_number_of_confined_ranks_is_refused():
    with pytest.raises(ConfigError, match="ranks that were started"):
        adopt_placement(CONFINED, "ddp", devices=3, nodes=2, machine=Machine(gpus=1))


def test_a_strategy_of_one_process_refuses_two_ranks():
    two = Rank(global_rank=1, local_rank=1, world_size=2, local_world_size=2)
    with pytest.raises(ConfigError, match="in a job of 2 ranks; expected one rank"):
        adopt_placement(two, "data_parallel", demand=Demand(rest="layers"), machine=Machine(gpus=2))


@pytest.mark.parametrize(
    ("backend", "machine", "chosen"),
    [
        ("auto", Machine(gpus=2), "nccl"),
        ("gloo", Machine(gpus=2), "gloo"),
        ("auto", Machine(gpus=2, nccl=False), "gloo"),
        ("auto", Machine(gpus=0), "gloo"),
    ],
)
def test_the_backend_of_the_process_group(backend, machine, chosen):
    assert placement("ddp", backend=backend, machine=machine).backend == chosen
    assert placement("ddp", devices=1, backend=backend, machine=machine).backend is None
    alone = placement("ddp", devices=1, backend=backend, machine=machine, demand=Demand(group=True))
    assert alone.backend == chosen


@pytest.mark.parametrize("machine", [Machine(gpus=0), Machine(gpus=2, nccl=False)])
def test_nccl_without_gpus_is_refused(machine):
    with pytest.raises(ConfigError, match=r"launch\.backend: nccl"):
        placement("ddp", backend="nccl", machine=machine)
