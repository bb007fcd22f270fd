"""Delay two slow imports of torchmetrics: scipy.signal and matplotlib.

torchmetrics imports scipy.signal (0.6 s) for audio metrics, and matplotlib (0.4 s) to draw metrics (torchmetrics 1.9,
two cores). While torchmetrics is imported, stub modules replace the two packages. A stub imports the real package when
a name is used that the stub does not define, or when a metric is drawn.

EXP_PLAIN_IMPORTS=1 in the environment disables the stubs. tests/run/test_lighter_imports.py tests them.
"""

from __future__ import annotations

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


def install() -> None:
    """Install the import hook that delays the imports, unless EXP_PLAIN_IMPORTS is 1."""
    is_there = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not is_there and os.environ.get("EXP_PLAIN_IMPORTS") != "1":
        sys.meta_path.insert(0, _Finder())


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while modules are imported.

    The imports of torch and Lightning would trigger five full collections, which take 0.4 s. At the end of the context,
    all objects are excluded from later collections, unless exp is a part of another program.

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
        if fullname != "torchmetrics":
            return None
        found = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """A wrapper of the loader of torchmetrics. While the package is imported, stubs are in sys.modules."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        for package, stubs in STUBS.items():
            if package not in sys.modules:
                sys.modules.update({stub.__name__: stub for stub in stubs})
        try:
            self._real.exec_module(module)
        finally:
            _remove_stubs()


def _remove_stubs() -> None:
    for name, module in tuple(sys.modules.items()):
        if isinstance(module, _Stub):
            del sys.modules[name]


class _Stub(ModuleType):
    """A stub of a module that defines some names. For any other name, it imports the real module.

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
        _remove_stubs()
        return getattr(importlib.import_module(self.__name__), name)


def instances_of(module: str, name: str) -> type:
    """Return a class that can replace `module.name` in isinstance() without importing the module.

    Before the module is imported, isinstance() is False for all objects.
    """

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            real = getattr(sys.modules.get(module), name, None)
            return real is not None and isinstance(instance, real)

    return Meta(name, (), {})


def _style(*arguments: Any, **named: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that runs a function in matplotlib.pyplot.style.context, imported at the first call."""

    def decorate(plot: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plot)
        def call(*of_plot: Any, **named_of_plot: Any) -> Any:
            with importlib.import_module("matplotlib.pyplot").style.context(*arguments, **named):
                return plot(*of_plot, **named_of_plot)

        return call

    return decorate


_AXES = _Stub("matplotlib.axes", Axes=instances_of("matplotlib.axes", "Axes"))
_PYPLOT = _Stub("matplotlib.pyplot", Figure=object, style=_Stub("matplotlib.style", context=_style))
_COLORS = _Stub("matplotlib.colors", Colormap=object)
# Stubs by the package whose import they delay.
STUBS: Mapping[str, Sequence[ModuleType]] = {
    "scipy.signal": [_Stub("scipy.signal", hamming=None)],
    "matplotlib": [_Stub("matplotlib", axes=_AXES, pyplot=_PYPLOT, colors=_COLORS), _AXES, _PYPLOT],
}
