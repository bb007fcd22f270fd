"""Turn the weights of an ONNX file into 8-bit numbers by ONNX Runtime, and score it before and after on the run's data.

A network with convolutions is quantized statically, by the range of its activations on training samples; any other
dynamically, with ranges that each call finds itself. Both are ONNX Runtime's own choice for such networks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exp.construct import build_measures, build_objective
from exp.errors import RunError, shortened
from exp.extras.export.graph_capture import quiet
from exp.extras.export.named_network import OUTPUT
from exp.extras.export.onnx_file import Description, OnnxModel, arrays, described, required
from exp.extras.export.real_samples import RealSamples, resized
from exp.objectives.measures import as_scored
from exp.output import unwritable
from exp.saved_runs.run_files import RunFiles
from exp.shared_types import Batch, Stage

# Training samples by whose activations the ranges are chosen.
CALIBRATION = 256
CONVOLUTIONS = ("Conv", "ConvTranspose")


def quantized(content: bytes, samples: RealSamples, description: Description) -> tuple[bytes, str]:
    """The file with 8-bit weights, and in words how.

    Raises: RunError where ONNX Runtime cannot, or nothing in it can have them.
    """
    onnx = required("onnx", feature="quantize=int8")
    tools = required("onnxruntime.quantization", feature="quantize=int8")
    before = onnx.load_from_string(content)
    is_static = any(node.op_type in CONVOLUTIONS for node in before.graph.node)
    with tempfile.TemporaryDirectory() as place, quiet():
        given, ready, made = (Path(place) / name for name in ("given.onnx", "ready.onnx", "made.onnx"))
        try:
            given.write_bytes(content)
        except OSError as error:
            raise RunError(
                f"the network cannot be written for its quantization to {unwritable(place, error)}"
            ) from error
        try:
            # Folds batch norm into convolutions and infers shapes, which the quantizers ask for.
            tools.shape_inference.quant_pre_process(str(given), str(ready), skip_symbolic_shape=True)
            if is_static:
                reader = _calibration(samples)
                tools.quantize_static(str(ready), str(made), reader, per_channel=True)
            else:
                tools.quantize_dynamic(str(ready), str(made), weight_type=tools.QuantType.QInt8)
        except Exception as error:  # its own errors have no base, and onnx's and NumPy's pass through
            raise RunError(f"ONNX Runtime cannot quantize it: {shortened(str(error), most=300)}") from error
        after = onnx.load(str(made))
    if not any(one.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) for one in after.graph.initializer):
        kinds = sorted({node.op_type for node in before.graph.node})
        raise RunError(
            f"nothing in it can have 8-bit weights: it is made of {', '.join(kinds)}; expected MatMul, Gemm, Conv or "
            "Gather of weights. Leave quantize out"
        )
    described(after, description)
    how = f"static, by {CALIBRATION} samples of training at most" if is_static else "dynamic"
    found: bytes = after.SerializeToString()
    return found, f"int8 weights, {how}"


def scores(
    run: RunFiles, samples: RealSamples, *, before: OnnxModel, after: OnnxModel
) -> dict[str, tuple[float, float]]:
    """The run's loss and metrics by two files, on the test part, or else on the val part, by tag.

    Losses that need more than an output, such as gradients, are left out.
    Raises: RunError where the data has neither part.
    """
    stages: list[Stage] = [stage for stage in ("test", "val") if stage in samples.data.stages]
    if not stages:
        raise RunError("the run's data has neither a test nor a val part to score the quantized network on")
    first, second = (_scores(run, samples, model, stages[0]) for model in (before, after))
    return {name: (value, second[name]) for name, value in first.items()}


def _scores(run: RunFiles, samples: RealSamples, model: OnnxModel, stage: Stage) -> dict[str, float]:
    plain = run.resolved.plain
    objective = build_objective(plain)
    measures = [as_scored(measure.clone(), objective) for measure in build_measures(plain).values()]
    has_loss = not objective.needs and not plain["phases"]
    total, count = 0.0, 0
    for inputs, batch in samples.batches(stage):
        values = _values(samples, model, inputs, batch)
        if has_loss:
            loss, _ = objective(values, batch)
            total, count = total + float(loss) * batch.size, count + batch.size
        for measure in measures:
            measure.update(measure.read(values))
    found = {f"loss/{stage}": total / count} if count else {}
    for measure in measures:
        for part, value in measure.compute().items():
            tag = "/".join(filter(None, (measure.name, stage, part)))
            if value.numel() == 1:
                found[tag] = float(value)
    return found


def _values(samples: RealSamples, model: OnnxModel, inputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Any]:
    """A batch's entries and a file's outputs, as the run's terms and metrics find them."""
    found: dict[str, Any] = {name: torch.from_numpy(value) for name, value in model(arrays(inputs)).items()}
    data = batch.data
    entries = dict(data) if isinstance(data, Mapping) else dict(zip(("input", "target"), data, strict=False))
    one = samples.network.is_one_tensor
    return {**entries, **found, OUTPUT: found[OUTPUT] if one or OUTPUT in found else found}


def _calibration(samples: RealSamples) -> Any:
    """Training samples as ONNX Runtime's quantizer reads them, by `get_next`, one batch after another."""

    class Reader:
        def __init__(self) -> None:
            self.batches = _batches(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    return Reader()


def _batches(samples: RealSamples) -> Iterator[dict[str, np.ndarray]]:
    seen = 0
    for inputs, batch in samples.batches("train" if "train" in samples.data.stages else samples.stage()):
        if seen >= CALIBRATION:
            return
        seen += batch.size
        yield arrays(resized(inputs, max(1, min(batch.size, CALIBRATION))))
