"""Imported last by the server that jobs are forked from: ends it without the 0.8 s in which torch is deleted."""

from __future__ import annotations

import atexit
import os


def end_server(pid: int) -> None:
    """End this process at once if it is the server and not a job, which inherits the exit function."""
    if os.getpid() == pid:
        os._exit(0)


atexit.register(end_server, os.getpid())
