"""Every error that a user can cause. Each carries its values and prints what is, what must be, and the fix."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from typing import Any

from exp.name_clash import refuse_a_foreign_init
from exp.spelling import among, did_you_mean, show

refuse_a_foreign_init()

INTERRUPTED_BY_KEY = 130
LIBRARIES = ("torch", "torchmetrics", "lightning", "exp")
# What a constructor raises for a value that it does not take.
REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, LookupError, OSError, ImportError, ArithmeticError)


@dataclass(frozen=True)
class ErrorDetails:
    """One error of a config, in the order of its message: `KEY: GOT; expected EXPECTED. FIX`.

    key: The dotted config key.
    got: The value, or what is wrong with it.
    expected: A noun phrase.
    fix: The fix; None if it is unknown.
    source: The file with its line, or the command line.
    origins: Other keys whose place is the source: the first of them that is set.
    at: Line and column, from 1, within the text at `key`, a forward program; None once they are part of the source.
    subject: What the error is about, such as a column, if a key may have an error for each of several.
    """

    key: str
    got: str
    expected: str
    fix: str | None = None
    _: KW_ONLY
    source: str | None = None
    origins: tuple[str, ...] = ()
    at: tuple[int, int] | None = None
    subject: str = ""

    def __str__(self) -> str:
        place = f"line {self.at[0]}, column {self.at[1]}: " if self.at else ""
        line = f"{self.key}: {place}{self.got}; expected {self.expected}"
        if self.fix:
            line += f". {self.fix}"
        return f"{line}  [{self.source}]" if self.source else line


def invalid_value(
    key: str,
    value: object,
    expected: str,
    fix: str | None = None,
    *,
    because: str = "",
    source: str | None = None,
    origins: tuple[str, ...] = (),
    subject: str = "",
) -> ErrorDetails:
    """Return the error of a value that is not what is expected: `KEY: VALUE, BECAUSE; expected EXPECTED. FIX`.

    Args:
        key: Dotted config key.
        value: The value, shown as in YAML.
        expected: Noun phrase.
        fix: The fix. Default: none.
        because: What makes the value invalid, such as "and the data has 3 classes". Default: nothing.
        source: The file with its line, or the command line. Default: found from the key.
        origins: As in ErrorDetails.
        subject: As in ErrorDetails.
    """
    got = f"{show(value)}, {because}" if because else show(value)
    return ErrorDetails(key, got, expected, fix, source=source, origins=origins, subject=subject)


def unknown_word(
    key: str, word: str, known: Iterable[str], *, fix: str | None = None, source: str | None = None
) -> ErrorDetails:
    """Return the error of a word that is not one of the known words, with the closest one as the default fix."""
    words = list(known)
    return ErrorDetails(key, word, f"one of {among(words, word=word)}", fix or did_you_mean(word, words), source=source)


def unknown_key(key: str, known: Iterable[str], *, holder: str, fix: str | None = None) -> ErrorDetails:
    """Return the error of a key that its holder does not have, with the closest key as the default fix.

    Args:
        key: Dotted config key, whose last part is unknown.
        known: Keys that the holder has.
        holder: What the keys belong to, such as "a phase".
        fix: The fix. Default: the closest known key.
    """
    words, name = list(known), key.rpartition(".")[2]
    expected = f"one of {among(words, word=name, count=10)}"
    return ErrorDetails(key, f"no key of {holder}", expected, fix or did_you_mean(name, words))


def not_supported_with(
    key: str, value: object, other: str, expected: str = "another value", fix: str | None = None
) -> ErrorDetails:
    """Return the error of a value that another setting excludes: `KEY: VALUE with OTHER; expected EXPECTED. FIX`.

    Args:
        key: Dotted config key.
        value: The value; a text is shown without quotes.
        other: The other setting, such as "strategy=ddp".
        expected: Noun phrase, with the reason after a colon.
        fix: The fix. Default: none.
    """
    shown = value if isinstance(value, str) else show(value)
    return ErrorDetails(key, f"{shown} with {other}", expected, fix)


def out_of_range(
    key: str,
    value: object,
    *,
    least: float | None = None,
    most: float | None = None,
    unit: str = "",
    fix: str | None = None,
) -> ErrorDetails:
    """Return the error of a number outside its range, bounds included; without a bound the range is open."""
    bounds = [f"at least {least:g}" if least is not None else "", f"at most {most:g}" if most is not None else ""]
    expected = " and ".join(filter(None, bounds)) + (f" {unit}" if unit else "")
    return ErrorDetails(key, show(value), expected, fix)


def missing_value(key: str, expected: str, fix: str | None = None, *, got: str = "null") -> ErrorDetails:
    """Return the error of a key without a value. got: `null`, or `nothing` for a key that is absent."""
    return ErrorDetails(key, got, expected, fix)


def not_installed(key: str, package: str, install: str, *, feature: str) -> ErrorDetails:
    """Return the error of a feature whose package is not installed. install: Argument of pip install."""
    return ErrorDetails(key, f"{feature}, without the package {package}", "it installed", f"pip install {install}")


def constructor_error(
    error: BaseException,
    *,
    key: str,
    known: Container[str],
    got: str,
    make: functools.partial[Any] | None = None,
) -> ErrorDetails:
    """The error of what a constructor raised: `NAME is VALUE; expected WHAT` is told at that parameter's key.

    known: the parameters' names. got: what to say of any other message.
    make: the call. Of a class of a library the parameter is found that is to blame for any other message, too.
    """
    got = shorten(got)
    words, is_worded, expected = message_of(error).partition("; expected ")
    name, _, value = words.partition(" is ")
    if is_worded and name in known:
        return ErrorDetails(key=f"{key}.{name}", got=value, expected=expected)
    if is_worded:
        return ErrorDetails(key=key, got=words, expected=expected)
    # Code of the user's own is not called again: nobody knows what else it does. A part of exp's may read files.
    top = "" if make is None else make.func.__module__.partition(".")[0]
    if make is not None and top in LIBRARIES:
        others = None if top == "exp" else find_rejected_parameter(make.func, make)
        guilty = others or _find_named(
            message_of(error), [] if top == "exp" and len(make.keywords) == 1 else make.keywords
        )
        if guilty is not None:
            told = f"{show(make.keywords[guilty])}, and {got}"
            fix = _fix_of_divisor(make, guilty) if "divisible" in message_of(error) else None
            return ErrorDetails(key=f"{key}.{guilty}", got=told, expected="a value that it accepts", fix=fix)
    return ErrorDetails(key=key, got=got, expected="values that it accepts")


def shorten(message: str, *, most: int = 400) -> str:
    """A message in one line, cut where a library says more than anybody reads."""
    line = " ".join(message.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _fix_of_divisor(make: functools.partial[Any], name: str) -> str | None:
    """The nearest number with which a call succeeds that refuses another one for what it does not divide."""
    value = make.keywords[name]
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    for other in sorted(range(max(1, value - 16), value + 17), key=lambda one: (abs(one - value), one)):
        try:
            make.func(*make.args, **{**make.keywords, name: other})
        except REFUSALS:
            continue
        return f"Write {name}: {other}"
    return None


def find_rejected_parameter(
    call: Callable[..., object], given: functools.partial[Any], *, accepts: Callable[[Any], bool] = lambda _: True
) -> str | None:
    """The first of the values that were given without which a call succeeds: with the default, or a plain value.

    call: takes some of the values anew, by name. given: the function with all its values. accepts: judges a result.
    """
    call = functools.partial(call, *given.args, **given.keywords) if call is given.func else call
    parameters = inspect.signature(given.func).parameters
    for name, value in given.keywords.items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        plain = [type(value)(1), type(value)(2)] if is_number and default is inspect.Parameter.empty else []
        for other in [default] if default is not inspect.Parameter.empty else plain:
            try:
                if other != value and accepts(call(**{name: other})):
                    return name
            except REFUSALS:
                continue
    return None


def _find_named(message: str, names: Collection[str]) -> str | None:
    """The one parameter that a message names, or the only one that there is."""
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", message)] or list(names)
    return named[0] if len(named) == 1 else None


class ExpError(Exception):
    """Base of all errors that are not bugs of exp."""

    exit_status = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is made again by its message, which is not what these are made of.
        return _unpickle, (type(self), self.args, vars(self))


def _unpickle(kind: type[ExpError], arguments: tuple[Any, ...], state: dict[str, Any]) -> ExpError:
    error = kind.__new__(kind, *arguments)
    vars(error).update(state)
    return error


class ConfigError(ExpError):
    """A config with one or more errors. Nothing was built and nothing was written."""

    exit_status = 2

    def __init__(self, errors: Sequence[ErrorDetails], *, note: str | None = None) -> None:
        self.errors = tuple(errors)
        count = len(self.errors)
        title = f"{count} error{'s' if count != 1 else ''} in the config; nothing was started."
        super().__init__("\n".join([title, *(f"  {error}" for error in self.errors), *([note] if note else [])]))


def config_error(
    key: str,
    *,
    got: str,
    expected: str,
    fix: str | None = None,
    source: str | None = None,
    subject: str = "",
) -> ConfigError:
    """Return the ConfigError of a single error. The arguments are those of ErrorDetails."""
    return ConfigError([ErrorDetails(key, got, expected, fix, source=source, subject=subject)])


def raise_errors(errors: Iterable[ErrorDetails], *, note: str | None = None) -> None:
    """Raise ConfigError if there are errors. note: a line after them."""
    if found := tuple(errors):
        raise ConfigError(found, note=note)


class MissingExtraError(ExpError):
    """A feature was asked for whose package is not installed."""

    exit_status = 2

    def __init__(self, *, feature: str, package: str, extra: str) -> None:
        self.feature, self.package, self.extra = feature, package, extra
        super().__init__(
            f"{feature} needs the package {package}, which is not installed: pip install 'exp-framework[{extra}]'"
        )


def is_installed(package: str) -> bool:
    """Whether a package is there; a mere folder of its name, such as the one that W&B writes into, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class RunError(ExpError):
    """A run that started and failed for a reason that its user can fix."""


