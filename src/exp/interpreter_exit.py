"""The end of a command's process, without the interpreter's taking apart of modules where nobody would see it.

Behind what is registered for its exit an interpreter collects, and takes apart, all that torch, Lightning and
torchmetrics have made of themselves: 0.8 s of the processor for memory that the system takes back at once (torch 2.13,
Lightning 2.6.6, two cores). mypy ends its process like this, too.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import sysconfig
import threading

# Where the system installs packages: what is imported from elsewhere may be the user's own.
SITES = frozenset({"site-packages", "dist-packages"})
# Of what is installed there: what exp needs, and what that needs. Of others nobody knows what they do at their end.
KNOWN = frozenset({
    *("torch", "torchgen", "functorch", "lightning", "lightning_utilities", "torchmetrics", "lightning_fabric"),
    *("numpy", "scipy", "sklearn", "joblib", "threadpoolctl", "narwhals", "sympy", "mpmath", "networkx", "PIL"),
    *("hydra", "omegaconf", "antlr4", "yaml", "annotated_types", "typing_extensions", "packaging", "filelock"),
    *("tensorboard", "google", "absl", "grpc", "markdown", "werkzeug", "markupsafe", "jinja2", "psutil", "fsspec"),
    *("rich", "pygments", "markdown_it", "mdurl", "tqdm", "attr", "attrs", "setuptools", "pkg_resources"),
    *("_distutils_hack", "_cffi_backend"),
})  # fmt: skip
PACKAGE = os.path.dirname(__file__) + os.sep
# exp's, which in a checkout is in no such place, its half in Hydra's namespace, and Python's.
OWN = (
    PACKAGE,
    os.path.join(os.path.dirname(os.path.dirname(PACKAGE)), "hydra_plugins", ""),
    os.path.dirname(os.__file__) + os.sep,
)


def exit_without_teardown(status: int) -> int:
    """End this process at once, as soon as threads and what is registered for its exit are done, with a status.

    Returns: the status, where the interpreter has to end it: torch is not there; modules are that exp does not bring,
        which may do something as they are taken apart; exp is a part of another program, or a debugger's or
        profiler's; CUDA is in use, whose tools write as the libraries are unloaded; or standard output cannot be
        written, of which the interpreter tells.
    """
    torch = sys.modules.get("torch")
    is_plain = torch is not None and is_program() and not torch.cuda.is_initialized()
    if is_plain and not has_foreign_code() and finish():
        os._exit(status)
    gc.unfreeze()  # else what was imported for every run keeps alive what of the user's it refers to
    return status


def is_program() -> bool:
    """Return whether this interpreter was started for a command of exp, ends after it, and is watched by no tool."""
    if sys.gettrace() is not None or sys.getprofile() is not None or sys.flags.inspect:
        return False
    program = str(getattr(sys.modules["__main__"], "__file__", None))
    return program.startswith(PACKAGE) or program == os.path.join(sysconfig.get_path("scripts"), "exp")


def has_foreign_code() -> bool:
    """Whether something was imported that exp does not bring, such as a module of the user's."""
    program = sys.modules["__main__"]  # by another name, too, where a process was spawned
    for name, module in tuple(sys.modules.items()):
        path = str(getattr(module, "__file__", None))
        # Two of torch's call themselves by names without a folder.
        if module is program or not os.path.isabs(path) or path.startswith(OWN):
            continue
        if name.partition(".")[0] not in KNOWN or not SITES & set(path.split(os.sep)):
            return True
    return False


def finish() -> bool:
    """Do what an interpreter does before it takes modules apart: wait for threads, do what is registered, flush.

    Returns: whether that could be done; else the interpreter tells why.
    """
    try:
        vars(threading)["_shutdown"]()  # private to Python, and tested (3.11)
        run_exit_functions()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError, KeyboardInterrupt):
        return False
    return True


def run_exit_functions() -> None:
    """Do what was registered for the exit of this process."""
    atexit._run_exitfuncs()  # private to Python, and tested (3.11)
