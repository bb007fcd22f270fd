"""Exports the network of a saved run to a file for other programs, and compares the file with the network.

    exported = export(exp.load(DIR), format="onnx", output=Path("network.onnx"))

The comparison uses samples of the run's data in batches of 1, 7 and 64. If the outputs differ, no file is written.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from exp.data.data import Data
from exp.data.entries import inputs_in
from exp.data.randomness import preserve_generators
from exp.data.value_names import value_names
from exp.errors import COMMAND_LINE, RunError, config_error, shorten
from exp.extras.export.graph_capture import capture, dimensions_of, quiet
from exp.extras.export.named_network import NamedNetwork, named_network
from exp.extras.export.onnx_file import Description, OnnxModel, arrays, onnx_bytes, require_package
from exp.extras.export.served_tables import table_form
from exp.files import write_atomic
from exp.output import describe_write_error
from exp.saved_runs.prediction import config_classes, readings_at
from exp.saved_runs.run_files import EXPORTS, RunFiles
from exp.shared_types import Stage
from exp.spelling import among

Format = Literal["onnx", "torch_export"]
ENDINGS: Mapping[Format, str] = {"onnx": "network.onnx", "torch_export": "network.pt2"}
SIZES = (1, 7, 64)
RELATIVE, ABSOLUTE = 1e-3, 1e-5
# Splits in the order of preference. Validation and test are first, because they have no augmentation.
BY_CHOICE: tuple[Stage, ...] = ("val", "test", "train")
# Largest number of batches that are read. Their sequences may have different lengths.
BATCHES = 4
NOTE = "inputs are as the run's data gives them to the network: standardized, encoded and transformed"

Runner = Callable[[Mapping[str, Tensor]], Mapping[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Export:
    """An exported file.

    Args:
        path: The file.
        bytes: Size of the file in bytes.
        parameters: Number of parameters of the network.
        largest_difference: Largest absolute difference between an output of the file and the output of the network.
        samples: Number of samples that were compared.
    """

    path: Path
    bytes: int
    parameters: int
    largest_difference: float
    samples: int

    def __str__(self) -> str:
        lines = [
            f"{self.path}  {self.bytes / 2**20:.2f} MiB, {self.parameters:,} parameters",
            f"largest difference from the network {self.largest_difference:.1e}, on {self.samples} samples of its data "
            f"in batches of {among(map(str, SIZES))}",
            NOTE,
        ]
        return "\n  ".join(lines)


def export(
    run: RunFiles,
    *,
    format: Format = "onnx",
    output: str | Path | None = None,
    weights: str | Path | None = None,
) -> Export:
    """Write the network of a run as a file that other programs read.

    Args:
        run: The run.
        format: "onnx" for an ONNX file, or "torch_export" for a graph of torch.export.
        output: Path of the file. None: network.onnx or network.pt2 in exports/ of the run directory.
        weights: The checkpoint, as in RunFiles.network.

    Raises:
        ConfigError: The output path is invalid.
        ExportRefused: An operator is not supported.
        RunError: The outputs of the file differ from those of the network, or the file cannot be written.
    """
    path = _output(run, format, output, weights=weights)
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require_package(package, feature="format=onnx")
    network = named_network(run, weights=weights)
    examples = _examples(run.data, network)
    dimensions = dimensions_of(network)
    program = capture(network, _resize(examples[-1], 3), dimensions)
    if format == "onnx":
        with torch.no_grad():
            outputs = tuple(network(**examples[0]))
        description = _description(run, network, outputs=outputs, weights=weights)
        content = onnx_bytes(network, program, dimensions=dimensions, outputs=outputs, description=description)
        model = OnnxModel(content)
        difference = compare(network, lambda inputs: model(arrays(inputs)), examples, named="ONNX Runtime")
    else:
        content = _program_bytes(program)
        difference = compare(network, _program_runner(content), examples, named="the graph of torch.export")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise RunError(f"the network cannot be written to {describe_write_error(path, error)}") from error
    return Export(
        path=path,
        bytes=len(content),
        parameters=sum(one.numel() for one in network.network.parameters()),
        largest_difference=difference,
        samples=sum(len(next(iter(one.values()))) for one in examples),
    )


def _description(
    run: RunFiles, network: NamedNetwork, *, outputs: Sequence[str], weights: str | Path | None
) -> Description:
    columns = value_names(run.data.part(run.data.stages[0])).columns
    readings = readings_at(run.settings, run.path_of(weights), classes=config_classes(run))
    return Description(
        run=str(run.directory or run.checkpoint),
        columns={name: list(names) for name, names in columns.items() if name in network.inputs},
        readings={name: vars(one) for name, one in readings.items() if name in outputs},
        served_table=table_form(run),
    )


def _examples(data: Data, network: NamedNetwork) -> list[Mapping[str, Tensor]]:
    """Return one batch for each size in SIZES, and the batches with other sequence lengths.

    The samples are from the validation split, or else from the test or training split.

    Raises:
        RunError: The data has no sample.
    """
    stage = next(stage for stage in BY_CHOICE if stage in data.stages)
    found: list[dict[str, Tensor]] = []
    with preserve_generators():
        for number, batch in enumerate(itertools.islice(data.loader(stage), BATCHES)):
            if data.transforms_batches(stage):
                batch = data.transform_batch(batch, stage=stage, rank=0, epoch=0, number=number)
            entries = inputs_in(batch.data)
            only = next(iter(entries.values()))  # the only input of a network may have any name
            raw = {name: entries.get(name, only) for name in network.inputs}
            found.append({name: raw[name].to(getattr(torch, spec.dtype)) for name, spec in network.inputs.items()})
    if not found:
        raise RunError("the data of the run has no samples to check the export")
    # Only batches with the same lengths can be concatenated.
    alike = [one for one in found if _lengths(one) == _lengths(found[0])]
    whole = {name: torch.cat([one[name] for one in alike]) for name in found[0]}
    return [*(_resize(whole, size) for size in SIZES), *(one for one in found if _lengths(one) != _lengths(whole))]


def _lengths(inputs: Mapping[str, Tensor]) -> list[torch.Size]:
    return [one.shape[1:] for one in inputs.values()]


def _resize(inputs: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the first `size` samples of a batch, repeated if the batch is smaller."""
    return {name: one[torch.arange(size) % len(one)] for name, one in inputs.items()}


