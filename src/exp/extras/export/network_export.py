"""Export the network of a saved run: a file that other programs run, checked against the network that was trained.

    exported = export(exp.load(DIR), format="onnx", output=Path("network.onnx"))

An ONNX file and a graph of torch.export are compared with the network on samples of the run's own data, in batches of
1, 7 and 64, and not written where they differ. A state dict and a safetensors file hold the weights alone.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from exp.construct import build_objective
from exp.data.entries import TARGET
from exp.data.value_names import class_names, told_scales, value_names
from exp.errors import ConfigError, Fault, MissingExtraError, RunError, shortened
from exp.extras.export.graph_capture import capture, dimensions_of, quiet
from exp.extras.export.named_network import NamedNetwork, data_spec, named_network
from exp.extras.export.onnx_file import Description, OnnxModel, arrays, onnx_bytes, required
from exp.extras.export.preprocessing import preparations
from exp.extras.export.quantization import quantized, scores
from exp.extras.export.real_samples import RealSamples, resized, shortened_axes
from exp.extras.export.served_tables import table_form
from exp.files import write_whole
from exp.models.lora import is_adapted, merge
from exp.output import unwritable
from exp.saved_runs.answers import readings_of
from exp.saved_runs.prediction import stated_classes
from exp.saved_runs.run_files import EXPORTS, RunFiles
from exp.spelling import among

Format = Literal["onnx", "torch_export", "state_dict", "safetensors"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: Mapping[Format, str] = {
    "onnx": "network.onnx", "torch_export": "network.pt2", "state_dict": "network.pt",
    "safetensors": "network.safetensors",
}  # fmt: skip
# By which other programs, too, take a file for one of a format.
SUFFIXES: Mapping[str, Format] = {
    **{Path(name).suffix: format for format, name in ENDINGS.items()}, ".pth": "state_dict", ".ckpt": "state_dict",
}  # fmt: skip
SIZES = (1, 7, 64)
TIMED = (1, 64)
RELATIVE, ABSOLUTE = 1e-3, 1e-5
# A batch is timed so often, or for so long.
TIMES, SECONDS = 50, 1.0

# The unit of an input that the graph does not prepare.
AS_TRAINED = "as the run's data gives it to the network, standardised, encoded and transformed"

Runner = Callable[[Mapping[str, Tensor]], Mapping[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was exported.

    path, bytes: of the file. parameters: numbers that the network holds. largest_difference: of any output from the
    network's, on `samples` samples; None where nothing runs. quantized_difference: that of the quantized file, and
        the other is before it was; None where it is not.
    latency_ms: medians by batch size, of the file and of the network in torch. notes: what to know, a line each.
    scores: of a quantized file, each metric before and after.
    """

    path: Path
    bytes: int
    parameters: int
    largest_difference: float | None = None
    quantized_difference: float | None = None
    samples: int = 0
    latency_ms: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.path}  {self.bytes / 2**20:.2f} MiB, {self.parameters:,} numbers"]
        if self.largest_difference is not None:
            after = self.quantized_difference
            quantized = "" if after is None else f" before quantization, {after:.1e} quantized"
            lines.append(
                f"  largest difference from the network {self.largest_difference:.1e}{quantized}, on {self.samples} "
                f"samples of its data in batches of {', '.join(map(str, SIZES))}"
            )
        for size, (own, torchs) in self.latency_ms.items():
            lines.append(f"  a batch of {size}: {own:.3f} ms, in torch {torchs:.3f} ms (medians)")
        for name, (before, after) in self.scores.items():
            lines.append(f"  {name}: {before:.4f}, quantized {after:.4f}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def export(
    run: RunFiles,
    *,
    format: Format = "onnx",
    output: str | Path | None = None,
    weights: str | Path | None = None,
    averaged: bool = True,
    preprocessing: bool = False,
    quantize: Literal["int8"] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    timed: bool = True,
) -> Export:
    """Write the network of a run in a form that other programs read.

    output: the file; None is network.onnx, .pt2, .pt or .safetensors in the run directory's exports/.
    weights, averaged: as of RunFiles.network. preprocessing: whether raw numbers go in, which the graph standardises.
    quantize: int8 for an ONNX file with weights of 8 bits. dynamic: dimensions that may change, by input and axis,
        beside the batch and what the data leaves open. timed: whether latencies are measured.
    Raises: ConfigError for words that do not go together and for data that no graph prepares; ExportRefused for an
        operator that no graph holds; RunError where the file gives other numbers than the network, and then no file is
        left, and where it cannot be written.
    """
    _check_words(format, preprocessing=preprocessing, quantize=quantize, dynamic=dynamic)
    path = _output(run, format, output, weights=weights)
    if format in ("state_dict", "safetensors"):
        return _weights_file(run, path, format, weights=weights, averaged=averaged)
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            required(package, feature="format=onnx")
    source = Source.of(
        run,
        weights=weights,
        averaged=averaged,
        preprocessing=preprocessing,
        dynamic=dynamic or {},
        # ONNX Runtime has many operators, such as Erf, for float32 alone.
        keeps_doubles=format != "onnx",
    )
    write = _write_program if format == "torch_export" else _write_onnx
    written = write(source, path, quantize)
    if not timed:
        return written
    runner = _program_runner(path) if format == "torch_export" else _onnx_runner(OnnxModel(path))
    latency = {size: _latency(source.network, runner, resized(source.examples[0], size)) for size in TIMED}
    return replace(written, latency_ms=latency)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What an exported file is made from, and what it is held against.

    examples: batches of the run's own data. dimensions: those that may change, by input and axis.
    """

    run: RunFiles
    network: NamedNetwork
    samples: RealSamples
    examples: Sequence[Mapping[str, Tensor]]
    dimensions: Mapping[str, Mapping[int, str]]
    program: ExportedProgram
    outputs: Sequence[str]

    @classmethod
    def of(
        cls,
        run: RunFiles,
        *,
        weights: str | Path | None,
        averaged: bool,
        preprocessing: bool,
        dynamic: Mapping[str, Mapping[int, str]],
        keeps_doubles: bool,
    ) -> Source:
        """Capture the graph of a run's network. Raises: as `export`."""
        data_spec(run)
        data = run.data
        prepared = preparations(run.resolved.plain, data) if preprocessing else {}
        network = named_network(
            run, weights=weights, averaged=averaged, preparations=prepared, keeps_doubles=keeps_doubles
        )
        samples = RealSamples(data=data, network=network, preparations=prepared)
        dimensions = dimensions_of(network, dynamic)
        examples = samples.examples(sizes=SIZES)
        if dynamic:
            examples.append(shortened_axes(examples[SIZES.index(7)], dynamic))
        program = capture(run, network, resized(examples[-1], 3), dimensions)
        with torch.no_grad():
            outputs = tuple(network(**examples[0]))
        return cls(
            run=run,
            network=network,
            samples=samples,
            examples=examples,
            dimensions=dimensions,
            program=program,
            outputs=outputs,
        )

    @property
    def notes(self) -> list[str]:
        """What to know of the file, a line each."""
        notes = [f"{name}: {unit}" for name, unit in self.units.items()]
        form = table_form(self.run)
        if form is not None:
            columns = among([*form["told"]["numbers"], *form["told"]["words"]])
            notes.append(f"exp.serve takes the columns of the table as its file has them: {columns}")
        notes += [f"{name} takes the numbers of the Noise layer {path}" for path, name in self.network.noise.items()]
        if self.run.resolved.plain["precision"]["word"] == "fp64" and not self.network.is_double:
            notes.append("it computes in float32, and the run was trained in fp64")
        if self.network.left_out:
            notes.append(f"left out of the output, for they are no tensors: {', '.join(self.network.left_out)}")
        scales = told_scales(self.samples.data.fitted)
        notes += [f"{name} was standardised in training: times {deviation}, plus {mean} is its own unit"
                  for name, (mean, deviation) in scales.items()]  # fmt: skip
        return notes

    @property
    def units(self) -> dict[str, str]:
        """Return a description of the numbers of each input, by the input's name."""
        prepared, noise = self.samples.preparations, self.network.noise.values()
        names = [name for name in self.network.inputs if name not in noise]
        return {name: prepared[name].unit if name in prepared else AS_TRAINED for name in names}

    @property
    def description(self) -> Description:
        """What the file says of itself."""
        data, prepared = self.samples.data, self.samples.preparations
        names = value_names(data.part(data.stages[0]))
        classes = list(class_names(data.part(data.stages[0]), data.fitted).get(TARGET, ()))
        if not classes and data.spec.num_classes is not None:
            classes = [str(number) for number in range(data.spec.num_classes)]
        plain = self.run.resolved.plain
        is_own = plain["module"] is not None
        readings = {} if is_own else readings_of(build_objective(plain), data.fitted, classes=stated_classes(self.run))
        return Description(
            run=str(self.run.directory or self.run.checkpoint),
            units=self.units,
            readings={name: one.plain() for name, one in readings.items() if name in self.outputs},
            table=table_form(self.run, is_raw=bool(prepared)),
            columns={name: list(columns) for name, columns in names.columns.items() if name in self.network.inputs},
            classes=classes,
            target_scale={name: [one.tolist() for one in scale] for name, scale in told_scales(data.fitted).items()},
        )

    def told(self, path: Path, difference: float) -> Export:
        """The export of a file that has passed."""
        return Export(
            path=path,
            bytes=path.stat().st_size,
            parameters=sum(one.numel() for one in self.network.network.parameters()),
            largest_difference=difference,
            samples=sum(len(next(iter(one.values()))) for one in self.examples),
            notes=self.notes,
        )


