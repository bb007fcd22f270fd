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

from exp.errors import ConfigError, Fault, MissingExtraError, is_installed
from exp.extras.export.export import OF_A_RUN, keys_of_a_run, options_of_a_run, words_of_a_run
from exp.output import exit_status, loading_torch, outliving_output
from exp.signals import heeding

if TYPE_CHECKING:
    from exp.cli.run_arguments import RunArguments

HELP = """Serve the network of a saved run, or an ONNX file, as JSON over HTTP, with a page to try it in a browser.

  python -m exp.serve run=outputs/train/2026-01-31/12-00-00
  python -m exp.serve run=DIR preprocessing=true quantize=int8 port=8080
  python -m exp.serve model=network.onnx batch=128 wait_ms=5

  run=DIR              a run directory, a job's in a sweep's directory, or a checkpoint: it is exported first
  model=FILE           an ONNX file instead, such as python -m exp.export writes
  weights=, averaged=, preprocessing=, quantize=     of a run, as of exp.export; a table's columns always go in as
                       exp.predict takes them, by name
  port=NUMBER          left out: the first free one from 8000 on; 0: any free one
  host=ADDRESS         left out: 127.0.0.1; another one is open to whoever reaches it, for there is no password
  batch=NUMBER         samples of one call of the model (64); wait_ms=NUMBER: for which a request waits for others (2)
  queue=NUMBER         samples that may wait (1024); more are answered with 503
  samples=NUMBER       samples of one request (256); body_mib=NUMBER: its size (1)
  security.allow=[PACKAGE]   whose classes the run's config may name: trust it first

Ctrl-C and SIGTERM let it answer what has come, and end it."""
KEYS = {
    "model": "an ONNX file",
    "host": "an address of this machine",
    "port": "a port",
    "batch": "a number of samples",
    "wait_ms": "milliseconds",
    "queue": "a number of samples",
    "samples": "a number of samples",
    "body_mib": "a number of MiB",
}
# The defaults.
NUMBERS = {"batch": 64.0, "wait_ms": 2.0, "queue": 1024.0, "samples": 256.0, "body_mib": 1.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal.

    Returns:
        0 after Ctrl-C; 143 after SIGTERM; 2 for an error in the command, the config or the address; 1 if the network
        cannot be exported.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    from exp.cli.run_arguments import RUN, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.serve")
    keys, words = {"run": RUN, **KEYS, **keys_of_a_run()}, words_of_a_run()
    arguments = read_arguments(argv, keys=keys, words=words, needed=(), takes_overrides=False)
    values = arguments.values
    _check_words(values)
    numbers = {name: _number(name, values[name], otherwise) for name, otherwise in NUMBERS.items()}
    port = None if values["port"] is None else int(_number("port", values["port"], 0.0))
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if not is_installed(package):
            raise MissingExtraError(feature="exp.serve", package=package.replace("_", "-"), extra="serve")
    # These modules import torch.
    from exp.extras.export.onnx_file import OnnxModel
    from exp.extras.serve.model_server import LOOPBACK, LOOPBACK_NAMES, Limits, ModelServer

    limits = Limits(
        batch=int(numbers["batch"]),
        wait_ms=numbers["wait_ms"],
        queue=int(numbers["queue"]),
        samples=int(numbers["samples"]),
        body=int(numbers["body_mib"] * 2**20),
    )
    host = values["host"] or LOOPBACK
    if host not in LOOPBACK_NAMES:
        print(f"{host}: whoever reaches this address can use the model, for there is no password", file=sys.stderr)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with outliving_output(), _file(arguments) as path, heeding(lambda signum, frame: ended.put(signum)):
        # With more threads for each call, requests wait for threads longer than small networks compute.
        model = OnnxModel(path, threads=1)
        with ModelServer(model, host=host, port=port, limits=limits) as server:
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
    with loading_torch():
        from exp.extras.export.network_export import export
        from exp.extras.export.served_tables import table_form
        from exp.saved_runs.saved_run import load

    run = load(str(values["run"]), allow=arguments.allow)
    options = options_of_a_run(values)
    if table_form(run) is not None:
        options["preprocessing"] = False  # the server prepares the columns of a table, including words and dates
    with tempfile.TemporaryDirectory() as place:
        exported = export(run, format="onnx", output=Path(place) / "network.onnx", timed=False, **options)
        for note in exported.notes:
            print(note)
        yield exported.path


def _check_words(values: Mapping[str, str | None]) -> None:
    """Raise ConfigError for neither a run nor a file, for both, and for options of an export with a file."""
    if (values["run"] is None) == (values["model"] is None):
        got = "nothing to serve" if values["run"] is None else f"run={values['run']} beside model={values['model']}"
        raise ConfigError([Fault(key="run", got=got, expected="run=DIR or model=FILE.onnx", source="command line")])
    beside = [name for name in OF_A_RUN if values[name] is not None]
    if values["model"] is not None and beside:
        got = f"{values[beside[0]]} beside model={values['model']}, which is exported already"
        raise ConfigError([Fault(key=beside[0], got=got, expected="run=DIR", source="command line")])


def _number(name: str, text: str | None, otherwise: float) -> float:
    """Return the number of a word; raise ConfigError if it is not a number in its range."""
    if text is None:
        return otherwise
    is_whole = name not in ("wait_ms", "body_mib")
    least = 0.0 if name in ("port", "wait_ms") else 1.0 if is_whole else 0.001
    most = 65535.0 if name == "port" else 1e9
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most or (is_whole and not value.is_integer()):
        expected = f"{KEYS[name]}, from {least:g} to {most:g}"
        raise ConfigError([Fault(key=name, got=text, expected=expected, source="command line")])
    return value
