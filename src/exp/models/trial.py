"""The trial of a forward program: it runs once on stand-ins before it may run on tensors.

Python runs it, in a form where every operation is a call of a guard (models/compiler.py). So every path that the
network can take is taken here first, with its constants, loops and layers as they are: what a guard lets pass is what
a run will do, and what it refuses is told with its place. Conditions depend on constants and on `training` alone, so
one trial in each mode is enough. Each guard counts what it does, and refuses before it does too much.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, TracebackType

import torch
from torch import Tensor, nn

from exp.models import constants, vocabulary
from exp.models.program import Program
from exp.models.stand_ins import COMPUTABLE, LIMITS, UNKNOWN, Function, Layer, Refusal, stand_in
from exp.models.syntax import INSTEAD_OF_WRITING, ProgramError, joined

MAX_STEPS = 200_000
MAX_ARGUMENT_DEPTH = 20

# Names that no program can write.
GUARDS, SLICE = "guards", "builtins.slice"

# How the variables of an assignment nest: `a, (b, c) = ...` is ("", ("", "")).
Shape = str | tuple["Shape", ...]
Builtin = Callable[..., object]

_NOT_WRITTEN = "the function's result, or a layer for it"
_TENSOR_COMPARISONS = frozenset({"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"})


def try_out(program: Program, code: CodeType, functions: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Run a guarded program in training and in evaluation.

    code: of models/compiler.py's guarded form, whose parameters are the names of `given`, the inputs and `training`.
    functions: the listed functions that it names.
    given: stand-ins of the layers, and the constants.

    Raises: ProgramError, with the line and column of the program.
    """
    found: dict[tuple[int, int], ProgramError] = {}
    for training in (True, False) if "training" in program.names else (True,):
        guards = Guards()
        methods = {
            f"{GUARDS}.{name}": _collect_refusals(getattr(guards, name), guards, program, code, found)
            for name in vars(Guards)
            if not name.startswith("_")
        }
        namespace = {"__builtins__": {}, SLICE: slice, **methods, **functions}
        values = {**given, **dict.fromkeys(program.inputs, UNKNOWN), "training": training}
        names = code.co_varnames[: code.co_argcount]
        try:
            FunctionType(code, namespace)(*(_own(values[name]) for name in names))
        except Exception as fault:
            place = _place(code, fault.__traceback__)
            if not found:  # else what came of a refusal
                found[place[:2]] = _placed(program, fault, place)
    if found:
        raise joined(found.values()) from None


def _collect_refusals(
    guard: Callable[..., object],
    guards: Guards,
    program: Program,
    code: CodeType,
    found: dict[tuple[int, int], ProgramError],
) -> Callable[..., object]:
    """Return a guard that keeps what it refuses, by its place, and gives a tensor, or a loop without a round."""

    def guarded(*operands: object, **named: object) -> object:
        try:
            return guard(*operands, **named)
        except Exception as fault:
            frame = inspect.currentframe()
            while frame is not None and frame.f_code.co_filename != code.co_filename:
                frame = frame.f_back
            assert frame is not None
            place = _position(frame.f_code, frame.f_lasti)
            found.setdefault(place[:2], _placed(program, fault, place))
            if guards.steps > MAX_STEPS:
                raise
        return () if guard.__name__ == "rounds" else UNKNOWN

    return guarded


def all_layers(held: Mapping[str, nn.Module | Tensor], layers_as: str) -> object:
    """What the name `layers` stands for: all of them in a list, or in a dict by name."""
    found = {name: stand_in(name, one) for name, one in held.items()}
    return found if layers_as == "dict" else list(found.values())


