"""Run a command of exp by its name: `exp NAME ...`, `python -m exp NAME ...` and `python -m exp.NAME ...`.

Other packages can add a command with an entry point of the group `exp.commands`: `NAME = "package.module:main"`. The
function `main` reads `sys.argv` and returns the exit status.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from exp.cli.commands import COMMANDS, PACKAGE, SECTIONS

ENTRY_POINTS = "exp.commands"
HELP = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names.

    Args:
        argv: Arguments, without the program. Default: None, for the arguments of this process.

    Returns:
        Exit status of the command. 0 after the help, 2 for an unknown command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # `exp help train` and `exp --help train` are equivalent to `exp train --help`.
    if len(words) > 1 and words[0] in HELP and words[1] in COMMANDS:
        words = [words[1], "--help"]
    if words and (words[0] in COMMANDS or words[0] in plugins()):
        # sys.argv becomes that of `python -m exp.NAME`, because the run directory records the command line.
        sys.argv = [os.path.join(PACKAGE, f"{words[0]}.py"), *words[1:]]
        run(words[0])
    from exp.output import exit_status

    return exit_status(lambda: _answer(words))


def run(name: str) -> NoReturn:
    """Run a command with the arguments in `sys.argv`. This process ends with the exit status of the command."""
    if name in COMMANDS:
        main = importlib.import_module(f"exp.{COMMANDS[name].module}").main
    elif name in plugins():
        main = plugins()[name].load()
    else:
        print(f"exp {name}: the folder of this command below exp/extras is not installed", file=sys.stderr)
        sys.exit(2)
    status = main()

    from exp.interpreter_exit import exit_without_teardown

    sys.exit(exit_without_teardown(status))


def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the commands of other installed packages as entry points, by name of the command."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _answer(words: Sequence[str]) -> int:
    """Print the help, the version, or an error that suggests a command.

    Returns:
        Exit status: 2 for an error, otherwise 0.
    """
    if not words or words[0] in HELP:
        if len(words) > 1:
            return _refuse(words[1:])
        print(help_text())
        return 0
    if words[0] == "--version":
        import importlib.metadata

        from exp import __version__

        print(f"exp {__version__}, Hydra {importlib.metadata.version('hydra-core')}")
        return 0
    return _refuse(words)


def help_text() -> str:
    """Return the text of `exp --help`, with one line per command."""
    width = max(map(len, COMMANDS))
    lines = ["exp COMMAND [words]    one run:  exp train model=lenet    one command's help:  exp help train"]
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {command.help}" for name, command in commands.items())]
    if added := plugins():
        lines += ["", "Of other packages:", *(f"  {name:<{width}}  {point.value}" for name, point in added.items())]
    lines += ["", "exp COMMAND is the same as python -m exp.COMMAND. For tab completion: exp completion --help"]
    return "\n".join(lines)


def _refuse(words: Sequence[str]) -> int:
    """Print an error for an unknown command, which suggests a command line.

    Returns:
        Exit status 2.
    """
    # `exp` is suggested only if the user typed it, because the script may not be on the user's PATH.
    program = "exp" if os.path.basename(sys.argv[0]) == "exp" else "python -m exp"
    line = suggest_line(words)
    fix = f"Write:\n  {program} {line}" if line else f"The commands are {', '.join(COMMANDS)}"
    print(f"exp: {words[0] or 'an empty word'} is not a command. {fix}", file=sys.stderr)
    return 2


def suggest_line(words: Sequence[str]) -> str | None:
    """Return the command line that the user probably meant. Return None if no command is similar.

    These cases are handled: a misspelled command, a command of another framework, a missing command, and a command that
    is not the first argument.

    Args:
        words: Arguments as typed, without the program.
    """
    import shlex

    from exp.spelling import command_of, find_nearest

    first, rest = words[0], list(words[1:])
    if "=" in first or first[:1] in ("-", "+", "~"):
        named = next((word for word in rest if word in COMMANDS), None)
        return shlex.join([named or "train", first, *(word for word in rest if word != named)])
    plain = first.lower().removeprefix("exp.").removeprefix("exp-").replace("-", "_")
    line = plain if plain in COMMANDS else command_of(plain)
    near = line.split() if line else find_nearest(plain, COMMANDS)
    return shlex.join([*near, *rest]) if near else None
