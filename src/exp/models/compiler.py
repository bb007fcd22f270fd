"""Compilation of a checked forward program to functions.

Python's own compiler compiles the syntax tree. The compiled code sees only the names that exp adds to its namespace.

A syntax tree is compiled to two functions:

- The guarded function limits the size of computations with constants. models/trial.py runs this function on stand-ins
  for layers and tensors.
- The plain function runs on tensors. It first reads each layer from the network's table `_modules`, and then runs the
  program as written. A layer that is replaced, moved or wrapped after the compilation is therefore used.

The plain function is as fast as a hand-written forward, which reads `self.linear` with nn.Module.__getattr__.

The nodes keep their positions in the program, so that tracebacks show the program's lines.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType

import torch
from torch import Tensor, nn

from exp.models import vocabulary
from exp.models.program import Program
from exp.models.syntax import prefix_of
from exp.models.trial import GUARDS, Listed, Scalar, try_out

FILE_PREFIX = "<forward program "

# The names of functions that the compiler adds. A program cannot contain these names.
MODE, _LISTED, _TABLE = "network.training", "builtins.list", "network.modules"

# Stands for the module name of a function that the config defines.
GIVEN = "functions"


def compile_forward(
    program: Program,
    *,
    held: Mapping[str, nn.Module | Tensor],
    layers_as: str,
    constants: Mapping[str, object],
    functions: Mapping[str, Callable[..., object]],
) -> FunctionType:
    """Return the function `forward(self, <inputs>)` of a program, after running the program on stand-ins.

    Args:
        program: The program.
        held: The network's layers and parameters. The keys are the names in the program and in the state dict.
        layers_as: Type of the program's variable `layers`: "list", or "dict" by name. If a layer is named `layers`, the
            variable is this layer.
        constants: The constants that the config defines for the program, by name.
        functions: The functions that the config defines for the program, by name.

    Raises:
        ProgramError: The program has an error. The exception has the line and the column of the error.
    """
    prologue = _prologue(program, held=held, layers_as=layers_as, constants=constants)
    guarded, plain = _Guarded(program), _Plain(program)
    try_out(
        program,
        _code(program, [*prologue, *guarded.body()]),
        {_LISTED: Listed("list", "builtins"), **guarded.functions},
        held,
        MODE,
    )
    code = _code(program, [*prologue, *plain.body()])
    # torch.compile needs Python's builtins. The program does not use them, because the trial had no builtins.
    namespace: dict[str, object] = {"__builtins__": builtins, MODE: mode_of, _LISTED: list}
    namespace |= {name: _resolve(function, functions) for name, function in plain.functions.items()}
    return FunctionType(code, namespace, "forward")


def mode_of(network: nn.Module) -> bool:
    """Return the network's mode, True in training. Programs read it as the variable `training`."""
    return network.training


def _code(program: Program, body: list[ast.stmt]) -> CodeType:
    parameters = [ast.arg(name) for name in ("self", *program.names.inputs)]
    arguments = ast.arguments([], parameters, None, [], [], None, [])
    function = ast.FunctionDef("forward", arguments, body, [], lineno=1, col_offset=0)
    try:
        module = compile(ast.fix_missing_locations(ast.Module([function], [])), _register(program), "exec")
    except SyntaxError as error:  # too many nested loops
        raise program.source.error(error.lineno or 1, (error.offset or 1) - 1, error.msg, "Python syntax") from None
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def _register(program: Program) -> str:
    """Store the text of a program in Python's linecache for tracebacks, and return the program's file name."""
    text = program.source.text
    name = f"{FILE_PREFIX}{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, [f"{line}\n" for line in program.source.lines], name)
    return name