class Guards:
    """What the operations of a program become while it is tried. Raises Refusal, or ValueError with a message."""

    def __init__(self) -> None:
        self.steps = 0

    def count(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            message = f"the program takes over {MAX_STEPS:,} steps"
            raise Refusal(message, "fewer rounds of its loops, or a part of it as a layer of its own")

    def operand(self, value: object, depth: int = 0) -> None:
        """Refuse what cannot be given to an operation on tensors or to a layer."""
        self.count()
        if depth > MAX_ARGUMENT_DEPTH:
            raise Refusal("a value that is nested too deeply", f"at most {MAX_ARGUMENT_DEPTH} levels")
        if isinstance(value, Layer):
            cure = f"a call of it, `{value.path}(x)`" if value.is_callable else "one of its elements"
            raise Refusal(f"`{value.path}` is a layer ({value.kind}), not a tensor", cure)
        if isinstance(value, Function):
            raise Refusal(f"`{value.name}` is used as a value", "a call of it")
        if value is LIMITS:
            raise Refusal("the limits of a dtype are used as a value", "one of them, such as finfo(x.dtype).min")
        for part in _parts(value):
            self.operand(part, depth + 1)

    def binary(self, kind: str, left: object, right: object) -> object:
        self.count(1 + (_size(left) + _size(right)) // 100)
        if left is UNKNOWN or right is UNKNOWN:
            self.operand([left, right])
            return UNKNOWN
        return constants.binary(kind, left, right)

    def unary(self, kind: str, value: object) -> object:
        self.count()
        if value is UNKNOWN:
            if kind == "Not":
                raise Refusal("`not` of a tensor", "`~`, or logical_not(...)")
            return UNKNOWN
        return not value if kind == "Not" else constants.unary(kind, value)

    def compare(self, kinds: tuple[str, ...], *operands: object) -> object:
        """A comparison, or a chain of them: `1 < width < 3`."""
        self.count(1 + sum(map(_size, operands)) // 100)
        for kind, left, right in zip(kinds, operands, operands[1:], strict=False):
            if left is UNKNOWN or right is UNKNOWN:
                if len(kinds) > 1 or kind not in _TENSOR_COMPARISONS:
                    raise Refusal("this comparison of a tensor", "one of == != < <= > >=, joined by &")
                self.operand([left, right])
                return UNKNOWN
            if not constants.compare(kind, left, right):
                return False
        return True

    def must_hold(self, condition: object, message: object = None) -> None:
        """An assertion. One about tensors holds or fails when the network runs, on the check's shapes first."""
        self.count()
        if isinstance(condition, Function | Layer):
            bool(condition)  # refuses
        if condition is not UNKNOWN and not condition:
            raise Refusal(f"this assertion is false{f': {message}' if isinstance(message, str) else ''}", "a true one")

    def message(self, *parts: object) -> object:
        """The message of an assertion, in which sizes may stand."""
        self.operand(list(parts))
        return self.text(*parts) if UNKNOWN not in parts else UNKNOWN

    def joined(self, kind: str, *conditions: object) -> object:
        """`and` or `or` in an assertion."""
        self.count(len(conditions))
        for one in conditions:
            if isinstance(one, Function | Layer):
                bool(one)  # refuses
        known = [bool(one) for one in conditions if one is not UNKNOWN]
        decided = False in known if kind == "And" else True in known
        return UNKNOWN if UNKNOWN in conditions and not decided else (all if kind == "And" else any)(known)

    def opposite(self, condition: object) -> object:
        """`not` in an assertion."""
        return UNKNOWN if condition is UNKNOWN else self.unary("Not", condition)

    def relation(self, kinds: tuple[str, ...], *operands: object) -> object:
        """A comparison in an assertion, which may be one of sizes."""
        if UNKNOWN not in operands and not any(UNKNOWN in _parts(one) for one in operands):
            return self.compare(kinds, *operands)
        self.count(1 + sum(map(_size, operands)) // 100)
        self.operand(list(operands))
        return UNKNOWN

    def attribute(self, owner: object, name: str) -> object:
        self.count()
        if owner is UNKNOWN and name in vocabulary.ATTRIBUTES | vocabulary.RESULTS:
            return UNKNOWN
        if owner is LIMITS and name in vocabulary.LIMIT_ATTRIBUTES:
            return UNKNOWN
        if isinstance(owner, Layer):
            return owner.attribute(name)
        raise Refusal(f"this value has no attribute `.{name}`", "a tensor or a layer before it")

    def item(self, owner: object, index: object) -> object:
        self.count(1 + _size(owner) // 100)
        if owner is UNKNOWN:
            self.operand(index)
            return UNKNOWN
        if isinstance(owner, Layer):
            return owner.item(index)
        if isinstance(owner, dict):
            if self.key(index) not in owner:
                raise Refusal(f"no key {index!r}")
            return owner[index]
        if not isinstance(owner, list | tuple):
            raise Refusal(f"a {_kind(owner)} is indexed")
        return constants.element("the sequence", owner, index)

    def place(self, owner: object, index: object) -> object:
        """The index of an assignment to a part of something."""
        self.count()
        if isinstance(owner, dict):
            return self.key(index)
        if isinstance(owner, list) and isinstance(index, int) and -len(owner) <= index < len(owner):
            return index
        expected = INSTEAD_OF_WRITING if owner is UNKNOWN else "a dict, or a list of that length, made here"
        raise Refusal(f"an assignment into this {_kind(owner)}", expected)

    def key(self, value: object) -> object:
        if not isinstance(value, int | str):
            raise Refusal("a key that is not a constant", "a string or an integer")
        return value

    def text(self, *parts: object) -> str:
        """An f-string."""
        self.count()
        if not all(isinstance(part, constants.Scalar) for part in parts):
            raise Refusal("an f-string of something that is not a constant")
        constants.check_length(sum(_size(part) for part in parts))
        return "".join(map(str, parts))

    def elements(self, value: object) -> Iterable[object]:
        """What a loop runs through; it must be known before the run."""
        self.count(1 + _size(value) // 100)
        if isinstance(value, Layer):
            return value.elements
        if isinstance(value, list | tuple | dict):
            return value
        if value is UNKNOWN:
            message = "a loop over a tensor, whose length is known only while the network runs"
            raise Refusal(message, "names, `a, b = x.chunk(2, 1)`, or an operation on the whole")
        raise Refusal("a loop over a single value", "a list, a range or a container of layers")

    def rounds(self, value: object, shape: Shape, statements: int) -> Iterator[object]:
        """The elements of a loop, one for each round, in the nesting of its variables.

        statements: that a round has at most.
        """
        return self._rounds(self.elements(value), shape, statements)

    def _rounds(self, elements: Iterable[object], shape: Shape, statements: int) -> Iterator[object]:
        for one in elements:
            self.count(1 + statements)
            yield self.unpack(one, shape)

    def unpack(self, value: object, shape: Shape) -> object:
        """A value in parts, as many as there are variables. Only a run knows those of a tensor."""
        if isinstance(shape, str):
            return value
        self.count(1 + len(shape))
        parts = [UNKNOWN] * len(shape) if value is UNKNOWN else list(self.elements(value))
        if len(parts) != len(shape):
            raise Refusal(f"{len(parts)} values for {len(shape)} names", f"{len(parts)} names")
        return tuple(self.unpack(part, inner) for part, inner in zip(parts, shape, strict=True))

    def result(self, value: object = None) -> None:
        """What the program returns."""
        self.operand(value)
        if not _holds_unknown(value):
            raise Refusal("a return without a tensor", "a tensor, or several in a tuple or dict")

    def end(self) -> None:
        raise Refusal("the program ends without a return", "a last line such as `return x`")

    def call(self, called: object, /, *args: object, **kwargs: object) -> object:
        self.count()
        if isinstance(called, Function):
            return self.function(called, args, kwargs)
        if isinstance(called, Layer) and called.is_callable:
            self.operand([args, kwargs])
            return UNKNOWN
        name = f"`{called.path}` ({called.kind})" if isinstance(called, Layer) else f"a {_kind(called)}"
        raise Refusal(f"{name} is called", "a layer or a listed function before the parenthesis")

    def function(self, called: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        name = called.name
        on_tensors = bool(args) and args[0] is UNKNOWN
        if called.home == "builtins" and not (on_tensors and name in vocabulary.TORCH_FUNCTIONS):
            try:
                return _BUILTINS[name](self, *args, **kwargs)
            except TypeError:
                raise Refusal(f"`{name}` of these arguments") from None
        if called.home == "math" and not any(value is UNKNOWN for value in args):
            return constants.mathematics(getattr(math, name), _positional(name, args, kwargs), name)
        self.operand([args, kwargs])
        given = _named(called, args, kwargs)
        written = _written(name, given)
        if written is not None:
            raise Refusal(f"`{written}` of `{name}` writes into a tensor that other names may hold", _NOT_WRITTEN)
        is_functional = called.home == "torch.nn.functional"
        if is_functional and name in vocabulary.NEEDS_TRAINING and "training" not in given:
            message = f"`{name}` is not told whether the network trains, and would drop values in evaluation, too"
            raise Refusal(message, f"`{name}(x, p, training=training)`, or a layer for it")
        return LIMITS if called.home == "torch" and name in vocabulary.LIMITS else UNKNOWN

    def method(self, owner: object, name: str, /, *args: object, **kwargs: object) -> object:
        self.count(1 + _size(owner) // 100)
        if owner is UNKNOWN and name in vocabulary.METHODS:
            self.operand([args, kwargs])
            return UNKNOWN
        if isinstance(owner, Layer) and (owner.is_callable or name not in vocabulary.CONTAINER_METHODS):
            if name in vocabulary.CONTAINER_METHODS and not (args or kwargs):
                raise Refusal(f"`{owner.path}.{name}` is called without an input", "another name for the layer")
            return self.call(owner.attribute(name), *args, **kwargs)
        if not kwargs and owner is not UNKNOWN:
            if isinstance(owner, list) and name == "append" and len(args) == 1:
                constants.check_length(len(owner) + 1)
                owner.append(args[0])
                return None
            entries = owner.entries if isinstance(owner, Layer) else owner
            if isinstance(entries, dict) and not args and name in ("items", "keys", "values"):
                return list(getattr(entries, name)())
        raise Refusal(f"this value has no method `.{name}` of these arguments", "a tensor before it")


def _range(guards: Guards, *args: object) -> object:
    if UNKNOWN in args:
        raise Refusal("`range` of a size that is known only while the network runs")
    if not 1 <= len(args) <= 3 or not all(isinstance(value, int) for value in args):
        raise Refusal("`range` of these arguments")
    numbers = range(*(value for value in args if isinstance(value, int)))
    if len(numbers) > constants.MAX_LENGTH:
        raise Refusal(f"a range of over {constants.MAX_LENGTH} numbers")
    guards.count(len(numbers) // 100)
    return list(numbers)


def _len(guards: Guards, value: object) -> object:
    if value is UNKNOWN:
        raise Refusal("`len` of a tensor; `x.shape[0]` is its length")
    return len(value) if isinstance(value, str) else len(list(guards.elements(value)))


def _enumerate(guards: Guards, value: object, start: object = 0) -> object:
    if not isinstance(start, int):
        raise Refusal("`enumerate` of these arguments")
    return list(enumerate(guards.elements(value), start))


def _zip(guards: Guards, *values: object, strict: object = False) -> object:
    guards.count(len(values))
    return list(zip(*map(guards.elements, values), strict=bool(strict)))


def _reversed(guards: Guards, value: object) -> object:
    return list(guards.elements(value))[::-1]


def _list(guards: Guards, value: object = ()) -> object:
    return list(guards.elements(value))


def _tuple(guards: Guards, value: object = ()) -> object:
    return tuple(guards.elements(value))


def _dict(guards: Guards, **entries: object) -> object:
    return entries


def _sum(guards: Guards, value: object, start: object = 0) -> object:
    for one in guards.elements(value):
        start = guards.binary("Add", start, one)
    return start


# Of a number: a float has 17 of them.
MOST_DIGITS = 400


def _numbers(function: Callable[..., object], name: str) -> Builtin:
    """A builtin on numbers: max, min, abs, round."""

    def apply(guards: Guards, *args: object) -> object:
        if name in ("max", "min") and len(args) == 1:
            args = tuple(guards.elements(args[0]))
        if any(value is UNKNOWN for value in args):
            raise Refusal(f"`{name}` of a value that is known only while the network runs")
        if name == "round" and any(isinstance(value, int) and abs(value) > MOST_DIGITS for value in args[1:]):
            raise Refusal(f"`round` to {args[1]} digits", f"at most {MOST_DIGITS} of them")
        return constants.mathematics(function, args, name)

    return apply


def _scalar(function: Callable[..., object], name: str) -> Builtin:
    """A conversion of a single value: bool, float, int, str."""

    def convert(guards: Guards, value: object) -> object:
        if value is UNKNOWN:
            raise Refusal(f"`{name}` of a value that is known only while the network runs")
        if not isinstance(value, constants.Scalar):
            raise Refusal(f"`{name}` of a {_kind(value)}")
        return function(value)

    return convert


_BUILTINS: dict[str, Builtin] = {
    "dict": _dict,
    "enumerate": _enumerate,
    "len": _len,
    "list": _list,
    "range": _range,
    "reversed": _reversed,
    "sum": _sum,
    "tuple": _tuple,
    "zip": _zip,
    **{function.__name__: _numbers(function, function.__name__) for function in (abs, max, min, round)},
    **{kind.__name__: _scalar(kind, kind.__name__) for kind in (bool, float, int, str)},
}


def _positional(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    if kwargs:
        raise Refusal(f"`{name}` of these arguments")
    return args


def _named(called: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """The arguments of a function of torch.nn.functional by name, where it is written in Python and takes them."""
    function = getattr(torch.nn.functional, called.name) if called.home == "torch.nn.functional" else None
    if not isinstance(function, FunctionType):
        return kwargs
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except TypeError:
        return kwargs  # torch refuses it in its own words when the shapes are looked at


def _written(name: str, given: Mapping[str, object]) -> str | None:
    """The argument by which a call of a function of torch.nn.functional writes into a tensor; None where none does."""
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


def _own(value: object) -> object:
    """A list of its own for each run of the program."""
    return [_own(item) for item in value] if isinstance(value, list) else value


def _placed(program: Program, fault: Exception, place: tuple[int, int, int]) -> ProgramError:
    """The fault of a trial, at the place in the program that was being run."""
    line, column, end = place
    message, expected = str(fault), COMPUTABLE
    if isinstance(fault, Refusal):
        expected = fault.expected
    elif isinstance(fault, NameError):
        name = program.source.lines[line - 1].encode("utf-8", "replace")[column:end].decode("utf-8", "ignore")
        message, expected = f"`{name}` has no value yet", "an assignment on a line that runs before"
    return program.source.error(line, column, message, expected)


def _place(code: CodeType, traceback: TracebackType | None) -> tuple[int, int, int]:
    """Line, and first and last column in bytes, of the innermost piece of the program in a traceback."""
    place = (1, 0, 0)
    while traceback is not None:
        running = traceback.tb_frame.f_code
        if running.co_filename == code.co_filename:
            place = _position(running, traceback.tb_lasti)
        traceback = traceback.tb_next
    return place


def _position(code: CodeType, instruction: int) -> tuple[int, int, int]:
    """Line, and first and last column in bytes, of an instruction."""
    line, _, column, end = list(code.co_positions())[instruction // 2]
    return line or 1, column or 0, end or 0
