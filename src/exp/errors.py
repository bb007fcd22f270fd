"""Errors that users can cause. Each has the value, the expected value and the fix."""

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
# The source of an error in the words of a command.
COMMAND_LINE = "command line"
# A partial is invariant in the type of its result.
Call = functools.partial[Any]
LIBRARIES = ("torch", "torchmetrics", "lightning", "exp")
# Exceptions that constructors raise for invalid values.
REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, LookupError, OSError, ImportError, ArithmeticError)


@dataclass(frozen=True)
class ErrorDetails:
    """An error of a config, printed as `KEY: GOT; expected EXPECTED. FIX`.

    Attributes:
        key: Dotted config key.
        got: The value, or what is wrong with it.
        expected: Noun phrase.
        fix: The fix. None: unknown.
        source: The file with its line, or the command line.
        origins: Keys that give the source instead of `key`; the first one that is set counts.
        at: Line and column, from 1, in the forward program at `key`. None: they are part of the source.
        subject: The column or other object of the error, if a key may have one error for each of several.
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
) -> ErrorDetails:
    """Return the error of a value that is not what is expected: `KEY: VALUE, BECAUSE; expected EXPECTED. FIX`.

    Args:
        key: Dotted config key.
        value: The value, shown as in YAML.
        expected: Noun phrase.
        fix: The fix. Default: none.
        because: What makes the value invalid, such as "and the data has 3 classes". Default: nothing.
        source: As in ErrorDetails.
    """
    return ErrorDetails(key, f"{show(value)}, {because}" if because else show(value), expected, fix, source=source)


def unknown_word(
    key: str,
    word: str,
    known: Iterable[str],
    *,
    got: str | None = None,
    fix: str | None = None,
    source: str | None = None,
) -> ErrorDetails:
    """Return the error of a word that is not one of the known words, with the closest one as the default fix.

    Args:
        got: Text about the word. Default: the word.
    """
    words, got = list(known), word if got is None else got
    return ErrorDetails(key, got, f"one of {among(words, word=word)}", fix or did_you_mean(word, words), source=source)


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


def unsuitable(
    key: str, name: object, because: str, expected: str, fix: str | None = None, *, origins: tuple[str, ...] = ()
) -> ErrorDetails:
    """Return the error of something with a property that excludes it: `KEY: NAME, BECAUSE; expected EXPECTED. FIX`.

    Args:
        key: Dotted config key.
        name: A class, a layer, a file or a value, shown without quotes.
        because: The property, such as "which has no forward".
        expected: Noun phrase.
        fix: The fix. Default: none.
        origins: As in ErrorDetails.
    """
    return ErrorDetails(key, f"{name}, {because}", expected, fix, origins=origins)


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
    make: Call | None = None,
) -> ErrorDetails:
    """Return the error of an exception that a constructor raised.

    A message `NAME is VALUE; expected NOUN PHRASE` becomes an error at the key of that parameter.

    Args:
        key: Config key of the constructor's node.
        known: Names of the parameters.
        got: Value to report for other messages.
        make: The call, to find the parameter that a library's class rejects.
    """
    got, message = shorten(got), message_of(error)
    words, is_worded, expected = message.partition("; expected ")
    name, _, value = words.partition(" is ")
    if is_worded and name in known:
        return ErrorDetails(f"{key}.{name}", value, expected)
    if is_worded:
        return ErrorDetails(key, words, expected)
    # A user's code is not called again, because it may have side effects. Classes of exp may read files.
    top = "" if make is None else make.func.__module__.partition(".")[0]
    if make is not None and top in LIBRARIES:
        others = None if top == "exp" else find_rejected_parameter(make.func, make)
        names = [] if top == "exp" and len(make.keywords) == 1 else make.keywords
        rejected = others or _find_named(message, names)
        if rejected is not None:
            value = f"{show(make.keywords[rejected])}, and {got}"
            fix = _divisor_fix(make, rejected) if "divisible" in message else None
            return ErrorDetails(f"{key}.{rejected}", value, "a value that it accepts", fix)
    return ErrorDetails(key, got, "values that it accepts")


def shorten(message: str, *, most: int = 400) -> str:
    """Return a message as one line of at most `most` characters."""
    line = " ".join(message.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _divisor_fix(make: Call, name: str) -> str | None:
    """Return the fix with the nearest number that a call accepts instead of one that is not a divisor."""
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
    call: Callable[..., object], given: Call, *, accepts: Callable[[object], bool] = lambda _: True
) -> str | None:
    """Return the first parameter with which a call fails and without which, or with another value, it succeeds.

    Args:
        call: Called with one changed value by name.
        given: The function with all its values.
        accepts: Returns whether a result is a success.
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
    """Return the one parameter that a message names, or the only parameter."""
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", message)] or list(names)
    return named[0] if len(named) == 1 else None


class ExpError(Exception):
    """Base class of all errors that are not bugs of exp."""

    exit_status = 1

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is unpickled with its message, which is no argument of these classes.
        return _unpickle, (type(self), self.args, vars(self))


def _unpickle(kind: type[ExpError], arguments: tuple[object, ...], state: dict[str, object]) -> ExpError:
    error = kind.__new__(kind, *arguments)
    vars(error).update(state)
    return error


class ConfigError(ExpError):
    """Errors in a config. Nothing was built or written."""

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
    """Return a ConfigError with one error. The arguments are those of ErrorDetails."""
    return ConfigError([ErrorDetails(key, got, expected, fix, source=source, subject=subject)])


