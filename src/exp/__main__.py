"""exp COMMAND ...: every command of exp. `python -m exp COMMAND ...` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from exp.commands import COMMANDS, SECTIONS, Command

HELP = ("-h", "--help", "help")
# What people type who come from Lightning's CLI, TensorBoard or another trainer.
HABITS = {
    "fit": "train", "run": "train", "start": "train", "sweep": "train -m", "multirun": "train -m", "eval": "evaluate",
    "test": "evaluate", "validate": "evaluate", "tune": "find_lr", "lr_find": "find_lr", "tensorboard": "dashboard",
    "compare": "report", "show": "report", "infer": "predict", "list": "gallery", "info": "doctor",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the command line names, as `python -m` would; of another one say which there are.

    Returns: the exit status: the command's own; 0 after the help, 2 where there is no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # `exp help train` and `exp --help train` are `exp train --help`.
    if len(words) > 1 and words[0] in HELP and words[1] in COMMANDS:
        words = [words[1], "--help"]
    if words and words[0] in COMMANDS:
        _become(COMMANDS[words[0]], words[1:])
    from exp.output import exit_status

    return exit_status(lambda: _answer(words))


def _become(command: Command, words: Sequence[str]) -> NoReturn:
    """Run a command's module as the program, in this process: nothing but it is imported."""
    import runpy

    sys.argv = [sys.argv[0], *words]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)  # of a main that returns nothing


def _answer(words: Sequence[str]) -> int:
    """Print the help, the version, or what was meant. Returns: the exit status."""
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
    """The page of `exp --help`: every command in a line."""
    width = max(map(len, COMMANDS))
    lines = ["exp COMMAND [words]    one run:  exp train model=lenet    one command's help:  exp help train"]
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {command.help}" for name, command in commands.items())]
    lines += ["", "exp train is python -m exp.train, and so for each. For the tab key: exp completion --help"]
    return "\n".join(lines)


def _refuse(words: Sequence[str]) -> int:
    """Say that there is no such command, and the line that was meant. Returns: 2."""
    line = right_line(words)
    told = f"Write:\n  {_program()} {line}" if line else f"There are {', '.join(COMMANDS)}"
    print(f"exp: {words[0] or 'an empty word'} is no command. {told}", file=sys.stderr)
    return 2


def _program() -> str:
    """What a person types before a command here: the script may not be on their path."""
    import os

    return "exp" if os.path.basename(sys.argv[0]) == "exp" else "python -m exp"


def right_line(words: Sequence[str]) -> str | None:
    """The words that were meant: another spelling, another program's, or a command that was left out or stands last.

    Returns: None where nothing is near.
    """
    import shlex

    from exp.spelling import nearest

    first, rest = words[0], list(words[1:])
    if "=" in first or first[:1] in ("-", "+", "~"):
        named = next((word for word in rest if word in COMMANDS), None)
        return shlex.join([named or "train", first, *(word for word in rest if word != named)])
    plain = first.lower().removeprefix("exp.").removeprefix("exp-").replace("-", "_")
    near = [plain] if plain in COMMANDS else HABITS[plain].split() if plain in HABITS else nearest(plain, COMMANDS)
    return shlex.join([*near, *rest]) if near else None


if __name__ == "__main__":
    sys.exit(main())
