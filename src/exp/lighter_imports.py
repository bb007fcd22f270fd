"""What torch, Lightning and torchmetrics import for everybody comes in only where a run uses it.

Half of the time that `import torch, lightning` takes goes into torch._dynamo (1.4 s), for which the optimizers, the
decorator of functions that are not to be compiled, and two modules of Lightning ask, and into scipy.signal (1.3 s) and
matplotlib (0.4 s), which torchmetrics prepares for audio and for plots; the check of shapes on the meta device brings
sympy (0.5 s; torch 2.13, Lightning 2.6.6, torchmetrics 1.9, two cores). Here is the one place that knows those insides;
tests/run/test_lighter_imports.py holds them.

Those modules see a stand-in. Until something else imports torch._dynamo nothing is being compiled: disable(f) is f, and
graph_break() does nothing; from then on they see the real one. So it is with symbolic shapes: a condition that is a
bool already needs no solver. matplotlib comes in with the first plot of a metric. Where another version asks otherwise,
more is imported, and that is all.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule as FSDPModule
    from torch.distributed.tensor import DTensor as DTensor

DYNAMO = "torch._dynamo"
SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
OPERATORS = (
    *("torch._prims", "torch._prims_common", "torch._refs", "torch._meta_registrations", "torch.autograd"),
    *("torch._decomp", "torch._decomp.decompositions"),
)
# By the package that they ask for, at its import or later.
ASKING: Mapping[str, Sequence[str]] = {
    DYNAMO: (
        *("torch._compile", "torch.compiler", "torch.optim.optimizer"),
        *("lightning.fabric.wrappers", "lightning.pytorch.utilities.compile"),
    ),
    SYMBOLIC: ("torch", *OPERATORS),
    "sympy": OPERATORS,
    "scipy.signal": ("torchmetrics", "torchmetrics.audio", "torchmetrics.functional.audio"),
    "matplotlib": ("torchmetrics.utilities.plot",),
}
ALL_ASKING = frozenset(asking for all_asking in ASKING.values() for asking in all_asking)


def install() -> None:
    """Let the imports of this process be lighter; what has been imported already stays as it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ALL_ASKING and fullname != DYNAMO:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Executes a module by its own loader, and with stand-ins for the packages that it asks for."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        packages = [package for package, all_asking in ASKING.items() if module.__name__ in all_asking]
        if packages:
            # Its functions import, too, by the builtins that it has as they are made.
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": _importing(packages)}
        self._real.exec_module(module)
        while module.__name__ == DYNAMO and _waiting:
            _waiting.pop()()


def _importing(packages: Sequence[str]) -> Callable[..., ModuleType]:
    owners = {
        name: package for package in packages for name in STAND_INS[package] if f"{name}.".startswith(f"{package}.")
    }

    def import_(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if name not in owners or owners[name] in sys.modules:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        # `import a.b` gives a, and `import a.b as c` and `from a.b import c` a.b.
        return STAND_INS[owners[name]][name if fromlist else name.partition(".")[0]]

    return import_


class _Late(ModuleType):
    """A module that has some names of its own, and comes in where it is asked for any other."""

    def __init__(self, name: str, **given: object) -> None:
        super().__init__(name)
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def late_class(module: str, name: str) -> type:
    """A class for isinstance() alone: its instances are those of `module.name`, none before that is imported."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            real = getattr(sys.modules.get(module), name, None)
            return real is not None and isinstance(instance, real)

    return Meta(name, (), {})


if not TYPE_CHECKING:
    # With sympy and what else comes with them, 0.7 s.
    DTensor = late_class("torch.distributed.tensor", "DTensor")
    FSDPModule = late_class("torch.distributed.fsdp", "FSDPModule")


# What is to be disabled once torch._dynamo is there.
_waiting: list[Callable[[], None]] = []


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """torch._dynamo.disable: for a function that is called before that is imported."""

    def disabled() -> Any:
        return importlib.import_module(DYNAMO).disable(fn, recursive, **options)

    if not callable(fn) or isinstance(fn, type):
        return disabled()
    calls = [fn]
    _waiting.append(lambda: calls.__setitem__(0, disabled()))

    @functools.wraps(fn)
    def call(*arguments: Any, **named: Any) -> Any:
        return calls[0](*arguments, **named)

    return call


def _decided(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of symbolic_shapes. answer: what it gives for numbers, and tuples of numbers, without symbols."""

    def call(*arguments: Any, **named: Any) -> Any:
        if not named and all(map(_is_plain, arguments)):
            return answer(*arguments)
        return getattr(importlib.import_module(SYMBOLIC), name)(*arguments, **named)

    return call


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _style(*arguments: Any, **named: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """matplotlib.pyplot.style.context as a decorator."""

    def decorate(plot: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plot)
        def call(*of_plot: Any, **named_of_plot: Any) -> Any:
            with importlib.import_module("matplotlib.pyplot").style.context(*arguments, **named):
                return plot(*of_plot, **named_of_plot)

        return call

    return decorate


_DYNAMO = _Late(
    DYNAMO,
    OptimizedModule=late_class(DYNAMO, "OptimizedModule"),
    disable=_disable,
    graph_break=lambda *_, **__: None,
)
_ANSWERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), lambda value: value),
    **dict.fromkeys(("statically_known_true", "guard_int", "guarding_hint_or_throw"), lambda value: value),
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "sym_and": lambda *values: all(values),
    "sym_or": lambda *values: any(values),
    "sym_eq": lambda one, other: one == other if isinstance(one, int) else list(one) == list(other),
}
_SYMBOLIC = _Late(
    SYMBOLIC,
    **{name: _decided(name, answer) for name, answer in _ANSWERS.items()},
    # Whoever makes symbols imports the module.
    free_unbacked_symbols=lambda _: set(),
)
# To which torchmetrics would add scipy.signal.hamming, where scipy has it no more.
_SIGNAL = _Late("scipy.signal", hamming=None)
_AXES = _Late("matplotlib.axes", Axes=late_class("matplotlib.axes", "Axes"))
_PYPLOT = _Late("matplotlib.pyplot", Figure=object, style=_Late("matplotlib.style", context=_style))
_COLORS = _Late("matplotlib.colors", Colormap=object)
STAND_INS: Mapping[str, Mapping[str, ModuleType]] = {
    DYNAMO: {DYNAMO: _DYNAMO, "torch": _Late("torch", _dynamo=_DYNAMO)},
    SYMBOLIC: {SYMBOLIC: _SYMBOLIC},
    "sympy": {"sympy": _Late("sympy", Basic=late_class("sympy", "Basic"))},
    "scipy.signal": {"scipy.signal": _SIGNAL, "scipy": _Late("scipy", signal=_SIGNAL)},
    "matplotlib": {
        "matplotlib": _Late("matplotlib", axes=_AXES, pyplot=_PYPLOT, colors=_COLORS),
        "matplotlib.axes": _AXES,
        "matplotlib.pyplot": _PYPLOT,
    },
}
