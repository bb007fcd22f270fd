"""Real gloo groups: closed to other machines, and several runs at once."""

import json
import threading

import pytest

from exp.launch.launcher import launch
from exp.strategies.placement import Machine, placement

SOCKETS = """
torch = joined(rank)
total = torch.ones(1)
torch.distributed.all_reduce(total)
own = set()
for name in os.listdir("/proc/self/fd"):
    try:
        own.add(os.readlink(f"/proc/self/fd/{name}"))
    except FileNotFoundError:  # the descriptor of the listing itself
        pass
found = []
for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        columns = line.split()
        if f"socket:[{columns[9]}]" in own:
            found.append((columns[1], columns[3]))
note(rank, {"sockets": found, "sum": total.item()})
"""
LOOPBACKS = {
    "0100007F",  # 127.0.0.1
    "00000000000000000000000001000000",  # ::1
    "0000000000000000FFFF00000100007F",  # ::ffff:127.0.0.1
}


def test_no_socket_of_a_run_on_one_machine_can_be_reached_from_another(launched, run_directory):
    launched(SOCKETS, warm=True)
    addresses = []
    for rank in range(2):
        seen = json.loads((run_directory / f"note{rank}").read_text())
        assert seen["sum"] == 2
        addresses += [address.split(":")[0] for address, _ in seen["sockets"]]
    assert addresses, "gloo has sockets: a test that finds none looks in the wrong place"
    assert set(addresses) <= LOOPBACKS


def test_two_runs_at_once_do_not_meet(launched, run_directory, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    program = """
    torch = joined(rank)
    mine = torch.tensor([float(str(directory).endswith("second"))])
    torch.distributed.all_reduce(mine)
    time.sleep(0.5)
    note(rank, mine.item())
    """
    errors = []

    def other():
        try:
            launch(second, placement=placement("ddp", machine=Machine(gpus=0)), worker="rank_program")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    starter = threading.Timer(0.2, thread.start)
    starter.start()
    launched(program)
    starter.join()
    thread.join(timeout=120)
    assert not errors
    assert [(run_directory / f"note{rank}").read_text() for rank in range(2)] == ["0.0", "0.0"]
    assert [(second / f"note{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


@pytest.mark.parametrize("ranks", [1])
def test_one_rank_has_no_process_group(launched, run_directory, ranks):
    launched("torch = joined(rank); note(rank, torch.distributed.is_initialized())", ranks=ranks, warm=True)
    assert (run_directory / "note0").read_text() == "false"
