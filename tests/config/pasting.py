"""Functions that apply the fix of an error to the command line, as users do. Tests load this file by its path."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Sequence

from exp.check.examination import examine
from exp.check.first_samples import compare_with_data
from exp.check.resolution import resolve
from exp.check.stages import compose, refuse_early
from exp.cli.command_line import answer_question, parse_arguments
from exp.errors import ConfigError, ErrorDetails, ExpError
from exp.sweeps.sweep import compose_sweep

# A word after a verb such as Write that users can paste: an override, quoted or not, or a flag.
WORD = re.compile(r"(?:'[^']*'|\"[^\"]*\"|~[\w.]+|[~+]*[A-Za-z_][\w./@]*=\S+|--?[a-z][\w-]*)")
VERB = re.compile(r"\b(?:[Ww]rite|[Aa]dd|[Oo]r|is) ")
VALUE = re.compile(r"Write ((?:-?\d[\w.]*|null|true|false))(?: without quotes)?$")
SPELLING = re.compile(r"Did you mean (\S+)\?")
# Message about an unknown key, such as `optimizer.lrr=1`, and not about the value of an existing key.
OF_A_KEY = re.compile(r"no such|not a setting|there is no (?!option)|no key|no parameter|.*does not begin with a key")
# A word that users must replace, as in resume=PATH.
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]{2,}\b")


def answer(argv: Sequence[str]) -> list[ErrorDetails]:
    """Return the errors that `exp.check` finds in a command line; for a sweep, only those of the overrides."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            arguments = parse_arguments(argv)
            places = {"config_dir": arguments.config_dir, "config_name": arguments.config_name}
            if answer_question(arguments):
                return []
            if arguments.multirun:
                compose_sweep(arguments.overrides, **places)
            else:
                config = compose(arguments.overrides, **places)
                refuse_early(config)
                examined = examine(resolve(config))
                return list(examined.errors or compare_with_data(examined.decided)[0])
    except ConfigError as error:
        return list(error.errors)
    except SystemExit as error:  # a flag such as --version
        return [ErrorDetails(key="exit", got=str(error.code), expected="0")] if error.code else []
    except ExpError as error:
        return [ErrorDetails(key="run", got=str(error), expected="a run")]
    return []


def commands_in(fix: str) -> list[list[str]]:
    """Return the command lines in a fix, except those with a placeholder."""
    found = [command for verb in VERB.finditer(fix) if (command := command_at(fix, verb.end()))]
    return [command for command in found if not any(PLACEHOLDER.search(word) for word in command)]


def command_at(fix: str, place: int) -> list[str]:
    """Return the words of a command line from index `place` up to the first word with punctuation after it."""
    words: list[str] = []
    while (match := WORD.match(fix, place)) is not None:
        word = match[0] if match[0][0] in "'\"" else match[0].rstrip(",;:?")
        words += shlex.split(word)
        if not fix.startswith(" ", match.start() + len(word)):
            break
        place = match.start() + len(word) + 1
    return words


def fixed(argv: Sequence[str], error: ErrorDetails) -> list[list[str]]:
    """Return a command line for each fix in the error, with the wrong words replaced by it."""
    fix = error.fix or ""
    wrong = flag_words(argv, error.key) or [text for text in argv if is_about(error.key, text)]
    rest = [text for text in argv if text not in wrong]
    results = []
    if (spelling := SPELLING.search(fix)) and wrong:
        results.append([*rest, respelled(wrong[0], spelling[1], error)])
    if (value := VALUE.search(fix)) and wrong:
        results.append([*rest, f"{wrong[0].partition('=')[0]}={value[1]}"])
    if fix.startswith("Put -m in front"):
        results.append(["-m", *argv])
    if re.search(r"\b[Ll]eave (it|.* )out\b", fix) and wrong:
        results.append(rest)
    for command in commands_in(fix):
        kept = [text for text in rest if key_of(text) not in map(key_of, command)]
        results.append([*kept, *command] if command[0] != "-m" else ["-m", *kept, *command[1:]])
    return results


def key_of(text: str) -> str:
    return text.lstrip("+~").partition("=")[0].partition("@")[0]


def is_about(key: str, text: str) -> bool:
    return ("=" in text and key_of(text) == key.partition("@")[0]) or key in (text, text.lstrip("+~"))


def flag_words(argv: Sequence[str], key: str) -> list[str]:
    """Return a flag and its value if `key` is a flag, otherwise an empty list."""
    for place, word in enumerate(argv):
        if key.startswith("--") and word.partition("=")[0] == key:
            takes_next = "=" not in word and "=" not in "".join(argv[place + 1 : place + 2])
            return list(argv[place : place + 1 + takes_next])
    return []


def respelled(text: str, word: str, error: ErrorDetails) -> str:
    """Return an override with the corrected spelling of its key or value."""
    sign = text[: len(text) - len(text.lstrip("+~"))]
    own, _, value = text.lstrip("+~").partition("=")
    if "=" in word:
        return word
    if not OF_A_KEY.match(error.got):
        return f"{sign}{own}=[{word}]" if value.startswith("[") else f"{sign}{own}={word}"
    if "." in own and "." not in word:  # in `optimiser.lr` only the first part is wrong
        word = f"{word}.{own.partition('.')[2]}"
    return f"~{word}" if sign == "~" else f"{sign}{word}={value}"
