"""The graph that a program's trace fills: one node for each operation on tensors, placed in the program's text."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from exp.models.program import Program
from exp.models.references import Reference

MAX_STEPS = 50_000
MAX_ARGUMENT_DEPTH = 20

HOMES = {"torch": torch, "torch.nn.functional": torch.nn.functional, "math": math}


@dataclass(frozen=True, eq=False)
class Function:
    """A listed function: its name in the program, and the module of HOMES (or `builtins`) that it is taken from."""

    name: str
    home: str

    def resolve(self) -> Any:
        return getattr(HOMES[self.home], self.name)


def unpack(value: Any, count: int) -> tuple[Any, ...]:
    """The `count` parts of a run-time value, as Python's `a, b = value` gives them. Raises ValueError."""
    parts = tuple(value)
    if len(parts) != count:
        raise ValueError(f"{len(parts)} values to unpack, {count} names")
    return parts


def is_dynamic(value: Any) -> bool:
    """Whether a value is known only while the network runs."""
    return isinstance(value, fx.Node) or (isinstance(value, Reference) and value.is_tensor)


class Recorder:
    """Records operations of one program, and counts its steps.

    `meta["position"]` of a node is its place in the program: line and byte offset of its start and of its end.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, fx.Graph()
        self.steps = 0
        self._parameters: dict[str, fx.Node] = {}

    def emit(self, op: str, target: Any, args: tuple, kwargs: dict, node: ast.AST) -> fx.Node:
        created = self.graph.create_node(op, target, args, kwargs)
        created.meta["position"] = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        return created

    def operation(self, function: Any, node: ast.AST, *operands: Any) -> fx.Node:
        return self.emit("call_function", function, tuple(self.argument(value, node) for value in operands), {}, node)

    def parameter(self, target: str, node: ast.AST) -> fx.Node:
        if target not in self._parameters:
            self._parameters[target] = self.emit("get_attr", target, (), {}, node)
        return self._parameters[target]

    def count(self, node: ast.AST) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            cure = "fewer rounds of its loops, or a part of it as a layer of its own"
            raise self.program.error(node, f"the program takes over {MAX_STEPS} steps to unroll", cure)

    def argument(self, value: Any, node: ast.AST, depth: int = 0) -> Any:
        """`value` as an operand of the graph: parameters become nodes, and what is no value is refused."""
        self.count(node)
        if isinstance(value, fx.Node | int | float | str | torch.dtype | type(None) | type(...)):
            return value
        if depth > MAX_ARGUMENT_DEPTH:
            raise self.program.error(node, "a value that is nested too deeply", f"at most {MAX_ARGUMENT_DEPTH} levels")
        if isinstance(value, Reference):
            if value.is_tensor:
                return self.parameter(value.target, node)
            cure = f"a call of it, `{value.target}(x)`" if value.is_callable else "one of its elements"
            raise self.program.error(node, f"`{value.target}` is a layer ({value.kind}), not a tensor", cure)
        if isinstance(value, list | tuple):
            return type(value)(self.argument(item, node, depth + 1) for item in value)
        if isinstance(value, dict):
            return {key: self.argument(item, node, depth + 1) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self.argument(item, node, depth + 1) for item in (value.start, value.stop, value.step)))
        raise self.program.error(node, f"`{getattr(value, 'name', value)}` is used as a value", "a call of it")
