"""Tests of every layer in torch's module_db as a node of a config, for test_against_torch.py.

Each case of module_db becomes a node in `model.layers` in up to three forms: with positional arguments, with named
arguments, and without the input size if exp infers it. The node is checked and built as in a run. A forward program
calls the layer. Initial weights, outputs, gradients and buffers must equal those of the class in Python bit for bit.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exp.check.parameters import target_errors
from exp.construct import construct
from exp.errors import ConfigError
from exp.models.inference import LAZY_CLASSES
from exp.models.syntax import ProgramError

HERE = Path(__file__).parent
CONTAINER = "exp.models.containers.ModuleDictModel"


def load(name: str) -> Any:
    """Return the module of a file next to this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


operators = load("operators")


def plain(value: Any) -> Any:
    """Return a value for a YAML file, or raise operators.NotText if YAML cannot express it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    raise operators.NotText(f"a {type(value).__name__} as an argument")


def as_config_has_them(value: Any) -> Any:
    """Return a value with its floating-point tensors in float32, the dtype of a config's numbers as tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: as_config_has_them(one) for name, one in value.items()}
    return type(value)(map(as_config_has_them, value)) if isinstance(value, list | tuple) else value


def nodes(kind: type[nn.Module], call: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each form of a layer in a config: name for the table, and node."""
    target = {"_target_": f"torch.nn.{kind.__name__}"}
    args, named = plain(call.args), {name: plain(value) for name, value in call.kwargs.items()}
    yield "by position", {**target, **({"_args_": args} if args else {}), **named}
    names = [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]
    if len(args) > len(names):
        return
    by_name = {**target, **dict(zip(names, args, strict=False)), **named}
    if args:
        yield "by name", by_name
    if kind in LAZY_CLASSES and LAZY_CLASSES[kind][1] in by_name:
        yield "size left out", {name: value for name, value in by_name.items() if name != LAZY_CLASSES[kind][1]}


def drive(module: Any, rows: dict[tuple[str, str], Any], *, most: int) -> None:
    """Compare all cases of a layer in training and in evaluation, and add the results to `rows`."""
    for training in (True, False):
        for given, called in module.cases(training=training)[:most]:
            built = type(given)(args=as_config_has_them(given.args), kwargs=as_config_has_them(given.kwargs))
            name = f"torch.nn.{module.kind.__name__}"
            try:
                ways = list(nodes(module.kind, built))
            except operators.NotText as error:
                row = rows.setdefault((name, "by position"), operators.Row(name=name, form="by position"))
                row.unwritten[str(error)] += 1
                continue
            for form, node in ways:
                row = rows.setdefault((name, form), operators.Row(name=name, form=form))
                try:
                    _try(row, module.kind, node, built, called, training=training)
                except operators.NotText as error:
                    row.unwritten[str(error)] += 1


def _try(row: Any, kind: type[nn.Module], node: dict[str, Any], built: Any, called: Any, *, training: bool) -> None:
    writer = operators.Writer()
    text = f"return module({writer.call(called.args, called.kwargs)})"
    inputs = [f"a{index}" for index in range(len(writer.tensors))]
    config = {"_target_": CONTAINER, "layers": {"module": node}, "forward": text, "inputs": inputs}
    by_hand = _seeded(lambda: kind(*built.args, **built.kwargs).double().train(training))
    errors = target_errors({"model": config}, allow=())
    if errors:
        said = [f"{one.key.removeprefix('model.layers.module.')}: {one.got}, not {one.expected}" for one in errors]
        row.refused["; ".join(said)] += 1
        return
    try:
        network = _seeded(lambda: construct(config, key="model", allow=()).double().train(training))
    except (ConfigError, ProgramError) as error:
        errors = error.errors if isinstance(error, ConfigError) else []
        row.refused["; ".join(one.got for one in errors) or str(error)] += 1
        return
    except Exception as error:
        row.wrong.append(f"{node}: {error!r}")
        return
    if row.form == "size left out" and not isinstance(by_hand, Exception) and not isinstance(network, Exception):
        _sized(network, by_hand, writer.tensors)
    if isinstance(by_hand, Exception):
        row.by_torch[f"{type(by_hand).__name__}: {str(by_hand).splitlines()[0]}"] += 1
        return
    _compare(row, node, network, by_hand, called, writer.tensors)


def _seeded(make: Any) -> Any:
    torch.manual_seed(0)
    try:
        return make()
    except (ConfigError, ProgramError):
        raise
    except Exception as error:
        return error


def _sized(network: nn.Module, by_hand: nn.Module, given: Sequence[torch.Tensor]) -> None:
    """Infer the size of a layer with one forward, and load the weights of the layer built by hand."""
    training = network.training
    try:
        with torch.no_grad():
            network.eval()(*given)
        network.module.load_state_dict(by_hand.state_dict())
    except RuntimeError as error:
        # Only InstanceNorm fails, because torch's lazy class reads axis 1 even if there is no batch axis.
        raise operators.NotText("an input without a batch axis, which data never give") from error
    network.train(training)


def _compare(row: Any, node: Any, network: Any, by_hand: Any, called: Any, given: Sequence[torch.Tensor]) -> None:
    is_lazy = any(map(nn.parameter.is_lazy, (*by_hand.parameters(), *by_hand.buffers())))
    if not is_lazy and not _same_tables(network.module, by_hand):
        row.wrong.append(f"{node}: other initial weights")
        return
    hand = operators.by_hand(by_hand, called, given)
    found, expected = (
        operators.run(call, given, learners) for call, learners in ((network, network.module), (hand, by_hand))
    )
    if isinstance(expected, Exception) and type(found) is type(expected):
        row.by_torch[f"{type(expected).__name__}: {str(expected).splitlines()[0]}"] += 1
    elif isinstance(found, Exception) or isinstance(expected, Exception):
        row.wrong.append(f"{node}: {found!r}, by hand {expected!r}")
    elif not operators.same(found[0], expected[0]):
        row.wrong.append(f"{node}: another output")
    elif not operators.same(found[1], expected[1]):
        row.wrong.append(f"{node}: another gradient")
    elif not _same_tables(network.module, by_hand):
        row.wrong.append(f"{node}: other buffers")
    else:
        row.equal += 1
        row.backward += bool(found[1])


def _same_tables(one: nn.Module, other: nn.Module) -> bool:
    mine, others = one.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(operators.same(mine[name], others[name]) for name in mine)


def seen(*, most: int, only: Sequence[str] = ()) -> list[Any]:
    """Return the results for all layers of module_db, or for the layers in `only`."""
    rows: dict[tuple[str, str], Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in operators.load("torch_databases").modules():
            if not only or module.kind.__name__ in only:
                drive(module, rows, most=most)
    return list(rows.values())