def compare(network: NamedNetwork, run: Runner, examples: Sequence[Mapping[str, Tensor]], *, named: str) -> float:
    """Return the largest absolute difference between the outputs of a file and those of the network.

    Args:
        network: The network.
        run: Function that runs the file on a batch of inputs.
        examples: Batches of inputs.
        named: Name of the program that runs the file, for messages.

    Raises:
        RunError: An output differs by more than ABSOLUTE + RELATIVE * |value|, or the file cannot be run.
    """
    largest = 0.0
    for inputs in examples:
        with torch.no_grad():
            wanted = arrays(network(**inputs))
        size = len(next(iter(inputs.values())))
        try:
            found = run(inputs)
        except (RunError, RuntimeError) as error:
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in inputs.items())
            reason = shorten(str(error), most=300)
            raise RunError(f"{named} cannot run the file for {shapes}: {reason}. Nothing was written") from error
        for name, value in wanted.items():
            if found[name].shape != value.shape:
                raise RunError(
                    f"{named} returns {name} of shape {list(found[name].shape)} for a batch of {size}; expected "
                    f"{list(value.shape)}, as from the network. Nothing was written"
                )
            apart = np.abs(found[name].astype(np.float64) - value.astype(np.float64))
            difference = float(np.nanmax(apart, initial=0.0))
            if not np.allclose(found[name], value, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
                raise RunError(
                    f"{named} returns other values than the network: {name} differs by {difference:.2e} for a batch "
                    f"of {size}; expected at most {ABSOLUTE:g} + {RELATIVE:g} of the value. Nothing was written. A "
                    "network that draws random numbers returns other outputs at each call"
                )
            largest = max(largest, difference)
    return largest


def _program_bytes(program: ExportedProgram) -> bytes:
    # Saved to memory, because torch's file writer ends the process if the disk is full.
    content = io.BytesIO()
    with quiet():
        torch.export.save(program, content)
    return content.getvalue()


def _program_runner(content: bytes) -> Runner:
    with quiet():
        module = torch.export.load(io.BytesIO(content)).module()

    def run(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            return arrays(module(**inputs))

    return run


def _output(run: RunFiles, format: Format, output: str | Path | None, *, weights: str | Path | None) -> Path:
    """Return the path of the file to write.

    Raises:
        ConfigError: The output is a directory, a file of the run, or has the suffix of another format.
    """
    name = ENDINGS[format]
    if output is None:
        if run.directory is None:
            got = f"null, and {run.checkpoint} is not in a run directory"
            raise config_error("output", got=got, expected="a file", fix=f"Write output={name}", source=COMMAND_LINE)
        return run.directory / EXPORTS / name
    path = Path(output)
    if path.is_dir():
        fix = f"Write output={path / name}"
        raise config_error("output", got=f"{path}, a directory", expected="a file", fix=fix, source=COMMAND_LINE)
    run.refuse_own_file(path, weights=weights)
    for other in get_args(Format):
        if other != format and path.suffix == Path(ENDINGS[other]).suffix:
            got = f"{path}, whose suffix is that of format={other}, with format={format}"
            fix = f"Write output={path.with_suffix(Path(name).suffix)}, or format={other}"
            raise config_error("output", got=got, expected="a file", fix=fix, source=COMMAND_LINE)
    return path
