"""Take the network of a saved run as a function of named tensors: what every exported form of it is made from.

The same whatever the run's network is: its inputs by the names that the data declares, its outputs by theirs, in one
dtype, with LoRA's part in the weights, and with nothing drawn at random inside.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from exp.check.plan import Resolved
from exp.errors import RunError
from exp.extras.export.preprocessing import Preparation, Standardisation
from exp.models.inference import network_call
from exp.models.layers import Noise
from exp.models.lora import is_adapted, merge
from exp.nested import named_parts
from exp.saved_runs.run_files import RunFiles
from exp.shared_types import DataSpec, TensorSpec, dtype_name

OUTPUT = "output"
# What runs and files have as numbers; complex ones are none of an ONNX file's inputs.
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class NamedNetwork(nn.Module):
    """A network whose forward takes tensors by name, `[B, ...]`, and returns a dict of tensors by name.

    An output that is one tensor is `output`; the parts of another have the names of nested.named_parts, and those of a
    part in it `part.inner`. What is no tensor is left out.

    network: in evaluation mode. declared: the names of the data's inputs. inputs: of the forward, with what each is.
    noise: inputs that take the place of Noise layers, by the path of the layer.
    preparations: what is done to raw inputs, by name. is_double: whether it computes in float64, else in float32.
    is_one_tensor, left_out: attributes, whether the network returned one tensor when it was called last, and what of
        its output was none.
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        declared: Sequence[str],
        inputs: Mapping[str, TensorSpec],
        noise: Mapping[str, str],
        preparations: Mapping[str, Standardisation],
        is_double: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.inputs, self.noise = dict(inputs), dict(noise)
        self.preparations = nn.ModuleDict({_module_name(name): one for name, one in preparations.items()})
        self._refused = [name for name, one in preparations.items() if one.fills is None]
        self.is_double = is_double
        self._dtype = torch.float64 if is_double else torch.float32
        self._call = network_call(network, tuple(declared))
        self.left_out: tuple[str, ...] = ()
        self.is_one_tensor = True
        by_name = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]
        signature = inspect.Signature(by_name)

        def forward(*given: Tensor, **named: Tensor) -> dict[str, Tensor]:
            return self._run(signature.bind(*given, **named).arguments)

        vars(forward)["__signature__"] = signature
        # On the instance, so that torch.export finds the inputs' names.
        self.__dict__["forward"] = forward

    def _run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for path, name in self.noise.items():
            layer = self.network.get_submodule(path)
            assert isinstance(layer, GivenNoise)
            layer.held[path] = given[name]
        prepared = {name: self._prepared(name, value) for name, value in given.items() if name not in self._drawn}
        output = self._call(self.network, prepared)
        self.is_one_tensor = isinstance(output, Tensor)
        left_out: list[str] = []
        found = {OUTPUT: output} if isinstance(output, Tensor) else _tensors(named_parts(output), (), left_out)
        self.left_out = tuple(left_out)
        if not found:
            raise RunError(f"{type(self.network).__name__} returns a {type(output).__name__} without a tensor in it")
        for name in self._refused:
            # A network may lose nan, as max(x, 0) does, and answer with a number.
            missing = given[name].isnan().flatten(1).any(1)
            found = {part: _without_answer(one, missing) for part, one in found.items()}
        return found

    @property
    def _drawn(self) -> set[str]:
        return set(self.noise.values())

    def _prepared(self, name: str, value: Tensor) -> Tensor:
        own = _module_name(name)
        made: Tensor = self.preparations[own](value) if own in self.preparations else value
        return made.to(self._dtype) if made.is_floating_point() else made


class GivenNoise(nn.Module):
    """Stands for the Noise layer at `path`, whose numbers are an input of the network.

    held: the numbers, `[B, *shape]`, by that path; in a dict, for torch.export takes a tensor that is an attribute for
        a state that changes.
    """

    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.path = path
        self.held: dict[str, Tensor] = {}

    def forward(self, like: Tensor) -> Tensor:
        """The numbers that were given. like: the batch, of which a Noise layer takes the size."""
        return self.held[self.path]


