"""python -m exp.dashboard [directory]: TensorBoard for outputs/, a sweep or a run, on this machine alone.

    python -m exp.dashboard                                   all runs below outputs/
    python -m exp.dashboard outputs/train/sweeps/2026-01-31/12-00-00 --page hparams

Runs are called by what was typed, and what people look at first is pinned on top of the page. It prints the address,
opens it in a browser where there is a screen, and ends with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import signal
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from exp.errors import ExpError
from exp.extras.dashboard.run_names import LinkedRuns, runs_below
from exp.output import exit_status
from exp.signals import heed
from exp.sweeps.run_records import is_sweep

LOOPBACK = "127.0.0.1"
# What a user calls a page, and what TensorBoard calls it in an address.
PAGES = {
    "overview": "data/plugin/exp/overview",
    "scalars": "#timeseries",
    "custom_scalars": "#custom_scalars",
    "hparams": "#hparams",
    "images": "#images",
    "pr_curves": "#pr_curves",
    "histograms": "#histograms",
    "text": "#text",
    "graphs": "#graphs",
}


SECONDS_BETWEEN_LOOKS = 5.0


class DashboardError(ExpError):
    """There is nothing to show, or it cannot be shown there."""

    exit_status = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted.

    Returns: 0 after Ctrl-C, 143 after SIGTERM, 2 where there is nothing to show or the address cannot be had.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    arguments = _arguments(argv)
    ended = threading.Event()
    signals: list[int] = []

    def end(signum: int, frame: object) -> None:
        signals.append(signum)
        ended.set()

    found = shown_below(arguments.directory)
    heed(end)
    with tempfile.TemporaryDirectory(prefix="exp-dashboard-") as place:
        links = LinkedRuns(arguments.directory, Path(place))
        links.refresh()
        address = serve(Path(place), host=arguments.host, port=arguments.port)
        page = arguments.page or page_for(arguments.directory, runs=len(found))
        _tell(f"{address}{PAGES[page]}", arguments, count=len(found))
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            links.refresh()
    return 0 if signals[0] == signal.SIGINT else 128 + signals[0]


def _tell(address: str, arguments: argparse.Namespace, *, count: int) -> None:
    if arguments.host != LOOPBACK:
        print(
            f"{arguments.host}: whoever reaches this address can read everything, for TensorBoard asks for no password",
            file=sys.stderr,
        )
    print(f"{count} run{'s' if count != 1 else ''}  {address}  (Ctrl-C ends it)", flush=True)
    if arguments.browser and has_screen():
        webbrowser.open(address)


def shown_below(directory: Path) -> list[Path]:
    """The folders at and below `directory` that hold TensorBoard events.

    Raises: DashboardError where there is none.
    """
    if not directory.is_dir():
        there = "is a file" if directory.exists() else "does not exist"
        raise DashboardError(
            f"{directory} {there}; expected a directory of runs, such as outputs, which python -m exp.train makes"
        )
    found = runs_below(directory)
    if not found:
        raise DashboardError(
            f"{directory} holds no TensorBoard events; expected a run directory, or one above. Runs that were started "
            "with logger=[] wrote none"
        )
    return found


def page_for(directory: Path, *, runs: int) -> str:
    """Hyperparameters for a sweep, the pictures of a look at the data, and the overview of runs for all else."""
    if (directory / "data.md").is_file():
        return "images"
    if runs == 1:
        return "overview"
    # <name>/sweeps/<date>/<time>; its table is there when it is done, and tells one that was put elsewhere.
    is_one = directory.absolute().parent.parent.name == "sweeps" or is_sweep(directory)
    return "hparams" if is_one else "overview"


def serve(directory: Path, *, host: str, port: int | None) -> str:
    """Starts TensorBoard in threads of this process, and its reader, which ends with it. Returns: the address.

    Raises: DashboardError where the address or the port cannot be had.
    """
    from tensorboard.program import TensorBoard, TensorBoardServerException
    from tensorboard.util import tb_logging

    from exp.extras.dashboard.overview import Overview
    from tensorboard import default

    # What it has to say, it says through us: the address, and an error.
    tb_logging.get_logger().setLevel(logging.ERROR)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = TensorBoard(plugins=[*default.get_plugins(), Overview])
    wanted = [] if port is None else ["--port", str(port)]
    server.configure(argv=["tensorboard", "--logdir", str(directory), "--host", host, *wanted])
    try:
        # It advises there, at every start, on how it reads files.
        with contextlib.redirect_stderr(io.StringIO()):
            address: str = server.launch()
            return address
    except TensorBoardServerException as error:
        raise DashboardError(f"{error.msg} Choose another --port, or --host, or leave them out") from error


def has_screen() -> bool:
    """Whether a browser that opened could be seen. Without one, a text browser would take the terminal."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m exp.dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("outputs"), help="outputs, a sweep or a run")
    parser.add_argument("--page", choices=tuple(PAGES), help="by default hparams for a sweep, else overview")
    parser.add_argument("--port", type=int, help="by default the first free one from 6006 on; 0 for any free one")
    parser.add_argument("--host", default=LOOPBACK, help="another address is open to whoever reaches it: no password")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="only print the address")
    return parser.parse_args(argv)
