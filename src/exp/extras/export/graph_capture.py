"""Capture the graph of a saved run's network by torch.export, or say which operator of which line keeps it from that.

The graph is PyTorch's own: a .pt2 file holds it, an ONNX file is made from it. Dimensions that may change have names.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from exp.check.input_faults import operation_fault
from exp.config.yaml_files import position_of, split
from exp.data.randomness import preserve_generators
from exp.errors import ConfigError, Fault, RunError, is_own_code, one_line, own_frames, shortened
from exp.extras.export.named_network import NamedNetwork
from exp.models.compiler import FILE_PREFIX
from exp.models.containers import ProgramModel, config_key
from exp.saved_runs.run_files import RunFiles
from exp.spelling import among

BATCH = "batch"
# Lines of a program in what torch notes of a node.
FRAME = re.compile(rf'File "{re.escape(FILE_PREFIX)}[^"]*", line (\d+), in \w+\n\s*(.*)')
PLACE = re.compile(r'File "([^"]+)", line (\d+), in')
# What torch says of a dimension that the network, or torch's own unrolling of a layer, has made a constant of.
CONSTANT = re.compile(r"L\['(?P<name>\w+)'\]\.size\(\)\[(?P<axis>\d+)\] as dynamic .*constant \((?P<size>\d+)\)")


class ExportRefused(RunError):
    """A network cannot be exported. operator: of torch, `aten.svd`, where one is to blame; key: of the config."""

    def __init__(self, message: str, *, operator: str | None, key: str | None) -> None:
        self.operator, self.key = operator, key
        super().__init__(message)


def dimensions_of(network: NamedNetwork, named: Mapping[str, Mapping[int, str]]) -> dict[str, dict[int, str]]:
    """The names of the dimensions that may change, by input and axis: the batch, unknown lengths, and those named.

    named: by input and axis, 0 is the batch.
    Raises: ConfigError for an input or an axis that there is not.
    """
    faults = []
    for name, axes in named.items():
        spec = network.inputs.get(name)
        if spec is None:
            expected = f"an input of the network: {among(network.inputs, word=name)}"
            faults.append(Fault(key="dynamic", got=name, expected=expected, source="command line"))
            continue
        for axis in axes:
            if not 0 < axis <= len(spec.shape):
                got = f"axis {axis} of {name}, which is [batch, {', '.join(map(str, spec.shape))}]"
                expected = f"an axis from 1 to {len(spec.shape)}; axis 0, the batch, may always change"
                faults.append(Fault(key="dynamic", got=got, expected=expected, source="command line"))
    if faults:
        raise ConfigError(faults)
    found = {}
    for name, spec in network.inputs.items():
        unknown = [axis for axis, size in enumerate(spec.shape, 1) if size is None]
        own = {axis: "length" if len(unknown) == 1 else f"length_{axis}" for axis in unknown}
        found[name] = {0: BATCH, **own, **named.get(name, {})}
    return found


def capture(
    run: RunFiles, network: NamedNetwork, example: Mapping[str, Tensor], dimensions: Mapping[str, Mapping[int, str]]
) -> ExportedProgram:
    """The graph of a network.

    example: a batch of at least two samples. dimensions: as of `dimensions_of`.
    Raises: ExportRefused, with the operator or the line that cannot be captured.
    """
    shapes = {name: dict.fromkeys(axes, Dim.DYNAMIC) for name, axes in dimensions.items()}
    with _innermost() as stack, quiet(), torch.no_grad():
        try:
            network(**example)
            program = torch.export.export(network, (), dict(example), dynamic_shapes=shapes, strict=False)
        except RunError:
            raise
        except Exception as error:  # torch.export has a dozen kinds, and code of the user's own any
            raise _refusal(run, network, error, stack, dimensions) from error
    random = next((node for node in program.graph.nodes if _may_draw(node)), None)
    # Dropout is among them, and draws nothing in evaluation.
    if random is not None and _differs(network, example):
        raise refused(run, network, random, why="draws random numbers: the same input gives other outputs each time")
    return program


def refused(run: RunFiles, network: NamedNetwork, node: fx.Node, *, why: str) -> ExportRefused:
    """The error of a node of the graph, with its place in the config."""
    operator, key, kind = operator_of(node.target), "model", ""
    with contextlib.suppress(AttributeError):  # of a module that the network made on the fly
        path = innermost_module(node)
        inner = network.network.get_submodule(path)
        key, kind = config_key(network.network, path), f" of {type(inner).__name__}"
        found = FRAME.findall(str(node.meta.get("stack_trace", "")))
        if found and isinstance(inner, ProgramModel):
            line, text = found[-1]
            return _refused(run, f"{operator} {why}", key=f"{key}.forward", operator=operator, line=(int(line), text))
    own = [place for place in PLACE.findall(str(node.meta.get("stack_trace", ""))) if is_own_code(place[0])]
    by = f", at {own[-1][0]}:{own[-1][1]}," if own else ""
    return _refused(run, f"{operator}{kind}{by} {why}", key=key, operator=operator)


def operator_of(target: object) -> str:
    """The name of an operator as torch prints it, `aten.svd`."""
    return str(target).removesuffix(".default")


def innermost_module(node: fx.Node) -> str:
    """The path of the layer that a node of the graph comes from, in the run's own network."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    # A layer that is called a second time has a mark behind its path.
    last = re.sub(r"@\d+", "", paths[-1]) if paths else ""
    return last.removeprefix("network").removeprefix(".")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings, prints and log lines of torch's exporters, which are about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    said = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _may_draw(node: fx.Node) -> bool:
    tags: Sequence[object] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _differs(network: NamedNetwork, example: Mapping[str, Tensor]) -> bool:
    """Whether two calls with one input give different outputs."""
    with preserve_generators(), torch.no_grad():
        first, second = network(**example), network(**example)
    return any(not torch.equal(value.nan_to_num(), second[name].nan_to_num()) for name, value in first.items())


