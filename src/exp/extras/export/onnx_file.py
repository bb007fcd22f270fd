"""Write the captured graph of a network as an ONNX file, read one, and run it by ONNX Runtime.

What the file says of itself, beside ONNX's own, is JSON in its metadata under `exp`: the run, the units of raw inputs,
the names of columns and classes. A file without it, of another program, is read all the same.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from exp.errors import MissingExtraError, RunError, chain_of, shortened
from exp.extras.export.graph_capture import operator_of, quiet, refused
from exp.extras.export.named_network import NamedNetwork
from exp.saved_runs.run_files import RunFiles

METADATA = "exp"
EXTRA = "export"
# A file of protobuf, which an ONNX file is, holds no more.
MOST_BYTES = 2**31 - 1
# ONNX Runtime's words for what NumPy has.
NUMPY = {
    "tensor(double)": np.float64, "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}  # fmt: skip
MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>")
FAILED = re.compile(r"Error when translating node (?:%?)(\w+)")


@dataclass(frozen=True, kw_only=True)
class Description:
    """What an exported file says of its network. Plain values alone.

    run: the run directory or checkpoint. units: of raw inputs, in words; of an input that is not here, what goes in is
    what the network was trained with. columns: names along an input's last axis. classes: their names, or numbers as
    text, in order; none for a regression. target_scale: mean and deviation of standardised targets, by name.
    quantization: int8, or null. readings: how outputs are read, by name, as Reading.plain has them. table: what
    ServedTable is made of, of a network whose inputs are made of the columns of a table.
    """

    run: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Sequence[str] = ()
    target_scale: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    quantization: str | None = None
    readings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    table: Mapping[str, Any] | None = None

    @classmethod
    def of_text(cls, text: str) -> Description:
        """Reads the JSON of a file. Raises: RunError where it is none of exp's."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise RunError(f"the file's metadata {METADATA} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Port:
    """An input or output of a file. shape: with a name for each dimension that may change, None where it has none."""

    name: str
    shape: tuple[int | str | None, ...]
    dtype: type[np.generic]

    @property
    def has_free_batch(self) -> bool:
        """Whether its first dimension may be any."""
        return bool(self.shape) and not isinstance(self.shape[0], int)


class OnnxModel:
    """An ONNX file in ONNX Runtime, on the CPU.

    source: a file, or its bytes. threads: of one call; None leaves it to ONNX Runtime.
    Raises: MissingExtraError; RunError where the file is not there or none of ONNX.
    """

    def __init__(self, source: Path | bytes, *, threads: int | None = None) -> None:
        runtime = required("onnxruntime", feature="running an ONNX file")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what is wrong is raised
        if threads is not None:
            options.intra_op_num_threads = threads
        if isinstance(source, Path) and not source.is_file():
            raise RunError(f"{source} is not there; expected an ONNX file, such as python -m exp.export writes")
        try:
            given = source if isinstance(source, bytes) else str(source)
            self._session = runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has a class for each of its codes, and no base
            name = source if isinstance(source, Path) else "the exported graph"
            raise RunError(f"{name} cannot be read as ONNX: {shortened(str(error), most=300)}") from error
        self.inputs = [_port(one) for one in self._session.get_inputs()]
        self.outputs = [_port(one) for one in self._session.get_outputs()]
        found = self._session.get_modelmeta().custom_metadata_map
        self.description = Description.of_text(found[METADATA]) if METADATA in found else Description()

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name.

        Raises: RunError where ONNX Runtime refuses the inputs, such as a number beyond an embedding.
        """
        try:
            values = self._session.run(None, dict(inputs))
        except Exception as error:  # as above
            raise RunError(f"ONNX Runtime refuses them: {shortened(str(error), most=300)}") from error
        return {port.name: value for port, value in zip(self.outputs, values, strict=True)}


def onnx_bytes(
    run: RunFiles,
    network: NamedNetwork,
    program: ExportedProgram,
    *,
    dimensions: Mapping[str, Mapping[int, str]],
    outputs: Sequence[str],
    description: Description,
) -> bytes:
    """A checked ONNX file of a captured graph.

    dimensions: names of those that may change, by input and axis. outputs: their names, in order.
    Raises: ExportRefused for an operator that ONNX does not have; MissingExtraError; RunError where onnx.checker finds
        a fault, and for more than 2 GiB.
    """
    onnx = required("onnx", feature="format=onnx")
    size = sum(one.numel() * one.element_size() for one in network.state_dict().values())
    if size > MOST_BYTES:
        raise RunError(f"the weights take {size:,} bytes, and an ONNX file holds {MOST_BYTES:,}; take another format")
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
            raise _refusal(run, network, program, error) from error
        assert made is not None
        proto = made.model_proto
    described(proto, description)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # ValidationError, and protobuf's own
        raise RunError(f"onnx.checker refuses what was exported: {shortened(str(error), most=300)}") from error
    found: bytes = proto.SerializeToString()
    return found


def described(proto: Any, description: Description) -> None:
    """Write what a file says of itself into it. proto: onnx.ModelProto."""
    kept = [one for one in proto.metadata_props if one.key != METADATA]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(vars(description))


def required(package: str, *, feature: str) -> Any:
    """A package of the extra `export`. Raises: MissingExtraError."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(feature=feature, package=package, extra=EXTRA) from error


def arrays(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors as ONNX Runtime takes them."""
    return {name: one.detach().cpu().contiguous().numpy() for name, one in inputs.items()}


def _port(found: Any) -> Port:
    if found.type not in NUMPY:
        raise RunError(f"{found.name} is {found.type}; expected tensors of {', '.join(NUMPY)}")
    return Port(name=found.name, shape=tuple(found.shape), dtype=NUMPY[found.type])


def _refusal(run: RunFiles, network: NamedNetwork, program: ExportedProgram, error: BaseException) -> Exception:
    """The error of an operator that ONNX does not have, or that its conversion fails for."""
    texts = [str(cause) for cause in chain_of(error, explicit=True)]
    missing, failed = MISSING.search("\n".join(texts)), FAILED.search("\n".join(texts))
    if missing:
        name, overload = missing.groups()
        wanted = f"{name}.{overload}".removesuffix(".default")
        why = "has no counterpart in ONNX"
    else:
        wanted, why = "", f"cannot be written as ONNX: {shortened(texts[-1], most=200)}"
    # An operator that ONNX lacks may be one that torch has made of another.
    for graph in (program.graph, program.run_decompositions().graph):
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        by_name = [node for node in nodes if failed and node.name == failed.group(1)]
        alike = [node for node in nodes if wanted and operator_of(node.target).endswith(wanted.rpartition(".")[2])]
        for node in [node for node in alike if operator_of(node.target) == wanted] or alike or by_name:
            return refused(run, network, node, why=why)
    return RunError(f"the network cannot be exported. {wanted or 'An operator'} {why}")
