"""Stand-ins: objects that replace layers, functions and tensors while a forward program is tried before the run.

Stand-ins support the operations of a program through Python's special methods, and report forbidden operations to a
trial. The names of their private attributes begin with an underscore, because a program cannot contain such names.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor, nn

from exp.models.syntax import INSTEAD_OF_WRITING, nearest_or
from exp.models.vocabulary import ATTRIBUTES, LIMIT_ATTRIBUTES, METHODS, PARAMETER_ATTRIBUTES, RESULTS

COMPUTABLE = "what a forward program can compute before the run"

_SEQUENCES = (nn.ModuleList, nn.ParameterList, nn.Sequential)
_MAPPINGS = (nn.ModuleDict, nn.ParameterDict)
_NOT_CALLABLE = (nn.ModuleList, nn.ParameterList, nn.ModuleDict, nn.ParameterDict)
_UNPACK = dis.opmap["UNPACK_SEQUENCE"]


class Undecided(Exception):
    """The condition of an assertion depends on a value that is known only in a run."""


class Reporter(Protocol):
    """The object to which stand-ins report operations."""

    is_asserting: bool

    def refuse(self, message: str, expected: str = COMPUTABLE) -> Unknown:
        """Record an error at the current position in the program. Return a substitute for the result."""

    def compute(self, *operands: object, **named: object) -> Unknown:
        """Check the operands of an operation on tensors, or the inputs of a layer. Return a stand-in for the result."""


class Unknown:
    """Stand-in for a value that is known only in a run: a tensor, a size, or the output of a layer."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def __getattr__(self, name: str) -> object:
        if name in METHODS:
            return self._reporter.compute
        if name in ATTRIBUTES | RESULTS:
            return self
        if name.startswith("_"):  # of Python
            raise AttributeError(name)
        return self._reporter.refuse(f"this value has no attribute `.{name}`", "a tensor or a layer before it")

    def __bool__(self) -> bool:
        if self._reporter.is_asserting:
            raise Undecided
        message = "a condition that is known only while the network runs"
        self._reporter.refuse(message, "a constant, or where(condition, a, b) on tensors; ~ instead of not")
        return True

    def __iter__(self) -> Iterator[object]:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        code, place = frame.f_back.f_code.co_code, frame.f_back.f_lasti
        if code[place] == _UNPACK:  # `a, b = x`: the number of elements is known only in a run
            return iter([self] * code[place + 1])
        message = "a loop over a tensor, whose length is known only while the network runs"
        self._reporter.refuse(message, "names, `a, b = x.chunk(2, 1)`, or an operation on the whole")
        return iter(())

    def __getitem__(self, index: object) -> Unknown:
        return self._reporter.compute(index)

    def __setitem__(self, index: object, value: object) -> None:
        self._reporter.refuse("an assignment into this tensor", INSTEAD_OF_WRITING)

    def __len__(self) -> int:
        self._reporter.refuse("`len` of a tensor; `x.shape[0]` is its length")
        return 0

    def __index__(self) -> int:
        self._reporter.refuse("an index that is known only while the network runs", "an integer")
        return 0

    def _same(self, *_: object) -> Unknown:
        return self

    __neg__ = __pos__ = __invert__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same
    __eq__ = __ne__ = _same  # type: ignore[assignment]  # tensors return a tensor
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Limits:
    """Stand-in for the result of finfo and iinfo, which has numbers as attributes."""

    _reporter: Reporter

    def __getattr__(self, name: str) -> Unknown:
        if name in LIMIT_ATTRIBUTES:
            return self._reporter.compute()
        return self._reporter.refuse(f"this value has no attribute `.{name}`", "a limit, such as .min")


@dataclass(frozen=True, eq=False)
class Listed:
    """A listed function, with its name in the program and its module."""

    name: str
    home: str


@dataclass(frozen=True, eq=False)
class Layer:
    """Stand-in for a layer of the network. `_path` is the layer's name in the state dict, such as `linears.0`."""

    _path: str
    _module: nn.Module
    _reporter: Reporter

    def __call__(self, *inputs: object, **named: object) -> object:
        if isinstance(self._module, _NOT_CALLABLE):
            return self._refuse("is called", "a layer or a listed function before the parenthesis")
        return self._reporter.compute(*inputs, **named)

    def __getattr__(self, name: str) -> object:
        """Return the stand-in of a sublayer or tensor, or a method of a dict of layers."""
        if name.startswith("_"):  # of Python
            raise AttributeError(name)
        if isinstance(self._module, _MAPPINGS) and name in ("items", "keys", "values"):
            method: Callable[..., object] = getattr(self._entries, name)
            return method
        held = getattr(self._module, name, self)
        if isinstance(held, nn.Module | Tensor) or (held is None and name in PARAMETER_ATTRIBUTES):
            return stand_in(f"{self._path}.{name}", held, self._reporter)
        return self._refuse(f"has no layer or parameter `{name}`")

    def __bool__(self) -> bool:
        self._refuse("is a condition", "a constant")
        return True

    def __len__(self) -> int:
        return len(self._entries or self._elements)

    def __iter__(self) -> Iterator[object]:
        """Return an iterator over the layers of a list, or the keys of a dict."""
        return iter(self._entries or self._elements)

    def __getitem__(self, index: object) -> object:
        """Return the stand-in of an element, such as `linears[0]`, `linears[1:]` or `heads["main"]`."""
        if isinstance(self._module, _MAPPINGS):
            if isinstance(index, str) and index in self._entries:
                return self._entries[index]
            expected = nearest_or(str(index), self._entries, otherwise=f"one of {', '.join(self._entries)}")
            return self._refuse(f"has no {index!r}; it has {expected}")
        if not isinstance(self._module, _SEQUENCES):
            return self._refuse("is indexed", "a list or a dict of layers")
        if not isinstance(index, int | slice):
            return self._refuse("is indexed by something that is not an integer")
        if isinstance(index, int) and not -len(self._elements) <= index < len(self._elements):
            return self._refuse(f"has {len(self._elements)} elements, and no number {index}")
        return self._elements[index]

    def _refuse(self, message: str, expected: str = COMPUTABLE) -> Unknown:
        return self._reporter.refuse(f"`{self._path}` ({type(self._module).__name__}) {message}", expected)

    @cached_property  # a program may read it in each of a thousand lines
    def _elements(self) -> list[object]:
        """The stand-ins of the elements of a list."""
        if not isinstance(self._module, _SEQUENCES):
            return []
        held = enumerate(self._module)
        return [stand_in(f"{self._path}.{index}", one, self._reporter) for index, one in held]

    @cached_property
    def _entries(self) -> dict[str, object]:
        """The stand-ins of the entries of a dict, by name."""
        held = self._module.items() if isinstance(self._module, _MAPPINGS) else ()
        return {name: stand_in(f"{self._path}.{name}", one, self._reporter) for name, one in held}


def stand_in(path: str, held: object, reporter: Reporter) -> object:
    """Return the stand-in of a layer or a parameter; None if the value is None."""
    if isinstance(held, nn.Module):
        return Layer(path, held, reporter)
    return None if held is None else Unknown(reporter)
