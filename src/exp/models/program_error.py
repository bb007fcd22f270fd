"""The one error of forward programs, which knows its line and column, and what it expects instead of a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from exp.errors import ExpError
from exp.spelling import nearest


class ProgramError(ExpError):
    """A fault in a forward program. `line` and `column` count from 1, inside the program's own text.

    place: the key of the program below the model's. key: the whole config key, where whoever built the model knows it.
    """

    exit_status = 2

    def __init__(self, *, line: int, column: int, message: str, expected: str, source_line: str | None = None) -> None:
        self.line, self.column = line, column
        self.message, self.expected = message, expected
        self.source_line = source_line
        self.place = "forward"
        self.key: str | None = None
        text = f"forward program, line {line}, column {column}: {message}; expected {expected}"
        if source_line is not None:
            text += f"\n    {source_line}\n    {' ' * (column - 1)}^"
        super().__init__(text)

    def __reduce__(self) -> tuple[Callable[..., ProgramError], tuple[int | str | None, ...]]:
        return _rebuild, (self.line, self.column, self.message, self.expected, self.source_line)


def _rebuild(line: int, column: int, message: str, expected: str, source_line: str | None) -> ProgramError:
    return ProgramError(line=line, column=column, message=message, expected=expected, source_line=source_line)


def nearest_or(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """What to expect instead of `name`: the nearest known spelling, or `otherwise` where none is near."""
    found = nearest(name, known)
    return f"`{found[0]}`" if found else otherwise
