"""Forward programs as checked syntax trees. This module does not import torch, and builds no layers.

A program has the syntax of the body of a Python method `forward`. Python's parser makes the syntax tree,
models/syntax.py rejects nodes that are not on a list of allowed nodes, and models/compiler.py compiles the tree.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from exp.models.syntax import Names, ProgramError, check

MAX_CHARACTERS = 20_000
MAX_DEPTH = 60

_SIZE_FIX = "a smaller program: move a part of it into a separate layer"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A forward program that models/syntax.py has checked.

    Args:
        text: The program as written. Lines and columns of a ProgramError refer to this text.
        names: The names that are defined before the program runs.
        tree: The syntax tree.
        source: The lines of the text.
    """

    text: str
    names: Names
    tree: ast.Module = field(repr=False, compare=False)
    source: Source = field(repr=False, compare=False)

    @functools.cached_property
    def loaded(self) -> frozenset[str]:
        """All names that the program reads."""
        nodes = ast.walk(self.tree)
        return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """All names of variables. The other names are functions of models/vocabulary.py."""
        return self.names.variables(self.tree)

    def error(self, node: ast.AST, message: str, expected: str) -> ProgramError:
        """Return an error at the position of a node.

        Args:
            node: The node.
            message: Description of the error.
            expected: Description of a valid program, as a noun phrase.
        """
        return self.source.error_at(node, message, expected)


class Source:
    """The lines of a program, without their common indentation."""

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
        """Return an error at a position.

        Args:
            line: The line, from 1.
            byte_offset: The column in bytes of UTF-8, from 0, as in the module ast.
            message: Description of the error.
            expected: Description of a valid program, as a noun phrase.
        """
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

    def error_at(self, node: ast.AST, message: str, expected: str) -> ProgramError:
        """Return an error at the position of a node."""
        return self.error(getattr(node, "lineno", 1), getattr(node, "col_offset", 0), message, expected)


def parse(
    text: str,
    layer_names: Iterable[str],
    *,
    inputs: Sequence[str] = ("x",),
    constants: Iterable[str] = (),
    functions: Iterable[str] = (),
    is_bounded: bool = True,
) -> Program:
    """Parse and check the text of a program.

    Args:
        text: The text.
        layer_names: The names of the network's layers and parameters.
        inputs: The names of the network's inputs. Default: x.
        constants: The names of the constants that the config defines for the program.
        functions: The names of the functions that the config defines for the program.
        is_bounded: Whether a long text is an error. False for a text that exp generated with one line per layer.
            Default: true.

    Raises:
        ProgramError: The text is not a valid program.
    """
    names = Names(
        layers=frozenset(layer_names),
        inputs=tuple(inputs),
        constants=frozenset(constants),
        functions=frozenset(functions),
    )
    return _parse(text, names, is_bounded)


def require_layers_used(programs: Sequence[Program]) -> None:
    """Raise ProgramError for a layer that no program of the network uses. The variable `layers` uses all layers.

    Args:
        programs: The programs of the network. The error has a position in the first program.
    """
    first, loaded = programs[0], frozenset().union(*(program.loaded for program in programs))
    unused = ", ".join(f"`{name}`" for name in sorted(first.names.layers - loaded))
    if unused and ("layers" not in loaded or "layers" in first.names.layers):
        raise first.error(first.tree.body[0], f"the program never uses {unused}", "a use of every layer in `layers`")


@functools.lru_cache(maxsize=256)  # copies of a repeated block share one tree, which never changes
def _parse(text: str, names: Names, is_bounded: bool) -> Program:
    source = Source(text)
    if is_bounded and len(text) > MAX_CHARACTERS:
        raise source.error(1, 0, f"the program has {len(text)} characters", f"at most {MAX_CHARACTERS}; {_SIZE_FIX}")
    tree = _read(source)
    if is_bounded:
        _require_shallow(tree, source)
    check(tree, names, source.error_at)
    return Program(text=text, names=names, tree=tree, source=source)


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


def _require_shallow(tree: ast.Module, source: Source) -> None:
    """Raise ProgramError if a tree is nested more than MAX_DEPTH levels deep.

    A recursive function would overflow Python's stack on a deeper tree.
    """
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise source.error_at(level[-1], "the program is nested too deeply", f"at most {MAX_DEPTH} levels")
