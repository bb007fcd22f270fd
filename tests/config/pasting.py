"""Paste a cure into the command that it was told of, as whoever reads it would. Run by path: it is no test."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Sequence

from exp.check.stages import compose, refuse_early
from exp.config.command import answer_question, is_question, parse_arguments
from exp.errors import ConfigError, ExpError, Fault
from exp.sweeps.sweep import compose_sweep

# What one can type behind a word such as Write: overrides, in quotes or not, and flags.
TOKEN = r"(?:'[^']*'|\"[^\"]*\"|~[\w.]+|[~+]*[A-Za-z_][\w./@]*=\S+|--?[a-z][\w-]*)"
FLAGS = (["--package"], ["--config-dir"], ["--config-name"], ["--cfg"], ["--info"])
SHORT = {"--package": "-p", "--config-path": "-cp", "--config-name": "-cn"}
VERB = re.compile(r"\b(?:[Ww]rite|[Aa]dd|[Oo]r|is) ")
VALUE = re.compile(r"Write ((?:-?\d[\w.]*|null|true|false))(?: without quotes)?$")
SPELLING = re.compile(r"Did you mean (\S+)\?")
# What is said of a key that is not there, as of `optimizer.lrr=1`, and not of a value.
OF_A_KEY = re.compile(r"no such|not a setting|there is no (?!option)|no key|no parameter|.*begins with no key")
# A word of a page, such as resume=PATH, that nobody can type as it stands.
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]{2,}\b")


def key_of(text: str) -> str:
    return text.lstrip("+~").partition("=")[0].partition("@")[0]


def commands_in(cure: str) -> list[list[str]]:
    """Each of the commands that a cure names, as the words of a shell; those with a placeholder left out."""
    found = [command for verb in VERB.finditer(cure) if (command := command_at(cure, verb.end()))]
    return [command for command in found if not any(PLACEHOLDER.search(word) for word in command)]


def command_at(cure: str, place: int) -> list[str]:
    """The words of a shell from a place of a cure to the first that is none, or has a sign behind it."""
    words: list[str] = []
    while (match := re.compile(TOKEN if words[-1:] not in FLAGS else r"[\w./-]+").match(cure, place)) is not None:
        word = match[0] if match[0][0] in "'\"" else match[0].rstrip(",;:?")
        words += shlex.split(word)
        if not cure.startswith(" ", match.start() + len(word)):
            break
        place = match.start() + len(word) + 1
    return words


def pasted(argv: Sequence[str], fault: Fault) -> list[list[str]]:
    """The command with the cure of one of its faults in the place of what was wrong, once for each that it names."""
    cure = fault.cure or ""
    wrong = [text for text in argv if is_about(fault.key, text)]
    rest = [text for text in argv if text not in wrong]
    if "--" in fault.key[:2]:
        rest = without_flag(argv, fault.key)
    results = []
    if (spelling := SPELLING.search(cure)) and wrong:
        results.append([*rest, *respelled(wrong[0], spelling[1], fault)])
    if (value := VALUE.search(cure)) and wrong:
        results.append([*rest, f"{wrong[0].partition('=')[0]}={value[1]}"])
    if cure.startswith("Put -m in front"):
        results.append(["-m", *argv])
    if re.search(r"\b[Ll]eave (it|.* )out\b", cure) and (wrong or rest != list(argv)):
        results.append(rest)
    for command in commands_in(cure):
        kept = [text for text in rest if key_of(text) not in map(key_of, command)]
        results.append([*kept, *command] if command[0] != "-m" else ["-m", *kept, *command[1:]])
    return results


def is_about(key: str, text: str) -> bool:
    """Whether an override is what a fault at a key is told of."""
    own = key_of(text)
    return ("=" in text and (own == key.partition("@")[0] or text == key)) or text.lstrip("+~") == key or text == key


def without_flag(argv: Sequence[str], flag: str) -> list[str]:
    names = (flag, SHORT[flag]) if flag in SHORT else (flag,)
    kept, words = [], list(argv)
    while words:
        word = words.pop(0)
        if word.partition("=")[0] not in names:
            kept.append(word)
        elif word in names and words and not words[0].startswith("-") and "=" not in words[0]:
            words.pop(0)
    return kept


def respelled(text: str, word: str, fault: Fault) -> list[str]:
    """An override with another spelling of its key, or of its value."""
    sign = text[: len(text) - len(text.lstrip("+~"))]
    own, _, value = text.lstrip("+~").partition("=")
    if "=" in word:
        return [word]
    if not OF_A_KEY.match(fault.got):
        return [f"{sign}{own}=[{word}]" if value.startswith("[") else f"{sign}{own}={word}"]
    if "." in own and "." not in word:  # `optimiser.lr`, of which the first word is wrong
        word = f"{word}.{own.partition('.')[2]}"
    return [f"~{word}" if sign == "~" else f"{sign}{word}={value}"]


def answer(argv: Sequence[str], *, whole: bool = False) -> list[Fault]:
    """What exp.check finds in a command, none where it would run. whole: with what needs torch, not of a sweep."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            arguments = parse_arguments(argv)
            where = {"config_dir": arguments.config_dir, "config_name": arguments.config_name}
            if is_question(arguments):
                answer_question(arguments)
            elif arguments.multirun:
                compose_sweep(arguments.overrides, **where)
            else:
                config = compose(arguments.overrides, **where)
                refuse_early(config)
                if whole:
                    from exp.check.plan import examine, resolve

                    return list(examine(resolve(config)).faults)
    except ConfigError as error:
        return list(error.faults)
    except SystemExit as error:  # of --version
        return [Fault(key="exit", got=str(error.code), expected="0")] if error.code else []
    except ExpError as error:
        return [Fault(key="run", got=str(error), expected="a run")]
    return []
