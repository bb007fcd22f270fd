"""Functions that write a captured graph as an ONNX file, and run ONNX files with ONNX Runtime.

The metadata of a file contains JSON under the key `exp`: the run, the names of input columns, and the meaning of
outputs. ONNX files of other programs, which do not have this key, are also supported.
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
# Maximum size of a protobuf file in bytes.
MOST_BYTES = 2**31 - 1
# NumPy dtypes by the name of the type in ONNX Runtime.
NUMPY = {
    "tensor(double)": np.float64, "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Description:
    """Metadata of an exported file. All values can be written as JSON.

    Args:
        run: Path of the run directory or of the checkpoint. Default: empty.
        columns: Names of the columns along the last axis of each input, by name of the input. Default: no names.
        readings: Fields of the Reading of each output, by name of the output. A Reading is the meaning of an output,
            such as scores of classes. Default: no readings.
        served_table: Argument of ServedTable.of, if the inputs are encoded columns of a table. Default: None.
    """

    run: str = ""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    readings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    served_table: Mapping[str, object] | None = None

    @classmethod
    def of_text(cls, text: str) -> Description:
        """Return the description in the metadata of a file. Keys that only other versions of exp use are ignored.

        Args:
            text: JSON text of the metadata.

        Raises:
            RunError: The text is not JSON, or not an object.
        """
        names = [one.name for one in dataclasses.fields(cls)]
        try:
            return cls(**{name: value for name, value in json.loads(text).items() if name in names})
        except (ValueError, AttributeError) as error:
            raise RunError(f"the file's metadata {METADATA} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Port:
    """Input or output of an ONNX file.

    Args:
        name: Name of the tensor.
        shape: Sizes of the axes. A dynamic axis has a name or None instead of a size.
        dtype: Dtype of the tensor.
    """

    name: str
    shape: tuple[int | str | None, ...]
    dtype: type[np.generic]


class OnnxModel:
    """ONNX model that ONNX Runtime runs on the CPU.

    Args:
        source: Path of an ONNX file, or the content of an ONNX file.
        threads: Number of threads for a call of the model. Default: the default of ONNX Runtime.

    Attributes:
        inputs: Inputs of the model.
        outputs: Outputs of the model.
        description: Metadata of the file. It is empty for files of other programs.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        RunError: The file does not exist or is not ONNX.
    """

    def __init__(self, source: Path | bytes, *, threads: int | None = None) -> None:
        runtime = require_package("onnxruntime", feature="running an ONNX file")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # Only fatal messages are logged, because errors are also raised.
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
        """Return a mapping from the names of the outputs to their values.

        Args:
            inputs: Values of the inputs by name.

        Raises:
            RunError: ONNX Runtime rejects the inputs, for example because an index is outside an embedding.
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
    """Return the content of an ONNX file for a captured graph. onnx.checker has checked the content.

    Args:
        network: The network.
        program: Graph of the network from graph_capture.capture.
        dimensions: Names of the dynamic dimensions, by input and axis.
        outputs: Names of the outputs in order.
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
    """Import a package of the pip extra `export`, and return the package.

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
    """Return the tensors of a mapping as NumPy arrays."""
    return {name: one.detach().cpu().contiguous().numpy() for name, one in inputs.items()}


def _port(found: Any) -> Port:
    if found.type not in NUMPY:
        raise RunError(f"{found.name} is {found.type}; expected tensors of {', '.join(NUMPY)}")
    return Port(name=found.name, shape=tuple(found.shape), dtype=NUMPY[found.type])
