"""Compile a checked forward program to functions, with Python's compiler on its syntax tree, in a closed namespace.

One tree gives two functions. The guarded one has a guard around each operation, and models/trial.py runs it on
stand-ins. The plain one runs on tensors: it is the program as it is written, after a line for each layer that reads it
from the `_modules` table. That is as fast as code by hand, where `self.linear` goes through nn.Module.__getattr__, and
finds a layer that was replaced, moved or wrapped later.

The nodes keep the places of the program, so a traceback shows its lines.
"""

from __future__ import annotations

import ast
import builtins
import copy
import hashlib
import linecache
import math
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType

import torch
from torch import Tensor, nn

from exp.models import vocabulary
from exp.models.program import Program
from exp.models.stand_ins import Function
from exp.models.syntax import prefix_of
from exp.models.trial import GUARDS, Scalar, Shape, try_out

FILE_PREFIX = "<forward program "

# Names that no program can write, for functions that the compiler adds.
MODE, _LISTED, _TABLE, _VALUE = "network.training", "builtins.list", "network.modules", "the value"

# The home of functions that the config lists. It is not a module.
GIVEN = "functions"

_HOMES = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.fft": torch.fft,
    "torch.linalg": torch.linalg,
    "torch.masked": torch.masked,
    "torch.signal.windows": torch.signal.windows,
    "torch.sparse": torch.sparse,
    "torch.special": torch.special,
    "math": math,
}


def compile_forward(
    program: Program,
    *,
    held: Mapping[str, nn.Module | Tensor],
    layers_as: str,
    constants: Mapping[str, object],
    functions: Mapping[str, Callable[..., object]],
    asserts: bool = True,
) -> FunctionType:
    """Return the function `forward(self, <inputs>)` of a program, after its trial.

    Args:
        program: The program.
        held: The network's layers and parameters, by their names in the program and in the state dict.
        layers_as: The value of the name `layers`, unless a layer has that name: "list", or "dict" by name.
        constants: The values that the config gives the program.
        functions: The functions that the config lists, by their names in the program.
        asserts: False leaves out the assertions, for a graph, which cannot hold them.

    Raises:
        ProgramError: With the line and column of the program.
    """
    prologue = _prologue(program, held=held, layers_as=layers_as, constants=constants)
    guarded, plain = _Guarded(program), _Plain(program, asserts=asserts)
    try_out(program, _code(program, [*prologue, *guarded.body()]), guarded.functions, held, MODE)
    code = _code(program, [*prologue, *plain.body()])
    # torch.compile asks for Python's builtins. The trial, which had none, read no name that is not here.
    namespace: dict[str, object] = {"__builtins__": builtins, MODE: mode_of, _LISTED: list}
    namespace |= {name: _resolve(function, functions) for name, function in plain.functions.items()}
    return FunctionType(code, namespace, "forward")


def mode_of(network: nn.Module) -> bool:
    """Return the value of `training` in a program."""
    return network.training


def _code(program: Program, body: list[ast.stmt]) -> CodeType:
    parameters = [ast.arg(name) for name in ("self", *program.inputs)]
    arguments = ast.arguments([], parameters, None, [], [], None, [])
    function = ast.FunctionDef("forward", arguments, body, [], lineno=1, col_offset=0)
    try:
        module = compile(ast.fix_missing_locations(ast.Module([function], [])), _registered(program), "exec")
    except SyntaxError as fault:  # Python bounds the depth of nested loops
        raise program.source.error(fault.lineno or 1, (fault.offset or 1) - 1, fault.msg, "Python syntax") from None
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def _registered(program: Program) -> str:
    """Return the file name under which a traceback finds the program's text in linecache."""
    text = program.source.text
    name = f"{FILE_PREFIX}{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, [f"{line}\n" for line in program.source.lines], name)
    return name


