"""Arithmetic on what is known before the run, bounded so that no program can eat the machine.

Python's integers and sequences grow without limit (`9 ** 9 ** 9`, `[0] * 10 ** 10`); here integers stay within 64 bits
and sequences within MAX_LENGTH. The functions raise ValueError with a message for the program's author.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

MAX_LENGTH = 10_000
MAX_INTEGER = 2**63

Scalar = int | float | str | None
T = TypeVar("T")

# By the names that Python's syntax trees give them.
OPERATORS: dict[str, Callable[..., object]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "MatMult": operator.matmul,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "USub": operator.neg,
    "UAdd": operator.pos,
    "Invert": operator.invert,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}


def binary(kind: str, left: object, right: object) -> object:
    """`left kind right` of two constants: numbers, strings, or sequences that are joined or repeated."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        return _numbers(kind, left, right)
    if kind == "Add":
        for sequence in (str, list, tuple):
            if isinstance(left, sequence) and isinstance(right, sequence):
                check_length(len(left) + len(right))
                return operator.add(left, right)
    if kind == "Mult" and isinstance(left, str | list | tuple) and isinstance(right, int):
        check_length(len(left) * max(right, 0))
        return left * right
    raise ValueError(f"{kind} of {type(left).__name__} and {type(right).__name__}")


def unary(kind: str, value: object) -> object:
    """`-value`, `+value` or `~value` of a number."""
    if not isinstance(value, int | float):
        raise ValueError(f"{kind} of {type(value).__name__}")
    if kind == "Invert":
        if not isinstance(value, int):
            raise ValueError("`~` of a float")
        return ~int(value)
    return _checked(OPERATORS[kind](value))


def compare(kind: str, left: object, right: object) -> bool:
    """A comparison of two constants. Sequences compare by their scalars only, which bounds the work."""
    if kind in ("In", "NotIn"):
        return _contains(right, left) == (kind == "In")
    if kind in ("Is", "IsNot"):
        if left is not None and right is not None:
            raise ValueError("`is` of anything but None")
        return (left is right) == (kind == "Is")
    for side in (left, right):
        is_plain = isinstance(side, list | tuple) and all(isinstance(item, Scalar) for item in side)
        if not isinstance(side, Scalar) and not is_plain:
            raise ValueError(f"a comparison of {type(side).__name__}")
    return bool(_python(OPERATORS[kind], left, right))


def mathematics(function: Callable[..., object], arguments: Sequence[object], name: str) -> object:
    """A function of Python's own on numbers."""
    if not all(isinstance(value, int | float) for value in arguments):
        raise ValueError(f"`{name}` of these arguments")
    return _python(function, *arguments)


def element(name: str, sequence: Sequence[T], index: object) -> T | Sequence[T]:
    """`sequence[index]` by an integer or a slice of integers; `name` is what messages call the sequence."""
    if isinstance(index, slice):
        if all(isinstance(bound, int | None) for bound in (index.start, index.stop, index.step)):
            return _python(sequence.__getitem__, index)
    elif isinstance(index, int):
        try:
            return sequence[index]
        except IndexError:
            raise ValueError(f"{name} has {len(sequence)} elements, and no number {index}") from None
    raise ValueError(f"{name} is indexed by something that is not an integer")


def check_length(length: int) -> None:
    """Refuse a sequence that is too long, before it is made."""
    if length > MAX_LENGTH:
        raise ValueError(f"a sequence of over {MAX_LENGTH} elements")


def _python(function: Callable[..., T], *arguments: object) -> T:
    try:
        return function(*arguments)
    except (ArithmeticError, TypeError) as fault:
        raise ValueError(str(fault)) from None


def _contains(container: object, item: object) -> bool:
    if isinstance(container, str) and isinstance(item, str):
        return item in container
    if not isinstance(container, list | tuple | dict) or not isinstance(item, Scalar):
        raise ValueError(f"`in` of {type(item).__name__} and {type(container).__name__}")
    return any(isinstance(entry, Scalar) and entry == item for entry in container)


def _numbers(kind: str, left: float, right: float) -> object:
    if kind == "MatMult":
        raise ValueError("`@` of two numbers")
    if kind == "Pow" and isinstance(left, int) and right > 1 and abs(left).bit_length() * right > 64 * 2:
        raise ValueError("a power of more than 64 bits")
    if kind in ("LShift", "RShift") and not 0 <= right <= 64:
        raise ValueError("a shift by more than 64 bits")
    return _checked(_python(OPERATORS[kind], left, right))


def _checked(value: object) -> object:
    if isinstance(value, complex):
        raise ValueError("a complex number")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise ValueError("an integer of more than 64 bits")
    return value
