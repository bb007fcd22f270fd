"""The wall that every `_target_` passes: a dotted name becomes a class or a function, or nothing is imported.

1. The name itself is compared with the allowed packages, before any import.
2. Only its module part is imported, and one attribute is taken out of that module's own namespace; of a package that
   imports its parts when they are asked for, out of what the package itself gives for the name.
3. It must be a class whose own name is the one written or, in a listed package, a public alias of a class that lives
   in that package; or one of a short list of torch functions.
4. It must be of its slot's base class: a Module for a layer, an Optimizer for the optimizer.
5. A function, or a class's own method that makes one (`AutoModel.from_config`), may stand where what it returns is
   judged: the model, a layer, a loss, a data set. It must live in the package like a class, and the package be one that
   the command line, an entry point or the user's own ./conf allows: those of torch and Lightning stay listed by name.

So a name that an allowed module happens to import (`logging.os.system`) leads nowhere.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from exp.config.annotations import return_annotation
from exp.config.search_path import ENTRY_POINTS, is_users_conf, make_importable
from exp.config.versions import current_target
from exp.errors import ConfigError, ErrorDetails, ExpError, chain_of
from exp.spelling import among, find_nearest

# Package: where a public alias found in it may really live.
LISTED = {
    "exp.models": "exp.models",
    "exp.functions": "exp.functions",
    "exp.data": "exp.data",
    "exp.objectives": "exp.objectives",
    "exp.optim": "exp.optim",
    "exp.strategies": "exp.strategies",
    "exp.hooks": "exp.hooks",
    "exp.tensorboard": "exp.tensorboard",
    "exp.loggers": "exp.loggers",
    # exp itself makes the classes of the engine's other modules.
    "exp.engine.ema": "exp.engine.ema",
    "exp.engine.state_at": "exp.engine.state_at",
    **{f"exp.extras.{name}": f"exp.extras.{name}" for name in (
        "debugging", "deepspeed", "evaluation", "finders.range_test", "finders.size_trial", "gallery", "hf", "mlflow",
        "research", "wandb",
    )},
    "torch.nn": "torch.nn",
    "torch.optim": "torch.optim",
    "torchmetrics": "torchmetrics",
    "lightning.pytorch.callbacks": "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers": "lightning.pytorch.loggers",
    "lightning.pytorch.profilers": "lightning.pytorch.profilers",
    "lightning.pytorch.strategies": "lightning.pytorch.strategies",
}  # fmt: skip
LISTED_CLASSES = {
    "lightning.pytorch.Trainer": "lightning.pytorch.trainer",
    # One by one: the package also holds file readers that open any path for writing.
    "torch.utils.data.ConcatDataset": "torch.utils.data",
    "torch.utils.data.ChainDataset": "torch.utils.data",
    "torch.utils.data.StackDataset": "torch.utils.data",
    "torch.utils.data.Subset": "torch.utils.data",
    "torch.utils.data.RandomSampler": "torch.utils.data",
    "torch.utils.data.SequentialSampler": "torch.utils.data",
    "torch.utils.data.SubsetRandomSampler": "torch.utils.data",
    "torch.utils.data.WeightedRandomSampler": "torch.utils.data",
}
# With `_partial_: true`, as an activation or an initialisation. Each takes tensors and numbers and gives tensors.
FUNCTIONS = frozenset(
    {f"torch.nn.functional.{name}" for name in (
        "celu", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_softmax", "logsigmoid",
        "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softmax", "softplus", "softsign", "tanh", "tanhshrink",
        "scaled_dot_product_attention",
    )}
    | {f"torch.nn.init.{name}" for name in (
        "constant_", "dirac_", "eye_", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "orthogonal_",
        "sparse_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_",
    )}
)  # fmt: skip
# Names that people write for one of the listed.
MOVED = {
    "pytorch_lightning.": "lightning.pytorch.",
    "lightning.Trainer": "lightning.pytorch.Trainer",
    "torch.Linear": "torch.nn.Linear",
    "nn.": "torch.nn.",
    "optim.": "torch.optim.",
    "torch.nn.optim.": "torch.optim.",
    "src.": "",
}
_NOTHING = object()
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)+", re.ASCII)


class TargetError(ConfigError):
    """A `_target_` that the wall refuses."""

    def __init__(self, *, target: str, got: str, expected: str, fix: str | None = None) -> None:
        self.target = target
        super().__init__([ErrorDetails(key="_target_", got=got, expected=expected, fix=fix)])


def is_of_a_target(error: BaseException) -> bool:
    """Return whether an interpolation failed because its resolver's function is refused, which is its own error."""
    return any(isinstance(cause, TargetError) for cause in chain_of(error))


