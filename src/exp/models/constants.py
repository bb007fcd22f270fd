"""Arithmetic on what is known before the run, bounded so that no program can eat the machine at trace time.

Python's integers and sequences grow without limit (`9 ** 9 ** 9`, `[0] * 10 ** 10`); here integers stay within 64 bits
and sequences within MAX_LENGTH. The functions raise ValueError with a message for the program's author.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

MAX_LENGTH = 10_000
MAX_INTEGER = 2**63

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

Scalar = int | float | str | None


def is_scalar(value: Any) -> bool:
    return isinstance(value, Scalar)


def binary(kind: type[ast.operator], left: Any, right: Any) -> Any:
    """`left kind right` of two constants: numbers, strings, or sequences that are joined or repeated."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        return _numbers(kind, left, right)
    if kind is ast.Add and type(left) is type(right) and isinstance(left, str | list | tuple):
        _check_length(len(left) + len(right))
        return left + right
    if kind is ast.Mult and isinstance(left, str | list | tuple) and isinstance(right, int):
        _check_length(len(left) * max(right, 0))
        return left * right
    raise ValueError(f"{kind.__name__} of {type(left).__name__} and {type(right).__name__}")


def unary(kind: type[ast.unaryop], value: Any) -> Any:
    if kind is ast.Not:
        return not truth(value)
    if not isinstance(value, int | float):
        raise ValueError(f"{kind.__name__} of {type(value).__name__}")
    if kind is ast.Invert and not isinstance(value, int):
        raise ValueError("`~` of a float")
    if kind is ast.Invert:
        return ~int(value)
    return _checked(OPERATORS[kind](value))


def compare(kind: type[ast.cmpop], left: Any, right: Any) -> bool:
    """A comparison of two constants. Sequences compare by their scalars only, which bounds the work."""
    if kind in (ast.In, ast.NotIn):
        return _contains(right, left) == (kind is ast.In)
    if kind in (ast.Is, ast.IsNot):
        if left is not None and right is not None:
            raise ValueError("`is` of anything but None")
        return (left is right) == (kind is ast.Is)
    for side in (left, right):
        if not is_scalar(side) and not (isinstance(side, list | tuple) and all(is_scalar(item) for item in side)):
            raise ValueError(f"a comparison of {type(side).__name__}")
    try:
        return OPERATORS[kind](left, right)
    except TypeError as fault:
        raise ValueError(str(fault)) from None


def part(name: str, sequence: list | tuple, index: Any) -> Any:
    """`sequence[index]` by an integer or a slice of integers; `name` is what messages call the sequence."""
    bounds = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    allowed = int | None if isinstance(index, slice) else int
    if not all(isinstance(bound, allowed) for bound in bounds):
        raise ValueError(f"{name} is indexed by something that is not an integer")
    try:
        return sequence[index]
    except IndexError:
        raise ValueError(f"{name} has {len(sequence)} elements, and no number {index}") from None


def truth(value: Any) -> bool:
    """Whether a constant counts as true."""
    if not isinstance(value, int | float | str | list | tuple | dict | None):
        raise ValueError(f"a condition on {type(value).__name__}")
    return bool(value)


def _contains(container: Any, item: Any) -> bool:
    if isinstance(container, str) and isinstance(item, str):
        return item in container
    if not isinstance(container, list | tuple | dict) or not is_scalar(item):
        raise ValueError(f"`in` of {type(item).__name__} and {type(container).__name__}")
    return any(is_scalar(entry) and entry == item for entry in container)


def _numbers(kind: type[ast.operator], left: float, right: float) -> float:
    if kind is ast.MatMult:
        raise ValueError("`@` of two numbers")
    if kind is ast.Pow and isinstance(left, int) and right > 1 and abs(left).bit_length() * right > 64 * 2:
        raise ValueError("a power of more than 64 bits")
    if kind in (ast.LShift, ast.RShift) and not 0 <= right <= 64:
        raise ValueError("a shift by more than 64 bits")
    try:
        return _checked(OPERATORS[kind](left, right))
    except (ArithmeticError, TypeError) as fault:
        raise ValueError(str(fault)) from None


def _checked(value: Any) -> float:
    if isinstance(value, complex):
        raise ValueError("a complex number")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise ValueError("an integer of more than 64 bits")
    return value


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise ValueError(f"a sequence of over {MAX_LENGTH} elements")
