"""Exit without interpreter teardown: run atexit handlers, flush, then `os._exit`.

The teardown collects the objects of torch, Lightning and torchmetrics, which takes 0.8 s of processor time (torch 2.13,
Lightning 2.6.6, two cores). The system frees their memory anyway. mypy exits in the same way.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import sysconfig
import threading

# Folders of installed packages. Modules from other places may be the user's.
SITES = frozenset({"site-packages", "dist-packages"})
# Dependencies of exp. Other packages may have work to do at exit.
KNOWN = frozenset({
    *("torch", "torchgen", "functorch", "lightning", "lightning_utilities", "torchmetrics", "lightning_fabric"),
    *("numpy", "scipy", "sklearn", "joblib", "threadpoolctl", "narwhals", "sympy", "mpmath", "networkx", "PIL"),
    *("hydra", "omegaconf", "antlr4", "yaml", "annotated_types", "typing_extensions", "packaging", "filelock"),
    *("tensorboard", "google", "absl", "grpc", "markdown", "werkzeug", "markupsafe", "jinja2", "psutil", "fsspec"),
    *("rich", "pygments", "markdown_it", "mdurl", "tqdm", "attr", "attrs", "setuptools", "pkg_resources"),
    *("_distutils_hack", "_cffi_backend"),
})  # fmt: skip
PACKAGE = os.path.dirname(__file__) + os.sep
# Folders of exp, which may be a checkout, of its part in Hydra's namespace, and of Python.
OWN = (
    PACKAGE,
    os.path.join(os.path.dirname(os.path.dirname(PACKAGE)), "hydra_plugins", ""),
    os.path.dirname(os.__file__) + os.sep,
)


def exit_without_teardown(status: int) -> int:
    """Exit this process with a status, after its threads and its exit functions.

    Returns:
        The status, if the interpreter has to exit normally: torch is not imported; other modules are imported, which
        may have work to do; exp is part of another program, a debugger or a profiler; CUDA is in use, whose tools write
        when libraries are unloaded; or standard output cannot be written, which the interpreter reports.
    """
    torch = sys.modules.get("torch")
    is_plain = torch is not None and is_program() and not torch.cuda.is_initialized()
    if is_plain and not has_foreign_code() and finish():
        os._exit(status)
    gc.unfreeze()  # otherwise frozen modules keep the user's objects alive
    return status


def is_program() -> bool:
    """Return whether this interpreter runs only a command of exp, without a debugger or profiler."""
    if sys.gettrace() is not None or sys.getprofile() is not None or sys.flags.inspect:
        return False
    program = str(getattr(sys.modules["__main__"], "__file__", None))
    return program.startswith(PACKAGE) or program == os.path.join(sysconfig.get_path("scripts"), "exp")


def has_foreign_code() -> bool:
    """Return whether a module was imported that is no dependency of exp, such as the user's."""
    program = sys.modules["__main__"]  # a spawned process has it under another name as well
    for name, module in tuple(sys.modules.items()):
        path = str(getattr(module, "__file__", None))
        # Two modules of torch have paths without a folder.
        if module is program or not os.path.isabs(path) or path.startswith(OWN):
            continue
        if name.partition(".")[0] not in KNOWN or not SITES & set(path.split(os.sep)):
            return True
    return False


def finish() -> bool:
    """Wait for threads, run exit functions and flush, like the interpreter before its teardown.

    Returns:
        False if that failed, which the interpreter then reports.
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
    """Run the exit functions of this process."""
    atexit._run_exitfuncs()  # private to Python, and tested (3.11)