def _prologue(
    program: Program, *, held: Mapping[str, nn.Module | Tensor], layers_as: str, constants: Mapping[str, object]
) -> list[ast.stmt]:
    """Return a statement for each layer and constant that the program uses."""
    found = {name: _read(name, one) for name, one in held.items()}
    values = {**found, **{name: _literal(value) for name, value in constants.items()}}
    every: ast.expr = ast.List(list(found.values()), ast.Load())
    if layers_as == "dict":
        every = ast.Dict([ast.Constant(name) for name in found], list(found.values()))
    values.setdefault("layers", every)
    values["training"] = ast.Call(_load(MODE), [_load("self")], [])
    table = ast.Attribute(_load("self"), "_modules", ast.Load())
    lines = {_TABLE: table} | {name: value for name, value in values.items() if name in program.names}
    nodes: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], value) for name, value in lines.items()]
    start = ast.Pass(lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
    for node in nodes:
        for part in ast.walk(node):
            ast.copy_location(part, start)
    return nodes


def _read(name: str, held: nn.Module | Tensor) -> ast.expr:
    if isinstance(held, nn.Module):
        return ast.Subscript(_load(_TABLE), ast.Constant(name), ast.Load())
    # As an attribute, because a parametrization turns it into a property.
    return ast.Attribute(_load("self"), name, ast.Load())


def _literal(value: object) -> ast.expr:
    if isinstance(value, list):
        return ast.List([_literal(item) for item in value], ast.Load())
    assert isinstance(value, Scalar)
    return ast.Constant(value)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class _Compiled(ast.NodeTransformer):
    """The base of both forms: listed functions have one name each, and `x += y` is `x = x + y`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.functions: dict[str, object] = {}

    def body(self) -> list[ast.stmt]:
        """Return the statements of the program in this form. The program's tree does not change."""
        tree = self.visit(ast.parse(self.program.source.text))
        assert isinstance(tree, ast.Module)
        return tree.body

    def listed(self, name: str, home: str, node: ast.AST) -> ast.expr:
        key = f"{home}.{name}"
        if home in _HOMES and not hasattr(_HOMES[home], name):
            raise self.program.error(node, f"torch {torch.__version__} has no `{name}`", "a function that it has")
        is_value = vocabulary.is_value(name, home)
        self.functions[key] = getattr(_HOMES[home], name) if is_value else Function(name, home)
        return ast.copy_location(_load(key), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Store) or node.id in self.program.variables:
            return node
        if node.id in self.program.function_names:
            return self.listed(node.id, GIVEN, node)
        home = "builtins" if node.id in vocabulary.BUILTINS else vocabulary.home_of(node.id)
        return self.listed(node.id, home, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        # An input, or a tensor that another name holds, keeps its values.
        assert isinstance(node.target, ast.Name)
        both = ast.BinOp(ast.copy_location(_load(node.target.id), node.target), node.op, node.value)
        whole = ast.Assign([node.target], ast.copy_location(both, node))
        changed = self.visit(ast.copy_location(whole, node))
        assert isinstance(changed, ast.stmt)
        return changed

    def prefixed(self, node: ast.Attribute) -> ast.expr | None:
        prefix = prefix_of(node, self.program.variables)
        return None if prefix is None else self.listed(node.attr, vocabulary.PREFIXES[prefix], node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        # A list may be read more than once.
        return self.generic_visit(ast.copy_location(ast.ListComp(node.elt, node.generators), node))


class _Plain(_Compiled):
    """The program as it is written, with lists instead of iterators."""

    def __init__(self, program: Program, *, asserts: bool) -> None:
        super().__init__(program)
        self.asserts = asserts

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return self.generic_visit(node) if self.asserts else ast.copy_location(ast.Pass(), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self.prefixed(node) or self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        changed = self.generic_visit(node)
        assert isinstance(changed, ast.Call)
        is_view = isinstance(changed.func, ast.Attribute) and changed.func.attr in ("items", "keys", "values")
        if not is_view or changed.args or changed.keywords:
            return changed
        return ast.copy_location(ast.Call(ast.copy_location(_load(_LISTED), node), [changed], []), node)


class _Guarded(_Compiled):
    """Calls a method of trial.Guards for each operation, at the operation's place."""

    def guard(self, name: str, node: ast.AST, *operands: ast.expr | Scalar | Shape) -> ast.Call:
        """Return a call of a guard. Its operands are visited here; constants are operands, too."""
        function = ast.copy_location(_load(f"{GUARDS}.{name}"), node)
        arguments = [self.visit(one) if isinstance(one, ast.expr) else self.constant(one, node) for one in operands]
        return ast.copy_location(ast.Call(function, arguments, []), node)

    def constant(self, value: Scalar | Shape, node: ast.AST) -> ast.expr:
        if isinstance(value, tuple):
            return ast.copy_location(ast.Tuple([self.constant(part, node) for part in value], ast.Load()), node)
        return ast.copy_location(ast.Constant(value), node)

    # -- statements --

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list[ast.stmt]:
        if len(node.targets) == 1:
            return self.assignment(node.targets[0], self.visit(node.value), node)
        stored = ast.copy_location(ast.Name(_VALUE, ast.Store()), node)
        first = ast.copy_location(ast.Assign([stored], self.visit(node.value)), node)
        value = ast.copy_location(_load(_VALUE), node)
        return [first, *(self.assignment(target, value, node) for target in node.targets)]

    def assignment(self, target: ast.expr, value: ast.expr, node: ast.stmt) -> ast.stmt:
        if isinstance(target, ast.Tuple | ast.List):
            unpack = self.guard("unpack", target, None, _shape(target))
            unpack.args[0] = value
            value = unpack
        return ast.copy_location(ast.Assign([self.visit(target)], value), node)

    def visit_For(self, node: ast.For) -> ast.AST:
        statements = sum(isinstance(part, ast.stmt) for part in ast.walk(node)) - 1
        rounds = self.guard("rounds", node.iter, node.iter, _shape(node.target), statements)
        node.iter = self.constant(None, node.iter)  # the guard's operand is visited already
        self.generic_visit(node)
        node.iter = rounds
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter = self.guard("rounds", node.iter, node.iter, _shape(node.target), 1)
        node.target, node.ifs = self.visit(node.target), [self.visit(test) for test in node.ifs]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        message: ast.expr = node.msg or ast.copy_location(ast.Constant(None), node)
        leaves = [*_leaves(node.test), *_leaves(message)]
        nothing = ast.arguments([], [], None, [], [], None, [])
        call = self.guard("asserted", node)
        operands = ast.Tuple([self.visit(copy.deepcopy(one)) for one in leaves], ast.Load())
        deferred = [ast.Lambda(nothing, self.visit(one)) for one in (node.test, message)]
        call.args = [ast.copy_location(one, node) for one in (operands, *deferred)]
        return ast.copy_location(ast.Expr(call), node)

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        node.value = self.guard("result", node, *([node.value] if node.value else []))
        return node

    # -- expressions --

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self.guard("binary", node, type(node.op).__name__, node.left, node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return self.guard("unary", node, type(node.op).__name__, node.operand)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        kinds = tuple(type(one).__name__ for one in node.ops)
        return self.guard("compare", node, kinds, node.left, *node.comparators)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self.prefixed(node) or self.guard("attribute", node, node.value, node.attr)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = node.func
        if isinstance(function, ast.Attribute) and self.prefixed(function) is None:
            call = self.guard("method", node, function.value, function.attr, *node.args)
        else:
            call = self.guard("call", node, function, *node.args)
        call.keywords = [self.visit(keyword) for keyword in node.keywords]
        return call

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            return self.guard("item", node, node.value, node.slice)
        owner = self.visit(node.value)
        node.slice = self.guard("place", node, node.value, node.slice)
        node.value = owner
        return node

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        return self.guard("slice", node, node.lower, node.upper, node.step)

    def visit_Starred(self, node: ast.Starred) -> ast.expr:
        node.value = self.guard("spread", node, node.value)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        node.keys = [self.guard("key", key, key) for key in node.keys if key is not None]
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        key = self.guard("key", node.key, node.key)
        node.key = self.constant(None, node.key)
        self.generic_visit(node)
        node.key = key
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        return self.guard("text", node, *_leaves(node))


def _leaves(node: ast.expr) -> list[ast.expr]:
    """Return the parts of an assertion or f-string whose values it compares or shows."""
    match node:
        case ast.BoolOp():
            return [leaf for value in node.values for leaf in _leaves(value)]
        case ast.UnaryOp(op=ast.Not()):
            return _leaves(node.operand)
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.JoinedStr():
            return [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
    return [node]


def _shape(target: ast.expr) -> Shape:
    """Return how the variables of an assignment nest."""
    return tuple(map(_shape, target.elts)) if isinstance(target, ast.Tuple | ast.List) else ""


# -- the listed functions in a run --


def _resolve(found: object, given: Mapping[str, Callable[..., object]]) -> object:
    """Return the function or value of a listed name: torch's, Python's, or the config's."""
    if not isinstance(found, Function):
        return found
    if found.home == GIVEN:
        return given[found.name]
    if found.home != "builtins":
        return getattr(_HOMES[found.home], found.name)
    return _LISTS.get(found.name) or _EITHER.get(found.name) or getattr(builtins, found.name)


def _range(*bounds: int) -> list[int]:
    return list(range(*bounds))


def _enumerate(values: Iterable[object], start: int = 0) -> list[tuple[int, object]]:
    return list(enumerate(values, start))


def _zip(*values: Iterable[object], strict: bool = False) -> list[tuple[object, ...]]:
    return list(zip(*values, strict=strict))


def _reversed(values: Iterable[object]) -> list[object]:
    return list(values)[::-1]


# Python's functions of these names return iterators, which can be read only once.
_LISTS: dict[str, Callable[..., object]] = {
    "range": _range,
    "enumerate": _enumerate,
    "zip": _zip,
    "reversed": _reversed,
}


def _either(on_tensors: Callable[..., object], on_numbers: Callable[..., object]) -> Callable[..., object]:
    """Return torch's function if the first argument is a tensor, else Python's."""

    def apply(*args: object, **kwargs: object) -> object:
        return (on_tensors if isinstance(args[0], Tensor) else on_numbers)(*args, **kwargs)

    return apply


_EITHER: dict[str, Callable[..., object]] = {
    "abs": _either(torch.abs, abs),
    "max": _either(torch.max, max),
    "min": _either(torch.min, min),
    "round": _either(torch.round, round),
    "sum": _either(torch.sum, sum),
}
