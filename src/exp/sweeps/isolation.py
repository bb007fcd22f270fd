"""Isolate the jobs of a sweep in one process: environment, random states and torch's switches are restored."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

from exp.signals import ENDING


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Restores the process afterwards, whatever happens inside.

    Covers environment variables, working directory, log handlers, warning filters, signal handlers, the random states
    of Python, NumPy and torch, torch's threads, determinism, precision switches and default dtype, what was compiled,
    and a process group left open.
    """
    environment = dict(os.environ)
    directory = os.getcwd()
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    python_random = random.getstate()
    on_main_thread = threading.current_thread() is threading.main_thread()
    signals = {number: signal.getsignal(number) for number in ENDING}
    put_back = [*_numpy(), *_torch()]
    with warnings.catch_warnings():
        try:
            yield
        finally:
            os.chdir(directory)
            _restore_environment(environment)
            root.setLevel(level)
            root.handlers[:] = handlers
            random.setstate(python_random)
            if on_main_thread:
                for number, handler in signals.items():
                    signal.signal(number, handler)
            for action in put_back:
                action()
            _close_process_group()
            _forget_compiled()
            gc.collect()


def _restore_environment(kept: dict[str, str]) -> None:
    for name in [name for name in os.environ if name not in kept]:
        del os.environ[name]
    for name, value in kept.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _numpy() -> Iterator[Callable[[], object]]:
    if "numpy" in sys.modules:
        import numpy

        state = numpy.random.get_state()
        yield lambda: numpy.random.set_state(state)


def _torch() -> Iterator[Callable[[], object]]:
    if "torch" not in sys.modules:
        return
    import torch

    generator = torch.get_rng_state()
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul = torch.get_float32_matmul_precision()
    benchmark, cudnn_deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic

    def put_back() -> None:
        torch.set_rng_state(generator)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (deterministic, warns):
            # Not for nothing: this setter imports torch's compiler, two seconds.
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, cudnn_deterministic
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    yield put_back


def _forget_compiled() -> None:
    if "torch._dynamo" in sys.modules:  # whose import takes a second
        from exp.engine.compilation import forget_compiled

        forget_compiled()


def _close_process_group() -> None:
    if "torch" not in sys.modules:
        return
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
