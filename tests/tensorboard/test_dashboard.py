"""python -m exp.dashboard: the TensorBoard process, its pages and its sockets."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from exp.extras.dashboard import dashboard
from exp.extras.dashboard.dashboard import DashboardError, find_event_folders, page_for
from exp.tensorboard.logger import TensorBoardLogger


def log_a_run(directory, *tags: str) -> None:
    directory.mkdir(parents=True)
    logger = TensorBoardLogger(directory=directory)
    logger.log_metrics(dict.fromkeys(tags or ("loss/train",), 1.0), 1)
    logger.finalize("success")


@contextlib.contextmanager
def started(folder, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start the command, and yield the process and its first line."""
    command = [sys.executable, "-m", "exp.dashboard", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate(timeout=60)


def fetched(address: str) -> object:
    end = time.monotonic() + 100
    while time.monotonic() < end:
        with urllib.request.urlopen(address, timeout=60) as reply:
            if found := json.load(reply):
                return found
        time.sleep(0.1)
    return None


def test_it_serves_only_this_machine(tmp_path, monkeypatch):
    log_a_run(tmp_path / "outputs" / "train" / "b", "memory/host_rss_mib")
    log_a_run(tmp_path / "outputs" / "train" / "a", "loss/train", "accuracy/val")
    (tmp_path / "outputs" / "train" / "a" / "overrides.yaml").write_text("- optimizer.lr=0.1\n")
    (place := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with started(tmp_path, "--port", "0", "--no-browser") as (process, line):
        port = int(
            re.fullmatch(r"2 runs  http://127\.0\.0\.1:(\d+)/data/plugin/exp/overview  \(Ctrl-C ends it\)\n", line)[1]
        )
        assert sorted(fetched(f"http://127.0.0.1:{port}/data/runs")) == ["lr=0.1 · train a", "train b tensorboard"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/exp/overview", timeout=60) as reply:
            found = urllib.parse.urlsplit(reply.url)
        (cards,) = urllib.parse.parse_qs(found.query)["pinnedCards"]
        assert json.loads(cards) == [{"plugin": "scalars", "tag": tag} for tag in ("loss/train", "accuracy/val")]
        listed = fetched(f"http://127.0.0.1:{port}/data/plugins_listing")
        assert "custom_scalars" in listed
        assert "exp" not in listed
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = {
            connection.laddr.ip
            for member in family
            for connection in member.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        log_a_run(tmp_path / "outputs" / "train" / "c")
        end = time.monotonic() + 60
        while len(names := fetched(f"http://127.0.0.1:{port}/data/runs")) < 3 and time.monotonic() < end:
            time.sleep(0.5)
        assert "train c tensorboard" in names
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 0
        assert list(place.iterdir()) == []
        assert psutil.wait_procs(family, timeout=60)[1] == []
        assert process.stderr.read() == ""


def test_a_taken_port_fails_and_another_host_warns(tmp_path):
    log_a_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "exp.dashboard", "run", "--port", port]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert port in done.stderr
    assert "Choose another --port" in done.stderr
    assert "Traceback" not in done.stderr
    with started(tmp_path, "run", "--port", "0", "--host", "127.0.0.2", "--no-browser") as (process, line):
        assert re.match(r"1 run  http://127\.0\.0\.2:\d+/data/plugin/exp/overview ", line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 143
        assert "no authentication; anyone who can reach 127.0.0.2 can read everything" in process.stderr.read()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (name, f"{name} has no TensorBoard events; expected a run directory, or a folder above")
        for name in ("missing", "file", "empty")
    ],
)
def test_a_directory_without_events_is_refused(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert dashboard.main([name]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_the_page_fits_the_directory(tmp_path):
    run, sweep = tmp_path / "train" / "2026-01-31" / "1", tmp_path / "train" / "sweeps" / "2026-01-31" / "12-00-00"
    for directory in (run, sweep / "0", sweep / "1"):
        log_a_run(directory)
    assert len(find_event_folders(tmp_path)) == 3
    pages = {path: page_for(path, runs=len(find_event_folders(path))) for path in (run, sweep, tmp_path)}
    assert pages == {run: "overview", sweep: "hparams", tmp_path: "overview"}
    with pytest.raises(DashboardError):
        find_event_folders(tmp_path / "nowhere")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are assumed to have a desktop")
def test_a_browser_needs_a_screen(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not dashboard.has_screen()
    monkeypatch.setenv("DISPLAY", ":0")
    assert dashboard.has_screen()
