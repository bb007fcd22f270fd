"""Errors that users can cause. Messages contain the wrong value, the expected value and a fix."""

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

from exp.spelling import among, did_you_mean, show

INTERRUPTED_BY_KEY = 130
# The source of an error on the command line.
COMMAND_LINE = "command line"
# Any, because functools.partial is invariant in the type of its result.
Call = functools.partial[Any]
LIBRARIES = ("torch", "torchmetrics", "lightning", "exp")
# Exceptions that constructors raise for invalid values.
REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, LookupError, OSError, ImportError, ArithmeticError)


@dataclass(frozen=True)
class ErrorDetails:
    """An error of a config, printed as `KEY: GOT; expected EXPECTED. FIX`.

    Attributes:
        key: Dotted config key.
        got: The wrong value, or a description of the problem.
        expected: Expected value, as a noun phrase.
        fix: Sentence that states the fix. None: the fix is unknown.
        source: File and line that set the value, or the command line.
        origins: Other config keys that may have caused the error. If a file or the command line sets one of them, its
            source is reported instead of the source of `key`.
        at: Line and column, from 1, in the model's forward program at `key`. None: `source` contains the position.
        subject: Name that distinguishes several errors of the same key, such as the name of a data column.
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
    """Return an error about an invalid value: `KEY: VALUE, BECAUSE; expected EXPECTED. FIX`.

    Args:
        key: Dotted config key.
        value: Invalid value. The message shows it as in YAML.
        expected: Expected value, as a noun phrase.
        fix: Sentence that states the fix. Default: none.
        because: Reason why the value is invalid, such as "and the data has 3 classes". Default: none.
        source: File and line that set the value, or the command line. Default: None, unknown.
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
    """Return an error about a word that is not one of the allowed words.

    Args:
        key: Dotted config key.
        word: Word as typed.
        known: Allowed words.
        got: Description of the problem. Default: None, the word as typed.
        fix: Sentence that states the fix. Default: a proposal of the most similar allowed word.
        source: File and line that set the value, or the command line. Default: None, unknown.
    """
    words, got = list(known), word if got is None else got
    return ErrorDetails(key, got, f"one of {among(words, word=word)}", fix or did_you_mean(word, words), source=source)


def unknown_key(key: str, known: Iterable[str], *, holder: str, fix: str | None = None) -> ErrorDetails:
    """Return an error about a key that does not exist.

    Args:
        key: Dotted config key. Its last name is unknown.
        known: Existing keys of the same node.
        holder: Noun phrase for the node, such as "a phase".
        fix: Sentence that states the fix. Default: a proposal of the most similar existing key.
    """
    words, name = list(known), key.rpartition(".")[2]
    expected = f"one of {among(words, word=name, count=10)}"
    return ErrorDetails(key, f"no key of {holder}", expected, fix or did_you_mean(name, words))


def not_supported_with(
    key: str, value: object, other: str, expected: str = "another value", fix: str | None = None
) -> ErrorDetails:
    """Return an error about a value that conflicts with a second setting: `KEY: VALUE with OTHER; expected EXPECTED`.

    Args:
        key: Dotted config key.
        value: Value of the key. The message shows a text without quotes.
        other: Second setting, such as "strategy=ddp".
        expected: Expected value as a noun phrase, with the reason after a colon.
        fix: Sentence that states the fix. Default: none.
    """
    shown = value if isinstance(value, str) else show(value)
    return ErrorDetails(key, f"{shown} with {other}", expected, fix)


def unsuitable(key: str, name: object, because: str, expected: str, fix: str | None = None) -> ErrorDetails:
    """Return an error about a class, layer, file or value that cannot be used: `KEY: NAME, BECAUSE; expected EXPECTED`.

    Args:
        key: Dotted config key.
        name: Name of the class, layer, file or value. The message shows it without quotes.
        because: Reason why it cannot be used, such as "which has no forward".
        expected: Expected value, as a noun phrase.
        fix: Sentence that states the fix. Default: none.
    """
    return ErrorDetails(key, f"{name}, {because}", expected, fix)


def missing_value(key: str, expected: str, fix: str | None = None, *, got: str = "null") -> ErrorDetails:
    """Return an error about a key without a value.

    Args:
        key: Dotted config key.
        expected: Expected value, as a noun phrase.
        fix: Sentence that states the fix. Default: none.
        got: Description of the missing value: "null" for a key with the value null, "nothing" or "no such key" for a
            key that does not exist.
    """
    return ErrorDetails(key, got, expected, fix)


