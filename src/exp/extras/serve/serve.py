"""python -m exp.serve run=DIR, or model=FILE.onnx: serves an exported network over HTTP, to this machine by default."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import MissingExtraError, config_error, is_installed
from exp.extras.export.export import keys_of_a_run, options_of_a_run
from exp.output import announce_torch_import, command, survive_output_errors
from exp.signals import handle_signals

if TYPE_CHECKING:
    from exp.cli.run_arguments import RunArguments

HELP = """Serve the network of a saved run, or an ONNX file, as JSON over HTTP.

  python -m exp.serve run=outputs/train/2026-01-31/12-00-00
  python -m exp.serve run=DIR preprocessing=true port=8080
  python -m exp.serve model=network.onnx batch=128 wait_ms=5

  run=DIR              a run directory, the directory of a sweep's job, or a checkpoint: it is exported first
  model=FILE           an ONNX file instead, such as python -m exp.export writes
  weights=, preprocessing=   for run=DIR, as in exp.export; the columns of a table are taken by name, as in exp.predict
  port=NUMBER          default: 8000; 0: any free port
  host=ADDRESS         default: 127.0.0.1; anyone who reaches another address can use the model: there is no password
  batch=NUMBER         samples of one call of the model (default: 64)
  wait_ms=NUMBER       the time for which a request waits for others (default: 2)
  security.allow=[PACKAGE]   packages whose classes the run's config may name; allow only packages that you trust

Ctrl-C and SIGTERM end the server after it has answered open requests."""
KEYS = {
    "model": "an ONNX file", "host": "an address of this machine", "port": "a port", "batch": "a number of samples",
    "wait_ms": "milliseconds",
}  # fmt: skip
# Default, smallest and largest value.
NUMBERS = {"port": (8000, 0, 65535), "batch": (64, 1, 10**6), "wait_ms": (2, 0, 10**6)}


@command(help=HELP)
def main(argv: Sequence[str]) -> int:
    """Serve until a signal.

    Returns:
        0 after Ctrl-C; 143 after SIGTERM; 2 for an error in the command, the config or the address; 1 if the network
        cannot be exported.
    """
    from exp.cli.run_arguments import RUN, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.serve")
    keys = {"run": RUN, **KEYS, **keys_of_a_run()}
    arguments = read_arguments(argv, keys=keys, needed=(), takes_overrides=False)
    values = arguments.values
    _check_words(values)
    numbers = {name: _number(name, values[name]) for name in NUMBERS}
    for package in ("starlette", "uvicorn"):
        if not is_installed(package):
            raise MissingExtraError(feature="exp.serve", package=package, extra="serve")
    # These modules import torch.
    from exp.extras.export.onnx_file import OnnxModel
    from exp.extras.serve.model_server import LOOPBACK, LOOPBACK_NAMES, ModelServer

    host = values["host"] or LOOPBACK
    if host not in LOOPBACK_NAMES:
        print(f"{host}: whoever reaches this address can use the model, for there is no password", file=sys.stderr)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with survive_output_errors(), _file(arguments) as path, handle_signals(lambda signum, frame: ended.put(signum)):
        # With more threads for each call, requests wait for threads longer than small networks compute.
        model = OnnxModel(path, threads=1)
        with ModelServer(model, host=host, **numbers) as server:
            print(f"{values['run'] or values['model']}  {server.address}  (Ctrl-C ends it)", flush=True)
            signum = ended.get()
    return 0 if signum == signal.SIGINT else 128 + signum


@contextlib.contextmanager
def _file(arguments: RunArguments) -> Iterator[Path]:
    """Yield the ONNX file to serve: the named one, or a temporary one of the run."""
    values = arguments.values
    if values["model"] is not None:
        yield Path(values["model"])
        return
    with announce_torch_import():
        from exp.extras.export.network_export import export
        from exp.extras.export.served_tables import table_form
        from exp.saved_runs.saved_run import load

    run = load(str(values["run"]), allow=arguments.allow)
    options = options_of_a_run(values)
    if table_form(run) is not None:
        options["preprocessing"] = False  # the server prepares the columns of a table, including words and dates
    with tempfile.TemporaryDirectory() as place:
        exported = export(run, format="onnx", output=Path(place) / "network.onnx", **options)
        print(*exported.notes, sep="\n")
        yield exported.path


def _check_words(values: Mapping[str, str | None]) -> None:
    """Raise ConfigError for neither a run nor a file, for both, and for options of an export with a file."""
    if (values["run"] is None) == (values["model"] is None):
        got = "nothing to serve" if values["run"] is None else f"run={values['run']} beside model={values['model']}"
        raise config_error("run", got=got, expected="run=DIR or model=FILE.onnx", source="command line")
    beside = [name for name in keys_of_a_run() if values[name] is not None]
    if values["model"] is not None and beside:
        got = f"{values[beside[0]]} beside model={values['model']}, which is exported already"
        raise config_error(beside[0], got=got, expected="run=DIR", source="command line")


def _number(name: str, text: str | None) -> int:
    """Return the number of a word; raise ConfigError if it is not a whole number in its range."""
    default, least, most = NUMBERS[name]
    if text is None:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise config_error(name, got=text, expected=f"{KEYS[name]}, from {least} to {most}", source="command line")
    return int(text)
