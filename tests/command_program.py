"""What a process of `commands` in tests/conftest.py does: `python -m exp.train ...` without the start of Python.

SETTINGS is a mapping: module, arguments, directory, environment, output and error (files).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    os.chdir(settings["directory"])
    os.environ.clear()
    os.environ.update(settings["environment"])
    # As a fresh interpreter has it: the working directory of `-m`, then PYTHONPATH.
    folders = [settings["directory"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, settings["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, settings["error"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [settings["module"], *settings["arguments"]]
    status = 1
    try:
        status = importlib.import_module(settings["module"]).main(settings["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(status)


if __name__ == "__main__":
    main(globals()["SETTINGS"])
