"""The trial of a forward program: it runs once on stand-ins before it may run on tensors.

The compiled program runs with a guard around each operation (models/compiler.py). A guard refuses what no run may do:
conditions on tensors, writing into tensors, attributes of layers other than sublayers and parameters, and values or
loops that grow without limit. Conditions depend on constants and on `training` alone, so one trial in each mode takes
every path that a run can take.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from exp.models import vocabulary
from exp.models.program import Program
from exp.models.stand_ins import COMPUTABLE, LIMITS, UNKNOWN, Function, Layer, Limits, Refusal, stand_in
from exp.models.syntax import INSTEAD_OF_WRITING, ProgramError, joined

MAX_STEPS = 200_000
# A refusal takes 0.2 ms, and a loop may repeat it.
STEPS_OF_A_REFUSAL = 1_000
MAX_ARGUMENT_DEPTH = 20
MAX_LENGTH = 10_000
MAX_INTEGER = 2**63
# Of a number: a float has 17 digits.
MAX_DIGITS = 400

# The names of the guards begin with this, which no program can write.
GUARDS = "guards"

# The nesting of the variables of an assignment: `a, (b, c) = ...` is ("", ("", "")).
Shape = str | tuple["Shape", ...]
Scalar = int | float | str | None
# The operators of two values, by the names of Python's syntax trees.
OPERATORS: dict[str, Callable[..., object]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv,
    "FloorDiv": operator.floordiv, "Mod": operator.mod, "Pow": operator.pow, "BitAnd": operator.and_,
    "BitOr": operator.or_, "BitXor": operator.xor, "LShift": operator.lshift, "RShift": operator.rshift,
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "Is": operator.is_, "IsNot": operator.is_not,
}  # fmt: skip
_COMPARISONS_OF_TENSORS = frozenset({"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"})
_CONVERSIONS = frozenset({"bool", "float", "int", "str"})
_OF_NUMBERS = frozenset({"abs", "max", "min", "round"})


def try_out(
    program: Program,
    code: CodeType,
    functions: Mapping[str, object],
    held: Mapping[str, nn.Module | Tensor],
    mode: str,
) -> None:
    """Run a guarded program in training and in evaluation.

    Args:
        program: The program.
        code: Its guarded form, with the parameters `self` and the inputs.
        functions: The other names of its namespace: functions that it lists, and those of the compiler.
        held: The layers and parameters of the network, by name.
        mode: The name of the function that returns `training`.

    Raises:
        ProgramError: With the line and column of the program.
    """
    found: dict[tuple[int, int], ProgramError] = {}
    stand_ins = {name: stand_in(name, one) for name, one in held.items()}
    network = SimpleNamespace(_modules=stand_ins, **stand_ins)
    for training in (True, False) if "training" in program.names else (True,):
        guards = Guards()
        methods = {
            f"{GUARDS}.{name}": _collect_refusals(getattr(guards, name), guards, program, code, found)
            for name in vars(Guards)
            if not name.startswith("_")
        }
        # Without Python's builtins: a name that has no value must not become one of them.
        namespace = {"__builtins__": {}, **functions, **methods, mode: lambda _, training=training: training}
        try:
            returned = FunctionType(code, namespace)(network, *(UNKNOWN for _ in program.inputs))
        except Exception as error:
            place = _place(code, error.__traceback__)
            if not found:  # else a consequence of a refusal
                found[place[:2]] = _placed(program, error, place)
        else:
            if returned is None and not found:
                last = program.tree.body[-1]
                raise program.error(last, "the program ends without a return", "a last line such as `return x`")
    if found:
        raise joined(found.values()) from None


def _collect_refusals(
    guard: Callable[..., object],
    guards: Guards,
    program: Program,
    code: CodeType,
    found: dict[tuple[int, int], ProgramError],
) -> Callable[..., object]:
    """Return a guard that stores its errors by their place, and then returns a tensor, or a loop without a round."""

    def guarded(*operands: object, **named: object) -> object:
        try:
            return guard(*operands, **named)
        except Exception as error:
            frame = inspect.currentframe()
            while frame is not None and frame.f_code.co_filename != code.co_filename:
                frame = frame.f_back
            assert frame is not None
            place = _position(frame.f_code, frame.f_lasti)
            found.setdefault(place[:2], _placed(program, error, place))
            guards.steps += STEPS_OF_A_REFUSAL
            if guards.steps > MAX_STEPS:
                raise
        return () if guard.__name__ == "rounds" else UNKNOWN

    return guarded


class Guards:
    """The operations of a program during its trial. They raise Refusal, or an exception of Python with a message."""

    def __init__(self) -> None:
        self.steps = 0

    def _count(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            message = f"the program takes over {MAX_STEPS:,} steps"
            raise Refusal(message, "fewer rounds of its loops, or a part of it as a layer")

    def _require_operand(self, value: object, depth: int = 0) -> None:
        """Refuse what cannot be given to an operation on tensors or to a layer."""
        self._count()
        if depth > MAX_ARGUMENT_DEPTH:
            raise Refusal("a value that is nested too deeply", f"at most {MAX_ARGUMENT_DEPTH} levels")
        if isinstance(value, Layer):
            fix = f"a call of it, `{value.path}(x)`" if value.is_callable else "one of its elements"
            raise Refusal(f"`{value.path}` is a layer ({value.kind}), not a tensor", fix)
        if isinstance(value, Function):
            raise Refusal(f"`{value.name}` is used as a value", "a call of it")
        if isinstance(value, Limits):
            raise Refusal("the limits of a dtype are used as a value", "one of them, such as finfo(x.dtype).min")
        for part in _parts(value):
            self._require_operand(part, depth + 1)

    def _sequence(self, value: object) -> Iterable[object]:
        """Return the values that a loop runs through."""
        self._count(1 + _size(value) // 100)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise Refusal("a loop over a single value", "a list, a range or a container of layers")
        return value

    # -- statements --

    def rounds(self, value: object, shape: Shape, statements: int) -> Iterator[object]:
        """Return the elements of a loop, nested as its variables. A round has this number of statements at most."""
        elements = iter(self._sequence(value))
        return (self._round(one, shape, statements) for one in elements)

    def _round(self, value: object, shape: Shape, statements: int) -> object:
        self._count(1 + statements)
        return self.unpack(value, shape)

    def unpack(self, value: object, shape: Shape) -> object:
        """Return a value in as many parts as there are variables. Only a run knows the parts of a tensor."""
        if isinstance(shape, str):
            return value
        self._count(1 + len(shape))
        parts = [UNKNOWN] * len(shape) if value is UNKNOWN else list(self._sequence(value))
        if len(parts) != len(shape):
            raise Refusal(f"{len(parts)} values for {len(shape)} names", f"{len(parts)} names")
        return tuple(self.unpack(part, inner) for part, inner in zip(parts, shape, strict=True))

    def spread(self, value: object) -> Iterable[object]:
        """Return the values of `*value`."""
        found = list(self._sequence(value))
        _bound_length(len(found))
        return found

    def place(self, owner: object, index: object) -> object:
        """Return the index of an assignment to a part of a list or dict."""
        if isinstance(owner, dict):
            return self.key(index)
        if isinstance(owner, list) and isinstance(index, int):
            return index
        expected = INSTEAD_OF_WRITING if owner is UNKNOWN else "a dict, or a list of that length, made here"
        raise Refusal(f"an assignment into this {_kind(owner)}", expected)

    def asserted(self, leaves: Iterable[object], holds: Callable[[], object], text: Callable[[], object]) -> None:
        """Judge an assertion about constants. One about tensors is judged when the network runs."""
        self._require_operand(leaves)
        if _holds_unknown(leaves) or holds():
            return
        message = text()
        raise Refusal("this assertion is false" + (f": {message}" if message else ""), "a true assertion")

    def result(self, value: object = None) -> object:
        """Return the output of the program."""
        self._require_operand(value)
        if not _holds_unknown(value):
            raise Refusal("a return without a tensor", "a tensor, or several in a tuple or dict")
        return value

    # -- expressions --

    def binary(self, kind: str, left: object, right: object) -> object:
        self._count(1 + (_size(left) + _size(right)) // 100)
        if left is not UNKNOWN and right is not UNKNOWN:
            return _bounded(kind, left, right)
        self._require_operand([left, right])
        return UNKNOWN

    def unary(self, kind: str, value: object) -> object:
        if value is UNKNOWN and kind == "Not":
            raise Refusal("`not` of a tensor", "`~`, or logical_not(...)")
        functions: dict[str, Callable[..., object]]
        functions = {"Not": operator.not_, "USub": operator.neg, "UAdd": operator.pos, "Invert": operator.invert}
        return UNKNOWN if value is UNKNOWN else functions[kind](value)

    def compare(self, kinds: tuple[str, ...], *operands: Any) -> object:
        """Return the result of a comparison, or of a chain of them: `1 < width < 3`."""
        is_identity = all(kind in ("Is", "IsNot") for kind in kinds)
        self._require_operand([one for one in operands if not (is_identity and isinstance(one, Layer))])
        for kind, left, right in zip(kinds, operands, operands[1:], strict=False):
            if kind in ("Is", "IsNot") and left is not None and right is not None:
                raise Refusal("`is` of anything but None", "a comparison by ==")
            if _holds_unknown(left) or _holds_unknown(list(right) if isinstance(right, dict) else right):
                if len(kinds) > 1 or kind not in _COMPARISONS_OF_TENSORS:
                    raise Refusal("this comparison of a tensor", "one of == != < <= > >=, joined by &")
                return UNKNOWN
            found = operator.contains(right, left) if kind in ("In", "NotIn") else OPERATORS[kind](left, right)
            if found == (kind == "NotIn"):
                return False
        return True

    def attribute(self, owner: object, name: str) -> object:
        self._count()
        if owner is UNKNOWN and name in vocabulary.ATTRIBUTES | vocabulary.RESULTS:
            return UNKNOWN
        if owner is LIMITS and name in vocabulary.LIMIT_ATTRIBUTES:
            return UNKNOWN
        if isinstance(owner, Layer):
            return owner.attribute(name)
        raise Refusal(f"this value has no attribute `.{name}`", "a tensor or a layer before it")

    def item(self, owner: object, index: Any) -> object:
        self._count(1 + _size(owner) // 100)
        if isinstance(owner, dict):
            return owner[self.key(index)]
        self._require_operand(index)
        if owner is UNKNOWN:
            return UNKNOWN
        if not isinstance(owner, list | tuple | str | Layer):
            raise Refusal(f"a {_kind(owner)} is indexed")
        if index is UNKNOWN:
            raise Refusal(f"a {_kind(owner)} is indexed by something that is not an integer")
        return owner[index]

    def slice(self, *bounds: object) -> object:
        return slice(*bounds)

    def key(self, value: object) -> object:
        if not isinstance(value, Scalar):
            raise Refusal("a key that is not a constant", "a string or an integer")
        return value

    def text(self, *parts: object) -> str:
        """Return an f-string."""
        if not all(isinstance(part, Scalar) for part in parts):
            raise Refusal("an f-string of something that is not a constant")
        _bound_length(sum(map(_size, parts)))
        return "".join(map(str, parts))

    def call(self, called: object, /, *args: object, **kwargs: object) -> object:
        self._count()
        if isinstance(called, Function):
            return self._function(called, args, kwargs)
        if isinstance(called, Layer) and called.is_callable:
            self._require_operand([args, kwargs])
            return UNKNOWN
        name = f"`{called.path}` ({called.kind})" if isinstance(called, Layer) else f"a {_kind(called)}"
        raise Refusal(f"{name} is called", "a layer or a listed function before the parenthesis")

    def method(self, owner: object, name: str, /, *args: object, **kwargs: object) -> object:
        self._count(1 + _size(owner) // 100)
        if owner is UNKNOWN and name in vocabulary.METHODS:
            self._require_operand([args, kwargs])
            return UNKNOWN
        if isinstance(owner, Layer) and (owner.is_callable or name not in vocabulary.CONTAINER_METHODS):
            if name in vocabulary.CONTAINER_METHODS and not (args or kwargs):  # the compiler makes a list of it
                raise Refusal(f"`{owner.path}.{name}` is called without an input", "another name for the layer")
            return self.call(owner.attribute(name), *args, **kwargs)
        if isinstance(owner, list) and name == "append" and len(args) == 1 and not kwargs:
            _bound_length(len(owner) + 1)
            owner.append(args[0])
            return None
        entries = owner.entries if isinstance(owner, Layer) else owner
        if isinstance(entries, dict) and name in ("items", "keys", "values") and not (args or kwargs):
            return list(getattr(entries, name)())
        raise Refusal(f"this value has no method `.{name}` of these arguments", "a tensor before it")

    def _function(self, called: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        name = called.name
        if called.home == "builtins" and not (args[:1] == (UNKNOWN,) and name in vocabulary.TORCH_FUNCTIONS):
            return self._builtin(name, args, kwargs)
        self._require_operand([args, kwargs])
        if called.home == "math" and UNKNOWN not in args:
            return getattr(math, name)(*args, **kwargs)
        given = _named(called, args, kwargs)
        written = _written(name, given)
        if written is not None:
            message = f"`{written}` of `{name}` writes into a tensor that other names may hold"
            raise Refusal(message, "the function's result, or a layer for it")
        if called.home == "torch.nn.functional" and name in vocabulary.NEEDS_TRAINING and "training" not in given:
            message = f"`{name}` is not told whether the network trains, and would drop values in evaluation, too"
            raise Refusal(message, f"`{name}(x, p, training=training)`, or a layer for it")
        return LIMITS if called.home == "torch" and name in vocabulary.LIMITS else UNKNOWN

    def _builtin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        """Return the result of a function of Python, in a list where Python gives an iterator."""
        if name == "len" and UNKNOWN in args:
            raise Refusal("`len` of a tensor; `x.shape[0]` is its length")
        if name in ("max", "min") and len(args) == 1:
            args = tuple(self._sequence(args[0]))
        if name in _CONVERSIONS | _OF_NUMBERS or name == "range":
            if UNKNOWN in args:
                raise Refusal(f"`{name}` of a value that is known only while the network runs")
            kinds = Scalar if name in _CONVERSIONS else int | float
            if kwargs or not all(isinstance(one, kinds) for one in args):
                raise Refusal(f"`{name}` of these arguments")
        if name == "range":
            numbers = range(*args)
            _bound_length(len(numbers))
            self._count(len(numbers) // 100)
            return list(numbers)
        if name == "round" and any(isinstance(one, int) and abs(one) > MAX_DIGITS for one in args[1:]):
            raise Refusal(f"`round` to {args[1]} digits", f"at most {MAX_DIGITS} of them")
        if name == "dict" and args:
            raise Refusal("`dict` of these arguments")
        if name == "sum":
            return self._sum(*args, **kwargs)
        for one in args if name in ("enumerate", "list", "reversed", "tuple", "zip") else ():
            self._count(1 + _size(one) // 10)
        if name == "reversed":
            return list(self._sequence(args[0]))[::-1]
        found = getattr(builtins, name)(*args, **kwargs)
        return list(found) if name in ("enumerate", "zip") else found

    def _sum(self, values: object, start: object = 0) -> object:
        for one in self._sequence(values):
            start = self.binary("Add", start, one)
        return start


def _bounded(kind: str, left: object, right: object) -> object:
    """Return `left kind right` of two constants.

    Integers of Python grow without limit (`9 ** 9 ** 9`), as do sequences (`[0] * 10 ** 10`).
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
    raise Refusal(f"{kind} of {_kind(left)} and {_kind(right)}")


