"""The table of exp's commands. An entry has the command's module, its line of help, and its flags and keys.

This module imports almost nothing, because every command and every tab completion imports it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

# The directory of the package exp. If users remove a folder of extras/, the commands in the folder disappear.
PACKAGE = os.path.dirname(os.path.dirname(__file__))

# Stands for the values of a flag or a key that accepts any file or folder.
PATH = "path"
ALLOW = "--allow="
SWITCH = "true|false"
OF_A_RUN = {"run": PATH, "weights": "best|last|path"}
EXPORTED = {**OF_A_RUN, "security.allow": ""}
# Hydra's flags, for commands that take overrides.
HYDRA_FLAGS = (
    "--multirun", "--cfg=job|hydra|all", "--package=", "--resolve", "--config-name=", "--config-dir=path",
    "--help", "--version",
)  # fmt: skip


class Command(NamedTuple):
    """A command, which is run by `exp NAME ...` or `python -m exp.NAME ...`.

    Args:
        module: Module in the package exp. Its function `main` runs the command and returns the exit status.
        help: Line for `exp --help`.
        has_overrides: Whether the command accepts overrides of a config. Default: False.
        flags: Flags of the command. A flag with a value ends with `=`, or with `=A|B` if the value is A or B. Default:
            none.
        keys: Keys for arguments `key=value` of the command, each with its allowed values as `A|B`. Default: none.
        words: Allowed values of arguments without a key, as `A|B`. Default: empty.
    """

    module: str
    help: str
    has_overrides: bool = False
    flags: tuple[str, ...] = ()
    keys: dict[str, str] = {}
    words: str = ""


def _of_config(module: str, help: str, *flags: str, words: str = "", **keys: str) -> Command:
    return Command(module, help, True, flags, keys, words)


def _tool(module: str, help: str, *flags: str, words: str = "") -> Command:
    return Command(module, help, False, flags, {}, words)


# Commands by section, in the order of --help.
SECTIONS: dict[str, dict[str, Command]] = {
    "Train": {
        "train": _of_config("cli.train", "one run, or with -m a sweep"),
        "resume": _of_config("cli.resume", "resume a run", "--verify", ALLOW, words=PATH),
        "fork": _of_config("cli.fork", "start a run from a step of another run, RUN@STEP", words=PATH),
    },
    "Before a run": {
        "check": _of_config("cli.check", "report the errors of a config; train nothing"),
        "plan": _of_config("cli.plan", "layers, memory of each rank and time of a step, before a run", device="",
                           memory="", search=SWITCH),
        "precision": _of_config("extras.debugging.precision_report", "show what a precision does to each layer"),
        "data": _of_config("extras.survey.data", "statistics and leaks of the data", "--samples=all"),
        "find_lr": _of_config("extras.finders.find_lr", "suggest a learning rate from a range test", "--min=", "--max=",
                              "--steps="),
        "find_batch": _of_config("extras.finders.find_batch", "find the largest and the fastest batch that fit into "
                                 "memory", "--memory=", "--max=", "--steps="),
        "why": _of_config("cli.why", "show the file, group or override that set a key"),
        "gallery": _tool("cli.gallery", "the experiments that come with exp", words="experiment"),
    },
    "After a run": {
        "dashboard": _tool("extras.dashboard.dashboard", "TensorBoard for outputs/, a sweep or a run",
                           "--page=scalars|custom_scalars|hparams|images|pr_curves|histograms|text|graphs", "--port=",
                           "--host=", "--no-browser", words=PATH),
        "report": _tool("extras.report.report", "compare runs and sweeps in one HTML page", "--output=path",
                        "--repeat-over=", "--metric=", words=PATH),
        "evaluate": Command("cli.evaluate", "evaluate a saved run", True, (),
                            {**OF_A_RUN, "stage": "test|val|all"}),
        "predict": Command("cli.predict", "predict new samples with a trained network", True, (),
                           {**OF_A_RUN, "input": PATH, "output": PATH}),
        "export": Command("extras.export.export", "a saved network as an ONNX file", False, (),
                          {**EXPORTED, "output": PATH}),
        "serve": Command("extras.serve.serve", "a saved network over HTTP, on this machine", False, (),
                         {**EXPORTED, "model": PATH, "host": "", "port": ""}),
    },
    "Tools": {
        "doctor": _tool("extras.doctor.doctor", "check the installation and the machine", "--quick",
                        "--outputs=path"),
        "audit": _tool("extras.audit.audit", "show what a downloaded config or checkpoint would do", ALLOW, words=PATH),
        "schema": _tool("extras.schema.schema", "JSON schemas for editors that complete YAML", ALLOW),
        "completion": _tool("cli.completion", "tab completion for bash and zsh", words="bash|zsh"),
        "worker": _tool("cli.worker", "one rank of a frozen run, for torchrun and SLURM", "--resume=path", ALLOW,
                        "--requeues=", words=PATH),
    },
}  # fmt: skip


def has_extra(name: str) -> bool:
    """Return whether the package `extras/NAME` exists.

    The file `__init__.py` of the package is checked, because a removed package may leave a folder with compiled files.
    """
    return os.path.isfile(os.path.join(PACKAGE, "extras", name, "__init__.py"))


def _is_installed(command: Command) -> bool:
    package, name = command.module.split(".")[:2]
    return package != "extras" or has_extra(name)


for _commands in SECTIONS.values():
    for _name in [name for name, command in _commands.items() if not _is_installed(command)]:
        del _commands[_name]
COMMANDS: dict[str, Command] = {name: command for named in SECTIONS.values() for name, command in named.items()}
