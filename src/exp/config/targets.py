"""Return the class or the function that a `_target_` (a dotted name) names, if these rules allow it.

1. The name is compared with the allowed packages before any import.
2. Only the module in the name is imported, and only one attribute of the module is read.
3. The attribute must be a class that is defined under this name, or one of a short list of torch functions. In a listed
   package, it may also be a public alias of a class of that package.
4. The class must be a subclass of the base that the key requires: a Module for a layer, an Optimizer for the optimizer.
5. Functions, and class methods such as `AutoModel.from_config`, are allowed for a model, a layer, a loss and a data
   set, because exp checks the result. The package of the function must be allowed by the command line, by an entry
   point or by the user's ./conf. Functions of torch and Lightning must be listed by name.

These rules refuse names that an allowed module has only imported from elsewhere, such as `logging.os.system`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from exp.config.annotations import return_annotation
from exp.config.search_path import conf_points, is_users_conf, make_importable
from exp.config.versions import current_target
from exp.errors import ConfigError, ErrorDetails, ExpError, chain_of, one_line
from exp.spelling import among, find_nearest, target_of_habit

# Allowed packages. The value is the package in which a class must be defined, so that public aliases are allowed, too.
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
    # Other modules of exp.engine are not allowed, because only exp builds their classes.
    "exp.engine.ema": "exp.engine.ema",
    **{f"exp.extras.{name}": f"exp.extras.{name}" for name in (
        "debugging", "deepspeed", "evaluation", "finders.range_test", "finders.size_trial", "gallery", "hf", "mlflow",
        "research", "tokenizers", "wandb",
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
    # Classes are listed by name, because the package also has file readers that open any path for writing.
    **{f"torch.utils.data.{name}": "torch.utils.data" for name in (
        "ConcatDataset", "ChainDataset", "StackDataset", "Subset", "RandomSampler", "SequentialSampler",
        "SubsetRandomSampler", "WeightedRandomSampler",
    )},
}  # fmt: skip
# Allowed functions of torch, used with `_partial_: true` as an activation or an initialization. Their arguments and
# results are tensors and numbers.
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
_NOTHING = object()
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)+", re.ASCII)


class TargetError(ConfigError):
    """Raised if a `_target_` is not allowed or cannot be resolved."""

    def __init__(self, got: str, expected: str, fix: str | None = None) -> None:
        super().__init__([ErrorDetails("_target_", got, expected, fix)])


def is_of_a_target(error: BaseException) -> bool:
    """Return whether an interpolation failed because the function of its resolver is not allowed.

    The function is then reported by a separate error.

    Args:
        error: Exception that OmegaConf raised for the interpolation.
    """
    return any(isinstance(cause, TargetError) for cause in chain_of(error))


def resolve(
    dotted: str,
    *,
    base: str | Sequence[str] | None = None,
    returns: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> Any:
    """Return the class or function with a dotted name. Modules outside the allowed packages are not imported.

    Args:
        dotted: Dotted name of the class or function.
        base: Dotted names of classes. The class must be a subclass of at least one of them. Default: None, any allowed
            class.
        returns: Dotted names of the classes that the result of a function may have. Only the function's return
            annotation is checked. The caller must check the result of each call. Default: (), only functions in
            FUNCTIONS are allowed.
        allow: Packages that the command line allows by `security.allow`.

    Raises:
        TargetError: The name is not allowed, or cannot be resolved.
    """
    if isinstance(dotted, str):
        dotted = current_target(dotted)
    home = _home_of_name(dotted, allow=allow)
    value = _attribute(dotted, home=home)
    is_listed_function = dotted in FUNCTIONS
    if inspect.isroutine(value) and not is_listed_function:
        _require_function(dotted, value, home=home, returns=returns)
        return value
    if not is_listed_function:
        _require_class_at_home(dotted, value, home=home)
    if base is not None:
        _require_base(dotted, value, bases=[base] if isinstance(base, str) else list(base))
    if not is_listed_function and inspect.isabstract(value):
        fix = f"The class does not define {among(sorted(value.__abstractmethods__))}"
        raise TargetError(f"{dotted}, an abstract class", "a class that can be built", fix)
    return value


def resolve_function(dotted: str, *, allow: Sequence[str] = ()) -> Any:
    """Return a function that a model's forward program declares. A subclass of torch.autograd.Function is allowed, too.

    Args:
        dotted: Dotted name of the function or class.
        allow: Packages that the command line allows by `security.allow`.

    Raises:
        TargetError: The name is not allowed, or cannot be resolved.
    """
    if dotted in FUNCTIONS:
        fix = "Remove the declaration, because a forward program calls functions of torch by name"
        raise TargetError(f"{dotted}, a function of torch", "a function of yours", fix)
    value = resolve(dotted, returns=("builtins.object",), allow=allow)
    if inspect.isclass(value):
        _require_base(dotted, value, bases=["torch.autograd.Function"])
    return value


def resolve_resolver(dotted: str, *, allow: Sequence[str] = ()) -> Any:
    """Return a user's function that is declared as a resolver of interpolations.

    Args:
        dotted: Dotted name of the function.
        allow: Packages that the command line allows by `security.allow`.

    Raises:
        TargetError: The name is not allowed, or cannot be resolved.
    """
    home = _home_of_name(dotted, allow=allow)
    value = _attribute(dotted, home=home)
    if not inspect.isroutine(value) or dotted in FUNCTIONS:
        raise TargetError(f"{dotted}, which is not a function of yours", "a function of yours")
    _require_function(dotted, value, home=home, returns=("builtins.object",))
    return value


def _home_of_name(dotted: str, *, allow: Sequence[str]) -> str:
    """Return the package in which the class or function with a dotted name must be defined. No module is imported.

    Raises:
        TargetError: The name is outside the allowed packages.
    """
    if not isinstance(dotted, str) or not NAME.fullmatch(dotted):
        raise TargetError(repr(dotted), "the dotted name of a class, such as torch.nn.Linear")
    top = dotted.partition(".")[0]
    home = _listed_home(dotted, allow=allow)
    if home is None and top not in closed_packages() and is_next_to_conf(top):
        home = top
    if home is None:
        expected = "a class of exp, torch.nn, torch.optim, torchmetrics, lightning.pytorch, or of yours"
        raise TargetError(f"{dotted}, outside the allowed packages", expected, _fix_outside(dotted))
    return home


def is_listed(dotted: object, *, allow: Sequence[str]) -> bool:
    """Return whether a dotted name is in a package that is allowed in any working directory. No module is imported.

    Args:
        dotted: Dotted name. For any other value, the result is False.
        allow: Packages that the command line allows.
    """
    if not isinstance(dotted, str) or NAME.fullmatch(dotted) is None:
        return False
    return bool(_listed_home(current_target(dotted), allow=allow))


def _listed_home(dotted: str, *, allow: Sequence[str]) -> str | None:
    if dotted in LISTED_CLASSES:
        return LISTED_CLASSES[dotted]
    # Longer names are tried first, because a subpackage in LISTED has precedence over its parent.
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        package = ".".join(parts[:length])
        if package in LISTED:
            return LISTED[package]
        if package in allow:
            return package
    return parts[0] if parts[0] in plugin_packages() else None


def _attribute(dotted: str, *, home: str) -> Any:
    """Import the module in a dotted name. Return the attribute with the last part of the name.

    The dotted name may also name a class method, such as `mine.Model.from_file`. The method is then returned.

    Args:
        dotted: Dotted name.
        home: Package in which a class with the method must be defined.
    """
    module_name, _, attribute = dotted.rpartition(".")
    package, _, holder = module_name.rpartition(".")
    # By convention, only classes begin with a capital letter.
    if package and holder[:1].isupper() and inspect.isclass(owner := _member(_import(package, dotted), holder)):
        _require_class_at_home(module_name, owner, home=home)
        own = inspect.getattr_static(owner, attribute, None)
        if attribute.startswith("_") or not isinstance(own, classmethod | staticmethod):
            expected = f"a class, such as {module_name}, or a class method that makes an object"
            fix = _similar(attribute, vars(owner), of=module_name)
            raise TargetError(f"{dotted}, which is not a class method of {module_name}", expected, fix)
        return getattr(owner, attribute)
    module = _import(module_name, dotted)
    value = _member(module, attribute)
    if value is _NOTHING:
        raise _absent_error(dotted, module, home=home)
    return value


def _member(module: ModuleType, name: str) -> Any:
    """Return an attribute of a module.

    If the module defines `__getattr__`, reading the attribute may import further modules.

    Returns:
        The attribute. _NOTHING if the module does not have it, or if the name begins with `_`.
    """
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
        raise _import_error(f"{module.__name__}.{name}", module.__name__, error) from error


def _require_function(dotted: str, value: Any, *, home: str, returns: Sequence[str]) -> None:
    is_method = inspect.ismethod(value) or dotted.rpartition(".")[0].rpartition(".")[2][:1].isupper()
    got, wrap = f"{dotted}, {'a method' if is_method else 'a function'}", "Wrap the function in a class"
    if home in LISTED.values() or home in LISTED_CLASSES.values():
        raise TargetError(got, "a class", wrap)
    if not returns:
        raise TargetError(got, "a class, because functions may make only a model, a layer, a loss or a data set", wrap)
    if not (inspect.isfunction(value) or inspect.ismethod(value)):
        raise TargetError(f"{dotted}, a {type(value).__name__}", "a class, or a function in Python")
    _require_home(dotted, value, home=home)
    kind = return_annotation(value)
    classes = [class_of(name) for name in returns]
    # An annotation with a base class, such as nn.Module, is accepted, because the result may be a subclass.
    if kind is not None and not any(issubclass(kind, one) or issubclass(one, kind) for one in classes):
        returned = "nothing" if kind is type(None) else f"a {kind.__name__}"
        raise TargetError(f"{got} that returns {returned}", f"a function that returns a {classes[0].__name__}")


def _require_home(dotted: str, value: Any, *, home: str) -> None:
    real = f"{value.__module__}.{value.__qualname__}"
    if real != dotted and not _is_inside(real, home):
        fix = f"Write {real}" if any(_is_inside(real, package) for package in LISTED) else None
        raise TargetError(f"{dotted}, which is {real}", f"a class or a function of {home}", fix)


def _import(module_name: str, dotted: str) -> ModuleType:
    top = module_name.split(".")[0]
    if top not in closed_packages() and is_next_to_conf(top):
        make_importable()
    try:
        return importlib.import_module(module_name)
    except ExpError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _absent_module_error(dotted, error.name) from error
        raise _import_error(dotted, module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_error(dotted, module_name, error) from error


def _require_class_at_home(dotted: str, value: object, *, home: str) -> None:
    if not inspect.isclass(value):
        kind = "a function" if callable(value) else f"a {type(value).__name__}"
        fix = "Wrap the function in a class" if callable(value) else None
        raise TargetError(f"{dotted}, {kind}", "a class", fix)
    _require_home(dotted, value, home=home)


def _require_base(dotted: str, value: object, *, bases: list[str]) -> None:
    classes = tuple(class_of(base) for base in bases)
    if not (inspect.isclass(value) and issubclass(value, classes)):
        wanted = " or ".join(bases)
        raise TargetError(f"{dotted}, which is not a {wanted}", f"a subclass of {wanted}")


def class_of(dotted: str) -> type:
    """Return the class with a dotted name. The name must come from exp's code, because no rule is checked."""
    module_name, _, attribute = dotted.rpartition(".")
    found: type = getattr(importlib.import_module(module_name), attribute)
    return found