def command_line_error(key: str, got: str, expected: str, fix: str | None = None) -> ErrorDetails:
    """Return an error in the words of a command."""
    return ErrorDetails(key, got, expected, fix, source=COMMAND_LINE)


def raise_errors(errors: Iterable[ErrorDetails], *, note: str | None = None) -> None:
    """Raise ConfigError if there are errors. note: Line after them."""
    if found := tuple(errors):
        raise ConfigError(found, note=note)


class MissingExtraError(ExpError):
    """A feature whose package is not installed."""

    exit_status = 2

    def __init__(self, *, feature: str, package: str, extra: str) -> None:
        self.feature, self.package, self.extra = feature, package, extra
        super().__init__(
            f"{feature} needs the package {package}, which is not installed: pip install 'exp-framework[{extra}]'"
        )


def is_installed(package: str) -> bool:
    """Return whether a package is installed. A folder of its name, such as W&B's `wandb`, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class RunError(ExpError):
    """The failure of a run that started, with a cause that users can fix."""


class NonFiniteError(RunError):
    """A loss, gradient or weight that is not finite and ends the run."""


class UserCodeError(RunError):
    """An exception in the user's code, or in a library that got a value from it.

    Attributes:
        what: The action that failed, such as `reading sample 40 of train`.
        cause: The exception in one line.
        frames: Frames of the user's code in the traceback, as Python prints them. Text, because workers send it.
        command: Command that resumes the run. None: unknown, or nothing was saved.
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
        """Return the error for an exception, with its current traceback."""
        return cls(what=what, cause=one_line(error), frames=user_frames(error))

    def __str__(self) -> str:
        fix = "This is an error in your code or data: fix it there" if self.frames else "Check the values that it got"
        text = "\n".join(filter(None, [super().__str__(), self.frames, fix]))
        return text + (f". The last checkpoint is good. Resume with\n  {self.command}" if self.command else "")


def chain_of(error: BaseException, *, explicit: bool = False) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once.

    A chain may be circular: with OC_CAUSE=1, or under a debugger, OmegaConf raises exceptions that are their own cause.

    Args:
        explicit: Leave out exceptions during whose handling another one was raised.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not one for one in seen):
        yield current
        seen.append(current)
        current = current.__cause__ or (None if explicit else current.__context__)


def one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return ": ".join(filter(None, [type(error).__name__, _first_line(error)]))


def describe_exception(error: BaseException) -> str:
    """Return the first line of an exception's message; for an OSError the system's words and the path."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return _first_line(error) or type(error).__name__


def message_of(error: BaseException) -> str:
    """Return the message of an exception, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception as second:
        return f"(its __str__ failed with {type(second).__name__})"


def _first_line(error: BaseException) -> str:
    return next(iter(message_of(error).strip().splitlines()), "")


def user_frames(error: BaseException) -> str:
    """Return the frames of the user's code in an exception's traceback, without those of exp, Python and packages."""
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python's "generator raised StopIteration" does not show where
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list([frame for frame in frames if is_user_code(frame.filename)])).rstrip()


def user_location(error: BaseException) -> str:
    """Return where the user's code raised an exception, such as ` (nets.py, line 12)`; empty for other code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    files = [frame for frame in frames if os.path.isfile(frame.filename)]
    return f" ({os.path.basename(files[-1].filename)}, line {files[-1].lineno})" if files else ""


def innermost_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost frame of the user's code that exp called, or else the innermost frame."""
    called = itertools.dropwhile(lambda frame: not frame.filename.startswith(_FOREIGN[0]), stack)
    return ([frame for frame in called if is_user_code(frame.filename)] or stack)[-1]


def is_user_code(file: str) -> bool:
    """Return whether a file is the user's: not of exp, Python or an installed package."""
    if {"site-packages", "dist-packages"} & set(file.split(os.sep)) or file.startswith(_FOREIGN):
        return False
    return os.path.isfile(file) or file in linecache.cache  # a forward program is no file


# sys.prefix is not used, because users may work in a folder below it.
_FOREIGN = (os.path.join(os.path.dirname(__file__), ""), os.path.join(sysconfig.get_path("stdlib"), ""), "<frozen ")


class RankError(RunError):
    """A rank that died. The message is that of this rank, not a neighbor's "connection closed".

    Attributes:
        command: Command that resumes the run. None: unknown, or nothing was saved.
    """

    def __init__(self, *, rank: int, reason: str, detail: str = "") -> None:
        self.rank, self.reason, self.detail = rank, reason, detail
        self.command: str | None = None
        super().__init__(f"rank {rank} {reason}" + (f"\n{detail}" if detail else ""))

    def __str__(self) -> str:
        return super().__str__() + (f"\nResume with\n  {self.command}" if self.command else "")


class Interrupted(ExpError):
    """A signal that ended the run at a clean point, with its state saved.

    Attributes:
        command: Command that resumes the run. None: unknown.
        detail: Ranks that did not exit, and where they hang.
    """

    def __init__(self, *, signum: int, checkpoint: str | None, detail: str = "") -> None:
        self.signum, self.checkpoint, self.detail = signum, checkpoint, detail
        self.exit_status = 128 + signum
        self.command: str | None = None
        why = "a rank hung" if detail else "no step was finished"
        where = f"the state is in {checkpoint}" if checkpoint else f"no state was saved: {why}"
        super().__init__(f"interrupted by signal {signum}; {where}")

    def __str__(self) -> str:
        text = super().__str__() + (f". Resume with\n  {self.command}" if self.command else "")
        return f"{text}\n{self.detail}" if self.detail else text