def _bound_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise Refusal(f"a sequence of over {MAX_LENGTH} elements")


def _named(called: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Return the arguments of a function of torch.nn.functional by name, if it is written in Python and takes them."""
    function = getattr(torch.nn.functional, called.name) if called.home == "torch.nn.functional" else None
    if not isinstance(function, FunctionType):
        return kwargs
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except TypeError:
        return kwargs  # torch refuses them with its own message when the shapes are checked


def _written(name: str, given: Mapping[str, object]) -> str | None:
    """Return the argument by which a call of a function of torch.nn.functional writes into a tensor; None if none."""
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
    return value is UNKNOWN or any(map(_holds_unknown, _parts(value)))


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _kind(value: object) -> str:
    return "tensor" if value is UNKNOWN else type(value).__name__


def _placed(program: Program, error: Exception, place: tuple[int, int, int]) -> ProgramError:
    """Return an error of a trial, at the place in the program that was being run."""
    line, column, end = place
    message, expected = str(error), COMPUTABLE
    if isinstance(error, Refusal):
        expected = error.expected
    elif isinstance(error, NameError):
        name = program.source.lines[line - 1].encode("utf-8", "replace")[column:end].decode("utf-8", "ignore")
        message, expected = f"`{name}` has no value yet", "an assignment on a line that runs before"
    elif isinstance(error, KeyError):
        message = f"no key {message}"
    return program.source.error(line, column, message, expected)


def _place(code: CodeType, traceback: TracebackType | None) -> tuple[int, int, int]:
    """Return the line, and the first and last column in bytes, of the program's innermost frame in a traceback."""
    place = (1, 0, 0)
    while traceback is not None:
        running = traceback.tb_frame.f_code
        if running.co_filename == code.co_filename:
            place = _position(running, traceback.tb_lasti)
        traceback = traceback.tb_next
    return place


def _position(code: CodeType, instruction: int) -> tuple[int, int, int]:
    """Return the line, and the first and last column in bytes, of an instruction."""
    line, _, column, end = list(code.co_positions())[instruction // 2]
    return line or 1, column or 0, end or 0
