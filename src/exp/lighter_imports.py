"""Delay two slow imports of torchmetrics: scipy.signal and matplotlib.

torchmetrics imports scipy.signal (0.6 s) for audio metrics, and matplotlib (0.4 s) to draw metrics (torchmetrics 1.9,
two cores). In the modules of torchmetrics listed in ASKING, stub modules replace the two packages. A stub imports the
real package when a name is used that the stub does not define, or when a metric is drawn.

If another version of torchmetrics imports the packages in other modules, these imports are not delayed.
EXP_PLAIN_IMPORTS=1 in the environment disables the stubs. tests/run/test_lighter_imports.py tests them.
"""

from __future__ import annotations

import builtins
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from exp.interpreter_exit import is_program

SIGNAL, MATPLOTLIB = "scipy.signal", "matplotlib"
# Modules of torchmetrics, each with the slow package that it imports at the top or in a function.
ASKING: Mapping[str, str] = {
    "torchmetrics": SIGNAL,
    "torchmetrics.audio": SIGNAL,
    "torchmetrics.functional.audio": SIGNAL,
    "torchmetrics.utilities.plot": MATPLOTLIB,
}


def install() -> None:
    """Install the import hook that delays the imports, unless EXP_PLAIN_IMPORTS is 1."""
    is_there = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not is_there and os.environ.get("EXP_PLAIN_IMPORTS") != "1":
        sys.meta_path.insert(0, _Finder())


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while modules are imported.

    The imports of torch and Lightning would trigger five full collections, which take 0.4 s. At the end of the context,
    all existing objects are excluded from later collections if the process runs only a command of exp.

    Do not fork in the context, because garbage collection would stay disabled in the child.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_program():
            gc.freeze()
        if was_enabled:
            gc.enable()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ASKING:
            return None
        found = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, STAND_INS[ASKING[fullname]], ASKING[fullname])
        return spec


class _Loader(Loader):
    """Loader of a module in which the imports of one package return stubs instead of the real package.

    Args:
        real: Loader of the module.
        stand_ins: Stubs by module name.
        package: Name of the package to replace.
    """

    def __init__(self, real: Loader, stand_ins: Mapping[str, ModuleType], package: str) -> None:
        self._real, self._stand_ins, self._package = real, stand_ins, package

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        # The stubs also replace imports inside functions, because functions use the builtins of their module.
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._import}
        self._real.exec_module(module)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        is_stood_in = name in self._stand_ins and f"{name}.".startswith(f"{self._package}.")
        if not is_stood_in or self._package in sys.modules:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        # `import a.b` returns a; `import a.b as c` and `from a.b import c` return a.b.
        return self._stand_ins[name if fromlist else name.partition(".")[0]]


class _StandIn(ModuleType):
    """Stub of a module. If a name is read that the stub does not define, the real module is imported.

    Args:
        name: Name of the module.
        **given: Names that the stub defines.
    """

    def __init__(self, name: str, **given: object) -> None:
        super().__init__(name)
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def instances_of(module: str, name: str) -> type:
    """Return a class that can replace the class `module.name` in isinstance() without importing the module.

    isinstance() returns False for all objects until other code imports the module.
    """

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            real = getattr(sys.modules.get(module), name, None)
            return real is not None and isinstance(instance, real)

    return Meta(name, (), {})


def _style(*arguments: Any, **named: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that runs a function within matplotlib.pyplot.style.context.

    matplotlib is imported when the decorated function is called.

    Args:
        *arguments: Positional arguments of style.context.
        **named: Keyword arguments of style.context.
    """

    def decorate(plot: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plot)
        def call(*of_plot: Any, **named_of_plot: Any) -> Any:
            with importlib.import_module("matplotlib.pyplot").style.context(*arguments, **named):
                return plot(*of_plot, **named_of_plot)

        return call

    return decorate


_SIGNAL = _StandIn(SIGNAL, hamming=None)
_AXES = _StandIn("matplotlib.axes", Axes=instances_of("matplotlib.axes", "Axes"))
_PYPLOT = _StandIn("matplotlib.pyplot", Figure=object, style=_StandIn("matplotlib.style", context=_style))
STAND_INS: Mapping[str, Mapping[str, ModuleType]] = {
    SIGNAL: {SIGNAL: _SIGNAL, "scipy": _StandIn("scipy", signal=_SIGNAL)},
    MATPLOTLIB: {
        MATPLOTLIB: _StandIn(
            MATPLOTLIB, axes=_AXES, pyplot=_PYPLOT, colors=_StandIn("matplotlib.colors", Colormap=object)
        ),
        "matplotlib.axes": _AXES,
        "matplotlib.pyplot": _PYPLOT,
    },
}
