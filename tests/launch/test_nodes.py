"""The same frozen run on one machine, as two nodes of torchrun (two network namespaces), and as tasks of SLURM."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import exp
from exp.config.freeze import freeze

RUN = (
    *("model=lenet", "strategy=ddp", "launch.accelerator=cpu", "trainer.max_epochs=null", "trainer.max_steps=8"),
    *("trainer.enable_progress_bar=false", "test=false", "hooks=[]", "trainer.limit_val_batches=1"),
    "precision=fp64",  # in float32 the bits of a fresh process and of a forked one differ on some processors
)
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@pytest.fixture
def frozen(tmp_path, monkeypatch):
    """A function: the run directory of a frozen run, made without starting it."""
    monkeypatch.chdir(tmp_path)

    def frozen(name: str, *overrides: str) -> Path:
        config = exp.compose([f"hydra.run.dir={tmp_path / name}", *RUN, *overrides])
        exp.validate(config)
        return freeze(config)

    return frozen


@pytest.fixture
def one_node(frozen, ranks):
    """The weights of two ranks on one node, which meet in a file."""
    return weights(ranks.train(*RUN, ranks=2).directory)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def assert_same_weights(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    found = weights(directory)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def environment(**more: str) -> dict[str, str]:
    return (
        os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more
    )


def ended_well(processes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 300
    try:
        for process in processes:
            _, said = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def agent(directory: Path, address: str, endpoint: str, *before: str, **more: str) -> subprocess.Popen[str]:
    """torchrun on one of two nodes, with one rank.

    address: this node's, for its name need not resolve here; torchrun would look by it for the node of the endpoint,
        too, so that one is told that it is.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    if address != "127.0.0.1":
        line += [f"--rdzv-conf=is_host={str(endpoint.startswith(f'{address}:')).lower()}"]
    line += [f"--local-addr={address}", f"--rdzv-endpoint={endpoint}", "-m", "exp.worker", str(directory)]
    return subprocess.Popen([*before, *line], env=environment(**more), stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: two hosts, as far as a socket can see.

    None where they are not permitted: the nodes are then two processes of this host.
    """
    if shutil.which("ip") is None:
        yield None
        return
    made = names = [f"exp{os.getpid()}{side}" for side in "ab"]
    lines = [f"ip netns add {name}" for name in names]
    lines += [f"ip link add {names[0]} type veth peer name {names[1]}"]
    for name, address in zip(names, ADDRESSES, strict=True):
        lines += [f"ip link set {name} netns {name}", f"ip -n {name} addr add {address}/24 dev {name}"]
        lines += [f"ip -n {name} link set {name} up", f"ip -n {name} link set lo up"]
    try:
        for line in lines:
            if subprocess.run(line.split(), capture_output=True, check=False).returncode:
                names = None
                break
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_two_agents_of_torchrun(frozen, one_node, two_hosts):
    if two_hosts is None:
        directory = frozen("two", "launch.nodes=2", "launch.devices=1", "launch.network_interface=lo")
        endpoint = f"127.0.0.1:{free_port()}"
        started = [agent(directory, "127.0.0.1", endpoint) for _ in range(2)]
    else:
        directory = frozen("two", "launch.nodes=2", "launch.devices=1")
        started = [
            agent(directory, address, f"{ADDRESSES[0]}:29400", "ip", "netns", "exec", host, GLOO_SOCKET_IFNAME=host)
            for address, host in zip(ADDRESSES, two_hosts, strict=True)
        ]
    ended_well(started)
    assert_same_weights(directory, one_node)


def test_tasks_of_slurm(frozen, one_node, commands):
    directory = frozen("two")
    step = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    step |= {"SLURM_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0"}
    started = [
        commands.start(
            str(directory), module="exp.worker", environment={**step, "SLURM_PROCID": task, "SLURM_NODEID": task}
        )
        for task in "01"
    ]
    for task in started:
        done = task.end()
        assert done.returncode == 0, done.stderr
    assert_same_weights(directory, one_node)


def test_an_interface_that_is_not_there(frozen, commands):
    directory = frozen("two", "launch.network_interface=eth77")
    nobody = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    done = commands.run(str(directory), module="exp.worker", environment=place | nobody)
    assert done.returncode == 1
    assert "launch.network_interface is eth77" in done.stderr
    assert "expected one of" in done.stderr
