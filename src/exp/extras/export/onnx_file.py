"""Writes a captured graph as an ONNX file, and reads and runs ONNX files with ONNX Runtime.

The metadata of the file has JSON under the key `exp`: the run, the names of input columns, and the meaning of outputs.
ONNX files of other programs, which lack this key, can be read as well.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from exp.errors import MissingExtraError, RunError, chain_of, shorten
from exp.extras.export.graph_capture import Dimensions, ExportRefused, quiet
from exp.extras.export.named_network import NamedNetwork

METADATA = "exp"
# The limit of a protobuf file.
MOST_BYTES = 2**31 - 1
# NumPy's dtypes by ONNX Runtime's names.
NUMPY = {
    "tensor(double)": np.float64, "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Description:
    """Metadata of an exported file, in plain values.

    Args:
        run: Run directory or checkpoint.
        columns: Names of the columns along the last axis, by input.
        readings: Meaning of each output by name, as returned by Reading.plain.
        served_table: Arguments of ServedTable if the inputs are columns of a table, else None.
    """

    run: str = ""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    readings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    served_table: Mapping[str, object] | None = None

    @classmethod
    def of_text(cls, text: str) -> Description:
        """Return the description from the JSON of a file. Keys of other versions of exp are ignored.

        Raises:
            RunError: The JSON is not from exp.
        """
        names = [one.name for one in dataclasses.fields(cls)]
        try:
            return cls(**{name: value for name, value in json.loads(text).items() if name in names})
        except (ValueError, AttributeError) as error:
            raise RunError(f"the file's metadata {METADATA} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Port:
    """An input or output of an ONNX file.

    Args:
        name: Name of the tensor.
        shape: Sizes of the axes. A dynamic axis has a name instead, or None.
        dtype: Dtype of the tensor.
    """

    name: str
    shape: tuple[int | str | None, ...]
    dtype: type[np.generic]


class OnnxModel:
    """An ONNX model that ONNX Runtime runs on the CPU.

    Args:
        source: Path of the ONNX file, or its content.
        threads: Number of threads of one call. None: the default of ONNX Runtime.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        RunError: The file does not exist or is not ONNX.
    """

    def __init__(self, source: Path | bytes, *, threads: int | None = None) -> None:
        runtime = require_package("onnxruntime", feature="running an ONNX file")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        if threads is not None:
            options.intra_op_num_threads = threads
        if isinstance(source, Path) and not source.is_file():
            raise RunError(f"{source} does not exist; expected an ONNX file, such as those of python -m exp.export")
        given, name = (source, "the exported graph") if isinstance(source, bytes) else (str(source), str(source))
        try:
            self._session = runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions have no common class
            raise RunError(f"{name} cannot be read as ONNX: {shorten(str(error), most=300)}") from error
        self.inputs = [_port(one) for one in self._session.get_inputs()]
        self.outputs = [_port(one) for one in self._session.get_outputs()]
        found = self._session.get_modelmeta().custom_metadata_map
        self.description = Description.of_text(found[METADATA]) if METADATA in found else Description()

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of the model by name.

        Raises:
            RunError: ONNX Runtime rejects the inputs, such as an index outside an embedding.
        """
        try:
            values = self._session.run(None, dict(inputs))
        except Exception as error:  # ONNX Runtime's exceptions have no common class
            raise RunError(f"ONNX Runtime rejects the inputs: {shorten(str(error), most=300)}") from error
        return {port.name: value for port, value in zip(self.outputs, values, strict=True)}


def onnx_bytes(
    network: NamedNetwork,
    program: ExportedProgram,
    *,
    dimensions: Dimensions,
    outputs: Sequence[str],
    description: Description,
) -> bytes:
    """Return the content of an ONNX file for a captured graph, after a check by onnx.checker.

    Args:
        network: The network.
        program: Graph of the network.
        dimensions: Names of the dynamic dimensions, by input and axis.
        outputs: Names of the outputs, in order.
        description: Metadata of the file.

    Raises:
        ExportRefused: ONNX does not support an operator.
        RunError: onnx.checker rejects the file, or it is larger than 2 GiB.
    """
    onnx = require_package("onnx", feature="exp.export")
    size = sum(one.numel() * one.element_size() for one in network.state_dict().values())
    if size > MOST_BYTES:
        raise RunError(
            f"the weights have {size:,} bytes; expected at most {MOST_BYTES:,} in an ONNX file. torch.export.save can "
            "save larger networks"
        )
    with quiet(), torch.no_grad():
        try:
            made = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(network.inputs),
                output_names=list(outputs),
                dynamic_shapes={name: dict(axes) for name, axes in dimensions.items()},
                external_data=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = shorten(str([*chain_of(error, explicit=True)][-1]), most=300)
            raise ExportRefused("model", f"an operator cannot be written as ONNX: {reason}") from error
        assert made is not None
        proto = made.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(vars(description))
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # onnx's and protobuf's exceptions have no common class
        raise RunError(f"onnx.checker rejects the file: {shorten(str(error), most=300)}") from error
    content: bytes = proto.SerializeToString()
    return content


def require_package(package: str, *, feature: str) -> Any:
    """Return an imported package of the extra `export`.

    Args:
        package: Name of the package.
        feature: Feature that needs the package, for the error.

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(feature=feature, package=package, extra="export") from error


def arrays(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return tensors as NumPy arrays by name."""
    return {name: one.detach().cpu().contiguous().numpy() for name, one in inputs.items()}


def _port(found: Any) -> Port:
    if found.type not in NUMPY:
        raise RunError(f"{found.name} is {found.type}; expected tensors of {', '.join(NUMPY)}")
    return Port(name=found.name, shape=tuple(found.shape), dtype=NUMPY[found.type])