def _write_program(source: Source, path: Path, quantize: str | None) -> Export:
    """A .pt2 file, which torch.export.load reads."""
    # In memory, for torch's own writer ends the process where a disk is full.
    content = io.BytesIO()
    with quiet():
        torch.export.save(source.program, content)
    runner = _program_runner(content)
    difference = compare(source.network, runner, source.examples, named="the graph of torch.export")
    _write(path, content.getvalue())
    return source.told(path, difference)


def _write_onnx(source: Source, path: Path, quantize: str | None) -> Export:
    description = source.description
    content = onnx_bytes(
        source.run,
        source.network,
        source.program,
        dimensions=source.dimensions,
        outputs=source.outputs,
        description=description,
    )
    model = OnnxModel(content)
    difference = compare(source.network, _onnx_runner(model), source.examples, named="ONNX Runtime")
    how: list[str] = []
    found: Mapping[str, tuple[float, float]] = {}
    after: float | None = None
    if quantize is not None:
        content, told = quantized(content, source.samples, replace(description, quantization=quantize))
        small = OnnxModel(content)
        how, found = [told], scores(source.run, source.samples, before=model, after=small)
        after = largest_difference(source.network, _onnx_runner(small), source.examples)
    _write(path, content)
    written = source.told(path, difference)
    return replace(written, notes=[*written.notes, *how], scores=found, quantized_difference=after)


