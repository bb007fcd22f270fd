"""A real TensorBoard in a process of its own, and the sockets that it opens."""

from __future__ import annotations

import contextlib
import json
import os
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

from exp import dashboard
from exp.dashboard import DashboardError, page_for, shown_below
from exp.tensorboard.logger import TensorBoardLogger


def log_a_run(directory, *tags: str) -> None:
    directory.mkdir(parents=True)
    logger = TensorBoardLogger(directory=directory)
    logger.log_metrics(dict.fromkeys(tags or ("loss/train",), 1.0), 1)
    logger.finalize("success")


@contextlib.contextmanager
def started(folder, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process and its first line."""
    command = [sys.executable, "-m", "exp.dashboard", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate(timeout=60)


def fetched(address: str, data: bytes | None = None) -> object:
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    end = time.monotonic() + 100
    while time.monotonic() < end:
        with urllib.request.urlopen(request, timeout=60) as reply:
            if found := json.load(reply):
                return found
        time.sleep(0.1)
    return None


def own_addresses() -> list[str]:
    return [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]


def test_it_serves_this_machine_alone_and_leaves_nothing(tmp_path, monkeypatch):
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
        layout = fetched(f"http://127.0.0.1:{port}/data/plugin/custom_scalars/layout")
        charts = {category["title"]: [chart["title"] for chart in category["chart"]] for category in layout["category"]}
        assert charts == {"Overview": ["loss", "metrics, validation"], "Memory": ["host, MiB"]}
        regex = layout["category"][1]["chart"][0]["multiline"]["tag"][0]
        query = urllib.parse.urlencode({"run": "train b tensorboard", "tag": regex})
        drawn = fetched(f"http://127.0.0.1:{port}/data/plugin/custom_scalars/scalars?{query}")
        assert drawn["regex_valid"]
        assert [point[1:] for point in drawn["tag_to_events"]["memory/host_rss_mib"]] == [[1, 1.0]]
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = {
            connection.laddr.ip
            for member in family
            for connection in member.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        for address in own_addresses():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)
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


def test_the_page_of_a_sweep_has_a_row_for_each_job_with_its_values_and_its_end(tmp_path):
    sweep = tmp_path / "train" / "sweeps" / "2026-01-31" / "12-00-00"
    for job in range(12):
        logger = TensorBoardLogger(directory=sweep / str(job))
        logger.log_hyperparams({"optimizer.lr": 10.0**-job, "data.drop_last": job % 2 == 0}, metrics=["loss/val"])
        logger.log_metrics({"loss/val": float(job)}, 1)
        if job < 11:
            logger.end("completed" if job % 2 else "failed")
        logger.finalize("success")
    with started(tmp_path, str(sweep), "--port", "0", "--no-browser") as (_, line):
        address = re.fullmatch(r"12 runs  (http://127\.0\.0\.1:\d+/)#hparams .*\n", line)[1]
        question = {
            "experimentName": "",
            "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
            "colParams": [{"metric": {"tag": "loss/val", "group": ""}}],
            "startIndex": 0,
            "sliceSize": 100,
        }
        fetched(f"{address}data/runs")
        found = fetched(f"{address}data/plugin/hparams/session_groups", json.dumps(question).encode())
    rows = {group["sessions"][0]["name"].split()[0]: group for group in found["sessionGroups"]}
    assert sorted(map(int, rows)) == list(range(12))
    for job in range(12):
        row = rows[str(job)]
        assert row["hparams"]["optimizer.lr"] == 10.0**-job
        assert row["hparams"]["data.drop_last"] is (job % 2 == 0)
        assert [value["value"] for value in row["metricValues"]] == [float(job)]
        # No word for the one under way: TensorBoard keeps the first that it reads, to the end of its own process.
        ended = {0: "STATUS_FAILURE", 1: "STATUS_SUCCESS"}[job % 2] if job < 11 else "STATUS_UNKNOWN"
        assert row["sessions"][0]["status"] == ended


def test_a_port_that_is_taken_is_one_clear_line_and_a_wider_address_a_warning(tmp_path):
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
        assert "127.0.0.2: whoever reaches this address can read everything" in process.stderr.read()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "missing does not exist; expected a directory of runs, such as outputs"),
        ("file", "file is a file; expected a directory of runs"),
        ("empty", "empty holds no TensorBoard events; expected a run directory, or one above"),
    ],
)
def test_where_there_is_nothing_to_show_it_says_so(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert dashboard.main([name]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_the_page_is_the_one_that_fits(tmp_path):
    run, sweep = tmp_path / "train" / "2026-01-31" / "1", tmp_path / "train" / "sweeps" / "2026-01-31" / "12-00-00"
    for directory in (run, sweep / "0", sweep / "1"):
        log_a_run(directory)
    assert len(shown_below(tmp_path)) == 3
    pages = {path: page_for(path, runs=len(shown_below(path))) for path in (run, sweep, tmp_path)}
    assert pages == {run: "overview", sweep: "hparams", tmp_path: "overview"}
    with pytest.raises(DashboardError):
        shown_below(tmp_path / "nowhere")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a desktop is taken for granted")
def test_no_browser_is_opened_where_no_one_could_see_it(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not dashboard.has_screen()
    monkeypatch.setitem(os.environ, "DISPLAY", ":0")
    assert dashboard.has_screen()
