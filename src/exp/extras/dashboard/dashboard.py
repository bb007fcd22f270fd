"""python -m exp.dashboard [directory]: shows all runs, a sweep or a run in TensorBoard on this machine.

    python -m exp.dashboard                                   all runs below outputs/
    python -m exp.dashboard outputs/train/sweeps/2026-01-31/12-00-00 --page hparams

Runs are named by their overrides, and the most important curves are pinned at the top of the page. By default, other
machines cannot open the page. The command prints its address, opens it in a browser if there is a screen, and ends with
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import queue
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from exp.errors import ExpError
from exp.extras.dashboard.run_names import LinkedRuns, runs_below
from exp.output import command
from exp.signals import handle_signals
from exp.sweeps.ledger import is_sweep

LOOPBACK = "127.0.0.1"
OVERVIEW = "data/plugin/exp/overview"
PAGES = ("overview", "scalars", "custom_scalars", "hparams", "images", "pr_curves", "histograms", "text", "graphs")
SECONDS_BETWEEN_LOOKS = 5.0


class DashboardError(ExpError):
    """Error of a directory without TensorBoard events, or of an address that is already in use."""

    exit_status = 2


@command()
def main(argv: Sequence[str]) -> int:
    """Serve TensorBoard until Ctrl-C or SIGTERM.

    Returns:
        Exit status: 0 after Ctrl-C, 143 after SIGTERM, or 2 if there is nothing to show or the address is not free.
    """
    arguments = _arguments(argv)
    count = len(find_event_folders(arguments.directory))
    page = arguments.page or page_for(arguments.directory, runs=count)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with (
        handle_signals(lambda signum, frame: signals.put(signum)),
        tempfile.TemporaryDirectory(prefix="exp-dashboard-") as place,
    ):
        links = LinkedRuns(arguments.directory, Path(place))
        links.refresh()
        address = serve(Path(place), host=arguments.host, port=arguments.port)
        address += OVERVIEW if page == "overview" else f"#{page}"
        if arguments.host != LOOPBACK:
            warning = f"anyone who can reach {arguments.host} can read everything"
            print(f"warning: no authentication; {warning}", file=sys.stderr)
        print(f"{count} run{'s' if count != 1 else ''}  {address}  (Ctrl-C ends it)", flush=True)
        if arguments.browser and has_screen():
            webbrowser.open(address)
        while True:
            with contextlib.suppress(queue.Empty):
                signum = signals.get(timeout=SECONDS_BETWEEN_LOOKS)
                return 0 if signum == signal.SIGINT else 128 + signum
            links.refresh()


def find_event_folders(directory: Path) -> list[Path]:
    """Return the folders with TensorBoard events at and below a directory.

    Raises:
        DashboardError: No folder has events.
    """
    found = runs_below(directory)
    if not found:
        expected = "expected a run directory, or a folder above it, such as outputs of python -m exp.train"
        raise DashboardError(f"{directory} has no TensorBoard events; {expected}. Runs with logger=[] write no events")
    return found


def page_for(directory: Path, *, runs: int) -> str:
    """Return the page to open: "hparams" for a sweep with several runs, else "overview".

    Args:
        directory: Directory of the dashboard.
        runs: Number of runs in the directory.
    """
    # A running sweep has no table yet, so its path is checked as well.
    is_one = runs > 1 and (directory.absolute().parent.parent.name == "sweeps" or is_sweep(directory))
    return "hparams" if is_one else "overview"


def serve(directory: Path, *, host: str, port: int | None) -> str:
    """Start TensorBoard in threads of this process, and return its address.

    Args:
        directory: Folder with the links to runs.
        host: Address at which TensorBoard listens.
        port: Port. 0: any free port. None: the first free port from 6006.

    Raises:
        DashboardError: The address or the port is not free.
    """
    from tensorboard.program import TensorBoard, TensorBoardServerException
    from tensorboard.util import tb_logging

    from exp.extras.dashboard.overview import Overview
    from tensorboard import default

    tb_logging.get_logger().setLevel(logging.ERROR)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = TensorBoard(plugins=[*default.get_plugins(), Overview])
    wanted = [] if port is None else ["--port", str(port)]
    server.configure(argv=["tensorboard", "--logdir", str(directory), "--host", host, *wanted])
    try:
        # TensorBoard prints advice about its file reader at each start.
        with contextlib.redirect_stderr(io.StringIO()):
            address: str = server.launch()
            return address
    except TensorBoardServerException as error:
        raise DashboardError(f"{error.msg} Choose another --port, or --host, or leave them out") from error


def has_screen() -> bool:
    """Return whether this machine can show a browser window.

    If there is no screen, the browser would be a text browser, which occupies the terminal.
    """
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m exp.dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("outputs"), help="outputs, a sweep or a run")
    parser.add_argument("--page", choices=PAGES, help="default: hparams for a sweep, else overview")
    parser.add_argument("--port", type=int, help="default: the first free port from 6006; 0: any free port")
    parser.add_argument("--host", default=LOOPBACK, help="default: 127.0.0.1; other addresses are open to the network")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="only print the address")
    return parser.parse_args(argv)
