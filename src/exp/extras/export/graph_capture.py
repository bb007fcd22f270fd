"""Capture of the graph of a network with torch.export. Errors name the layer and the line of code."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from exp.errors import RunError, is_user_code, one_line, shorten
from exp.extras.export.named_network import NamedNetwork
from exp.models.compiler import FILE_PREFIX
from exp.models.containers import ProgramModel, config_key

Dimensions = Mapping[str, Mapping[int, str]]

# Matches torch's message about a dynamic dimension that becomes a constant: the input, the axis and the constant.
CONSTANT = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\] as dynamic .*constant \((\d+)\)")


class ExportRefused(RunError):
    """Error that reports a network that cannot be exported.

    Args:
        place: Config key, layer or line of code with the error.
        what: Description of the error.
    """

    def __init__(self, place: str, what: str) -> None:
        super().__init__(
            f"the network cannot be exported. {place}: {what}; expected operators that a graph supports. "
            "exp.load(DIR).network() returns the network itself"
        )


def dimensions_of(network: NamedNetwork) -> Dimensions:
    """Return the names of the dynamic dimensions of a network's inputs.

    Dynamic dimensions are the batch, and all axes that have no fixed size.

    Returns:
        A mapping from the names of the inputs to mappings from axes to the names of their dimensions.
    """
    found: dict[str, dict[int, str]] = {}
    for name, spec in network.inputs.items():
        unknown = [axis for axis, size in enumerate(spec.shape, 1) if size is None]
        found[name] = {0: "batch", **{axis: f"length_{axis}" if unknown[1:] else "length" for axis in unknown}}
    return found


def capture(network: NamedNetwork, example: Mapping[str, Tensor], dimensions: Dimensions) -> ExportedProgram:
    """Return the graph of a network from torch.export.

    Args:
        network: The network.
        example: Inputs of a batch of at least two samples, by name.
        dimensions: The result of `dimensions_of`.

    Raises:
        ExportRefused: An operator or a line of code cannot be captured.
    """
    shapes = {name: dict.fromkeys(axes, Dim.DYNAMIC) for name, axes in dimensions.items()}
    with quiet(), torch.no_grad():
        try:
            network(**example)
            return torch.export.export(network, (), dict(example), dynamic_shapes=shapes, strict=False)
        except RunError:
            raise
        except Exception as error:  # The exceptions of torch.export and of user code have no common base class.
            raise _refusal(network, error, dimensions) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context manager that suppresses the warnings, prints and log lines of torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    output = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _refusal(network: NamedNetwork, error: Exception, dimensions: Dimensions) -> ExportRefused:
    constant = CONSTANT.search(str(error))
    if constant is not None:
        name, axis, size = constant.groups()
        unrolled = "torch.export unrolls LSTM, GRU and RNN, or the code uses a size as a number"
        what = f"the dimension {dimensions[name][int(axis)]} of {name} becomes the constant {size}: {unrolled}"
        return ExportRefused("model", what)
    paths = {module: path for path, module in reversed(list(network.network.named_modules()))}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    entered = [paths[one] for one in callers if isinstance(one, nn.Module) and one in paths]
    steps = traceback.extract_tb(error.__traceback__)
    frames = [(step.filename, step.lineno or 1, step.line or "") for step in steps]
    place, layer = _place(network.network, entered[-1] if entered else "", frames)
    reason = shorten(str(error).split("\n\n")[0] or one_line(error), most=300)
    return ExportRefused(place, f"{layer or 'the network'} cannot be captured: {reason}")


def _place(network: nn.Module, path: str, frames: list[tuple[str, int, str]]) -> tuple[str, str]:
    """Return two texts that locate an error: the config key of a layer, and the class of the layer.

    If the error is in a forward program, the first text also contains the line of the program, and the second text is
    empty. If the error is in user code, the second text also contains the file and the line.

    Args:
        network: The network of the run.
        path: The path of the layer in the network.
        frames: File, line number and source line of each stack frame. The last frame is the innermost one.
    """
    layer, key = network.get_submodule(path), config_key(network, path)
    program = [(line, text) for file, line, text in frames if file.startswith(FILE_PREFIX)]
    if program and isinstance(layer, ProgramModel):
        line, text = program[-1]
        return f"{key}.forward, line {line}, `{text.strip()}`", ""
    own = [f" ({Path(file).name}, line {line})" for file, line, _ in frames if is_user_code(file)]
    return key, f"{type(layer).__name__}{own[-1] if own else ''}"