def _is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _fix_outside(dotted: str) -> str | None:
    if (name := target_of_habit(dotted)) is not None:
        return f"Did you mean {name}?"
    package, _, name = dotted.rpartition(".")
    top = dotted.split(".")[0]
    near = find_nearest(package, [listed for listed in LISTED if find_nearest(top, [listed.split(".")[0]])])
    if near and name[0].isupper():
        return f"Did you mean {near[0]}.{name}?"
    if top in closed_packages() or top in sys.stdlib_module_names:
        return None
    return (
        f"If {top} is your module, put {top}.py next to your ./conf. "
        f"If you trust the package {top}, add 'security.allow=[{top}]' to the command"
    )


def _similar(word: str, names: Iterable[str], *, of: str) -> str | None:
    near = find_nearest(word, [name for name in names if not name.startswith("_")])
    return f"Did you mean {of}.{near[0]}?" if near else None


def _absent_error(dotted: str, module: ModuleType, *, home: str) -> TargetError:
    own = vars(module)
    known = [name for name, value in own.items() if inspect.isclass(value)]
    if home not in LISTED.values():
        # dir() also lists the names that the package imports on access.
        known += [name for name in dir(module) if name not in own or inspect.isfunction(own[name])]
    module_name, _, word = dotted.rpartition(".")
    fix = _similar(word, known, of=module_name)
    return TargetError(f"{dotted}, which does not exist", f"a class of {module_name}", fix)


