"""The plan of a tensor-parallel run: how each layer is cut, by name patterns or by the names of exp's models.

column              Linear: each rank gives a part of the outputs, as a following row layer takes them
row                 Linear: each rank takes a part of the inputs; the output is whole
column_whole        a column layer whose output is put together again, such as a head over a vocabulary
vocabulary          Embedding: each rank has a part of the words; the output is whole
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from exp.errors import ConfigError, ErrorDetails, config_error, raise_errors
from exp.models.containers import ProgramModel
from exp.spelling import among, did_you_mean

AUTO = "auto"
# Of a plan `auto`: the names in conf/model/gpt.yaml and transformer.yaml, and what others call the same.
COLUMNS = ("query", "key", "value", "expand", "gate")
ROWS = ("project", "contract")
HEADS = "*heads"
# What these do to a number depends on that number alone, so that a part of the values is enough.
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
    """layers: name to word. constants: name of a container to its constants that count parts."""

    layers: Mapping[str, str]
    constants: Mapping[str, Sequence[str]]


def make_plan(
    network: nn.Module, plan: str | Mapping[str, str], *, divide: str | Sequence[str], vocabulary: bool
) -> Plan:
    """Return the plan for a network.

    plan, divide, vocabulary: the options of exp.strategies.tensor_parallel.TensorParallel.
    Raises: ConfigError with every error.
    """
    if isinstance(plan, str):
        layers = _automatic(network, plan, vocabulary=vocabulary)
    else:
        layers = _by_patterns(network, plan, vocabulary=vocabulary)
    if divide == AUTO:
        constants = _heads(network, layers) if isinstance(plan, str) else {}
    else:
        constants = _constants(network, [divide] if isinstance(divide, str) else divide)
    return Plan(layers=layers, constants=constants)


def division_errors(network: nn.Module, plan: Plan, *, ranks: int) -> list[ErrorDetails]:
    """Return an error if the ranks do not divide all sizes that are cut."""
    sizes: dict[str, int] = {}
    for name, word in plan.layers.items():
        layer = network.get_submodule(name)
        if isinstance(layer, nn.Linear) and word == "column":
            sizes[f"the outputs of {name}"] = layer.out_features
        if isinstance(layer, nn.Linear) and word == "row":
            sizes[f"the inputs of {name}"] = layer.in_features
    for name, constants in plan.constants.items():
        container = network.get_submodule(name)
        assert isinstance(container, ProgramModel)
        sizes |= {f"{name}.{constant}".lstrip("."): count_of(container, constant) for constant in constants}
    uneven = {what: size for what, size in sizes.items() if size % ranks}
    if not uneven:
        return []
    common = math.gcd(*sizes.values())
    good = [str(count) for count in range(1, common + 1) if common % count == 0]
    told = [f"{what} ({size})" for what, size in uneven.items()]
    return [
        ErrorDetails(
            key="launch.devices",
            got=f"{ranks} ranks for each layer, which do not divide {among(told, count=4)}",
            expected=f"a number that divides all that is cut: {among(good)}",
        )
    ]


def count_of(container: ProgramModel, constant: str) -> int:
    """The value of a constant that counts what is cut."""
    value = container.constants[constant]
    assert isinstance(value, int)
    return value


def tied_cuts(network: nn.Module, plan: Plan) -> list[ErrorDetails]:
    """Weights that are cut in one place and used in another."""
    names: dict[int, list[str]] = {}
    for path, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(path)
    return [
        ErrorDetails(
            key="strategy.plan",
            got=f"{' and '.join(tied)} are one weight",
            expected="a weight of one layer where it is cut",
        )
        for tied in names.values()
        if len(tied) > 1 and any(path.rpartition(".")[0] in plan.layers for path in tied)
    ]


def _automatic(network: nn.Module, plan: str, *, vocabulary: bool) -> dict[str, str]:
    if plan != AUTO:
        raise ConfigError([_error("strategy.plan", repr(plan), "auto, or a mapping of name patterns to words")])
    linears = [name for name, layer in network.named_modules() if type(layer) is nn.Linear]
    layers = {
        name: "column" if _last(name) in COLUMNS else "row" for name in linears if _last(name) in (*COLUMNS, *ROWS)
    }
    layers = layers or _pairs(network)
    if set(layers.values()) != {"column", "row"}:
        expected = (
            f"Linear layers called {', '.join(COLUMNS)} and {' or '.join(ROWS)}, or two in turn in a chain of layers; "
            f"there are {among(linears)}"
        )
        fix = "Write strategy.plan={NAME_OF_FIRST: column, NAME_OF_SECOND: row} with the names of two that follow"
        raise config_error("strategy.plan", got="auto", expected=expected, fix=fix)
    return layers | (_over_the_vocabulary(network, layers) if vocabulary else {})


def _pairs(network: nn.Module) -> dict[str, str]:
    """Return layers as columns and rows: in torch.nn.Sequential, and in models that call their layers in turn."""
    found: dict[str, str] = {}
    for path, module in network.named_modules():
        if isinstance(module, ProgramModel):
            chain = module.chain
        else:
            chain = [name for name, _ in module.named_children()] if type(module) is nn.Sequential else []
        found |= _pairs_of(network, [f"{path}.{name}".lstrip(".") for name in chain])
    return found


def _pairs_of(network: nn.Module, chain: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    first: str | None = None
    for name in chain:
        layer = network.get_submodule(name)
        if type(layer) is nn.Linear:
            if first is None:
                first = name
            else:
                found |= {first: "column", name: "row"}
                first = None
        elif type(layer).__name__ not in ELEMENTWISE or not type(layer).__module__.startswith("torch.nn."):
            first = None
    return found


def _over_the_vocabulary(network: nn.Module, layers: Mapping[str, str]) -> dict[str, str]:
    found = {name: "vocabulary" for name, layer in network.named_modules() if isinstance(layer, nn.Embedding)}
    heads = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear) and _last(name) == "head"]
    if not found and not heads:
        expected = "an Embedding, or a Linear called head"
        raise ConfigError([_error("strategy.vocabulary", "true, and the network has neither", expected)])
    return found | {name: "column_whole" for name in heads if name not in layers}


def _by_patterns(network: nn.Module, plan: Mapping[str, str], *, vocabulary: bool) -> dict[str, str]:
    errors = []
    if vocabulary:
        expected = "the words vocabulary and column_whole in the plan"
        errors.append(_error("strategy.vocabulary", "true with a plan of patterns", expected))
    if not plan:
        errors.append(_error("strategy.plan", "no pattern", "auto, or a mapping of name patterns to words"))
    modules = {name: module for name, module in network.named_modules() if name}
    layers: dict[str, str] = {}
    for pattern, word in plan.items():
        key = f"strategy.plan.{pattern}"
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if word not in TAKES:
            expected = f"one of {', '.join(TAKES)}"
            errors.append(ErrorDetails(key=key, got=repr(word), expected=expected, fix=did_you_mean(word, TAKES)))
        elif not matched:
            expected = f"a pattern of names of layers: {among(modules, word=pattern)}"
            fix = did_you_mean(pattern, modules)
            errors.append(ErrorDetails(key=key, got="a pattern that matches nothing", expected=expected, fix=fix))
        else:
            errors += [error for name in matched for error in _kind_errors(key, name, modules[name], word)]
            layers |= dict.fromkeys(matched, word)
    raise_errors(errors)
    return layers


def _kind_errors(key: str, name: str, layer: nn.Module, word: str) -> Iterator[ErrorDetails]:
    # Not a subclass, whose forward may be another one.
    if type(layer) is not TAKES[word]:
        got = f"{word} for {name}, a {type(layer).__name__}"
        yield _error(key, got, f"a {TAKES[word].__name__} of torch.nn")
    elif isinstance(layer, nn.Embedding) and (
        layer.padding_idx is not None or layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq
    ):
        got = f"{word} for {name}, which has padding_idx, max_norm, sparse or scale_grad_by_freq"
        yield _error(key, got, "an Embedding without them")


def _heads(network: nn.Module, layers: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the constants that count heads, of the containers that hold layers in columns."""
    found = {}
    columns = [name for name, word in layers.items() if word == "column"]
    for path, module in network.named_modules():
        held = [name for name in columns if name.rpartition(".")[0] == path]
        if isinstance(module, ProgramModel) and held:
            found[path] = [constant for constant in module.constants if fnmatchcase(constant, HEADS)]
    return found


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
        matched = [known[name] for name in known if fnmatchcase(name, pattern)]
        if not matched:
            expected = f"a pattern of whole-number constants of containers: {among(known, word=pattern)}"
            errors.append(
                ErrorDetails(
                    key="strategy.divide", got=repr(pattern), expected=expected, fix=did_you_mean(pattern, known)
                )
            )
        for path, constant in matched:
            if constant not in found.setdefault(path, []):
                found[path].append(constant)
    raise_errors(errors)
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _error(key: str, got: str, expected: str) -> ErrorDetails:
    return ErrorDetails(key=key, got=got, expected=expected)
