"""The list of allowed syntax in forward programs, and the check of a syntax tree. This module does not import torch.

Syntax that is not on the list is an error.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from exp.errors import ExpError, shorten
from exp.models import vocabulary
from exp.spelling import find_nearest


class ProgramError(ExpError):
    """An error in a forward program.

    Attributes:
        line: The line in the program's text, from 1.
        column: The column, from 1.
        message: Description of the error.
        expected: Description of a valid program.
        source_line: The line of the program; None if the line is too long to print.
        place: The config key of the program, relative to the model's key. Default: forward.
        key: The full config key; None if unknown.
        others: The other errors of the program.
    """

    exit_status = 2

    def __init__(self, *, line: int, column: int, message: str, expected: str, source_line: str | None = None) -> None:
        self.line, self.column = line, column
        self.message, self.expected = message, expected
        self.source_line = source_line
        self.place = "forward"
        self.key: str | None = None
        self.others: tuple[ProgramError, ...] = ()
        text = f"forward program, line {line}, column {column}: {message}; expected {expected}"
        if source_line is not None:
            text += f"\n    {source_line}\n    {' ' * (column - 1)}^"
        super().__init__(text)


def combine(errors: Iterable[ProgramError]) -> ProgramError:
    """Return the first error in the order of the text.

    The attribute `others` of this error receives the other errors.
    """
    first, *others = sorted(errors, key=lambda error: (error.line, error.column))
    first.others = tuple(others)
    return first


def nearest_or(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return the known name that is closest to `name`, in backticks. Return `otherwise` if no known name is close."""
    found = find_nearest(name, known)
    return f"`{found[0]}`" if found else otherwise


ErrorAt = Callable[[ast.AST, str, str], ProgramError]

RESERVED = frozenset({"layers", "self", "training"})

