"""A frozen run has the same weights on one node, under torchrun and as tasks of SLURM."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = (
    *("model=lenet", "strategy=ddp", "launch.accelerator=cpu", "trainer.max_epochs=null", "trainer.max_steps=8"),
    *("trainer.enable_progress_bar=false", "test=false", "hooks=[]", "trainer.limit_val_batches=1"),
    "precision=fp64",  # in float32, a new process and a forked one differ in some bits on some processors
)
TWO_NODES = ("launch.nodes=2", "launch.devices=1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@pytest.fixture
def one_node(ranks):
    """The weights of a run with two ranks on one node, which find each other by a file."""
    return weights(ranks.train(*RUN, ranks=2).directory)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def assert_same_weights(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(weights(directory)), dict(expected), rtol=1e-9, atol=1e-12)


def environment(**more: str) -> dict[str, str]:
    return (
        os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more
    )


def assert_end_well(processes: list[subprocess.Popen[str]]) -> None:
    try:
        for process in processes:
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def agent(directory: Path, address: str, endpoint: str, *before: str, **more: str) -> subprocess.Popen[str]:
    """Start torchrun with one rank on one of two nodes.

    torchrun finds the node of the endpoint by its host name, which does not resolve in a namespace. So this function
    passes is_host, which is true if `address` is that of the endpoint.
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
    """Two connected network namespaces, which are two hosts for a socket.

    The value is None if namespaces are not permitted. Then the nodes are two processes of this host.
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


@pytest.mark.slow
def test_two_nodes_of_torchrun_equal_one_node(ranks, one_node, two_hosts):
    if two_hosts is None:
        directory = ranks.freeze(*RUN, *TWO_NODES)
        endpoint = f"127.0.0.1:{free_port()}"
        started = [agent(directory, "127.0.0.1", endpoint, GLOO_SOCKET_IFNAME="lo") for _ in range(2)]
    else:
        directory = ranks.freeze(*RUN, *TWO_NODES)
        started = [
            agent(directory, address, f"{ADDRESSES[0]}:29400", "ip", "netns", "exec", host, GLOO_SOCKET_IFNAME=host)
            for address, host in zip(ADDRESSES, two_hosts, strict=True)
        ]
    assert_end_well(started)
    assert_same_weights(directory, one_node)


@pytest.mark.slow
def test_tasks_of_slurm_equal_one_node(ranks, one_node, commands):
    directory = ranks.freeze(*RUN)
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


@pytest.mark.slow
def test_torchrun_equals_the_launcher_of_exp(ranks, one_node):
    directory = ranks.freeze(*RUN)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "exp.worker"]
    started = subprocess.Popen([*line, str(directory)], env=environment(), stderr=subprocess.PIPE, text=True)
    assert_end_well([started])
    assert_same_weights(directory, one_node)


@pytest.mark.slow
def test_torchrun_reports_the_error_of_a_failing_rank(write_program, tmp_path, run_directory):
    write_program(
        """
        if rank.global_rank == 1:
            raise ValueError("no such color")
        time.sleep(200)
        """
    )
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--redirects=3"]
    line += [f"--log-dir={tmp_path}/logs", "-m", "rank_program", str(run_directory)]
    more = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(line, env=more, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert any("ValueError: no such color" in log.read_text() for log in (tmp_path / "logs").rglob("stderr.log"))
