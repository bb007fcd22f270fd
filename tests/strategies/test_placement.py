"""Where the ranks of a run go, as a table of machines and wishes."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import exp
from exp.construct import build_strategy
from exp.errors import ConfigError
from exp.strategies.auto import Auto
from exp.strategies.placement import (
    ACCELERATORS,
    DEFAULT_DEMAND,
    Demand,
    Dimensions,
    Machine,
    Placement,
    adopted,
    placement,
)
from exp.strategies.rank import ALONE, Rank
from exp.strategies.single import Single

LAPTOP = Machine(gpus=0)
ONE_GPU = Machine(gpus=1)
FOUR_GPUS = Machine(gpus=4)
MAC = Machine(gpus=0, mps=True)
DEMANDS = {"auto": Auto(name="auto").demand, "single": Single(name="single").demand}


def said(placed: Placement) -> tuple[str, str, str | None, int]:
    return placed.strategy, placed.accelerator, placed.backend, placed.world_size


@pytest.mark.parametrize(
    ("machine", "strategy", "devices", "expected"),
    [
        (LAPTOP, "auto", "auto", ("single", "cpu", None, 1)),
        (LAPTOP, "auto", 3, ("ddp", "cpu", "gloo", 3)),
        (LAPTOP, "ddp", "auto", ("ddp", "cpu", "gloo", 2)),
        (LAPTOP, "ddp", 4, ("ddp", "cpu", "gloo", 4)),
        (LAPTOP, "ddp", 1, ("ddp", "cpu", None, 1)),
        (LAPTOP, "single", "auto", ("single", "cpu", None, 1)),
        (ONE_GPU, "auto", "auto", ("single", "cuda", None, 1)),
        (ONE_GPU, "ddp", "auto", ("ddp", "cuda", None, 1)),
        (FOUR_GPUS, "auto", "auto", ("ddp", "cuda", "nccl", 4)),
        (FOUR_GPUS, "auto", 1, ("single", "cuda", None, 1)),
        (FOUR_GPUS, "auto", [2, 3], ("ddp", "cuda", "nccl", 2)),
        (FOUR_GPUS, "ddp", "auto", ("ddp", "cuda", "nccl", 4)),
        (FOUR_GPUS, "single", "auto", ("single", "cuda", None, 1)),
        (FOUR_GPUS, "mine", "auto", ("mine", "cuda", "nccl", 4)),
        (MAC, "auto", "auto", ("single", "mps", None, 1)),
        (MAC, "ddp", "auto", ("ddp", "cpu", "gloo", 2)),
        (MAC, "auto", 2, ("ddp", "cpu", "gloo", 2)),
    ],
)
def test_a_strategy_takes_the_devices_of_the_machine(machine, strategy, devices, expected):
    demand = DEMANDS.get(strategy, DEFAULT_DEMAND)
    assert said(placement(strategy, devices=devices, machine=machine, demand=demand)) == expected


def test_the_accelerator_can_be_held_to_the_cpu():
    assert said(placement("ddp", accelerator="cpu", machine=FOUR_GPUS)) == ("ddp", "cpu", "gloo", 2)


def test_listed_gpus_go_to_the_local_ranks_in_their_order():
    placed = placement("ddp", devices=[3, 1], machine=FOUR_GPUS)
    assert [placed.device(0), placed.device(1)] == ["cuda:3", "cuda:1"]


@pytest.mark.parametrize(
    ("wish", "machine", "key", "cure"),
    [
        ({"devices": 8}, FOUR_GPUS, "launch.devices", "launch.accelerator=cpu"),
        ({"devices": [0, 9]}, FOUR_GPUS, "launch.devices", "launch.accelerator=cpu"),
        ({"devices": [0, 1]}, LAPTOP, "launch.devices", "launch.devices=2"),
        ({"devices": 0}, LAPTOP, "launch.devices", None),
        ({"devices": -1}, LAPTOP, "launch.devices", None),
        ({"devices": True}, LAPTOP, "launch.devices", None),
        ({"devices": "all"}, LAPTOP, "launch.devices", None),
        ({"devices": [0, 0]}, FOUR_GPUS, "launch.devices", None),
        ({"devices": []}, FOUR_GPUS, "launch.devices", None),
        ({"nodes": 0}, LAPTOP, "launch.nodes", None),
        ({"accelerator": "gpu"}, FOUR_GPUS, "launch.accelerator", "launch.accelerator=cuda"),
        ({"accelerator": "cuda"}, LAPTOP, "launch.accelerator", "launch.accelerator=cpu"),
        ({"accelerator": "mps"}, LAPTOP, "launch.accelerator", None),
        ({"accelerator": "mps", "devices": 2}, MAC, "launch.accelerator", "launch.accelerator=cpu"),
    ],
)
def test_a_wish_that_the_machine_cannot_grant_names_its_key_and_the_cure(wish, machine, key, cure):
    with pytest.raises(ConfigError) as caught:
        placement("ddp", **wish, machine=machine)
    faults = [fault for fault in caught.value.faults if fault.key == key]
    assert faults
    assert cure is None or cure in faults[0].cure


def test_no_more_cpu_ranks_than_make_sense():
    for cores, most in ((1, 16), (2, 16), (8, 32)):
        machine = Machine(gpus=0, cores=cores)
        assert placement("ddp", devices=most, machine=machine).world_size == most
        with pytest.raises(ConfigError, match=f"at most {most} on this machine, which has {cores} core") as caught:
            placement("ddp", devices=most + 1, machine=machine)
        assert [fault.key for fault in caught.value.faults] == ["launch.devices"]
    assert placement("ddp", devices=64, machine=Machine(gpus=64, cores=2)).world_size == 64
    # Layers over 64 names of the one CPU are one rank.
    assert placement("layer_split", devices=64, demand=Demand(rest="devices"), machine=Machine(gpus=0, cores=2))


def test_single_refuses_several_ranks():
    with pytest.raises(ConfigError, match="strategy=ddp"):
        placement("single", devices=2, machine=LAPTOP, demand=DEMANDS["single"])


DIMENSIONS = {
    "strategy=ddp": Dimensions(data=8),
    "strategy=ddp strategy.inner=layer_split": Dimensions(data=4, devices=2),
    "strategy=fsdp": Dimensions(shard=8),
    "strategy=deepspeed": Dimensions(data=8),
    "strategy=deepspeed strategy.stage=3": Dimensions(shard=8),
    "strategy=tensor_parallel": Dimensions(tensor=8),
    "strategy=pipeline": Dimensions(pipeline=8),
    "strategy=pipeline strategy.stages=2": Dimensions(data=4, pipeline=2),
    "strategy=layer_split": Dimensions(devices=8),
    "strategy=data_parallel": Dimensions(devices=8),
    "strategy=hybrid": Dimensions(data=4, tensor=2),
    "strategy=hybrid strategy.data=shard": Dimensions(shard=4, tensor=2),
    "strategy=hybrid strategy.tensor=1 strategy.pipeline=2": Dimensions(data=4, pipeline=2),
}


@pytest.mark.parametrize("words", DIMENSIONS)
def test_eight_devices_are_dimensions(words):
    strategy = build_strategy(exp.compose(words.split()))
    placed = placement("mine", devices=8, demand=strategy.demand, machine=Machine(gpus=8))
    assert placed.dimensions == DIMENSIONS[words]
    assert placed.world_size * placed.devices_per_rank == 8


def test_ranks_of_one_model_are_neighbours():
    mesh = Dimensions(data=2, tensor=2)
    assert (mesh.world_size, mesh.data_ranks, mesh.model_ranks) == (4, 2, 2)
    assert (mesh.models(), mesh.peers()) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])


@pytest.mark.parametrize("strategy", [Single(name="mine"), type("Mine", (Single,), {})(name="other")])
def test_single_by_another_name_is_single(strategy):
    assert said(placement("mine", machine=FOUR_GPUS, demand=strategy.demand)) == ("mine", "cuda", None, 1)
    assert placement("mine", machine=MAC, demand=strategy.demand).accelerator == "mps"
    with pytest.raises(ConfigError, match="mine with 2 ranks; expected one device"):
        placement("mine", devices=2, machine=LAPTOP, demand=strategy.demand)


def test_all_faults_come_at_once():
    with pytest.raises(ConfigError) as caught:
        placement("ddp", devices="many", nodes=0, accelerator="tpu", machine=LAPTOP)
    assert [fault.key for fault in caught.value.faults] == ["launch.devices", "launch.nodes", "launch.accelerator"]


@given(
    strategy=st.sampled_from(["auto", "single", "ddp", "mine"]),
    devices=st.one_of(
        st.just("auto"), st.integers(-2, 9), st.lists(st.integers(-1, 9)), st.text(max_size=3), st.none()
    ),
    nodes=st.integers(-1, 3),
    accelerator=st.sampled_from([*ACCELERATORS, "gpu", None]),
    machine=st.builds(Machine, gpus=st.integers(0, 8), mps=st.booleans()),
)
def test_every_wish_is_granted_within_the_machine_or_refused_with_its_keys(
    strategy, devices, nodes, accelerator, machine
):
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
        keys = {fault.key for fault in error.faults}
        placed = None
    if placed is None:
        assert keys <= {"launch.devices", "launch.nodes", "launch.accelerator", "strategy.name"}
        return
    assert placed.world_size == placed.nodes * placed.ranks_per_node >= 1
    assert (placed.backend is None) == (placed.world_size == 1)
    assert len(placed.device_indices) == (placed.ranks_per_node if placed.accelerator == "cuda" else 0)
    assert all(0 <= index < machine.gpus for index in placed.device_indices)
    assert devices == "auto" or placed.ranks_per_node == (devices if isinstance(devices, int) else len(devices))


def test_a_rank_adopts_what_its_launcher_started():
    rank = Rank(global_rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)
    assert said(adopted(rank, "auto", machine=LAPTOP, demand=DEMANDS["auto"])) == ("ddp", "cpu", "gloo", 8)
    assert adopted(rank, "ddp", machine=LAPTOP).nodes == 2
    assert said(adopted(ALONE, "auto", machine=FOUR_GPUS, demand=DEMANDS["auto"])) == ("single", "cuda", None, 1)


@pytest.mark.parametrize("wish", [{"devices": 2}, {"devices": 4, "nodes": 3}, {"devices": [0, 1]}])
def test_a_rank_refuses_numbers_that_were_not_started(wish):
    rank = Rank(global_rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)
    with pytest.raises(ConfigError, match="what was started: 4 ranks on each of 2 nodes"):
        adopted(rank, "ddp", **wish, machine=FOUR_GPUS)


def test_placing_on_a_known_machine_imports_no_torch():
    program = (
        "import sys; from exp.strategies.placement import Machine, placement\n"
        "placement('ddp', machine=Machine(gpus=0))\n"
        "sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


CONFINED = Rank(global_rank=6, local_rank=0, world_size=8, local_world_size=1, node_rank=6, is_confined=True)


@pytest.mark.parametrize("asked", [{}, {"devices": 4, "nodes": 2}, {"devices": 4}, {"nodes": 2}])
def test_a_rank_that_sees_its_own_gpu_alone_takes_it(asked):
    placed = adopted(CONFINED, "ddp", machine=Machine(gpus=1), **asked)
    assert (placed.world_size, placed.device(CONFINED.local_rank), placed.backend) == (8, "cuda:0", "nccl")


def test_another_number_than_the_confined_ranks_is_refused():
    with pytest.raises(ConfigError, match="what was started"):
        adopted(CONFINED, "ddp", devices=3, nodes=2, machine=Machine(gpus=1))


def test_one_process_with_all_devices_is_not_started_twice():
    two = Rank(global_rank=1, local_rank=1, world_size=2, local_world_size=2)
    with pytest.raises(ConfigError, match="rank 1 of 2; expected one rank"):
        adopted(two, "data_parallel", demand=Demand(rest="devices"), machine=Machine(gpus=2))


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
def test_nccl_where_there_is_none(machine):
    with pytest.raises(ConfigError, match=r"launch\.backend: nccl"):
        placement("ddp", backend="nccl", machine=machine)