_STATEMENTS = "assignments, calls, for, if, break, continue, pass and return"
_EXPRESSIONS = "names, calls, arithmetic, comparison, indexing, constants, tuples, lists, dicts and comprehensions"
_ALLOWED = (
    *(ast.Module, ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.If, ast.Break, ast.Continue, ast.Pass, ast.Return),
    *(ast.Name, ast.Load, ast.Store, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.Starred, ast.IfExp),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict),
    *(ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
)
_ATTRIBUTES = vocabulary.ATTRIBUTES | vocabulary.PARAMETER_ATTRIBUTES | vocabulary.RESULTS
INSTEAD_OF_WRITING = "where(mask, a, x), x.masked_fill(mask, a) or x.index_copy(...), which return a new tensor"
_CONSTANTS = (int, float, bool, str, type(None), type(...))
_CALLABLE = (ast.Name, ast.Attribute, ast.Subscript, ast.IfExp)


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names that are defined before a program runs.

    Args:
        layers: The names of the network's layers and parameters.
        inputs: The names of the network's inputs, in the order of the parameters of `forward`.
        constants: The names of the constants that the config defines.
        functions: The names of the functions that the config defines.
    """

    layers: frozenset[str]
    inputs: tuple[str, ...]
    constants: frozenset[str]
    functions: frozenset[str] = frozenset()

    def variables(self, tree: ast.Module) -> frozenset[str]:
        """Return the names of all variables: inputs, layers, constants, and the names that the program assigns."""
        return frozenset((*self.inputs, *self.layers, *self.constants, *_assigned_names(tree), "layers", "training"))


def check(tree: ast.Module, names: Names, error: ErrorAt) -> None:
    """Check that all nodes of a syntax tree are allowed, and that all names are valid.

    Args:
        tree: The syntax tree.
        names: The names that are defined before the program runs.
        error: Function of a node, a message and a description of valid programs. It returns the exception.

    Raises:
        ProgramError: The first error. The attribute `others` has the other errors.
    """
    _check_names(names, error)
    checker = _Checker(tree, names, error)
    checker.visit(tree)
    nodes = list(ast.walk(tree))
    in_loops = {part for node in nodes if isinstance(node, ast.For) for part in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.Break | ast.Continue) and node not in in_loops:
            checker.refuse(node, "break or continue outside a loop", "a loop around the statement")
    if not any(isinstance(node, ast.Return) for node in nodes):
        last = tree.body[-1] if tree.body else ast.Pass(lineno=1, col_offset=0)
        checker.refuse(last, "the program returns nothing", "a last line such as `return x`")
    if checker.found:
        raise combine(checker.found)


def _check_names(names: Names, error: ErrorAt) -> None:
    start = ast.Pass(lineno=1, col_offset=0)
    taken = [*names.inputs, *names.layers, *names.constants, *names.functions]
    for kind, example, own in (("an input", "x or mask", names.inputs), ("a function", "rearrange", names.functions)):
        for name in own:
            if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or name in RESERVED:
                raise error(start, f"{kind} is called `{name}`", f"a valid variable name, such as {example}")
    for name in sorted(set(taken)):
        if taken.count(name) > 1:
            expected = "different names for inputs, layers, constants and functions"
            raise error(start, f"two values or layers are called `{name}`", expected)


class _Checker(ast.NodeVisitor):
    def __init__(self, tree: ast.Module, names: Names, error: ErrorAt) -> None:
        self.names, self.error = names, error
        self.found: list[ProgramError] = []
        self.assigned = _assigned_names(tree)
        self.variables = names.variables(tree)
        self.known = self.variables | names.functions | vocabulary.FUNCTIONS | vocabulary.BUILTINS

    def refuse(self, node: ast.AST, message: str, expected: str) -> None:
        """Record an error. An error with the position or the message of an earlier error is not recorded."""
        found = self.error(node, message, expected)
        if all((found.line, found.column) != (one.line, one.column) and message != one.message for one in self.found):
            self.found.append(found)

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, _ALLOWED):
            expected = _STATEMENTS if isinstance(node, ast.stmt) else _EXPRESSIONS
            written = shorten(ast.unparse(node).partition("\n")[0])
            self.refuse(node, f"`{written}` is not allowed in a forward program", expected)
            return
        if (wrong := _wrong_form(node)) is not None:
            self.refuse(getattr(node, "target", node), *wrong)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.check_target(target)
        elif isinstance(node, ast.For | ast.comprehension):
            self.check_target(node.target)
        super().visit(node)

    def visit_Name(self, node: ast.Name, *, called: bool = False) -> None:
        if isinstance(node.ctx, ast.Store):
            if node.id in self.names.layers | self.names.constants | self.names.functions | RESERVED:
                expected = "another variable name: a layer, a constant or a function has this name"
                self.refuse(node, f"`{node.id}` would be overwritten", expected)
        elif node.id not in self.known:
            if called and self.is_explained(node, f"`{node.id}`", node.id, self.known):
                return
            # Functions are proposed only for names that are called, because a program can only call functions.
            near = self.known if called else self.variables
            inputs = ", ".join(f"`{name}`" for name in self.names.inputs)
            otherwise = "a layer or a torch function" if called else f"an input ({inputs}), a layer or a variable"
            self.refuse(node, f"`{node.id}` is unknown", nearest_or(node.id, near, otherwise=otherwise))

    def visit_Attribute(self, node: ast.Attribute, *, called: bool = False) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.refuse(node, f"the program assigns to the attribute `.{node.attr}`", "an assignment to a variable")
            return
        prefix = prefix_of(node, self.variables)
        if prefix is not None:
            known = vocabulary.members(prefix) if prefix in vocabulary.PREFIXES else frozenset()
            self.check_listed(node, f"`{prefix}.{node.attr}`", known, kind="function")
            return
        self.visit(node.value)
        known = vocabulary.METHODS | vocabulary.CONTAINER_METHODS if called else _ATTRIBUTES
        kind = "method" if called else "attribute"
        root = _root(node)
        # Attributes of variables are checked in the trial, because a variable may be a layer, which has other
        # attributes.
        if node.attr.startswith("_") or root is None or root in self.names.inputs:
            self.check_listed(node, f"the {kind} `.{node.attr}`", known, kind=kind)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self.visit_Attribute(node.func, called=True)
        elif isinstance(node.func, ast.Name):
            self.visit_Name(node.func, called=True)
        elif isinstance(node.func, _CALLABLE):
            self.visit(node.func)
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def check_listed(self, node: ast.Attribute, written: str, known: Set[str], *, kind: str) -> None:
        if node.attr not in known and not self.is_explained(node, written, node.attr, known):
            expected = nearest_or(node.attr, known, otherwise=f"a {kind} on the list in docs/models.md")
            self.refuse(node, f"{written} is not allowed in a program", expected)

    def is_explained(self, node: ast.AST, written: str, name: str, known: Set[str]) -> bool:
        """Record an error that gives the reason why a program cannot use a name.

        Args:
            node: The node with the name.
            written: The name as in the program, for the message.
            name: The name.
            known: The names that are allowed at this position.

        Returns:
            False if no reason is known. In this case, nothing is recorded.
        """
        found = vocabulary.hint(name, known)
        if found is not None:
            why, expected = found
            self.refuse(node, f"{written} is not allowed in a program: it {why}", expected)
        return found is not None

    def check_target(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self.check_target(element)
        elif isinstance(target, ast.Subscript):
            if not isinstance(target.value, ast.Name) or target.value.id not in self.assigned:
                expected = f"`outputs[name] = ...` on a dict or list of the program; for a tensor, {INSTEAD_OF_WRITING}"
                self.refuse(target, "an assignment into an object", expected)
        elif not isinstance(target, ast.Name):
            self.refuse(target, "an assignment to something that is not a variable", "a variable on the left side of =")


def _wrong_form(node: ast.AST) -> tuple[str, str] | None:
    """Return the error of a node that has an allowed type but a forbidden form, such as `**` in a call.

    Returns:
        The message and a description of an allowed form. None: the node is allowed.
    """
    match node:
        case ast.Constant(value, kind) if type(value) not in _CONSTANTS or kind is not None:
            return f"a constant of type {type(value).__name__}", "a number, string, bool or None"
        case ast.Constant(int() as value) if abs(value) >= 2**63:
            return "an integer of more than 64 bits", "a smaller integer"
        case ast.Call(func) if not isinstance(func, _CALLABLE):
            return "a call of something that cannot be called", "a call of a layer, a function or a method"
        case ast.keyword(None):
            return "`**` in a call", "arguments that are written out, such as dim=1"
        case ast.keyword("out"):
            return "`out=` writes into a tensor", "a call without `out=`, whose result is assigned to a variable"
        case ast.Dict(keys) if None in keys:
            return "`**` in a dict", "entries that are written out"
        case ast.Compare(ops=[*kinds], comparators=[*values]):
            for one, operand in zip(kinds, values, strict=True):
                if isinstance(one, ast.Is | ast.IsNot) and ast.unparse(operand) != "None":
                    return "`is` with another value than None", "a comparison with =="
        case ast.AugAssign(target) if not isinstance(target, ast.Name):
            return "an operator such as += on something that is not a variable", "a variable on the left side"
        case ast.For(orelse=[_, *_]):
            return "`else` of a loop", "a loop without `else`"
        case ast.comprehension(is_async=1):
            return "an async comprehension", "a comprehension without `async`"
    return None


def _assigned_names(tree: ast.Module) -> set[str]:
    nodes = ast.walk(tree)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def prefix_of(node: ast.Attribute, variables: Set[str]) -> str | None:
    """Return the module prefix of an attribute, such as `torch.nn.functional` for `torch.nn.functional.gelu`.

    Return None if the attribute begins with a variable instead of a module.
    """
    parts, value = [], node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    if not isinstance(value, ast.Name) or value.id in variables:
        return None
    roots = {prefix.split(".")[0] for prefix in vocabulary.PREFIXES}
    return ".".join([value.id, *reversed(parts)]) if value.id in roots else None


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
