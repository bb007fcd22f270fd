"""Trial of a forward program. The program runs on stand-ins for layers and tensors before it runs on tensors.

The stand-ins forbid conditions on tensors, writes into tensors, and attributes of layers except sublayers and
parameters. The attributes of a stand-in begin with an underscore, because a program cannot contain such names.

Guards are functions that limit computations with constants. The trial also limits the number of steps. Conditions
depend only on constants and on `training`, so a trial in each mode covers every path of a run.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FrameType, FunctionType, SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from exp.models import vocabulary
from exp.models.program import Program
from exp.models.syntax import INSTEAD_OF_WRITING, ProgramError, combine, nearest_or
from exp.models.vocabulary import ATTRIBUTES, METHODS, PARAMETER_ATTRIBUTES, RESULTS

# The maximum number of steps. A step is a Python instruction, or an element that an operation visits.
MAX_STEPS = 400_000
# The number of steps that each error adds, because recording an error takes 0.2 ms and a loop may repeat the error.
STEPS_OF_A_REFUSAL = 2_000
MAX_ARGUMENT_DEPTH = 20
MAX_LENGTH = 10_000
MAX_INTEGER = 2**63
# The maximum number of digits in a call of `round`. A float has 17 digits.
MAX_DIGITS = 400

# The prefix of the guards' names. A program cannot contain these names.
GUARDS = "guards"

Scalar = int | float | str | None
# Binary operators by their names in `ast`.
OPERATORS: dict[str, Callable[..., object]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv,
    "FloorDiv": operator.floordiv, "Mod": operator.mod, "Pow": operator.pow, "BitAnd": operator.and_,
    "BitOr": operator.or_, "BitXor": operator.xor, "LShift": operator.lshift, "RShift": operator.rshift,
}  # fmt: skip
KNOWN = "a value that is known before the run, such as a constant"

_SEQUENCES = (nn.ModuleList, nn.ParameterList, nn.Sequential)
_MAPPINGS = (nn.ModuleDict, nn.ParameterDict)
_NOT_CALLABLE = (nn.ModuleList, nn.ParameterList, nn.ModuleDict, nn.ParameterDict)
_UNPACK = dis.opmap["UNPACK_SEQUENCE"]
_CONVERSIONS = frozenset({"bool", "float", "int", "str"})
_OF_NUMBERS = frozenset({"abs", "max", "min", "range", "round"})


class Refusal(ValueError):
    """An exception for a forbidden operation on constants, such as a power with a huge result."""


class Stopped(Exception):
    """An exception that ends a trial with too many steps."""


def try_out(
    program: Program,
    code: CodeType,
    functions: Mapping[str, object],
    held: Mapping[str, nn.Module | Tensor],
    mode: str,
) -> None:
    """Run a guarded program in training mode and in evaluation mode.

    Args:
        program: The program.
        code: The compiled guarded function, with the parameters `self` and the inputs.
        functions: The functions and numbers that the program uses, by name.
        held: The layers and parameters of the network, by name.
        mode: The name of the function that returns `training`.

    Raises:
        ProgramError: The program has an error. The exception has the line and the column of the error.
    """
    found: dict[tuple[int, int], ProgramError] = {}
    for training in (True, False) if "training" in program.loaded else (True,):
        trial = Trial(program, code, found)
        stand_ins = {name: stand_in(name, one, trial) for name, one in held.items()}
        network = SimpleNamespace(_modules=stand_ins, **stand_ins)
        listed = {
            name: partial(trial.call_listed, one) if isinstance(one, Listed) else one for name, one in functions.items()
        }
        guards = {f"{GUARDS}.{name}": getattr(trial, name) for name in Trial.GUARDS}
        # The namespace has no builtins, so that a name without a value is an error.
        namespace = {"__builtins__": {}, **listed, **guards, mode: lambda _, training=training: training}
        before = sys.gettrace()
        sys.settrace(trial.trace)
        try:
            returned = FunctionType(code, namespace)(network, *(trial.unknown for _ in program.names.inputs))
        except Stopped:
            break
        except Exception as error:
            if not found:  # if errors are recorded, they are the cause of the exception
                place = _place(code, error.__traceback__)
                found[place[:2]] = _error_at(program, error, place)
        else:
            if returned is None and not found:
                last = program.tree.body[-1]
                raise program.error(last, "the program ends without a return", "a last line such as `return x`")
        finally:
            sys.settrace(before)
    if found:
        raise combine(found.values()) from None


class Trial:
    """A run of a program on stand-ins, which counts steps and records errors by position."""

    # The methods that the compiled program calls.
    GUARDS = ("attribute", "binary", "key", "operand", "result")

    def __init__(self, program: Program, code: CodeType, found: dict[tuple[int, int], ProgramError]) -> None:
        self.program, self.code, self.found = program, code, found
        self.unknown = Unknown(self)
        self.steps = 0

    # -- steps and errors --

    def count(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            self._keep(f"the program takes over {MAX_STEPS:,} steps", "loops with fewer iterations")
            raise Stopped

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Count one step for each Python instruction of the program.

        The method is a trace function for sys.settrace.
        """
        if frame.f_code.co_filename != self.code.co_filename:
            return None
        frame.f_trace_opcodes = True
        self.count()
        return self.trace

    def refuse(self, message: str, expected: str = KNOWN) -> Unknown:
        self._keep(message, expected)
        self.count(STEPS_OF_A_REFUSAL)
        return self.unknown

    def _keep(self, message: str, expected: str) -> None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self.code.co_filename:
            frame = frame.f_back
        assert frame is not None
        line, column, _ = _position(frame.f_code, frame.f_lasti)
        self.found.setdefault((line, column), self.program.source.error(line, column, message, expected))

    # -- guards --

    def operand(self, value: object, depth: int = 0) -> object:
        """Return a value. Record an error if operations on tensors do not accept the value.

        Args:
            value: The value.
            depth: Number of lists and dicts around the value. Default: 0.
        """
        self.count()
        if depth > MAX_ARGUMENT_DEPTH:
            return self.refuse("a list or dict that is nested too deeply", f"at most {MAX_ARGUMENT_DEPTH} levels")
        if isinstance(value, Layer):
            return self.refuse(f"`{value._path}` is a layer ({type(value._module).__name__}), not a tensor", "a call")
        if callable(value) and not isinstance(value, Unknown):
            return self.refuse("a function or a method is used as a value", "a call of the function or method")
        for part in _parts(value):
            self.operand(part, depth + 1)
        return value

    def key(self, value: object) -> object:
        """Return a dict key. Record an error if the key is not a constant."""
        return value if isinstance(value, Scalar) else self.refuse("a dict key that is not a constant", "a string")

    def attribute(self, value: object, name: str) -> object:
        """Return an attribute of a layer or tensor, or a method of a list or dict.

        Record an error for any other attribute.
        """
        is_method = isinstance(value, list | dict) and name in vocabulary.CONTAINER_METHODS and hasattr(value, name)
        if isinstance(value, Layer | Unknown) or is_method:
            return getattr(value, name)
        return self.refuse(f"`.{name}` of a {type(value).__name__}", "an attribute of a tensor or a layer")

    def binary(self, kind: str, left: object, right: object) -> object:
        self.count(1 + (_size(left) + _size(right)) // 100)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return self.compute(left, right)
        return _apply_bounded(kind, left, right)

    def result(self, value: object = None) -> object:
        """Return the output of the program. Record an error if the output contains no tensor."""
        self.operand(value)
        if not _holds_unknown(value):
            self.refuse("the returned value contains no tensor", "a tensor, or a tuple or dict of tensors")
        return value

    # -- operations and functions --

    def compute(self, *operands: object, **named: object) -> Unknown:
        self.operand([operands, named])
        return self.unknown

    def call_listed(self, listed: Listed, /, *arguments: Any, **named: object) -> object:
        """Call a function of models/vocabulary.py with constants, and return the result.

        If an argument is known only during a run, return a stand-in for the result.
        """
        name, home = listed.name, listed.home
        is_of_tensor = bool(arguments) and isinstance(arguments[0], Unknown)
        if home == "builtins" and not (is_of_tensor and name in vocabulary.TORCH_FUNCTIONS):
            return self._builtin(name, arguments, named)
        if home == "math" and not any(isinstance(one, Unknown) for one in arguments):
            return getattr(math, name)(*arguments, **named)
        given = _arguments_by_name(listed, arguments, named)
        written = _written_argument(name, given)
        if written is not None:
            message = f"`{written}` of `{name}` writes into a tensor, to which other variables may refer"
            return self.refuse(message, f"a call without `{written}`, or a layer in `layers`")
        if home == "torch.nn.functional" and name in vocabulary.NEEDS_TRAINING and "training" not in given:
            message = f"`{name}` without `training` would drop values in evaluation, too"
            return self.refuse(message, f"`{name}(x, p, training=training)`, or a layer in `layers`")
        return self.compute(*arguments, **named)

    def _builtin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        """Return the result of a Python function. A list is returned instead of an iterator."""
        self.count(1 + sum(map(_size, args)) // 10)
        if name == "sum":
            start, values = (args[1] if len(args) > 1 else 0), args[0]
            for one in values:
                start = self.binary("Add", start, one)
            return start
        if name in ("max", "min") and len(args) == 1:
            args = tuple(args[0])
        if name in _CONVERSIONS | _OF_NUMBERS:
            if any(isinstance(one, Unknown) for one in args):
                return self.refuse(f"`{name}` of a value that is known only while the network runs")
            kinds = Scalar if name in _CONVERSIONS else int | float
            if kwargs or not all(isinstance(one, kinds) for one in args):
                raise Refusal(f"`{name}` with these arguments")
        if name == "range":
            _bound_length(len(range(*args)))
            self.count(len(range(*args)) // 10)
        if name == "round" and any(isinstance(one, int) and abs(one) > MAX_DIGITS for one in args[1:]):
            raise Refusal(f"`round` to {args[1]} digits")
        if name == "dict" and args:
            raise Refusal("`dict` with positional arguments")
        if name == "reversed":
            return list(args[0])[::-1]
        found = getattr(builtins, name)(*args, **kwargs)
        return list(found) if name in ("enumerate", "range", "zip") else found


def _apply_bounded(kind: str, left: object, right: object) -> object:
    """Return the result of a binary operator on two constants.

    The size of the result is limited, because Python's integers and sequences have no maximum size. Examples are
    `9 ** 9 ** 9` and `[0] * 10 ** 10`.

    Raises:
        Refusal: The result would be too large.
    """
    if isinstance(left, int | float) and isinstance(right, int | float) and kind != "MatMult":
        if kind == "Pow" and isinstance(left, int) and right > 1 and abs(left).bit_length() * right > 64 * 2:
            raise Refusal("a power of more than 64 bits")
        if kind in ("LShift", "RShift") and not 0 <= right <= 64:
            raise Refusal("a shift by more than 64 bits")
        found = OPERATORS[kind](left, right)
        if isinstance(found, complex) or (isinstance(found, int) and abs(found) >= MAX_INTEGER):
            raise Refusal("a complex number" if isinstance(found, complex) else "an integer of more than 64 bits")
        return found
    if kind == "Add" and type(left) is type(right) and isinstance(left, str | list | tuple):
        _bound_length(len(left) + _size(right))
        return OPERATORS[kind](left, right)
    if kind == "Mult" and isinstance(left, str | list | tuple) and isinstance(right, int):
        _bound_length(len(left) * right)
        return left * right
    raise Refusal(f"{kind} of {type(left).__name__} and {type(right).__name__}")


def _bound_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise Refusal(f"a sequence of over {MAX_LENGTH} elements")


def _arguments_by_name(called: Listed, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Return the arguments of a call by parameter name.

    Positional arguments are included only if the function is in torch.nn.functional and written in Python.
    """
    function = getattr(torch.nn.functional, called.name) if called.home == "torch.nn.functional" else None
    if not isinstance(function, FunctionType):
        return kwargs
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except TypeError:
        return kwargs  # torch's error is reported when the shapes are checked


def _written_argument(name: str, given: Mapping[str, object]) -> str | None:
    """Return the name of the argument into which a function of torch.nn.functional writes.

    Return None if the function does not write into an argument.
    """
    if given.get("inplace", False) is not False:
        return "inplace"
    if name not in vocabulary.WRITES:
        return None
    argument, switch, default = vocabulary.WRITES[name]
    is_on = switch is None or given.get(switch, default) is not False
    return argument if is_on and given.get(argument) is not None else None


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    return (value.start, value.stop, value.step) if isinstance(value, slice) else ()


def _holds_unknown(value: object) -> bool:
    return isinstance(value, Unknown) or any(map(_holds_unknown, _parts(value)))


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _error_at(program: Program, error: Exception, place: tuple[int, int, int]) -> ProgramError:
    """Return an error at a position in the program for an exception of the trial."""
    line, column, end = place
    message, expected = str(error), "an operation that a forward program can compute before the run"
    if isinstance(error, NameError):
        name = program.source.lines[line - 1].encode("utf-8", "replace")[column:end].decode("utf-8", "ignore")
        message, expected = f"`{name}` has no value yet", "an assignment to this variable on an earlier line"
    elif isinstance(error, KeyError):
        message = f"no key {message}"
    return program.source.error(line, column, message, expected)


def _place(code: CodeType, traceback: TracebackType | None) -> tuple[int, int, int]:
    """Return the position at which a program raised an exception.

    Returns:
        The line, and the first and last column in bytes.
    """
    place = (1, 0, 0)
    while traceback is not None:
        running = traceback.tb_frame.f_code
        if running.co_filename == code.co_filename:
            place = _position(running, traceback.tb_lasti)
        traceback = traceback.tb_next
    return place


def _position(code: CodeType, instruction: int) -> tuple[int, int, int]:
    """Return the position of a Python instruction in the program.

    Returns:
        The line, and the first and last column in bytes.
    """
    line, _, column, end = list(code.co_positions())[instruction // 2]
    return line or 1, column or 0, end or 0


# -- stand-ins for layers, functions and tensors --


class Unknown:
    """Stand-in for a value that is known only during a run: a tensor, a size, or the output of a layer."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def __getattr__(self, name: str) -> object:
        if name in METHODS:
            return self._trial.compute
        if name in ATTRIBUTES | RESULTS:
            return self
        if name.startswith("_"):  # of Python
            raise AttributeError(name)
        expected = nearest_or(name, METHODS | ATTRIBUTES, otherwise="a method or attribute of docs/models.md")
        return self._trial.refuse(f"`.{name}` is not an allowed method or attribute of a tensor", expected)

    def __bool__(self) -> bool:
        message = "a condition that is known only while the network runs"
        self._trial.refuse(message, "a constant; for tensors, where(condition, a, b), and ~ instead of not")
        return True

    def __iter__(self) -> Iterator[object]:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        code, place = frame.f_back.f_code.co_code, frame.f_back.f_lasti
        if code[place] == _UNPACK:  # `a, b = x`: the number of elements is known only in a run
            return iter([self] * code[place + 1])
        message = "a loop over a tensor, whose length is known only while the network runs"
        self._trial.refuse(message, "unpacking, such as `a, b = x.chunk(2, 1)`, or an operation on the whole tensor")
        return iter(())

    def __call__(self, *_: object, **__: object) -> Unknown:
        return self._trial.refuse("a tensor is called", "a call of a layer, a function or a method")

    def __getitem__(self, index: object) -> Unknown:
        return self._trial.compute(index)

    def __setitem__(self, index: object, value: object) -> None:
        self._trial.refuse("an assignment into this tensor", INSTEAD_OF_WRITING)

    def __len__(self) -> int:
        self._trial.refuse("`len` of a tensor", "`x.shape[0]`, the length of the first axis")
        return 0

    def __index__(self) -> int:
        self._trial.refuse("an index that is known only while the network runs", "a constant integer")
        return 0

    def _same(self, *_: object) -> Unknown:
        return self

    __neg__ = __pos__ = __invert__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same
    __eq__ = __ne__ = _same  # type: ignore[assignment]  # tensors return a tensor
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Listed:
    """A function of models/vocabulary.py or of the config.

    Attributes:
        name: The name in the program.
        home: The name of the function's module.
    """

    name: str
    home: str


@dataclass(frozen=True, eq=False)
class Layer:
    """Stand-in for a layer of the network.

    Attributes:
        _path: The layer's name in the state dict, such as `linears.0`.
        _module: The layer.
        _trial: The trial that records errors.
    """

    _path: str
    _module: nn.Module
    _trial: Trial

    def __call__(self, *inputs: object, **named: object) -> object:
        if isinstance(self._module, _NOT_CALLABLE):
            return self._refuse("is called", "a call of one of its layers: lists and dicts of layers cannot be called")
        return self._trial.compute(*inputs, **named)

    def __getattr__(self, name: str) -> object:
        """Return the stand-in of a sublayer or tensor, or a method of a dict of layers.

        Record an error for other attributes.
        """
        if name.startswith("_"):  # of Python
            raise AttributeError(name)
        if isinstance(self._module, _MAPPINGS) and name in ("items", "keys", "values"):
            method: Callable[..., object] = getattr(self._entries, name)
            return method
        held = getattr(self._module, name, self)
        if isinstance(held, nn.Module | Tensor) or (held is None and name in PARAMETER_ATTRIBUTES):
            return stand_in(f"{self._path}.{name}", held, self._trial)
        return self._refuse(f"has no layer or parameter `{name}`", "the name of a layer or parameter inside")

    def __bool__(self) -> bool:
        self._refuse("is used as a condition", "a condition on constants")
        return True

    def __len__(self) -> int:
        return len(self._entries or self._elements)

    def __iter__(self) -> Iterator[object]:
        """Return an iterator over the layers of a list, or the keys of a dict."""
        return iter(self._entries or self._elements)

    def __getitem__(self, index: object) -> object:
        """Return the stand-in of an element or of a slice, such as `linears[0]`, `linears[1:]` or `heads["main"]`."""
        if isinstance(self._module, _MAPPINGS):
            if isinstance(index, str) and index in self._entries:
                return self._entries[index]
            expected = nearest_or(str(index), self._entries, otherwise=f"one of {', '.join(self._entries)}")
            return self._refuse(f"has no entry {index!r}", expected)
        if not isinstance(self._module, _SEQUENCES):
            return self._refuse("is indexed", "a list or a dict of layers")
        if not isinstance(index, int | slice):
            return self._refuse("is indexed by something that is not an integer", "a constant integer")
        if isinstance(index, int) and not -len(self._elements) <= index < len(self._elements):
            count = len(self._elements)
            return self._refuse(f"has {count} elements, and no element {index}", f"an index from 0 to {count - 1}")
        return self._elements[index]

    def _refuse(self, message: str, expected: str) -> Unknown:
        return self._trial.refuse(f"`{self._path}` ({type(self._module).__name__}) {message}", expected)

    @cached_property  # a program may read the elements in each of a thousand lines
    def _elements(self) -> list[object]:
        """The stand-ins of the elements of a list of layers."""
        if not isinstance(self._module, _SEQUENCES):
            return []
        held = enumerate(self._module)
        return [stand_in(f"{self._path}.{index}", one, self._trial) for index, one in held]

    @cached_property
    def _entries(self) -> dict[str, object]:
        """The stand-ins of the entries of a dict of layers, by name."""
        held = self._module.items() if isinstance(self._module, _MAPPINGS) else ()
        return {name: stand_in(f"{self._path}.{name}", one, self._trial) for name, one in held}


def stand_in(path: str, held: object, trial: Trial) -> object:
    """Return the stand-in of a layer or a parameter. Return None if `held` is None, such as a missing bias."""
    if isinstance(held, nn.Module):
        return Layer(path, held, trial)
    return None if held is None else Unknown(trial)