def constructor_error(
    error: BaseException,
    *,
    key: str,
    known: Container[str],
    got: str,
    make: Call | None = None,
) -> ErrorDetails:
    """Return the config error for an exception that a constructor raised.

    If the exception's message is `NAME is VALUE; expected NOUN PHRASE`, the error is reported at the key of the
    parameter NAME.

    Args:
        error: Exception of the constructor.
        key: Dotted key of the constructor's node.
        known: Names of the parameters in the node.
        got: Description of the problem. It is used if the exception's message has another format.
        make: The failed call. If the class is of a library, it is called again with other values, to find the parameter
            that causes the exception. None: the parameter is not searched for.
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
            return ErrorDetails(f"{key}.{rejected}", value, "a value that the class accepts")
    return ErrorDetails(key, got, "values that the class accepts")


def shorten(message: str, *, most: int = 400) -> str:
    """Return a message as one line of at most `most` characters."""
    line = " ".join(message.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def find_rejected_parameter(
    call: Callable[..., object], given: Call, *, accepts: Callable[[object], bool] = lambda _: True
) -> str | None:
    """Return the name of the parameter that makes a call fail; None if no single parameter is found.

    The call is repeated for each parameter. The parameter's value is replaced by its default, or by 1 or 2. The first
    parameter for which the repeated call succeeds is returned.

    Args:
        call: Function that is called with the changed parameter as a keyword argument.
        given: Failed call: a function with all its arguments.
        accepts: Function that returns whether the result of `call` is a success. Default: any result is a success.
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
    """Return the parameter name that occurs in a message; None if several names are possible.

    If no name occurs in the message and `names` has only one name, return this name.
    """
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", message)] or list(names)
    return named[0] if len(named) == 1 else None


class ExpError(Exception):
    """Base class of all errors that are not bugs of exp."""

    exit_status = 1

    def __reduce__(self) -> tuple[object, ...]:
        # By default, pickle calls the exception's class with the message. The constructors of these classes have other
        # parameters.
        return _unpickle, (type(self), self.args, vars(self))


def _unpickle(kind: type[ExpError], arguments: tuple[object, ...], state: dict[str, object]) -> ExpError:
    error = kind.__new__(kind, *arguments)
    vars(error).update(state)
    return error


class ConfigError(ExpError):
    """Raised if a config has errors. Nothing was built or written.

    Args:
        errors: Errors of the config.
        note: Text for the last line of the message. Default: none.
    """

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
) -> ConfigError:
    """Return a ConfigError with a single error. The arguments have the same meaning as in ErrorDetails."""
    return ConfigError([ErrorDetails(key, got, expected, fix, source=source)])


def command_line_error(key: str, got: str, expected: str, fix: str | None = None) -> ErrorDetails:
    """Return an error about the command line. The arguments have the same meaning as in ErrorDetails."""
    return ErrorDetails(key, got, expected, fix, source=COMMAND_LINE)


def raise_errors(errors: Iterable[ErrorDetails], *, note: str | None = None) -> None:
    """Raise ConfigError if the iterable contains errors.

    Args:
        errors: Errors of the config.
        note: Last line of the message. Default: none.
    """
    if found := tuple(errors):
        raise ConfigError(found, note=note)


class MissingExtraError(ExpError):
    """Raised if the package that a feature needs is not installed.

    Args:
        feature: Name of the feature, for the message.
        package: Name of the package.
        extra: Extra of exp-framework that installs the package.
    """

    exit_status = 2

    def __init__(self, *, feature: str, package: str, extra: str) -> None:
        self.feature, self.package, self.extra = feature, package, extra
        super().__init__(
            f"{feature} needs the package {package}, which is not installed: pip install 'exp-framework[{extra}]'"
        )


def is_installed(package: str) -> bool:
    """Return whether a package is installed.

    A folder without `__init__.py` does not count as a package, because W&B writes a folder `wandb` to the working
    directory.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class RunError(ExpError):
    """Raised if a run fails after it has started, for a cause that users can fix."""


class NonFiniteError(RunError):
    """Raised if a loss, gradient or weight is not finite, which ends the run."""


class UserCodeError(RunError):
    """Raised for an exception in the user's code, or in a library that received a value from the user's code.

    Attributes:
        what: Action that failed, such as `reading sample 40 of train`.
        cause: Type and message of the exception, in one line.
        frames: Frames of the user's code in the traceback, as Python prints them. They are a text, because a worker
            process of a data loader must pickle the error, and tracebacks cannot be pickled.
        command: Command that resumes the run. None: the command is unknown, or no checkpoint was saved.
    """

    def __init__(self, *, what: str, cause: str, frames: str) -> None:
        self.what, self.cause, self.frames = what, cause, frames
        self.command: str | None = None
        super().__init__(f"{what} failed with {cause}")

    @property
    def kind(self) -> str:
        """Name of the type of the user's exception."""
        return self.cause.partition(":")[0]

    @classmethod
    def of(cls, error: BaseException, *, what: str) -> UserCodeError:
        """Return the UserCodeError for a caught exception.

        Args:
            error: Caught exception, with its traceback.
            what: Action that failed.
        """
        return cls(what=what, cause=one_line(error), frames=user_frames(error))

    def __str__(self) -> str:
        fix = "Fix the error in your code or data" if self.frames else "Check the config values of this class"
        text = "\n".join(filter(None, [super().__str__(), self.frames, fix]))
        return text + (f". The last checkpoint is intact. Resume with\n  {self.command}" if self.command else "")


