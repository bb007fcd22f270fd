"""The parameters of a class as its source says them: nothing is imported, for torch alone takes seconds.

What a run is checked by is check/signature.py. This is for proposals, and for words that other frameworks have at a
key, where a parameter too few does no harm: `+` sets it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence

# Of names that one module imports from the next.
MOST_STEPS = 8
Definition = ast.ClassDef | ast.FunctionDef


def parameters_in_source(target: str) -> dict[str, list[str]]:
    """The parameters of a class or function by its dotted name, each with the words that its annotation lists.

    Returns: none where the source is not found.
    """
    module, _, name = target.rpartition(".")
    found = _definition(module, name, MOST_STEPS)
    return {} if found is None else dict(_parameters(*found, MOST_STEPS))


def _parameters(module: str, node: Definition, steps: int) -> Iterator[tuple[str, list[str]]]:
    """Those of a class's constructor, and of its bases where it passes any on or has none."""
    maker = node if isinstance(node, ast.FunctionDef) else _constructor(node)
    if maker is not None:
        taken = [*maker.args.posonlyargs, *maker.args.args, *maker.args.kwonlyargs]
        for one in taken[0 if maker is node else 1 :]:
            yield one.arg, _words_of(one.annotation)
    elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, _words_of(field.annotation)
    if isinstance(node, ast.ClassDef) and steps and (maker is None or maker.args.kwarg is not None):
        for base in node.bases:
            found = _definition(module, base.id, steps) if isinstance(base, ast.Name) else None
            if found is not None:
                yield from _parameters(*found, steps - 1)


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    found = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return found[-1] if found else None  # behind its overloads


def _words_of(annotation: ast.expr | None) -> list[str]:
    words = list(dict.fromkeys(_words(annotation)))
    return words if words != ["null"] else []


def _words(annotation: ast.expr | None) -> Iterator[str]:
    """The words that an annotation lists: of a bool, a Literal, or one of them among other types."""
    if isinstance(annotation, ast.Name) and annotation.id == "bool":
        yield from ("true", "false")
    elif isinstance(annotation, ast.Constant) and annotation.value is None:
        yield "null"
    elif isinstance(annotation, ast.BinOp):
        yield from _words(annotation.left)
        yield from _words(annotation.right)
    elif isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        kind = ast.unparse(annotation.value).rpartition(".")[2]
        if kind == "Literal":
            yield from (one.value for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str))
        elif kind in ("Optional", "Union", "Annotated"):
            for one in inner[:1] if kind == "Annotated" else inner:
                yield from _words(one)


def _definition(module: str, name: str, steps: int) -> tuple[str, Definition] | None:
    """A class or function, and the module that defines it, looked for through the imports of the one that names it."""
    tree, package = _parsed(module)
    imports: list[ast.ImportFrom] = []
    for node in _statements(tree.body):
        if isinstance(node, Definition) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            imports.append(node)
    for node in imports if steps else ():
        names = {alias.asname or alias.name: alias.name for alias in node.names}
        if name in names or "*" in names:
            found = _definition(_absolute(node, package), names.get(name) or name, steps - 1)
            if found is not None:
                return found
    return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, and of what stands in its `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
    return ".".join(part for part in (above, node.module) if part)


def _parsed(module: str) -> tuple[ast.Module, str]:
    """The source of a module as it is found from here, and the package that it is in."""
    return _parsed_in(os.getcwd(), module)


@functools.cache
def _parsed_in(here: str, module: str) -> tuple[ast.Module, str]:
    """The source of a module, and the package that it is in; an empty one where there is none to read."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    # Modules beside the user's own ./conf are imported, too, and are not on the path before.
    places = list(spec.submodule_search_locations or ()) if spec is not None else [os.path.join(here, top)]
    single = os.path.join(here, f"{top}.py") if spec is None else spec.origin or ""
    candidates = [(os.path.join(place, *rest, "__init__.py"), module) for place in places]
    if rest:
        candidates += [(f"{os.path.join(place, *rest)}.py", module.rpartition(".")[0]) for place in places]
    else:
        candidates += [(single, "")]
    for file, package in candidates:
        try:
            with open(file, encoding="utf-8") as opened:
                return ast.parse(opened.read()), package
        except (OSError, SyntaxError, ValueError):
            continue
    return ast.Module(body=[], type_ignores=[]), module