def resolve(
    dotted: str,
    *,
    base: str | Sequence[str] | None = None,
    returns: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> Any:
    """The class or function of a dotted name. Nothing outside the allowed packages is imported.

    base: dotted name, or names, of the classes that its slot takes one of; None where any allowed class fits.
    returns: dotted names of the classes of which a function must return one; without any, no function is taken but
        the listed. Whoever calls it judges what comes back.
    allow: packages that the command line allows, `security.allow`.
    Raises: TargetError.
    """
    if isinstance(dotted, str):
        dotted = current_target(dotted)
    home = _home_of_name(dotted, allow=allow)
    value = _found(dotted, home=home)
    if inspect.isroutine(value) and dotted not in FUNCTIONS:
        _require_function(dotted, value, home=home, returns=returns)
        return value
    found_by_list = dotted in FUNCTIONS
    if not found_by_list:
        _require_class_at_home(dotted, value, home=home)
    if base is not None:
        _require_base(dotted, value, bases=[base] if isinstance(base, str) else list(base))
    if not found_by_list and inspect.isabstract(value):
        fix = f"It lacks {among(sorted(value.__abstractmethods__))}"
        raise TargetError(
            target=dotted, got=f"{dotted}, an abstract class", expected="a class that can be built", fix=fix
        )
    return value


def resolve_function(dotted: str, *, allow: Sequence[str] = ()) -> Any:
    """Return the function, or the torch.autograd.Function, that a forward program may call by a name of its own.

    It passes the same wall as a class. Torch's own functions need no entry, because a program has a list of them.

    Raises:
        TargetError: The wall refuses the name.
    """
    if dotted in FUNCTIONS:
        expected = "a function of yours, or of a package that security.allow names"
        fix = "Leave it out: python docs/make_vocabulary.py lists the functions of torch that a program may call"
        raise TargetError(target=dotted, got=f"{dotted}, a function of torch", expected=expected, fix=fix)
    value = resolve(dotted, returns=("builtins.object",), allow=allow)
    if inspect.isclass(value):
        _require_base(dotted, value, bases=["torch.autograd.Function"])
    return value


def resolve_resolver(dotted: str, *, allow: Sequence[str] = ()) -> Any:
    """Return the function of the user's own that interpolations call. It passes the same wall as a class.

    Raises:
        TargetError: The wall refuses the name.
    """
    home = _home_of_name(dotted, allow=allow)
    value = _found(dotted, home=home)
    if not inspect.isroutine(value) or dotted in FUNCTIONS:
        raise TargetError(target=dotted, got=f"{dotted}, which is no function of yours", expected="a function of yours")
    _require_function(dotted, value, home=home, returns=("builtins.object",))
    return value


def _home_of_name(dotted: str, *, allow: Sequence[str]) -> str:
    """The package in which the class must live, by the name alone; nothing is imported here."""
    if not isinstance(dotted, str) or not NAME.fullmatch(dotted):
        raise TargetError(
            target=str(dotted), got=repr(dotted), expected="the dotted name of a class, such as torch.nn.Linear"
        )
    top = dotted.partition(".")[0]
    home = _listed_home(dotted, allow=allow)
    if home is None and top not in closed_packages() and stands_beside_conf(top):
        home = top
    if home is None:
        raise _outside(dotted)
    return home


def is_listed(dotted: Any, *, allow: Sequence[str]) -> bool:
    """Whether a name lies in the allowed packages, wherever this process stands. Nothing is imported."""
    if not isinstance(dotted, str) or NAME.fullmatch(dotted) is None:
        return False
    return bool(_listed_home(current_target(dotted), allow=allow))


def _listed_home(dotted: str, *, allow: Sequence[str]) -> str | None:
    if dotted in LISTED_CLASSES:
        return LISTED_CLASSES[dotted]
    # From the right, so that the narrowest listed package that holds the name decides.
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        package = ".".join(parts[:length])
        if package in LISTED:
            return LISTED[package]
        if package in allow:
            return package
    return parts[0] if parts[0] in plugin_packages() else None


def _found(dotted: str, *, home: str) -> Any:
    """Return an attribute of a module, or a method by which a class of a module makes objects."""
    module_name, _, attribute = dotted.rpartition(".")
    package, _, holder = module_name.rpartition(".")
    # By convention a class begins with a capital, and a module does not.
    if package and holder[:1].isupper() and inspect.isclass(owner := _member(_import(package, dotted), holder)):
        _require_class_at_home(module_name, owner, home=home)
        own = inspect.getattr_static(owner, attribute, None)
        if attribute.startswith("_") or not isinstance(own, classmethod | staticmethod):
            got = f"{dotted}, which is no class method of {module_name}"
            expected = f"a class, such as {module_name} itself, or a class method that makes an object"
            near = find_nearest(attribute, [name for name in vars(owner) if not name.startswith("_")])
            fix = f"Did you mean {module_name}.{near[0]}?" if near else None
            raise TargetError(target=dotted, got=got, expected=expected, fix=fix)
        return getattr(owner, attribute)
    module = _import(module_name, dotted)
    value = _member(module, attribute)
    if value is _NOTHING:
        raise _absent(dotted, module_name, module, home=home)
    return value


def _member(module: Any, name: str) -> Any:
    """What a module's own namespace holds, or what its own `__getattr__` gives: such a package imports late."""
    if name.startswith("_"):
        return _NOTHING
    own = vars(module)
    if name in own:
        return own[name]
    if "__getattr__" not in own and "__getattr__" not in vars(type(module)):
        return _NOTHING
    try:
        return getattr(module, name)
    except AttributeError:
        return _NOTHING
    except (Exception, SystemExit) as error:
        raise _broken(f"{module.__name__}.{name}", module.__name__, error) from error


def _require_function(dotted: str, value: Any, *, home: str, returns: Sequence[str]) -> None:
    is_method = inspect.ismethod(value) or dotted.rpartition(".")[0].rpartition(".")[2][:1].isupper()
    got, wrap = f"{dotted}, {'a method' if is_method else 'a function'}", "Wrap it in a class of your own"
    if home in LISTED.values() or home in LISTED_CLASSES.values():
        raise TargetError(target=dotted, got=got, expected="a class", fix=wrap)
    if not returns:
        expected = "a class: what a function returns is judged for a model, a layer, a loss or a data set alone"
        raise TargetError(target=dotted, got=got, expected=expected, fix=wrap)
    if not (inspect.isfunction(value) or inspect.ismethod(value)):
        got = f"{dotted}, a {type(value).__name__}"
        raise TargetError(target=dotted, got=got, expected="a class, or a function in Python")
    _require_home(dotted, value, home=home)
    said = return_annotation(value)
    classes = [class_of(name) for name in returns]
    # A base class says too little to refuse: nn.Module for a subclass.
    if said is not None and not any(issubclass(said, one) or issubclass(one, said) for one in classes):
        returned = "nothing" if said is type(None) else f"a {said.__name__}"
        expected = f"one that returns a {classes[0].__name__}"
        raise TargetError(target=dotted, got=f"{got} that returns {returned}", expected=expected)


def _require_home(dotted: str, value: Any, *, home: str) -> None:
    real = f"{value.__module__}.{value.__qualname__}"
    if real != dotted and not _inside(real, home):
        fix = f"Write {real}" if any(_inside(real, package) for package in LISTED) else None
        expected = f"a class or a function of {home}"
        raise TargetError(target=dotted, got=f"{dotted}, which is {real}", expected=expected, fix=fix)


def _import(module_name: str, dotted: str) -> Any:
    top = module_name.split(".")[0]
    if top not in closed_packages() and stands_beside_conf(top):
        make_importable()
    try:
        return importlib.import_module(module_name)
    except ExpError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _absent_module(dotted, error.name) from error
        raise _broken(dotted, module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(dotted, module_name, error) from error


def _require_class_at_home(dotted: str, value: Any, *, home: str) -> None:
    if not inspect.isclass(value):
        kind = "a function" if callable(value) else f"a {type(value).__name__}"
        fix = "Wrap it in a class of your own" if callable(value) else None
        raise TargetError(target=dotted, got=f"{dotted}, {kind}", expected="a class", fix=fix)
    _require_home(dotted, value, home=home)


def _require_base(dotted: str, value: Any, *, bases: list[str]) -> None:
    classes = tuple(class_of(base) for base in bases)
    if not (inspect.isclass(value) and issubclass(value, classes)):
        wanted = " or ".join(bases)
        raise TargetError(target=dotted, got=f"{dotted}, which is no {wanted}", expected=f"a subclass of {wanted}")


def class_of(dotted: str) -> Any:
    """A base class by a name of ours, never by one out of a config."""
    module_name, _, attribute = dotted.rpartition(".")
    return getattr(importlib.import_module(module_name), attribute)


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _outside(dotted: str) -> TargetError:
    return TargetError(
        target=dotted,
        got=f"{dotted}, outside the allowed packages",
        expected="a class of exp, torch.nn, torch.optim, torchmetrics, lightning.pytorch, or of yours",
        fix=_fix_outside(dotted),
    )


def _fix_outside(dotted: str) -> str | None:
    for wrong, right in MOVED.items():
        if dotted == wrong or (wrong.endswith(".") and dotted.startswith(wrong)):
            return f"Did you mean {right}{dotted[len(wrong) :]}?"
    package, _, name = dotted.rpartition(".")
    top = dotted.split(".")[0]
    near = find_nearest(package, [listed for listed in LISTED if find_nearest(top, [listed.split(".")[0]])])
    if near and name[0].isupper():
        return f"Did you mean {near[0]}.{name}?"
    if top in closed_packages() or top in sys.stdlib_module_names:
        return None
    return (
        f"If it is yours, let {top}.py stand beside your own ./conf; "
        f"if you trust the package, add 'security.allow=[{top}]' to the command"
    )


def _absent(dotted: str, module_name: str, module: Any, *, home: str) -> TargetError:
    own = vars(module)
    known = [name for name, value in own.items() if inspect.isclass(value)]
    if home not in LISTED.values():
        # Names that are imported late are known by dir alone.
        known += [name for name in dir(module) if name not in own or inspect.isfunction(own[name])]
    near = find_nearest(dotted.rpartition(".")[2], [name for name in known if not name.startswith("_")])
    fix = f"Did you mean {module_name}.{near[0]}?" if near else None
    return TargetError(
        target=dotted, got=f"{dotted}, which is not there", expected=f"a class of {module_name}", fix=fix
    )


def _absent_module(dotted: str, missing: str) -> TargetError:
    parent, _, word = missing.rpartition(".")
    name = dotted.rpartition(".")[2]
    fix = None
    if parent in sys.modules:
        own = vars(sys.modules[parent])
        # Lists names of files; imports none of them.
        siblings = [found.name for found in pkgutil.iter_modules(getattr(sys.modules[parent], "__path__", None) or [])]
        near = [f"{one}{dotted[len(missing) :]}" for one in find_nearest(word, siblings)]
        meant = [word] if word in own and inspect.isclass(own[word]) else [name] if name in own else near
        fix = f"Did you mean {parent}.{meant[0]}?" if meant else None
    return TargetError(target=dotted, got=f"{dotted}: no module {missing}", expected="a class in a module", fix=fix)


def _broken(dotted: str, module_name: str, error: BaseException) -> TargetError:
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return TargetError(
        target=dotted,
        got=f"{dotted}: importing {module_name} failed with {reason}",
        expected="a module that can be imported",
    )


def closed_packages() -> set[str]:
    """Packages whose listed parts are open and whose others stay closed, whatever stands in the working directory."""
    return {name.split(".")[0] for name in LISTED}


def plugin_packages() -> set[str]:
    """Top-level packages that install an `exp.conf` entry point: installing one is allowing it."""
    return {point.module.split(".")[0] for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def stands_beside_conf(package: str) -> bool:
    """Whether a module or package of that name stands in the working directory beside the user's own ./conf.

    A name of the standard library, or of an installed package that Python would import instead, is not the user's.
    """
    directory = Path.cwd().resolve()
    if not is_users_conf(directory / "conf") or package in sys.stdlib_module_names:
        return False
    # Python remembers what a folder held; a file that was written a moment ago, in a notebook say, is not in it yet.
    importlib.invalidate_caches()
    here = PathFinder.find_spec(package, [str(directory)])
    if here is None or here.origin is None:
        return False
    if package in sys.modules:
        return _same_file(sys.modules[package].__file__, here.origin)
    first = PathFinder.find_spec(package, [*sys.path, str(directory)])
    return first is not None and _same_file(first.origin, here.origin)


def _same_file(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()