class NonFiniteError(RunError):
    """A loss, a gradient or a weight is not finite, and the run cannot go on from there."""


class UserCodeError(RunError):
    """Code of the user's own, or what it handed to a library, raised an exception.

    what: what was being done, `reading sample 40 of train`. cause: the exception in one line. frames: those of the
    user's own code in its traceback, as Python shows them; empty where it has none. All are text, for a loader's worker
    sends them to another process.
    command: goes on with the run; None until whoever knows how it was started says so, and where nothing was saved.
    """

    def __init__(self, *, what: str, cause: str, frames: str) -> None:
        self.what, self.cause, self.frames = what, cause, frames
        self.command: str | None = None
        super().__init__(f"{what} failed with {cause}")

    @property
    def kind(self) -> str:
        """The name of the exception's type."""
        return self.cause.partition(":")[0]

    @classmethod
    def of(cls, error: BaseException, *, what: str) -> UserCodeError:
        """The error that tells another one, with its traceback as it is now."""
        return cls(what=what, cause=one_line(error), frames=user_frames(error))

    def __str__(self) -> str:
        fix = "It is an error of your own code or data: mend it there" if self.frames else "Look at what it was given"
        text = "\n".join(filter(None, [super().__str__(), self.frames, fix]))
        return text + (f". What was saved is good, and goes on with\n  {self.command}" if self.command else "")


