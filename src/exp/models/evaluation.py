"""What a call in a forward program may ask of the evaluator that meets it (models/expressions.py)."""

from __future__ import annotations

import ast
from collections.abc import Set
from typing import Any, Protocol

from exp.models.program import Program
from exp.models.recorder import Recorder


class Evaluation(Protocol):
    """One program being evaluated. A call's arguments go back to it, for they are expressions themselves.

    variables: every name that the program can have a value for.
    """

    program: Program
    recorder: Recorder
    variables: Set[str]

    def evaluate(self, node: ast.expr) -> Any:
        """The value of an expression. Raises: ProgramError."""

    def sequence(self, elements: list[ast.expr]) -> list:
        """The values of a list's or a call's elements, starred ones spread out."""

    def iterate(self, value: Any, node: ast.AST) -> list:
        """The elements that a loop runs through. Raises: ProgramError where they are not known before the run."""

    def binary(self, op: ast.operator, left: Any, right: Any, node: ast.AST) -> Any:
        """An operation on two values, computed or recorded."""
