"""A forward program as data: text in, a checked syntax tree out. Needs no torch and builds nothing.

The text is Python's syntax for the body of a `forward` method. Python's own parser reads it, models/syntax.py holds it
against a closed list, and models/compiler.py compiles the tree that is left.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from exp.models.syntax import Names, ProgramError, check, own_names

MAX_CHARACTERS = 20_000
MAX_NODES = 5_000
MAX_DEPTH = 60

_SIZE_FIX = "a smaller program: put a part of it into a layer of its own"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A forward program that passed the check.

    text: as written; `line` and `column` of a ProgramError count in it.
    inputs: names of the network's inputs, in the order of `forward`'s parameters.
    tree: the syntax tree, all of whose nodes are on the closed list.
    """

    text: str
    inputs: tuple[str, ...]
    layer_names: frozenset[str]
    constant_names: frozenset[str]
    function_names: frozenset[str]
    tree: ast.Module = field(repr=False, compare=False)
    source: Source = field(repr=False, compare=False)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every name that it reads."""
        nodes = ast.walk(self.tree)
        return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Every name that it can have a value for; the others are listed functions."""
        return own_names(self.tree, inputs=self.inputs, layers=self.layer_names, constants=self.constant_names)

    def error(self, node: ast.AST, message: str, expected: str) -> ProgramError:
        """The error `message`, placed at `node`."""
        return self.source.error(getattr(node, "lineno", 1), getattr(node, "col_offset", 0), message, expected)


class Source:
    """The program's lines, with the indentation that was taken off them."""

    def __init__(self, text: str) -> None:
        written = text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4).split("\n")
        first = next((line for line in written if line.strip()), "")
        self.margin = len(first) - len(first.lstrip(" "))
        self.written = written
        self.lines = [line[self.margin :] if not line[: self.margin].strip() else line for line in written]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def error(self, line: int, byte_offset: int, message: str, expected: str) -> ProgramError:
        """An error at a place in ast's terms: lines from 1, columns in bytes of UTF-8 from 0."""
        line = min(max(line, 1), len(self.lines))
        shown = self.lines[line - 1]
        characters = len(shown.encode("utf-8", "replace")[: max(byte_offset, 0)].decode("utf-8", "ignore"))
        return ProgramError(
            line=line,
            column=self.margin + characters + 1,
            message=message,
            expected=expected,
            source_line=self.written[line - 1] if len(shown) <= 200 else None,
        )


def parse(
    text: str,
    layer_names: Iterable[str],
    *,
    inputs: Sequence[str] = ("x",),
    constants: Iterable[str] = (),
    functions: Iterable[str] = (),
    used_elsewhere: Iterable[str] = (),
    is_bounded: bool = True,
) -> Program:
    """Read and check a forward program.

    layer_names: what the model holds, by the names that the program calls them by.
    inputs: the names of the network's inputs.
    constants: names of values that the config gives the program.
    functions: names of functions that the config lists for the program.
    used_elsewhere: layers that this program need not use, because another one of the network does.
    is_bounded: whether to refuse a long one: yes but of a text that exp itself has made, a line for each layer.

    Raises ProgramError, and nothing else, for any text.
    """
    names = Names(
        layers=frozenset(layer_names),
        inputs=tuple(inputs),
        constants=frozenset(constants),
        functions=frozenset(functions),
        used_elsewhere=frozenset(used_elsewhere),
    )
    return _parse(text, names, is_bounded)


def layers_used(texts: Iterable[str], layer_names: Iterable[str]) -> frozenset[str]:
    """Return the layers that programs name: all of them by `layers`, unless a layer has that name.

    A program that cannot be read names none; its own check reports the error.
    """
    names = frozenset(layer_names)
    used: set[str] = set()
    for text in texts:
        try:
            nodes = ast.walk(_read(Source(text)))
        except ProgramError:
            continue
        used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return names if "layers" in used - names else names & used


@functools.lru_cache(maxsize=256)  # the copies of a repeated block share one tree, which nobody changes
def _parse(text: str, names: Names, is_bounded: bool) -> Program:
    source = Source(text)
    if is_bounded and len(text) > MAX_CHARACTERS:
        raise source.error(1, 0, f"the program has {len(text)} characters", f"at most {MAX_CHARACTERS}; {_SIZE_FIX}")
    tree = _read(source)
    if is_bounded:
        _bound(tree, source)
    program = Program(
        text=text,
        inputs=names.inputs,
        layer_names=names.layers,
        constant_names=names.constants,
        function_names=names.functions,
        tree=tree,
        source=source,
    )
    check(tree, names, program.error)
    return program


def _read(source: Source) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an invalid escape in a string is an error, not a line on stderr
            return ast.parse(source.text)
    except SyntaxError as error:
        line, column = error.lineno or 1, (error.offset or 1) - 1
        shown = source.lines[min(line, len(source.lines)) - 1]
        offset = len(shown[: max(column, 0)].encode("utf-8", "replace"))
        raise source.error(line, offset, error.msg, "Python syntax") from None
    except (RecursionError, MemoryError):
        raise source.error(1, 0, "the program is nested too deeply", f"at most {MAX_DEPTH} levels") from None
    except (ValueError, SystemError, Warning) as error:
        raise source.error(1, 0, f"the program cannot be read ({error})", "Python syntax") from None


def _bound(tree: ast.Module, source: Source) -> None:
    """Refuse a tree so large or so deep that walking it would take long or overflow Python's stack."""
    count = 0
    stack: list[tuple[ast.AST, int, int, int]] = [(tree, 0, 1, 0)]
    while stack:
        node, depth, line, offset = stack.pop()
        line, offset = getattr(node, "lineno", line), getattr(node, "col_offset", offset)
        count += 1
        if count > MAX_NODES:
            raise source.error(line, offset, f"the program has over {MAX_NODES} syntax nodes", _SIZE_FIX)
        if depth > MAX_DEPTH:
            raise source.error(line, offset, "the program is nested too deeply", f"at most {MAX_DEPTH} levels")
        stack.extend((child, depth + 1, line, offset) for child in ast.iter_child_nodes(node))
