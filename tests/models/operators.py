"""Tests of every operator in torch's op_db in forward programs, for test_against_torch.py.

Each operator is called as a function, and as a method if Tensor has it. Forward and backward must equal torch's bit for
bit, and the inputs must not change. Operators that are not supported must be refused by the check of the program.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from exp.models.containers import ModuleDictModel
from exp.models.syntax import ProgramError

HERE = Path(__file__).parent


def load(name: str) -> Any:
    """Return the module of a file next to this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NotText(Exception):
    """Exception for an argument that cannot be written in a program."""


@dataclass(kw_only=True)
class Row:
    """Results of one spelling of an operator."""

    name: str
    form: str
    equal: int = 0
    backward: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unwritten: Counter[str] = field(default_factory=Counter)
    by_torch: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Writer:
    """Writer of arguments as text, in which tensors become inputs of the network."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            known = [id(one) for one in self.tensors]
            if id(value) not in known:
                self.tensors.append(value)
                known.append(id(value))
            return f"a{known.index(id(value))}"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, tuple):
            return "(" + "".join(f"{self.text(one)}, " for one in value) + ")"
        if isinstance(value, torch.dtype | torch.memory_format):
            return str(value)
        if isinstance(value, torch.device):
            return repr(str(value))
        if isinstance(value, bool | int | str) or value is None or value is ...:
            return "..." if value is ... else repr(value)
        if isinstance(value, float):
            if math.isfinite(value):
                return repr(value)
            return "math.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}math.inf"
        raise NotText(f"a {type(value).__name__} as an argument")

    def index(self, value: Any) -> str:
        if isinstance(value, tuple):
            return "".join(f"{self.index(one)}, " for one in value) or "()"
        if isinstance(value, slice):
            return ":".join("" if one is None else self.text(one) for one in (value.start, value.stop, value.step))
        return self.text(value)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{name}={self.text(value)}" for name, value in kwargs.items())])


def spellings(operator: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield name, form and function of each spelling of an operator."""
    for name in dict.fromkeys(operator.names):
        function = _found(torch, name)
        method = None if "." in name else getattr(torch.Tensor, name, None)
        if callable(function):
            yield f"torch.{name.removeprefix('torch.')}", "function", function
        if name == "__getitem__":
            yield "x[...]", "index", method
        elif callable(method):
            yield f".{name}", "method", method
        elif method is not None:
            yield f".{name}", "attribute", functools.partial(_attribute, name)
        elif function is None:
            yield f"torch.{name}", "function", None


def _found(owner: Any, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), owner)
    except AttributeError:
        return None


def _attribute(name: str, owner: torch.Tensor) -> Any:
    return getattr(owner, name)


def drive(operator: Any, *, most: int) -> Iterator[Row]:
    """Yield the results of each spelling of an operator."""
    samples = operator.samples(most)
    for name, form, function in spellings(operator):
        row = Row(name=name, form=form)
        for sample in samples:
            try:
                _try(row, function, operator.as_function(sample) if form == "function" else sample)
            except NotText as error:
                row.unwritten[str(error)] += 1
        yield row


def _text(row: Row, sample: Any, writer: Writer) -> str:
    if row.form == "function":
        return f"return {row.name}({writer.call(sample.args, sample.kwargs)})"
    if not isinstance(sample.args[0], torch.Tensor):
        raise NotText("a method of something that is no tensor")
    owner = writer.text(sample.args[0])
    if row.form == "attribute":
        return f"return {owner}{row.name}"
    if row.form == "index":
        return f"return {owner}[{writer.index(sample.args[1])}]"
    return f"return {owner}{row.name}({writer.call(sample.args[1:], sample.kwargs)})"


