"""The closed list of a forward program's syntax, the check of a tree against it, and its error. Imports no torch.

Whatever is not named here is refused: there is no rule that forbids, only rules that allow.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from exp.errors import ExpError
from exp.models import vocabulary
from exp.spelling import find_nearest


class ProgramError(ExpError):
    """An error in a forward program. `line` and `column` count from 1, inside the program's own text.

    place: the key of the program below the model's. key: the whole config key, where whoever built the model knows it.
    others: the other errors of the program's text.
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

    def __reduce__(self) -> tuple[Callable[..., ProgramError], tuple[int | str | None, ...], dict[str, object]]:
        given = (self.line, self.column, self.message, self.expected, self.source_line)
        return _rebuild, given, {"others": self.others}


def _rebuild(line: int, column: int, message: str, expected: str, source_line: str | None) -> ProgramError:
    return ProgramError(line=line, column=column, message=message, expected=expected, source_line=source_line)


def joined(errors: Iterable[ProgramError]) -> ProgramError:
    """Return the first error of a program in the order of its text, with the other errors as `others`."""
    first, *others = sorted(errors, key=lambda error: (error.line, error.column))
    first.others = tuple(others)
    return first


def nearest_or(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """What to expect instead of `name`: the nearest known spelling, or `otherwise` where none is near."""
    found = find_nearest(name, known)
    return f"`{found[0]}`" if found else otherwise


ErrorAt = Callable[[ast.AST, str, str], ProgramError]

RESERVED = frozenset({"layers", "self", "training"})

_STATEMENTS = "assignments, calls, for, if, assert, break, continue, pass and return"
_EXPRESSIONS = "names, calls, arithmetic, comparison, indexing, constants, tuples, lists, dicts and comprehensions"
_ALLOWED = (
    *(ast.Module, ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.If, ast.Assert, ast.Break, ast.Continue, ast.Pass),
    ast.Return,
    *(ast.Name, ast.Load, ast.Store, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.Starred, ast.IfExp),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.JoinedStr, ast.FormattedValue),
    *(ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
)
_ATTRIBUTES = vocabulary.ATTRIBUTES | vocabulary.PARAMETER_ATTRIBUTES | vocabulary.RESULTS | vocabulary.LIMIT_ATTRIBUTES
INSTEAD_OF_WRITING = "of a tensor, where(mask, a, x), x.masked_fill(mask, a) or x.index_copy(...)"
_CONSTANTS = (int, float, bool, str, type(None), type(...))
_CALLABLE = (ast.Name, ast.Attribute, ast.Subscript, ast.IfExp)


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names that a program finds when it starts.

    used_elsewhere: layers that other programs of the network use, so that this one need not.
    """

    layers: frozenset[str]
    inputs: tuple[str, ...]
    constants: frozenset[str]
    functions: frozenset[str] = frozenset()
    used_elsewhere: frozenset[str] = frozenset()


def check(tree: ast.Module, names: Names, error: ErrorAt) -> None:
    """Raise ProgramError for the first node, in the order of the text, that is not on the closed list.

    The error has those of the other nodes as `others`.
    """
    _check_names(names, error)
    checker = _Checker(tree, names, error)
    checker.visit(tree)
    nodes = list(ast.walk(tree))
    in_loops = {part for node in nodes if isinstance(node, ast.For) for part in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.Break | ast.Continue) and node not in in_loops:
            checker.refuse(node, "break or continue outside a loop", "a loop around it")
    if not any(isinstance(node, ast.Return) for node in nodes):
        last = tree.body[-1] if tree.body else ast.Pass(lineno=1, col_offset=0)
        checker.refuse(last, "the program returns nothing", "a last line such as `return x`")
    if checker.found:
        raise joined(checker.found)
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)}
    unused = sorted(names.layers - loaded - names.used_elsewhere)
    names_all = "layers" in loaded and "layers" not in names.layers
    if unused and not names_all:
        layers = ", ".join(f"`{name}`" for name in unused)
        expected = "a use of every layer, or the layer taken out of `layers`"
        raise error(tree.body[0], f"the program never uses {layers}", expected)


def _check_names(names: Names, error: ErrorAt) -> None:
    start = ast.Pass(lineno=1, col_offset=0)
    for name in names.inputs:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or name in RESERVED:
            raise error(start, f"an input is called `{name}`", "a plain name, such as x or mask")
    for name in names.functions:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or name in RESERVED:
            raise error(start, f"a function is called `{name}`", "a plain name, such as rearrange")
    taken = [*names.inputs, *names.layers, *names.constants, *names.functions]
    for name in sorted(set(taken)):
        if taken.count(name) > 1:
            expected = "one name for each input, layer, constant and function"
            raise error(start, f"`{name}` is the name of two things", expected)


class _Checker(ast.NodeVisitor):
    def __init__(self, tree: ast.Module, names: Names, error: ErrorAt) -> None:
        self.names, self.error = names, error
        self.found: list[ProgramError] = []
        self.assigned = assigned_names(tree)
        self.variables = own_names(tree, inputs=names.inputs, layers=names.layers, constants=names.constants)
        self.known = self.variables | names.functions | vocabulary.FUNCTIONS | vocabulary.BUILTINS
        self.may_hold_layers = _names_that_may_hold_layers(list(ast.walk(tree)), names.layers)

    def refuse(self, node: ast.AST, message: str, expected: str) -> None:
        """Keep an error, if there is none of its place or with its message: an unknown name is told once."""
        found = self.error(node, message, expected)
        if all((found.line, found.column) != (one.line, one.column) and message != one.message for one in self.found):
            self.found.append(found)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _ALLOWED):
            super().visit(node)
            return
        expected = _STATEMENTS if isinstance(node, ast.stmt) else _EXPRESSIONS
        self.refuse(node, f"{type(node).__name__} is not part of a forward program", expected)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, _CONSTANTS) or node.kind is not None:
            self.refuse(node, f"a constant of type {type(node.value).__name__}", "a number, string, bool or None")
        if isinstance(node.value, int) and abs(node.value) >= 2**63:
            self.refuse(node, "an integer of more than 64 bits", "a smaller one")

    def visit_Name(self, node: ast.Name, *, called: bool = False) -> None:
        if isinstance(node.ctx, ast.Store):
            if node.id in self.names.layers | self.names.constants | self.names.functions | RESERVED:
                expected = "a name that no layer, constant or listed function has"
                self.refuse(node, f"`{node.id}` would be overwritten", expected)
        elif node.id not in self.known:
            if called and self.is_left_out(node, f"`{node.id}`", node.id, self.known):
                return
            # What is not called is no function, however like one it is written.
            near = self.known if called else self.variables
            inputs = ", ".join(f"`{name}`" for name in self.names.inputs)
            otherwise = "a layer or a listed function" if called else f"an input ({inputs}), a layer or a variable"
            self.refuse(node, f"`{node.id}` is unknown", nearest_or(node.id, near, otherwise=otherwise))

    def visit_Attribute(self, node: ast.Attribute, *, called: bool = False) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.refuse(node, f"`.{node.attr}` is assigned to", "a variable: a program changes no object")
            return
        prefix = prefix_of(node, self.variables)
        if prefix is not None:
            known = vocabulary.members(prefix) if prefix in vocabulary.PREFIXES else frozenset()
            if node.attr not in known and not self.is_left_out(node, f"`{prefix}.{node.attr}`", node.attr, known):
                expected = nearest_or(node.attr, known, otherwise="a listed function (docs/models.md)")
                self.refuse(node, f"`{prefix}.{node.attr}` is not on the list", expected)
            return
        known = vocabulary.METHODS | vocabulary.CONTAINER_METHODS
        if not called:
            known = _ATTRIBUTES
        owned_by_layer = not node.attr.startswith("_") and _root(node) in self.may_hold_layers
        if node.attr not in known and not owned_by_layer:
            written = f"the {'method' if called else 'attribute'} `.{node.attr}`"
            if not self.is_left_out(node, written, node.attr, known):
                otherwise = f"a listed {'method' if called else 'attribute'} (docs/models.md)"
                self.refuse(node, f"{written} is not on the list", nearest_or(node.attr, known, otherwise=otherwise))
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if not isinstance(node.func, _CALLABLE):
            self.refuse(node, "this cannot be called", "a layer, a listed function or a listed method")
        elif isinstance(node.func, ast.Attribute):
            self.visit_Attribute(node.func, called=True)
        elif isinstance(node.func, ast.Name):
            self.visit_Name(node.func, called=True)
        else:
            self.visit(node.func)
        for argument in node.keywords:
            if argument.arg is None:
                self.refuse(argument, "`**` in a call", "the arguments by name")
            if argument.arg == "out":
                self.refuse(argument, "`out=` writes into a tensor", "the function's result")
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.check_target(target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.refuse(node.target, "an augmented assignment to a part", "a variable on the left")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for kind, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(kind, ast.Is | ast.IsNot) and not (isinstance(right, ast.Constant) and right.value is None):
                self.refuse(right, "`is` of anything but None", "a comparison by ==")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        if None in node.keys:
            self.refuse(node, "`**` in a dict", "the entries by name")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if node.orelse:
            self.refuse(node.orelse[0], "`else` of a loop", "a loop without it")
        self.check_target(node.target)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            self.refuse(node.target, "an async comprehension", "a plain one")
        self.check_target(node.target)
        self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if node.format_spec is not None or node.conversion != -1:
            self.refuse(node, "a format in an f-string", "a plain {name}")
        self.generic_visit(node)

    def is_left_out(self, node: ast.AST, written: str, name: str, known: Set[str]) -> bool:
        """Say why a name of torch is not listed, where it is known: a similar spelling would mislead."""
        found = vocabulary.hint(name, known)
        if found is not None:
            why, expected = found
            self.refuse(node, f"{written} is not on the list: it {why}", expected)
        return found is not None

    def check_target(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self.check_target(element)
        elif isinstance(target, ast.Subscript):
            if not isinstance(target.value, ast.Name) or target.value.id not in self.assigned:
                expected = f"`outputs[name] = ...` of a dict or list made here; {INSTEAD_OF_WRITING}"
                self.refuse(target, "an assignment into an object", expected)
        elif not isinstance(target, ast.Name):
            self.refuse(target, "an assignment to something that is not a variable", "a name on the left")


def assigned_names(tree: ast.Module) -> set[str]:
    """The program's own variables, whatever the order in which they are set."""
    nodes = ast.walk(tree)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def own_names(
    tree: ast.Module, *, inputs: Iterable[str], layers: Iterable[str], constants: Iterable[str]
) -> frozenset[str]:
    """The names that a program has a value for: what it finds when it starts, and its own variables."""
    return frozenset((*inputs, *layers, *constants, *assigned_names(tree), "layers", "training"))


def prefix_of(node: ast.Attribute, variables: Set[str]) -> str | None:
    """`torch.nn.functional` of `torch.nn.functional.gelu`, unless the first name is one of the program's own."""
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


def _names_that_may_hold_layers(nodes: list[ast.AST], layers: frozenset[str]) -> set[str]:
    """Names through which a layer's own sublayers and parameters may be reached; the tracer knows for certain."""
    found = set(layers) | {"layers"}
    size = -1
    while len(found) != size:
        size = len(found)
        for node in nodes:
            if isinstance(node, ast.For | ast.comprehension):
                targets, value = [node.target], node.iter
            elif isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            else:
                continue
            if _may_give_layers(value, found):
                found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found


def _may_give_layers(value: ast.expr, found: set[str]) -> bool:
    """Whether a value may be, or hold, a layer; what a layer or a function gives is a tensor."""
    if isinstance(value, ast.Name):
        return value.id in found
    if isinstance(value, ast.Call):
        function = value.func
        if isinstance(function, ast.Attribute) and function.attr in vocabulary.CONTAINER_METHODS:
            return _may_give_layers(function.value, found)
        builtin = isinstance(function, ast.Name) and function.id in vocabulary.BUILTINS
        return builtin and any(_may_give_layers(argument, found) for argument in value.args)
    if isinstance(value, ast.Subscript | ast.Attribute):
        return _may_give_layers(value.value, found)
    if isinstance(value, ast.BinOp) and not isinstance(value.op, ast.Add):
        return False
    return any(_may_give_layers(child, found) for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))