def _prologue(
    program: Program, *, held: Mapping[str, nn.Module | Tensor], layers_as: str, constants: Mapping[str, object]
) -> list[ast.stmt]:
    """Return an assignment statement for each layer and constant that the program uses."""
    found = {name: _read(name, one) for name, one in held.items()}
    values = {**found, **{name: _literal(value) for name, value in constants.items()}}
    every: ast.expr = ast.List(list(found.values()), ast.Load())
    if layers_as == "dict":
        every = ast.Dict([ast.Constant(name) for name in found], list(found.values()))
    values.setdefault("layers", every)
    values["training"] = ast.Call(_load(MODE), [_load("self")], [])
    table = ast.Attribute(_load("self"), "_modules", ast.Load())
    lines = {_TABLE: table} | {name: value for name, value in values.items() if name in program.loaded}
    nodes: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], value) for name, value in lines.items()]
    start = ast.Pass(lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
    for node in nodes:
        for part in ast.walk(node):
            ast.copy_location(part, start)
    return nodes


def _read(name: str, held: nn.Module | Tensor) -> ast.expr:
    if isinstance(held, nn.Module):
        return ast.Subscript(_load(_TABLE), ast.Constant(name), ast.Load())
    # A parameter is read as an attribute, because a parametrization replaces it by a property.
    return ast.Attribute(_load("self"), name, ast.Load())


def _literal(value: object) -> ast.expr:
    if isinstance(value, list):
        return ast.List([_literal(item) for item in value], ast.Load())
    assert isinstance(value, Scalar)
    return ast.Constant(value)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class _Plain(ast.NodeTransformer):
    """Converts the syntax tree of a program to the function that runs on tensors.

    Functions are called by unique names, such as `torch.relu`. Iterators become lists.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.functions: dict[str, object] = {}

    def body(self) -> list[ast.stmt]:
        """Return the converted statements. The syntax tree in `program` does not change."""
        tree = self.visit(ast.parse(self.program.source.text))
        assert isinstance(tree, ast.Module)
        return tree.body

    def refer_to(self, name: str, home: str, node: ast.AST) -> ast.expr:
        key = f"{home}.{name}"
        value: object = Listed(name, home)
        if home != GIVEN:
            module = pkgutil.resolve_name(home)
            if not hasattr(module, name):
                raise self.program.error(node, f"torch {torch.__version__} has no `{name}`", "a function of this torch")
            value = getattr(module, name) if vocabulary.is_value(name, home) else value
        self.functions[key] = value
        return ast.copy_location(_load(key), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Store) or node.id in self.program.variables:
            return node
        if node.id in self.program.names.functions:
            return self.refer_to(node.id, GIVEN, node)
        home = "builtins" if node.id in vocabulary.BUILTINS else vocabulary.home_of(node.id)
        return self.refer_to(node.id, home, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        # `x += y` becomes `x = x + y`, because `+=` would change the tensor for every variable that refers to it.
        assert isinstance(node.target, ast.Name)
        both = ast.BinOp(ast.copy_location(_load(node.target.id), node.target), node.op, node.value)
        whole = ast.Assign([node.target], ast.copy_location(both, node))
        changed = self.visit(ast.copy_location(whole, node))
        assert isinstance(changed, ast.stmt)
        return changed

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        # A generator becomes a list, which can be read more than once.
        return self.generic_visit(ast.copy_location(ast.ListComp(node.elt, node.generators), node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        prefix = prefix_of(node, self.program.variables)
        if prefix is None:
            return self.generic_visit(node)
        return self.refer_to(node.attr, vocabulary.PREFIXES[prefix], node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else None
        changed = self.generic_visit(node)
        assert isinstance(changed, ast.Call)
        is_iterator = isinstance(changed.func, ast.Name) and changed.func.id in _ITERATORS
        if not is_iterator and (method not in ("items", "keys", "values") or changed.args or changed.keywords):
            return changed
        return ast.copy_location(ast.Call(ast.copy_location(_load(_LISTED), node), [changed], []), node)


class _Guarded(_Plain):
    """Converts the syntax tree of a program to the guarded function.

    Operations of unlimited cost, such as a power of integers, become calls of methods of trial.Trial.
    """

    def guard(self, name: str, node: ast.AST, *operands: ast.expr | str) -> ast.Call:
        """Return the syntax node of a call of a method of trial.Trial.

        Args:
            name: Name of the method.
            node: The node that the call replaces.
            operands: Arguments of the call. Expressions are converted, texts become constants.
        """
        arguments = [
            self.visit(one) if isinstance(one, ast.expr) else ast.copy_location(ast.Constant(one), node)
            for one in operands
        ]
        return ast.copy_location(ast.Call(ast.copy_location(_load(f"{GUARDS}.{name}"), node), arguments, []), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if prefix_of(node, self.program.variables) is not None:
            return super().visit_Attribute(node)
        return self.guard("attribute", node, node.value, node.attr)

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        node.value = self.guard("result", node, *([node.value] if node.value else []))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self.guard("binary", node, type(node.op).__name__, node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
            return self.generic_visit(node)
        node.left = self.guard("operand", node.left, node.left)
        node.comparators = [self.guard("operand", one, one) for one in node.comparators]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        is_read = isinstance(node.ctx, ast.Load)
        node.value = self.visit(node.value)
        node.slice = self.guard("operand" if is_read else "key", node.slice, node.slice)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        node.keys = [self.guard("key", key, key) for key in node.keys if key is not None]
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_DictComp(self, node: ast.DictComp) -> ast.expr:
        node.key, node.value = self.guard("key", node.key, node.key), self.visit(node.value)
        node.generators = [self.visit(one) for one in node.generators]
        return node


# -- the functions of a program in a run --


def _resolve(found: object, given: Mapping[str, Callable[..., object]]) -> object:
    """Return the function or value that a name in a program refers to.

    Args:
        found: A function's name and module, or a value, which is returned unchanged.
        given: The functions that the config defines, by name.
    """
    if not isinstance(found, Listed):
        return found
    if found.home == GIVEN:
        return given[found.name]
    if found.home == "builtins" and found.name in _REPLACED:
        return _REPLACED[found.name]
    return getattr(pkgutil.resolve_name(found.home), found.name)


def _reverse(values: Iterable[object]) -> list[object]:
    return list(values)[::-1]


def _either(name: str) -> Callable[..., object]:
    """Return a function that calls torch's function `name` on tensors, and Python's function on other arguments.

    The type of the first argument decides.
    """
    on_tensors, on_numbers = getattr(torch, name), getattr(builtins, name)

    def apply(*args: object, **kwargs: object) -> object:
        return (on_tensors if isinstance(args[0], Tensor) else on_numbers)(*args, **kwargs)

    return apply


# Functions of Python that return iterators, which can be read only once.
_ITERATORS = ("builtins.enumerate", "builtins.range", "builtins.zip")
_REPLACED = {name: _either(name) for name in ("abs", "max", "min", "round", "sum")} | {"reversed": _reverse}
