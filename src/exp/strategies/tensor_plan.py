"""Plan of a tensor-parallel run: a word for each layer that states how the layer is split.

column              Linear: each rank computes a part of the outputs, which is the input of a row layer
row                 Linear: each rank takes a part of the inputs; the output is whole
column_whole        like column, but the ranks gather the whole output, such as a head over a vocabulary
vocabulary          Embedding: each rank has a part of the vocabulary; the output is whole

The words are set by name patterns, or by the layer names of exp's models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from exp.errors import ConfigError, ErrorDetails, invalid_value, not_supported_with, raise_errors, unknown_word
from exp.models.containers import ProgramModel
from exp.spelling import among, did_you_mean
from exp.strategies.strategy import shared_names

AUTO = "auto"
PLAN = "strategy.plan"
# Layer names for `auto`, as in conf/model/gpt.yaml and transformer.yaml. Other models with the same names also match.
COLUMNS = ("query", "key", "value", "expand", "gate")
ROWS = ("project", "contract")
HEADS = "*heads"
# Elementwise layers. Each output element depends on one input element, so a rank can apply them to its part of a
# tensor.
ELEMENTWISE = (
    "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip

TAKES: dict[str, type[nn.Module]] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "column_whole": nn.Linear,
    "vocabulary": nn.Embedding,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Split of a network's layers.

    Attributes:
        layers: Word of each split layer, by layer name. The words are the keys of TAKES.
        constants: Names of integer constants that are divided by the number of ranks, by the path of their container.
            An example is the number of attention heads.
    """

    layers: Mapping[str, str]
    constants: Mapping[str, Sequence[str]]

    def counts(self, network: nn.Module) -> dict[str, int]:
        """Return the values of `constants` in a network, by dotted name."""
        found = {}
        for path, names in self.constants.items():
            container = network.get_submodule(path)
            assert isinstance(container, ProgramModel)
            for name in names:
                value = container.constants[name]
                assert isinstance(value, int)
                found[f"{path}.{name}".lstrip(".")] = value
        return found


def make_plan(network: nn.Module, plan: str | Mapping[str, str], *, divide: str | Sequence[str]) -> Plan:
    """Return the plan for a network.

    Args:
        network: The network.
        plan: Option `plan` of exp.strategies.tensor_parallel.TensorParallel.
        divide: Option `divide` of TensorParallel.

    Raises:
        ConfigError: The options do not match the network. The exception has all errors.
    """
    layers = _automatic(network, plan) if isinstance(plan, str) else _from_patterns(network, plan)
    if divide == AUTO:
        constants = _heads(network, layers) if isinstance(plan, str) else {}
    else:
        constants = _constants(network, [divide] if isinstance(divide, str) else divide)
    return Plan(layers=layers, constants=constants)


def division_errors(network: nn.Module, plan: Plan, *, ranks: int) -> list[ErrorDetails]:
    """Return an error if the number of ranks does not divide a size that is split. Otherwise return an empty list."""
    sizes = {}
    for name, word in plan.layers.items():
        layer = network.get_submodule(name)
        if isinstance(layer, nn.Linear) and word in ("column", "row"):
            what, size = ("outputs", layer.out_features) if word == "column" else ("inputs", layer.in_features)
            sizes[f"the {what} of {name}"] = size
    sizes |= plan.counts(network)
    uneven = [f"{what} ({size})" for what, size in sizes.items() if size % ranks]
    if not uneven:
        return []
    common = math.gcd(*sizes.values())
    good = [str(count) for count in range(1, common + 1) if common % count == 0]
    other = f"sizes that cannot be divided evenly: {among(uneven, count=4)}"
    expected = f"a number of ranks that divides all sizes: {among(good)}"
    return [not_supported_with("launch.devices", f"{ranks} ranks", other, expected)]


def tied_errors(network: nn.Module, plan: Plan) -> list[ErrorDetails]:
    """Return an error for each weight that is split in one layer and also used in another layer."""
    return [
        not_supported_with(PLAN, "a split layer", f"a shared weight, {' and '.join(names)}", "unshared weights")
        for names in shared_names(network)
        if any(path.rpartition(".")[0] in plan.layers for path in names)
    ]