@contextlib.contextmanager
def _innermost() -> Iterator[list[nn.Module]]:
    """The modules that were entered and have not returned: after an exception, those on the way to it."""
    stack: list[nn.Module] = []

    def left(module: nn.Module, *_: Any) -> None:
        while stack and stack.pop() is not module:
            pass

    handles = [
        register_module_forward_pre_hook(lambda module, _: stack.append(module)),
        register_module_forward_hook(left),
    ]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _refusal(
    run: RunFiles,
    network: NamedNetwork,
    error: Exception,
    stack: list[nn.Module],
    dimensions: Mapping[str, Mapping[int, str]],
) -> ExportRefused:
    held = {module: path for path, module in reversed(list(network.network.named_modules()))}
    constant = CONSTANT.search(str(error))
    if constant is not None:
        return _constant(run, network, constant, held, dimensions)
    inner = [module for module in stack if module in held]
    key = config_key(network.network, held[inner[-1]] if inner else "")
    reason = shortened(str(error).split("\n\n")[0] or one_line(error), most=300)
    fault = operation_fault(error, key)
    if fault is not None:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(FILE_PREFIX)]
        return _refused(run, reason, key=fault.key, operator=None, line=(frames[-1].lineno or 1, frames[-1].line or ""))
    own = PLACE.findall(own_frames(error))
    by = f" at {own[-1][0]}:{own[-1][1]}" if own else ""
    what = f"{type(inner[-1]).__name__} cannot be captured{by}: {reason}" if inner else reason
    if inner and isinstance(inner[-1], nn.RNNBase):
        what += " (of a packed sequence the sizes depend on the numbers, which no graph can hold)"
    return _refused(run, what, key=key, operator=None)


def _constant(
    run: RunFiles,
    network: NamedNetwork,
    found: re.Match[str],
    held: Mapping[nn.Module, str],
    dimensions: Mapping[str, Mapping[int, str]],
) -> ExportRefused:
    """The error of a dimension that may change and is a constant in the graph."""
    name, axis, size = found["name"], int(found["axis"]), found["size"]
    what = f"the dimension {dimensions.get(name, {}).get(axis, axis)} of {name} becomes the constant {size}"
    recurrent = next((module for module in held if isinstance(module, nn.RNNBase)), None)
    if axis and recurrent is not None:
        kind = type(recurrent).__name__
        key = config_key(network.network, held[recurrent])
        return _refused(run, f"{kind}, which torch.export unrolls over its steps: {what}", key=key, operator=kind)
    return _refused(run, what, key="model", operator=None)


def _refused(
    run: RunFiles, what: str, *, key: str, operator: str | None, line: tuple[int, str] | None = None
) -> ExportRefused:
    place = key if line is None else f"{key}, line {line[0]}, `{line[1].strip()}`"
    where = _position(run, key, line)
    cure = "expected operators that a graph can hold. format=state_dict and format=safetensors need no graph"
    message = f"the network cannot be exported. {place}: {what}; {cure}" + (f"  [{where}]" if where else "")
    return ExportRefused(message, operator=operator, key=key)


def _position(run: RunFiles, key: str, line: tuple[int, str] | None) -> str | None:
    """The file and line of a key, or of a program's line, in the run's frozen config."""
    if run.directory is None:
        return None
    file, keys = run.directory / "config.yaml", split(key)
    found = None
    while keys and found is None:
        found = position_of(file, keys)
        keys = keys[:-1]
    if found is None:
        return None
    number = found.line
    if line is not None:
        # A text of several lines is quoted there, with an empty line for each of its ends.
        texts = _lines(file)[number - 1 :]
        wanted = line[1].strip()[:60]
        number += next((place for place, text in enumerate(texts) if wanted and wanted in text), 0)
    return f"{found.file}:{number}"


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()
