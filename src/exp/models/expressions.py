"""The evaluator of a program's expressions: constants are computed, operations on tensors become graph nodes.

A value is one of: a graph node (known only while the network runs), a Reference to a layer or parameter, a Function,
or a constant of Python. No name of a program is ever looked up on a Python object but the listed modules of torch.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from exp.models import constants, vocabulary
from exp.models.builtin_functions import BUILTINS
from exp.models.calls import call
from exp.models.program import Program
from exp.models.recorder import HOMES, Function, Recorder, is_dynamic, unpack
from exp.models.references import Reference
from exp.models.syntax import assigned_names, prefix_of


class Evaluator:
    """Evaluates the expressions of one program; what is dynamic goes to `recorder`."""

    def __init__(self, program: Program, layers: Mapping[str, Reference], all_layers: Any, given: Mapping[str, Any]):
        self.program, self.recorder = program, Recorder(program)
        self.layers, self.given, self.all_layers = layers, given, all_layers
        self.names: dict[str, Any] = {}
        own = {*program.inputs, *layers, *given, "layers", "training"}
        self.variables = assigned_names(program.tree) | own

    def evaluate(self, node: ast.expr) -> Any:
        self.recorder.count(node)
        try:
            return getattr(self, f"_{type(node).__name__}")(node)
        except ValueError as fault:
            expected = "what a forward program can compute before the run"
            raise self.program.error(node, str(fault), expected) from None

    def _Call(self, node: ast.Call) -> Any:
        return call(self, node)

    def _Constant(self, node: ast.Constant) -> Any:
        return node.value

    def _Name(self, node: ast.Name) -> Any:
        name = node.id
        for table in (self.names, self.layers, self.given):
            if name in table:
                return table[name]
        if name == "layers":
            return self.all_layers
        if name == "training":
            return self.recorder.parameter("training", node)
        if name in self.variables:
            raise self.program.error(node, f"`{name}` has no value yet", "an assignment on a line that runs before")
        if name in BUILTINS:
            return Function(name, "builtins")
        return Function(name, vocabulary.home_of(name))

    def _JoinedStr(self, node: ast.JoinedStr) -> str:
        parts = []
        for part in node.values:
            value = self.evaluate(part.value if isinstance(part, ast.FormattedValue) else part)
            if not constants.is_scalar(value):
                raise ValueError("an f-string of something that is not a constant")
            parts.append(str(value))
        return functools.reduce(lambda left, right: constants.binary(ast.Add, left, right), parts, "")

    def _Tuple(self, node: ast.Tuple) -> tuple:
        return tuple(self.sequence(node.elts))

    def _List(self, node: ast.List) -> list:
        return self.sequence(node.elts)

    def sequence(self, elements: list[ast.expr]) -> list:
        values = []
        for element in elements:
            if isinstance(element, ast.Starred):
                values.extend(self.iterate(self.evaluate(element.value), element))
            else:
                values.append(self.evaluate(element))
        return values

    def _Dict(self, node: ast.Dict) -> dict:
        result = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                raise ValueError("`**` in a dict")
            result[self.key(self.evaluate(key), key)] = self.evaluate(value)
        return result

    def key(self, value: Any, node: ast.AST) -> Any:
        if not isinstance(value, int | str):
            raise self.program.error(node, "a key that is not a constant", "a string or an integer")
        return value

    def _BinOp(self, node: ast.BinOp) -> Any:
        return self.binary(node.op, self.evaluate(node.left), self.evaluate(node.right), node)

    def binary(self, op: ast.operator, left: Any, right: Any, node: ast.AST) -> Any:
        if is_dynamic(left) or is_dynamic(right):
            return self.recorder.operation(constants.OPERATORS[type(op)], node, left, right)
        return constants.binary(type(op), left, right)

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.evaluate(node.operand)
        if not is_dynamic(value):
            return constants.unary(type(node.op), value)
        if isinstance(node.op, ast.Not):
            raise self.program.error(node, "`not` of a tensor", "`~`, or logical_not(...)")
        return self.recorder.operation(constants.OPERATORS[type(node.op)], node, value)

    def _BoolOp(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for part in node.values:
            value = self.evaluate(part)
            if self.truth(value, part) == isinstance(node.op, ast.Or):
                return value
        return value

    def _Compare(self, node: ast.Compare) -> Any:
        left, result = self.evaluate(node.left), True
        for op, operand in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(operand)
            if is_dynamic(left) or is_dynamic(right):
                if len(node.ops) > 1 or type(op) not in constants.OPERATORS:
                    raise self.program.error(node, "this comparison of a tensor", "one of == != < <= > >=, joined by &")
                return self.recorder.operation(constants.OPERATORS[type(op)], node, left, right)
            result = constants.compare(type(op), left, right)
            if not result:
                return False
            left = right
        return result

    def _IfExp(self, node: ast.IfExp) -> Any:
        return self.evaluate(node.body if self.truth(self.evaluate(node.test), node.test) else node.orelse)

    def truth(self, value: Any, node: ast.AST) -> bool:
        if is_dynamic(value):
            message = "a condition that is known only while the network runs"
            raise self.program.error(node, message, "a constant, or where(condition, a, b) on tensors")
        try:
            return constants.truth(value)
        except ValueError as fault:
            raise self.program.error(node, str(fault), "a constant") from None

    def _Subscript(self, node: ast.Subscript) -> Any:
        value, index = self.evaluate(node.value), self.evaluate(node.slice)
        if is_dynamic(value):
            return self.recorder.operation(operator.getitem, node, value, index)
        if isinstance(value, Reference):
            return value.item(index)
        if isinstance(value, dict):
            key = self.key(index, node.slice)
            if key not in value:
                raise ValueError(f"no key {key!r}")
            return value[key]
        if not isinstance(value, list | tuple):
            raise ValueError(f"a {type(value).__name__} is indexed")
        return constants.part("the sequence", value, index)

    def _Slice(self, node: ast.Slice) -> slice:
        return slice(*(None if part is None else self.evaluate(part) for part in (node.lower, node.upper, node.step)))

    def _Attribute(self, node: ast.Attribute) -> Any:
        prefix = prefix_of(node, self.variables)
        if prefix is not None:
            home = vocabulary.PREFIXES[prefix]
            if node.attr in vocabulary.DTYPES or (home == "math" and node.attr in ("e", "inf", "pi")):
                return getattr(HOMES[home], node.attr)
            return Function(node.attr, home)
        value = self.evaluate(node.value)
        if is_dynamic(value) and node.attr in vocabulary.ATTRIBUTES:
            return self.recorder.operation(getattr, node, value, node.attr)
        if isinstance(value, Reference) and not value.is_tensor:
            return value.attribute(node.attr)
        raise self.program.error(node, f"this value has no attribute `.{node.attr}`", "a tensor or a layer before it")

    def _ListComp(self, node: ast.ListComp) -> list:
        return [self.evaluate(node.elt) for _ in self.rounds(node.generators)]

    _GeneratorExp = _ListComp

    def _DictComp(self, node: ast.DictComp) -> dict:
        rounds = self.rounds(node.generators)
        return {self.key(self.evaluate(node.key), node.key): self.evaluate(node.value) for _ in rounds}

    def rounds(self, generators: list[ast.comprehension]) -> Iterator[None]:
        """Runs through a comprehension's loops, setting its variables; they are its own, as in Python."""
        if not generators:
            yield
            return
        first, *rest = generators
        outer = dict(self.names)
        for value in self.iterate(self.evaluate(first.iter), first.iter):
            self.assign(first.target, value)
            if all(self.truth(self.evaluate(test), test) for test in first.ifs):
                yield from self.rounds(rest)
        self.names = outer

    def iterate(self, value: Any, node: ast.AST) -> list:
        """The elements that a loop runs through; they must be known before the run."""
        if isinstance(value, Reference) and not value.is_tensor:
            return value.elements()
        if isinstance(value, list | tuple | dict):
            return list(value)
        if is_dynamic(value):
            message = "a loop over a tensor, whose length is known only while the network runs"
            raise self.program.error(node, message, "names, `a, b = x.chunk(2, 1)`, or an operation on the whole")
        raise self.program.error(node, "a loop over a single value", "a list, a range or a container of layers")

    def assign(self, target: ast.expr, value: Any) -> None:
        self.recorder.count(target)
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Subscript):
            self._assign_part(target, value)
        else:
            for element, part in zip(target.elts, self._parts(target, value), strict=True):
                self.assign(element, part)

    def _parts(self, target: ast.Tuple | ast.List, value: Any) -> list:
        count = len(target.elts)
        if isinstance(value, fx.Node):
            whole = self.recorder.emit("call_function", unpack, (value, count), {}, target)
            return [self.recorder.emit("call_function", operator.getitem, (whole, i), {}, target) for i in range(count)]
        parts = self.iterate(value, target)
        if len(parts) != count:
            raise self.program.error(target, f"{len(parts)} values for {count} names", f"{len(parts)} names")
        return parts

    def _assign_part(self, target: ast.Subscript, value: Any) -> None:
        container, index = self.evaluate(target.value), self.evaluate(target.slice)
        if isinstance(container, dict):
            container[self.key(index, target.slice)] = value
        elif isinstance(container, list) and isinstance(index, int) and -len(container) <= index < len(container):
            container[index] = value
        else:
            raise self.program.error(target, "an assignment into this", "a dict, or a list of that length, made here")