def _automatic(network: nn.Module, plan: str) -> dict[str, str]:
    if plan != AUTO:
        raise ConfigError([invalid_value(PLAN, plan, "auto, or a mapping of layer names to words such as column")])
    linears = [name for name, layer in network.named_modules() if type(layer) is nn.Linear]
    words = dict.fromkeys(COLUMNS, "column") | dict.fromkeys(ROWS, "row")
    layers = {name: words[_last(name)] for name in linears if _last(name) in words} or _pairs(network)
    if set(layers.values()) != {"column", "row"}:
        expected = (
            f"Linear layers called {', '.join(COLUMNS)} and {' or '.join(ROWS)}, or two Linear layers in sequence; "
            f"the network has the Linear layers {among(linears)}"
        )
        fix = "Write strategy.plan={NAME_OF_FIRST: column, NAME_OF_SECOND: row} with two consecutive layers"
        raise ConfigError([invalid_value(PLAN, plan, expected, fix)])
    return layers


def _pairs(network: nn.Module) -> dict[str, str]:
    """Return the words `column` and `row` for pairs of consecutive Linear layers, by layer name.

    The layers of a pair are in an nn.Sequential, or in a container that calls its layers in order.
    """
    found: dict[str, str] = {}
    for path, module in network.named_modules():
        if isinstance(module, ProgramModel):
            chain = list(module.chain)
        else:
            chain = [name for name, _ in module.named_children()] if type(module) is nn.Sequential else []
        first: str | None = None
        for name in (f"{path}.{one}".lstrip(".") for one in chain):
            layer = network.get_submodule(name)
            if type(layer) is nn.Linear and first is not None:
                found |= {first: "column", name: "row"}
                first = None
            elif type(layer) is nn.Linear:
                first = name
            elif type(layer).__name__ not in ELEMENTWISE or not type(layer).__module__.startswith("torch.nn."):
                first = None
    return found


def _from_patterns(network: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    errors = []
    if not plan:
        errors.append(invalid_value(PLAN, {}, f"auto, or a mapping of layer name patterns to {', '.join(TAKES)}"))
    modules = {name: module for name, module in network.named_modules() if name}
    layers: dict[str, str] = {}
    for pattern, word in plan.items():
        key = f"{PLAN}.{pattern}"
        matches = [name for name in modules if fnmatchcase(name, pattern)]
        if word not in TAKES:
            errors.append(unknown_word(key, word, TAKES))
        elif not matches:
            expected = f"a pattern of layer names: {among(modules, word=pattern)}"
            fix = did_you_mean(pattern, modules)
            errors.append(invalid_value(key, pattern, expected, fix, because="which matches no layer"))
        else:
            errors += [error for name in matches for error in _layer_errors(key, name, modules[name], word)]
            layers |= dict.fromkeys(matches, word)
    raise_errors(errors)
    return layers


def _layer_errors(key: str, name: str, layer: nn.Module, word: str) -> Iterator[ErrorDetails]:
    # Subclasses are rejected, because they may have another forward.
    if type(layer) is not TAKES[word]:
        yield invalid_value(
            key, word, f"a torch.nn.{TAKES[word].__name__}", because=f"and {name} is a {type(layer).__name__}"
        )
    elif isinstance(layer, nn.Embedding) and (
        layer.padding_idx is not None or layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq
    ):
        other = f"{name}, which has padding_idx, max_norm, sparse or scale_grad_by_freq"
        yield not_supported_with(key, word, other, "an Embedding without these options")


def _heads(network: nn.Module, layers: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the constants with names that end with `heads`, by path of their container.

    Only containers that contain a column layer are searched.
    """
    holders = {name.rpartition(".")[0] for name, word in layers.items() if word == "column"}
    return {
        path: [constant for constant in module.constants if fnmatchcase(constant, HEADS)]
        for path, module in network.named_modules()
        if isinstance(module, ProgramModel) and path in holders
    }


def _constants(network: nn.Module, patterns: Sequence[str]) -> dict[str, list[str]]:
    known = {
        f"{path}.{constant}".lstrip("."): (path, constant)
        for path, module in network.named_modules()
        if isinstance(module, ProgramModel)
        for constant, value in module.constants.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    errors = []
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        matches = [known[name] for name in known if fnmatchcase(name, pattern)]
        if not matches:
            expected = f"a pattern of the names of integer constants: {among(known, word=pattern)}"
            errors.append(invalid_value("strategy.divide", pattern, expected, did_you_mean(pattern, known)))
        for path, constant in matches:
            if constant not in found.setdefault(path, []):
                found[path].append(constant)
    raise_errors(errors)
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]
