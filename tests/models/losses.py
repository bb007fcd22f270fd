"""Tests of every loss in torch's module_db as an objective, for test_against_torch.py.

Each case of module_db becomes a node in `objective`: as a term with a named value for each parameter, and as the loss
alone if its parameters are output and target. The node is checked and built as in a run. Value and gradients must equal
those of the loss in Python.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exp.check.parameters import target_errors
from exp.check.shapes import term_errors
from exp.construct import construct
from exp.errors import ConfigError, RunError
from exp.objectives.objective import Objective
from exp.shared_types import DataSpec

HERE = Path(__file__).parent
TERM = "exp.objectives.objective.Term"
SPEC = DataSpec(input_shape=(1,), input_dtype="float64", num_classes=None, num_outputs=1)
# exp computes a mean loss as a sum divided by the number of targets, which changes the order of summation.
CLOSE = 1e-13


def load(name: str) -> Any:
    """Return the module of a file next to this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layers = load("layers")
operators = layers.operators


def nodes(kind: type[nn.Module], built: Any, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield each form of a loss in a config: name for the table, node, and names of its values."""
    args = layers.plain(built.args)
    named = {name: layers.plain(value) for name, value in built.kwargs.items() if name not in ("device", "dtype")}
    loss = {"_target_": f"torch.nn.{kind.__name__}", **({"_args_": args} if args else {}), **named}
    if len(names) == 2:
        yield "by position", loss, ["output", "target"]
    values = [f"value_{name}" for name in names]
    yield "by name", {"_target_": TERM, "loss": loss, "inputs": dict(zip(names, values, strict=True))}, values


def drive(module: Any, rows: dict[tuple[str, str], Any], *, most: int) -> None:
    """Compare all cases of a loss, and add the results to `rows`."""
    name = f"torch.nn.{module.kind.__name__}"
    for case, called in module.cases(training=True)[:most]:
        given = type(case)(args=layers.as_config_has_them(case.args), kwargs=layers.as_config_has_them(case.kwargs))
        parameters = [one for one in inspect.signature(module.kind.forward).parameters if one != "self"]
        # Lengths in a batch are a tensor.
        values = [one if isinstance(one, torch.Tensor) else torch.tensor(one) for one in called.args]
        try:
            ways = list(nodes(module.kind, given, parameters[: len(values)]))
        except operators.NotText as error:
            row = rows.setdefault((name, "by name"), operators.Row(name=name, form="by name"))
            row.unwritten[str(error)] += 1
            continue
        for form, node, names in ways:
            row = rows.setdefault((name, form), operators.Row(name=name, form=form))
            _try(row, module.kind, node, given, dict(zip(names, values, strict=True)))


def _try(row: Any, kind: type[nn.Module], node: dict[str, Any], given: Any, values: Mapping[str, torch.Tensor]) -> None:
    try:
        objective = _objective(node)
    except ConfigError as error:
        said = [one.got.replace(kind.__name__, "the loss") for one in error.errors]
        row.refused["; ".join(re.sub(r" \(.*?\),", "", one) for one in said)] += 1
        return
    found = operators.run(lambda *fresh: objective(dict(zip(values, fresh, strict=True)))[0], list(values.values()))
    if isinstance(found, RunError):
        row.refused[str(found)] += 1
        return
    wanted = operators.run(kind(*given.args, **given.kwargs).double(), list(values.values()))
    if isinstance(found, Exception) or isinstance(wanted, Exception):
        if type(found) is type(wanted):
            row.by_torch[f"{type(wanted).__name__}: {str(wanted).splitlines()[0]}"] += 1
        else:
            row.wrong.append(f"{node}: {found!r}, by hand {wanted!r}")
        return
    if wanted[0].isnan() and found[0] == 0:
        row.by_torch["nan where no target counts, for which exp has 0"] += 1
    elif not _close([found[0]], [wanted[0]]):
        row.wrong.append(f"{node}: {found[0]}, by hand {wanted[0]}")
    elif not _close(found[1], wanted[1]):
        row.wrong.append(f"{node}: another gradient")
    else:
        row.equal += 1
        row.backward += bool(found[1])


def _objective(node: dict[str, Any]) -> Objective:
    """Check and build an objective, or raise ConfigError."""
    if errors := list(target_errors({"objective": {"it": node}}, allow=())):
        raise ConfigError(errors)
    objective = Objective({"it": construct(node, key="objective.it", allow=())}).double()
    if errors := list(term_errors(objective, nn.Identity(), SPEC)):
        raise ConfigError(errors)
    return objective


def _close(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(
        (one is None) == (other is None)
        and (one is None or bool(torch.allclose(one, other, rtol=CLOSE, atol=CLOSE, equal_nan=True)))
        for one, other in zip(found, wanted, strict=True)
    )


def seen(*, most: int, only: Sequence[str] = ()) -> list[Any]:
    """Return the results for all losses of module_db, or for the losses in `only`."""
    rows: dict[tuple[str, str], Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in operators.load("torch_databases").modules():
            if module.kind.__name__.endswith("Loss") and (not only or module.kind.__name__ in only):
                drive(module, rows, most=most)
    return list(rows.values())
