"""Export of the network of a saved run as an ONNX file.

    exported = export(exp.load(DIR), output=Path("network.onnx"))

The outputs of the ONNX file are compared with the outputs of the network. The inputs are samples of the run's data, in
batches of 1, 7 and 64. If the outputs differ, no file is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exp.data.data import Data
from exp.data.entries import inputs_in, value_names
from exp.data.randomness import preserve_generators
from exp.errors import COMMAND_LINE, RunError, config_error
from exp.extras.export.graph_capture import capture, dimensions_of
from exp.extras.export.named_network import NamedNetwork, named_network
from exp.extras.export.onnx_file import Description, OnnxModel, arrays, onnx_bytes, require_package
from exp.extras.export.served_tables import table_form
from exp.files import write_atomic
from exp.output import describe_write_error
from exp.saved_runs.prediction import config_classes, readings_at
from exp.saved_runs.run_files import EXPORTS, RunFiles
from exp.shared_types import Stage
from exp.spelling import among

NAME = "network.onnx"
SIZES = (1, 7, 64)
RELATIVE, ABSOLUTE = 1e-3, 1e-5
# Splits from which samples for the comparison are read: the first one that exists. Validation and test come before
# training, because their samples are not augmented.
BY_CHOICE: tuple[Stage, ...] = ("val", "test", "train")
NOTE = "the inputs of the file are those of the network: standardized, encoded and transformed"


@dataclass(frozen=True, kw_only=True)
class Export:
    """Description of an exported file.

    Args:
        path: Path of the file.
        bytes: Size of the file in bytes.
        parameters: Number of parameters of the network.
        largest_difference: Largest absolute difference between the outputs of the file and of the network.
        samples: Number of samples for which the outputs were compared.
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


def export(run: RunFiles, *, output: str | Path | None = None, weights: str | Path | None = None) -> Export:
    """Write the network of a run as an ONNX file.

    Args:
        run: The run.
        output: Path of the file. Default: exports/network.onnx in the run directory.
        weights: Checkpoint with the weights: `best`, `last`, or a path. Default: the best, or else the last.

    Raises:
        ConfigError: The output path is invalid.
        ExportRefused: An operator is not supported.
        RunError: The outputs of the file differ from the outputs of the network, or the file cannot be written.
    """
    path = _output(run, output, weights=weights)
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package, feature="exp.export")
    network = named_network(run, weights=weights)
    examples = _examples(run.data, network)
    dimensions = dimensions_of(network)
    program = capture(network, _resize(examples[-1], 3), dimensions)
    with torch.no_grad():
        outputs = tuple(network(**examples[0]))
    description = _description(run, network, outputs=outputs, weights=weights)
    content = onnx_bytes(network, program, dimensions=dimensions, outputs=outputs, description=description)
    difference = compare(network, OnnxModel(content), examples)
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
    """Return the inputs of one batch for each size in SIZES, by name of the input.

    The samples are from the first split in BY_CHOICE that the data has.

    Args:
        data: The data of the run.
        network: The network.

    Raises:
        RunError: The data has no samples.
    """
    stage = next(stage for stage in BY_CHOICE if stage in data.stages)
    with preserve_generators():
        batch = next(iter(data.loader(stage)), None)
        if batch is None:
            raise RunError("the data of the run has no samples to check the export")
        if data.transforms_batches(stage):
            batch = data.transform_batch(batch, stage=stage, rank=0, epoch=0, number=0)
    entries = inputs_in(batch.data)
    only = next(iter(entries.values()))  # If the network has a single input, its name may differ from the data's name.
    raw = {name: entries.get(name, only) for name in network.inputs}
    inputs = {name: raw[name].to(getattr(torch, spec.dtype)) for name, spec in network.inputs.items()}
    return [_resize(inputs, size) for size in SIZES]


def _resize(inputs: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return a batch of the first `size` samples. Samples are repeated if the given batch is smaller."""
    return {name: one[torch.arange(size) % len(one)] for name, one in inputs.items()}


def compare(network: NamedNetwork, model: OnnxModel, examples: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the largest absolute difference between the outputs of an ONNX model and of the network.

    Args:
        network: The network.
        model: The ONNX model.
        examples: Batches of inputs. A batch is a mapping from the names of the inputs to tensors.

    Raises:
        RunError: An output differs by more than ABSOLUTE + RELATIVE * |value|, or ONNX Runtime cannot run the model.
    """
    largest = 0.0
    for inputs in examples:
        with torch.no_grad():
            wanted = arrays(network(**inputs))
        size = len(next(iter(inputs.values())))
        try:
            found = model(arrays(inputs))
        except RunError as error:
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in inputs.items())
            raise RunError(f"the exported graph cannot run for {shapes}: {error}. No file was written") from error
        for name, value in wanted.items():
            if found[name].shape != value.shape:
                raise RunError(
                    f"ONNX Runtime returns {name} of shape {list(found[name].shape)} for a batch of {size}; expected "
                    f"{list(value.shape)}, as from the network. No file was written"
                )
            apart = np.abs(found[name].astype(np.float64) - value.astype(np.float64))
            difference = float(np.nanmax(apart, initial=0.0))
            if not np.allclose(found[name], value, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
                raise RunError(
                    f"ONNX Runtime returns other values than the network: {name} differs by {difference:.2e} for a "
                    f"batch of {size}; expected at most {ABSOLUTE:g} + {RELATIVE:g} of the value. No file was written. "
                    "A network that draws random numbers returns other outputs at each call"
                )
            largest = max(largest, difference)
    return largest


def _output(run: RunFiles, output: str | Path | None, *, weights: str | Path | None) -> Path:
    """Return the path of the file to write.

    Args:
        run: The run.
        output: The path that the user has given, or None.
        weights: Checkpoint with the weights, which must not be overwritten.

    Raises:
        ConfigError: The path is a directory or a file of the run, or it is None and the run has no directory.
    """
    if output is None:
        if run.directory is None:
            got = f"null, and {run.checkpoint} is not in a run directory"
            raise config_error("output", got=got, expected="a file", fix=f"Write output={NAME}", source=COMMAND_LINE)
        return run.directory / EXPORTS / NAME
    path = Path(output)
    if path.is_dir():
        fix = f"Write output={path / NAME}"
        raise config_error("output", got=f"{path}, a directory", expected="a file", fix=fix, source=COMMAND_LINE)
    run.refuse_own_file(path, weights=weights)
    return path
