"""python -m exp.warm: keeps a process that has imported torch, of which `python -m exp.train` is a fork from then on.

    python -m exp.warm                 starts it, and returns once it waits
    python -m exp.warm --idle 8h       it ends when no command has come for so long; an hour unless told otherwise
    python -m exp.warm status          which wait, and for what they do not
    python -m exp.warm stop            ends it; runs that have begun go on

A command starts in a few tenths of a second, and does all else as without it. It is for commands of the same Python,
the same variables that torch reads, and the same container or cluster job. It ends by itself where exp, torch or
Python change. `runtime.warm=false` leaves a command alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from exp.errors import ConfigError, Fault
from exp.launch import warm_parent
from exp.output import exit_status
from exp.shared_types import span_seconds
from exp.sweeps.job import MODULES

# What a command imports beside a sweep's job. exp.train is not among them: it is the program itself.
OF_A_COMMAND = (
    "exp.check.stages",
    "exp.config.command",
    "exp.run_report",
    "hydra._internal.core_plugins.importlib_resources_config_source",
    "hydra_plugins.exp.launcher",
    "hydra_plugins.exp.sweeper",
)
LONGEST_SECONDS = 366 * 24 * 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Start, show or end the warm parents of this user.

    Returns: 0; of status and stop 1 where none waits; 2 for a wrong command.
    """
    done = exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))
    return done() if isinstance(done, warm_parent.Run) else done


def _command(argv: Sequence[str]) -> int | warm_parent.Run:
    arguments = parser().parse_args(argv)
    if arguments.what == "stop":
        return _stopped()
    if arguments.what == "status":
        return _shown()
    idle_seconds = _seconds(arguments.idle)
    waiting = warm_parent.start([*MODULES, *OF_A_COMMAND], idle_seconds=idle_seconds)
    if isinstance(waiting, warm_parent.Run):
        return waiting
    if waiting is not None:
        print(f"one waits already: process {waiting.pid}")
    else:
        print(f"it waits; it ends when no command has come for {arguments.idle}, or by python -m exp.warm stop")
    return 0


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m exp.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("what", nargs="?", choices=("start", "status", "stop"), default="start", help="by default start")
    found.add_argument("--idle", default="1h", metavar="TIME", help="a time such as 90s, 30m or 8h; by default 1h")
    return found


def _seconds(idle: str) -> float:
    try:
        seconds = span_seconds(idle)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_SECONDS:
        expected = "a time such as 90s, 30m or 8h, more than none and at most a year"
        raise ConfigError([Fault(key="--idle", got=idle, expected=expected, source="command line")])
    return seconds


def _stopped() -> int:
    count = warm_parent.stop()
    print(f"ended {count}; runs that have begun go on" if count else "none waits")
    return 0 if count else 1


def _shown() -> int:
    found = list(warm_parent.found())
    for one in found:
        count = f"{one.commands} command{'s' if one.commands != 1 else ''} so far"
        others = f"; not for commands of here, which differ in: {', '.join(one.differs)}" if one.differs else ""
        print(f"process {one.pid} waits, {count}{others}")
    if not found:
        print("none waits")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
