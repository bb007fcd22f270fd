"""From a traced graph to the straight-line `forward` that runs.

torch.fx writes `self.linears` and lets nn.Module.__getattr__ search for it, which costs 1.08 of a hand-written module.
Here a layer is read out of the `_modules` tables: no slower than by hand, and always the layer that is there now, so a
layer that is replaced, moved or wrapped later is the one that runs. A value is let go after its last use, as it would
be where a hand-written forward assigns to the same variable again.

Each line of the code carries the place of the program it came from: a traceback shows the program.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from exp.models.program import Program
from exp.models.recorder import unpack

_BINARY = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
_UNARY = {operator.neg: "-", operator.pos: "+", operator.invert: "~"}

FILE_PREFIX = "<forward program "


def compile_forward(graph: fx.Graph, program: Program) -> Callable:
    """The function `forward(self, <inputs>)` that does what the graph says with the layers of `self`."""
    writer = _Writer(graph)
    statements = writer.write()
    head = f"def forward({', '.join(['self', *program.inputs])}):\n"
    tree = ast.parse(head + "\n".join(f"    {text}" for text, _ in statements))
    for statement, (_, position) in zip(tree.body[0].body, statements, strict=True):
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                node.lineno, node.col_offset, node.end_lineno, node.end_col_offset = position
    name = _register_source(program)
    namespace = dict(writer.globals)
    exec(compile(tree, name, "exec"), namespace)  # text of this module's making: names in it are ours or checked
    return namespace["forward"]


def _register_source(program: Program) -> str:
    """Let tracebacks show the program: the file name under which linecache holds its text."""
    lines = program.source.lines
    name = f"{FILE_PREFIX}{hashlib.sha256(program.source.text.encode('utf-8', 'replace')).hexdigest()[:12]}>"
    linecache.cache[name] = (len(program.source.text), None, [f"{line}\n" for line in lines], name)
    return name


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.globals: dict[str, Any] = {}
        self.statements: list[tuple[str, tuple[int, int, int, int]]] = []
        self.variables: dict[fx.Node, str] = {}
        self.free: list[str] = []
        self.made = 0
        self.tables: dict[tuple[str, ...], str] = {}
        self.modules: dict[str, str] = {}
        self.global_names: dict[Any, str] = {}
        targets = [node.target for node in self.nodes if node.op == "call_module"]
        self.called_often = {target for target in targets if targets.count(target) > 1}
        self.parts = {
            user: node for node in self.nodes if node.target is unpack for user in node.users
        }  # of a tuple that is unpacked into names at once
        self.last_use: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            if node not in self.parts:
                self.last_use.update(dict.fromkeys(node.all_input_nodes, node))

    def write(self) -> list[tuple[str, tuple[int, int, int, int]]]:
        for node in self.nodes:
            if node.op == "placeholder":
                self.variables[node] = str(node.target)
            elif node.target is unpack:
                self.write_unpack(node)
            elif node not in self.parts:
                self.write_node(node)
        return self.statements

    def write_node(self, node: fx.Node) -> None:
        expression = self.expression(node)
        if node.op == "output":
            self.add(f"return {expression}", node)
            return
        dying = self.dying(node)
        if node.users:
            # The result takes the place of the first operand that nobody needs any more.
            self.variables[node] = dying.pop(0) if dying else self.new_variable()
            expression = f"{self.variables[node]} = {expression}"
        self.add(expression, node)
        self.release(dying, node)

    def write_unpack(self, node: fx.Node) -> None:
        source = self.value(node.args[0])
        dying = self.dying(node)
        names = ["_unused"] * node.args[1]
        for part in node.users:
            if part.users:
                self.variables[part] = names[part.args[1]] = self.new_variable()
        self.add(f"({', '.join(names)},) = {source}", node)
        self.release([*dying, *(["_unused"] if "_unused" in names else [])], node, reusable=dying)

    def dying(self, node: fx.Node) -> list[str]:
        return [self.variables[used] for used in node.all_input_nodes if self.last_use[used] is node]

    def release(self, variables: list[str], node: fx.Node, *, reusable: list[str] | None = None) -> None:
        for variable in variables:
            self.add(f"{variable} = None", node)
        self.free.extend(variables if reusable is None else reusable)

    def new_variable(self) -> str:
        if self.free:
            return self.free.pop()
        self.made += 1
        return f"_{self.made}"

    def add(self, text: str, node: fx.Node) -> None:
        self.statements.append((text, node.meta["position"]))

    # -- layers and parameters --

    def table(self, path: tuple[str, ...], node: fx.Node) -> str:
        """The variable with the `_modules` of the module at `path`."""
        if path not in self.tables:
            owner = f"{self.table(path[:-1], node)}[{path[-1]!r}]" if path else "self"
            self.tables[path] = f"_layers_{len(self.tables)}"
            self.add(f"{self.tables[path]} = {owner}._modules", node)
        return self.tables[path]

    def module(self, target: str, node: fx.Node) -> str:
        *owner, name = target.split(".")
        return f"{self.table(tuple(owner), node)}[{name!r}]"

    def callee(self, node: fx.Node) -> str:
        if node.target not in self.called_often:
            return self.module(node.target, node)
        if node.target not in self.modules:
            module = self.module(node.target, node)
            self.modules[node.target] = f"_layer_{len(self.modules)}"
            self.add(f"{self.modules[node.target]} = {module}", node)
        return self.modules[node.target]

    def attribute(self, node: fx.Node) -> str:
        owner, _, name = node.target.rpartition(".")
        base = self.module(owner, node) if owner else "self"
        return f"{base}.{name}" if name.isidentifier() else f"getattr({base}, {name!r})"

    # -- expressions --

    def expression(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{self.callee(node)}({self.call_arguments(node.args, node.kwargs)})"
        if node.op == "get_attr":
            return self.attribute(node)
        if node.op == "output":
            return self.value(node.args[0])
        if node.op == "call_method":
            owner, *args = node.args
            return f"{self.value(owner)}.{node.target}({self.call_arguments(args, node.kwargs)})"
        if node.target is getattr:
            return f"{self.value(node.args[0])}.{node.args[1]}"
        if node.target is operator.getitem:
            return f"{self.value(node.args[0])}[{self.index(node.args[1])}]"
        if node.target in _BINARY:
            left, right = node.args
            return f"{self.value(left)} {_BINARY[node.target]} {self.value(right)}"
        if node.target in _UNARY:
            return f"{_UNARY[node.target]}{self.value(node.args[0])}"
        return f"{self.as_global(node.target, node.target.__name__)}({self.call_arguments(node.args, node.kwargs)})"

    def call_arguments(self, args: Any, kwargs: dict) -> str:
        named = [f"{name}={self.value(value)}" for name, value in kwargs.items()]
        return ", ".join([*(self.value(value) for value in args), *named])

    def index(self, index: Any) -> str:
        if isinstance(index, tuple) and index:
            return ", ".join(map(self.index, index)) + ("," if len(index) == 1 else "")
        if isinstance(index, slice):
            parts = ["" if part is None else self.value(part) for part in (index.start, index.stop, index.step)]
            return ":".join(parts if parts[2] else parts[:2])
        return self.value(index)

    def value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.variables[value]
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.value(key)}: {self.value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        if isinstance(value, torch.dtype):
            return self.as_global(value, str(value).removeprefix("torch."))
        if isinstance(value, float) and not math.isfinite(value):
            return self.as_global(repr(value), "number", value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"({value!r})" if value < 0 or math.copysign(1.0, value) < 0 else repr(value)
        return repr(value)  # str, bool, None

    def as_global(self, key: Any, name: str, value: Any = None) -> str:
        """The global name under which the code finds a function, a dtype or an infinity."""
        if key not in self.global_names:
            self.global_names[key] = f"_{name}_{len(self.globals)}"
            self.globals[self.global_names[key]] = key if value is None else value
        return self.global_names[key]