def chain_of(error: BaseException, *, explicit: bool = False) -> Iterator[BaseException]:
    """Yield an exception, then what it was raised from or, unless `explicit`, while handling, each once.

    A chain may be circular: with OC_CAUSE=1, or under a debugger, OmegaConf raises exceptions that are their own cause.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not one for one in seen):
        yield current
        seen.append(current)
        current = current.__cause__ or (None if explicit else current.__context__)


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of what it says."""
    return ": ".join(filter(None, [type(error).__name__, _first_line(error)]))


def describe_exception(error: BaseException) -> str:
    """What an exception says in one line: the system's own words, and the path where it has one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return _first_line(error) or type(error).__name__


def message_of(error: BaseException) -> str:
    """What an exception says, also where its own `__str__` fails."""
    try:
        return str(error)
    except Exception as second:
        return f"(its __str__ failed with {type(second).__name__})"


def _first_line(error: BaseException) -> str:
    return next(iter(message_of(error).strip().splitlines()), "")


def user_frames(error: BaseException) -> str:
    """The frames of an exception's traceback that are of the user's own code: not of exp, Python or a package."""
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python's "generator raised StopIteration" shows no frame of what raised it
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list([frame for frame in frames if is_user_code(frame.filename)])).rstrip()


def user_location(error: BaseException) -> str:
    """Where in the user's own code an exception was raised, ` (nets.py, line 12)`; empty where it was not there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    files = [frame for frame in frames if os.path.isfile(frame.filename)]
    return f" ({os.path.basename(files[-1].filename)}, line {files[-1].lineno})" if files else ""


def innermost_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Where a thread stands: the user's own code that exp has called, or else whatever is innermost."""
    called = itertools.dropwhile(lambda frame: not frame.filename.startswith(_FOREIGN[0]), stack)
    return ([frame for frame in called if is_user_code(frame.filename)] or stack)[-1]


def is_user_code(file: str) -> bool:
    """Whether a file is of the user's own: not of exp, Python or an installed package."""
    if {"site-packages", "dist-packages"} & set(file.split(os.sep)) or file.startswith(_FOREIGN):
        return False
    return os.path.isfile(file) or file in linecache.cache  # a forward program is no file


# Not by sys.prefix, for a user may work in a folder of it.
_FOREIGN = (os.path.join(os.path.dirname(__file__), ""), os.path.join(sysconfig.get_path("stdlib"), ""), "<frozen ")


class RankError(RunError):
    """A rank died. The message is that rank's own, not a neighbour's "connection closed".

    command: goes on with the run; None until whoever knows how it was started says so, and where nothing was saved.
    """

    def __init__(self, *, rank: int, reason: str, detail: str = "") -> None:
        self.rank, self.reason, self.detail = rank, reason, detail
        self.command: str | None = None
        super().__init__(f"rank {rank} {reason}" + (f"\n{detail}" if detail else ""))

    def __str__(self) -> str:
        return super().__str__() + (f"\nIt goes on with\n  {self.command}" if self.command else "")


class Interrupted(ExpError):
    """A signal ended the run at a clean point, with its state saved.

    command: goes on with the run; None until whoever knows how it was started says so.
    detail: ranks that did not leave, and where they hang.
    """

    def __init__(self, *, signum: int, checkpoint: str | None, detail: str = "") -> None:
        self.signum, self.checkpoint, self.detail = signum, checkpoint, detail
        self.exit_status = 128 + signum
        self.command: str | None = None
        why = "a rank hung" if detail else "no step had been done"
        where = f"the state is in {checkpoint}" if checkpoint else f"no state was saved: {why}"
        super().__init__(f"interrupted by signal {signum}; {where}")

    def __str__(self) -> str:
        text = super().__str__() + (f". It goes on with\n  {self.command}" if self.command else "")
        return f"{text}\n{self.detail}" if self.detail else text
