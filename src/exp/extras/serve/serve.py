"""The command python -m exp.serve run=DIR or model=FILE.onnx, which serves an exported network over HTTP.

The server can be reached only from this machine by default.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import COMMAND_LINE, MissingExtraError, config_error, is_installed
from exp.lighter_imports import pause_garbage_collection
from exp.output import command, survive_output_errors
from exp.signals import handle_signals

if TYPE_CHECKING:
    from exp.cli.run_arguments import RunArguments

HELP = """Serve the network of a saved run, or an ONNX file, as JSON over HTTP.

  python -m exp.serve run=outputs/train/2026-01-31/12-00-00
  python -m exp.serve model=network.onnx port=8080

  run=DIR              a run directory, the directory of a sweep's job, or a checkpoint: it is exported first
  model=FILE           an ONNX file instead, such as python -m exp.export writes
  weights=WORD         for run=DIR: best, last, or the path of a checkpoint; default: the best, else the last
  port=NUMBER          default: 8000; 0: any free port
  host=ADDRESS         default: 127.0.0.1; at other addresses, anyone can use the model without authentication
  security.allow=[PACKAGE]   packages whose classes the run's config may name; allow only packages that you trust

Ctrl-C and SIGTERM end the server after it has answered open requests."""
KEYS = {"model": "an ONNX file", "host": "an address of this machine", "port": "a port"}
DEFAULT_PORT, LAST_PORT = 8000, 65535


@command(help=HELP)
def main(argv: Sequence[str]) -> int:
    """Run the command: serve the model until Ctrl-C or SIGTERM.

    Args:
        argv: Arguments of the command.

    Returns:
        Exit status 0 after Ctrl-C, or 143 after SIGTERM. Errors set the exit status 2 for an error in the command, the
        config or the address, and 1 if the network cannot be exported.
    """
    from exp.cli.run_arguments import RUN, WEIGHTS, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.serve")
    keys = {"run": RUN, **KEYS, "weights": WEIGHTS}
    arguments = read_arguments(argv, keys=keys, needed=(), takes_overrides=False)
    values = arguments.values
    _check_words(values)
    port = _port(values["port"])
    for package in ("starlette", "uvicorn"):
        if not is_installed(package):
            raise MissingExtraError(feature="exp.serve", package=package, extra="serve")
    # These modules import torch, so they are imported after the checks above.
    from exp.extras.export.onnx_file import OnnxModel
    from exp.extras.serve.model_server import LOOPBACK, LOOPBACK_NAMES, ModelServer

    host = values["host"] or LOOPBACK
    if host not in LOOPBACK_NAMES:
        print(f"warning: no authentication; anyone who can reach {host} can use the model", file=sys.stderr)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with survive_output_errors(), _file(arguments) as path, handle_signals(lambda signum, frame: ended.put(signum)):
        # A call uses one thread, because calls of small networks with several threads mostly wait for the threads.
        model = OnnxModel(path, threads=1)
        with ModelServer(model, host=host, port=port) as server:
            print(f"{values['run'] or values['model']}  {server.address}  (Ctrl-C ends it)", flush=True)
            signum = ended.get()
    return 0 if signum == signal.SIGINT else 128 + signum


@contextlib.contextmanager
def _file(arguments: RunArguments) -> Iterator[Path]:
    """Yield the path of the ONNX file to serve: the value of model=, or a temporary export of the run."""
    values = arguments.values
    if values["model"] is not None:
        yield Path(values["model"])
        return
    with pause_garbage_collection():
        from exp.extras.export.network_export import export
        from exp.saved_runs.saved_run import load

    run = load(str(values["run"]), allow=arguments.allow)
    with tempfile.TemporaryDirectory() as place:
        yield export(run, output=Path(place) / "network.onnx", weights=values["weights"]).path


def _check_words(values: Mapping[str, str | None]) -> None:
    """Raise ConfigError if the arguments cannot be combined.

    Exactly one of run= and model= must be given. weights= must not be combined with model=.

    Args:
        values: Values of the arguments by name. None if an argument is not given.
    """
    if (values["run"] is None) == (values["model"] is None):
        got = "nothing to serve" if values["run"] is None else f"run={values['run']} with model={values['model']}"
        raise config_error("run", got=got, expected="run=DIR or model=FILE.onnx", source=COMMAND_LINE)
    if values["model"] is not None and values["weights"] is not None:
        got = f"{values['weights']} with model={values['model']}, which is exported already"
        raise config_error("weights", got=got, expected="run=DIR", source=COMMAND_LINE)


def _port(text: str | None) -> int:
    """Return the port number in the argument port=. Return DEFAULT_PORT if the argument is not given.

    Args:
        text: The value of the argument, or None.

    Raises:
        ConfigError: The text is not a whole number from 0 to LAST_PORT.
    """
    if text is None:
        return DEFAULT_PORT
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise config_error("port", got=text, expected=f"a port, from 0 to {LAST_PORT}", source=COMMAND_LINE)
    return int(text)