def chain_of(error: BaseException, *, explicit: bool = False) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of the cause, and so on.

    The chain ends before an exception that was already yielded. Such cycles exist, because OmegaConf raises exceptions
    that are their own cause if OC_CAUSE=1 is set or a debugger runs.

    Args:
        error: First exception.
        explicit: Follow only `raise ... from ...` (`__cause__`). By default, `__context__` is followed as well.
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
    """Return a one-line description of an exception.

    An OSError is described by the system's message and the path. Any other exception is described by the first line of
    its message.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return _first_line(error) or type(error).__name__


def message_of(error: BaseException) -> str:
    """Return the message of an exception, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception as second:
        return f"(the __str__ of the exception failed with {type(second).__name__})"


def _first_line(error: BaseException) -> str:
    return next(iter(message_of(error).strip().splitlines()), "")


def user_frames(error: BaseException) -> str:
    """Return the frames of the user's code in the traceback of an exception, as Python prints them.

    Frames of exp, Python and installed packages are left out.
    """
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # the traceback of "generator raised StopIteration" lacks the line of the cause
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list([frame for frame in frames if is_user_code(frame.filename)])).rstrip()


def user_location(error: BaseException) -> str:
    """Return the file and line of the user's code that raised an exception, such as ` (nets.py, line 12)`.

    Return "" if the traceback contains no code of the user.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    files = [frame for frame in frames if os.path.isfile(frame.filename)]
    return f" ({os.path.basename(files[-1].filename)}, line {files[-1].lineno})" if files else ""


def innermost_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost frame of the user's code that exp has called.

    If exp has called no code of the user, return the innermost frame of the stack.

    Args:
        stack: Frames of a stack, the outermost first.
    """
    called = itertools.dropwhile(lambda frame: not frame.filename.startswith(_FOREIGN[0]), stack)
    return ([frame for frame in called if is_user_code(frame.filename)] or stack)[-1]


def is_user_code(file: str) -> bool:
    """Return whether a file contains code of the user, not of exp, Python or an installed package."""
    if {"site-packages", "dist-packages"} & set(file.split(os.sep)) or file.startswith(_FOREIGN):
        return False
    return os.path.isfile(file) or file in linecache.cache  # a forward program is only in linecache


# sys.prefix is not in this list, because users may work in a folder below sys.prefix.
_FOREIGN = (os.path.join(os.path.dirname(__file__), ""), os.path.join(sysconfig.get_path("stdlib"), ""), "<frozen ")


class RankError(RunError):
    """Raised if a rank fails. The error describes the rank that failed first, not the ranks that lost the connection.

    Attributes:
        rank: Global rank that failed.
        reason: Reason in one line, as the predicate of a sentence about the rank, such as "was killed".
        detail: Further lines of the message: a traceback, a stack or the end of a log. Default: none.
        command: Command that resumes the run. None: the command is unknown, or no checkpoint was saved.
    """

    def __init__(self, *, rank: int, reason: str, detail: str = "") -> None:
        self.rank, self.reason, self.detail = rank, reason, detail
        self.command: str | None = None
        super().__init__(f"rank {rank} {reason}" + (f"\n{detail}" if detail else ""))

    def __str__(self) -> str:
        return super().__str__() + (f"\nResume with\n  {self.command}" if self.command else "")


class Interrupted(ExpError):
    """Raised if a signal ends the run after the current step, with the state saved if possible.

    Attributes:
        signum: Number of the signal.
        checkpoint: Path of the saved checkpoint. None: no state was saved.
        detail: Description of the ranks that did not exit in time. Default: none.
        command: Command that resumes the run. None: the command is unknown.
    """

    def __init__(self, *, signum: int, checkpoint: str | None, detail: str = "") -> None:
        self.signum, self.checkpoint, self.detail = signum, checkpoint, detail
        self.exit_status = 128 + signum
        self.command: str | None = None
        why = "because a rank hung" if detail else "because no step was finished"
        where = f"the state is saved in {checkpoint}" if checkpoint else f"no state was saved, {why}"
        super().__init__(f"interrupted by signal {signum}; {where}")

    def __str__(self) -> str:
        text = super().__str__() + (f". Resume with\n  {self.command}" if self.command else "")
        return f"{text}\n{self.detail}" if self.detail else text