def compare(network: NamedNetwork, run: Runner, examples: Sequence[Mapping[str, Tensor]], *, named: str) -> float:
    """The largest difference of any number of the outputs from those of the network.

    Raises: RunError where one is beyond RELATIVE and ABSOLUTE.
    """
    largest = 0.0
    for inputs in examples:
        with torch.no_grad():
            wanted = network(**inputs)
        size = len(next(iter(inputs.values())))
        try:
            got = run(inputs)
        except (RunError, RuntimeError) as error:
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in inputs.items())
            reason = shortened(str(error), most=300)
            raise RunError(
                f"{named} cannot run it for a batch of {size}, {shapes}: {reason}. Nothing was written"
            ) from error
        for name, value in wanted.items():
            mine, theirs = got[name], value.numpy()
            if mine.shape != theirs.shape:
                raise RunError(
                    f"{named} gives {name} of shape {list(mine.shape)} for a batch of {size}, and the network "
                    f"{list(theirs.shape)}; nothing was written"
                )
            apart = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
            difference = float(np.nanmax(apart, initial=0.0))
            if not np.allclose(mine, theirs, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
                raise RunError(
                    f"{named} gives other numbers than the network: {name} differs by {difference:.2e} for a batch of "
                    f"{size}; expected {ABSOLUTE:g} + {RELATIVE:g} of the number at most. Nothing was written"
                    + _fast_path(network, inputs, name, mine)
                )
            largest = max(largest, difference)
    return largest


def largest_difference(network: NamedNetwork, run: Runner, examples: Sequence[Mapping[str, Tensor]]) -> float:
    """The largest difference of any number of the outputs from those of the network, however large it is."""
    largest = 0.0
    for inputs in examples:
        got = run(inputs)
        with torch.no_grad():
            wanted = {name: one.numpy().astype(np.float64) for name, one in network(**inputs).items()}
        for name, value in wanted.items():
            largest = max(largest, float(np.nanmax(np.abs(got[name].astype(np.float64) - value), initial=0.0)))
    return largest


def _fast_path(network: NamedNetwork, inputs: Mapping[str, Tensor], name: str, got: np.ndarray) -> str:
    """The reason where torch's own shortcut through an encoder, which no graph holds, makes the difference."""
    if not any(isinstance(module, nn.TransformerEncoderLayer) for module in network.modules()):
        return ""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            plain = network(**inputs)[name].numpy()
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
    if not np.allclose(got, plain, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
        return ""
    return (
        ". It is torch's fast path of nn.TransformerEncoder in evaluation, which gives 0 where src_key_padding_mask "
        "is true, as training does not: look at no masked place behind the encoder, or build it with "
        "enable_nested_tensor=False"
    )


def _onnx_runner(model: OnnxModel) -> Runner:
    return lambda inputs: model(arrays(inputs))


def _program_runner(source: Path | io.BytesIO) -> Runner:
    """A .pt2 file, or its bytes, read anew: what is written is what is checked."""
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with quiet():
        module = torch.export.load(source).module()

    def run(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            return arrays(module(**inputs))

    return run


def _latency(network: NamedNetwork, runner: Runner, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """Medians in ms of the file and of the network, each once warm."""

    def torchs() -> None:
        with torch.no_grad():
            network(**inputs)

    return _median(lambda: runner(inputs)), _median(torchs)


def _median(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    taken: list[float] = []
    ends = time.perf_counter() + SECONDS
    while len(taken) < TIMES and (time.perf_counter() < ends or not taken):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def _weights_file(run: RunFiles, path: Path, format: Format, *, weights: str | Path | None, averaged: bool) -> Export:
    """The weights alone, by the names that the network has them under, each tensor once in a safetensors file."""
    network = run.network(weights, averaged=averaged)
    if is_adapted(network):
        merge(network)
    state = {name: one.detach().contiguous() for name, one in network.state_dict().items()}
    notes: list[str] = []
    if format == "state_dict":
        content = io.BytesIO()
        torch.save(state, content)
        _write(path, content.getvalue())
    else:
        _write(path, _safetensors(state))
        held: dict[int, str] = {}
        for name, one in state.items():
            first = held.setdefault(one.data_ptr(), name)
            if first != name and one.numel():
                notes.append(f"{name} and {first} are one tensor, which is there twice")
    parameters = sum(one.numel() for one in network.parameters())
    return Export(path=path, bytes=path.stat().st_size, parameters=parameters, notes=notes)


def _write(path: Path, content: bytes) -> None:
    """Raises: RunError where there is no room, or no leave to write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"the network cannot be written to {unwritable(path, error)}") from error


def _safetensors(state: Mapping[str, Tensor]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise MissingExtraError(feature="format=safetensors", package="safetensors", extra="safetensors") from error
    # It refuses tensors that share their memory: a copy of each, so that whoever reads it finds every name.
    content: bytes = save({name: one.clone() for name, one in state.items()}, metadata={"format": "pt"})
    return content


def _output(run: RunFiles, format: Format, output: str | Path | None, *, weights: str | Path | None) -> Path:
    """Raises: ConfigError for a directory, a file of the run's own, another format's suffix, or where there is none to
    write to."""
    if output is None:
        if run.directory is None:
            got = f"nothing, and {run.checkpoint} lies outside of its run directory"
            raise ConfigError([_fault("output", got=got, expected="a file", cure=f"Write output={ENDINGS[format]}")])
        return run.directory / EXPORTS / ENDINGS[format]
    path = Path(output)
    if path.is_dir():
        cure = f"Write output={path / ENDINGS[format]}"
        raise ConfigError([_fault("output", got=f"{path}, a directory", expected="a file", cure=cure)])
    run.refuse_own_file(path, weights=weights)
    of_suffix = SUFFIXES.get(path.suffix.lower(), format)
    if of_suffix != format:
        got = f"{path}, whose suffix is that of format={of_suffix}, beside format={format}"
        right = path.with_suffix(Path(ENDINGS[format]).suffix)
        cure = f"Write output={right}, or format={of_suffix}"
        raise ConfigError([_fault("output", got=got, expected=f"a file in {right.suffix}", cure=cure)])
    return path


def _check_words(
    format: Format, *, preprocessing: bool, quantize: str | None, dynamic: Mapping[str, Mapping[int, str]] | None
) -> None:
    """Raises: ConfigError for words that do not go together."""
    has_graph = format in ("onnx", "torch_export")
    faults = []
    if quantize is not None and format != "onnx":
        faults.append(_fault("quantize", got=f"{quantize} with format={format}", expected="format=onnx"))
    for key, is_given in (("preprocessing", preprocessing), ("dynamic", bool(dynamic))):
        if is_given and not has_graph:
            got = f"beside format={format}, which holds weights alone"
            faults.append(_fault(key, got=got, expected="format=onnx or format=torch_export"))
    if faults:
        raise ConfigError(faults)


def _fault(key: str, *, got: str, expected: str, cure: str | None = None) -> Fault:
    return Fault(key=key, got=got, expected=expected, cure=cure, source="command line")