def _absent_module_error(dotted: str, missing: str) -> TargetError:
    parent, _, word = missing.rpartition(".")
    # iter_modules lists the names of files and imports no module.
    path = getattr(sys.modules.get(parent), "__path__", None) or []
    near = find_nearest(word, [found.name for found in pkgutil.iter_modules(path)])
    fix = f"Did you mean {parent}.{near[0]}{dotted[len(missing) :]}?" if near else None
    return TargetError(f"{dotted}: no module {missing}", "a class of an existing module", fix)


def _import_error(dotted: str, module_name: str, error: BaseException) -> TargetError:
    got = f"{dotted}: importing {module_name} failed with {one_line(error)}"
    return TargetError(got, "a module that can be imported")


def closed_packages() -> set[str]:
    """Return the top-level packages of LISTED.

    Only the listed parts of these packages are allowed. If a module of the user has the same name as one of these
    packages, the module is not allowed.
    """
    return {name.split(".")[0] for name in LISTED}


def plugin_packages() -> set[str]:
    """Return the top-level packages of installed plug-ins, which have an `exp.conf` entry point. They are allowed."""
    return {point.module.split(".")[0] for point in conf_points()}


def is_next_to_conf(package: str) -> bool:
    """Return whether importing a package name imports the user's module in the working directory.

    The result is False if the working directory contains no ./conf for exp, or if another module of the same name has
    precedence.
    """
    directory = Path.cwd().resolve()
    if not is_users_conf(directory / "conf") or package in sys.stdlib_module_names:
        return False
    # A notebook may have written the file after Python cached the folder.
    importlib.invalidate_caches()
    here = PathFinder.find_spec(package, [str(directory)])
    if here is None or here.origin is None:
        return False
    if package in sys.modules:
        return _is_same_file(sys.modules[package].__file__, here.origin)
    first = PathFinder.find_spec(package, [*sys.path, str(directory)])
    return first is not None and _is_same_file(first.origin, here.origin)


def _is_same_file(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()