def named_network(
    run: RunFiles,
    *,
    weights: str | Path | None = None,
    averaged: bool = True,
    preparations: Mapping[str, Preparation] | None = None,
    keeps_doubles: bool = True,
) -> NamedNetwork:
    """The network of a run, in evaluation mode, as a function of named tensors.

    In float32, whatever it was trained in, but for a run in fp64.

    weights, averaged: as of RunFiles.network. preparations: by input, so that raw numbers go in. keeps_doubles: whether
        a run in fp64 stays so.
    Raises: RunError where the network takes no input that the data declares, or one that no file can hold.
    """
    spec = data_spec(run)
    is_double = keeps_doubles and run.resolved.plain["precision"]["word"] == "fp64"
    network = plain_network(run, weights=weights, averaged=averaged, is_double=is_double)
    declared = tuple(spec.inputs)
    taken: list[str] = network_call(network, declared)(
        lambda *given, **named: [*given, *named.values()], dict(zip(declared, declared, strict=True))
    )
    inputs = {name: spec.inputs[name] for name in taken}
    for name, preparation in (preparations or {}).items():
        if name in inputs:
            inputs[name] = TensorSpec(shape=inputs[name].shape, dtype=dtype_name(preparation.raw_dtype))
    noise = _lift_noise(network, taken=set(inputs))
    for name, shape in noise.values():
        inputs[name] = TensorSpec(shape=shape, dtype="float64" if is_double else "float32")
    for name, one in inputs.items():
        if one.dtype not in DTYPES:
            raise RunError(f"the input {name} is {one.dtype}; expected one of {', '.join(DTYPES)}, to export it")
    return NamedNetwork(
        network=network,
        declared=declared,
        inputs=inputs,
        noise={path: name for path, (name, _) in noise.items()},
        preparations={name: one.module() for name, one in (preparations or {}).items() if name in inputs},
        is_double=is_double,
    ).eval()


def plain_network(
    run: RunFiles, *, weights: str | Path | None = None, averaged: bool = True, is_double: bool = False
) -> nn.Module:
    """The network of a run as if it had been trained in fp32: no casts between its layers, and LoRA's part merged.

    is_double: as if in fp64, so that no number is rounded on its way.

    Raises: RunError as RunFiles.network does.
    """
    plain = run.resolved.plain
    precision = {**plain["precision"], "word": "fp64" if is_double else "fp32", "keep": {}}
    resolved = Resolved(config=run.config, plain={**plain, "precision": precision})
    network = dataclasses.replace(run, resolved=resolved).network(weights, averaged=averaged)
    if is_adapted(network):
        merge(network)
    return network.requires_grad_(False)


def data_spec(run: RunFiles) -> DataSpec:
    """What the run's data declares. Raises: RunError for a module that brings loaders of its own."""
    plain = run.resolved.plain["data"]
    if not isinstance(plain, Mapping) or "num_outputs" not in plain:
        raise RunError("the run's data is of a LightningDataModule, which declares no inputs; expected exp's own data")
    return DataSpec.of(plain)


def _lift_noise(network: nn.Module, *, taken: set[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Put inputs in the place of Noise layers. Returns: by the layer's path, the input's name and shape."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, module in list(network.named_modules()):
        if isinstance(module, Noise):
            name = path.replace(".", "_")
            while name in taken:
                name += "_"
            taken.add(name)
            found[path] = name, module.shape
            network.set_submodule(path, GivenNoise(path=path))
    return found


def _tensors(parts: Mapping[str, object], above: tuple[str, ...], left_out: list[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        path = (*above, name)
        inner = named_parts(part)
        if isinstance(part, Tensor):
            found[".".join(path)] = part
        elif inner:
            found |= _tensors(inner, path, left_out)
        else:
            left_out.append(".".join(path))
    return found


def _without_answer(output: Tensor, missing: Tensor) -> Tensor:
    """Return an output `[B, ...]` with nan for the samples that lack a number. missing: `[B]`."""
    if not output.is_floating_point() or not output.dim() or output.shape[0] != missing.shape[0]:
        return output
    return torch.where(missing.reshape(-1, *[1] * (output.dim() - 1)), torch.nan, output)


def _module_name(name: str) -> str:
    """A name that nn.ModuleDict takes, which `a.b` or `type` is not."""
    return f"of_{name.replace('.', '_')}"