def _try(row: Row, function: Any, sample: Any) -> None:
    writer = Writer()
    text = _text(row, sample, writer)
    names = [f"a{index}" for index in range(len(writer.tensors))] or ["x"]
    try:
        network = ModuleDictModel(layers={}, forward=text, inputs=names)
    except ProgramError as error:
        row.refused[f"{error.message}; expected {error.expected}"] += 1
        return
    given = writer.tensors or [torch.zeros(1)]
    found, expected = (run(call, given) for call in (network, by_hand(function, sample, given)))
    if isinstance(expected, Exception) and type(found) is type(expected):
        row.by_torch[f"{type(expected).__name__}: {str(expected).splitlines()[0]}"] += 1
        return
    if isinstance(found, Exception) or isinstance(expected, Exception):
        row.wrong.append(f"{text}: {found!r}, by hand {expected!r}")
        return
    (outputs, gradients, changed), (wanted, wanted_gradients, _) = found, expected
    if changed:
        row.wrong.append(f"{text}: writes into an input")
    elif not same(found[:2], expected[:2]) and _wavers(by_hand(function, sample, given), given):
        row.by_torch["other bits from call to call by hand"] += 1
    elif not same(outputs, wanted):
        row.wrong.append(f"{text}: another output")
    elif not same(gradients, wanted_gradients):
        row.wrong.append(f"{text}: another gradient")
    else:
        row.equal += 1
        row.backward += bool(gradients)


def _wavers(call: Any, given: Sequence[torch.Tensor]) -> bool:
    """Return True if two calls of torch differ in some bits, as with LAPACK, which depends on memory addresses."""
    first = run(call, given)
    return any(not same(run(call, given)[:2], first[:2]) for _ in range(1000))


def by_hand(function: Any, sample: Any, given: Sequence[torch.Tensor]) -> Any:
    """Return a function that calls `function` with the arguments of a sample, and with other tensors."""

    def call(*fresh: torch.Tensor) -> Any:
        table = {id(old): new for old, new in zip(given, fresh, strict=True)}
        return function(*_replaced(sample.args, table), **_replaced(sample.kwargs, table))

    return call


def _replaced(value: Any, table: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return table[id(value)]
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_replaced(one, table) for one in value)
    return {key: _replaced(one, table) for key, one in value.items()} if isinstance(value, dict) else value


def run(call: Any, given: Sequence[torch.Tensor], holder: Any = None) -> Any:
    """Return outputs, gradients and if an input changed, or the exception; `holder` has further trained parameters."""
    fresh = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
    # Clones are no leaves, so that operators may write into them, which the comparison then finds.
    working = [one.clone() if one.requires_grad else one for one in fresh]
    torch.manual_seed(1)
    try:
        output = call(*working)
        parts = [one for one in tensors(output) if one.requires_grad]
        learners = [one for one in (*fresh, *(holder.parameters() if holder else ())) if one.requires_grad]
        gradients: list[Any] = []
        if parts and learners:
            torch.manual_seed(2)
            weights = [torch.randn(one.shape, dtype=one.dtype) for one in parts]
            gradients = list(torch.autograd.grad(parts, learners, weights, allow_unused=True))
    except Exception as error:
        return error
    changed = any(not same(one, old) for one, old in zip(working, given, strict=True))
    return output, gradients, changed


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [one for part in value for one in tensors(part)]
    return []


def same(one: Any, other: Any) -> bool:
    """Return True if outputs have the same types and bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)) if one.numel() else True
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def seen(*, most: int, only: Sequence[str] = ()) -> list[Row]:
    """Return the results for all spellings of all operators, or of those in `only`, merged by name."""
    rows: dict[str, Row] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in load("torch_databases").operators():
            if only and not set(only) & set(operator.names):
                continue
            for row in drive(operator, most=most):
                total = rows.setdefault(row.name, Row(name=row.name, form=row.form))
                total.equal, total.backward = total.equal + row.equal, total.backward + row.backward
                total.refused += row.refused
                total.unwritten += row.unwritten
                total.by_torch += row.by_torch
                total.wrong += row.wrong
    return list(rows.values())
