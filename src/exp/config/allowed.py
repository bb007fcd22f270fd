"""What a `_target_` may name: the listed packages, plug-ins, and the modules beside a user's own ./conf."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from importlib.machinery import PathFinder
from pathlib import Path

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
    # One module: the others of the engine are made by exp itself.
    "exp.engine.ema": "exp.engine.ema",
    "torch.nn": "torch.nn",
    "torch.optim": "torch.optim",
    "torchmetrics": "torchmetrics",
    "lightning.pytorch.callbacks": "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers": "lightning.pytorch.loggers",
    "lightning.pytorch.profilers": "lightning.pytorch.profilers",
    "lightning.pytorch.strategies": "lightning.pytorch.strategies",
}
LISTED_CLASSES = {
    "lightning.pytorch.Trainer": "lightning.pytorch.trainer",
    # One by one: the package also holds file readers that open any path for writing.
    "torch.utils.data.ConcatDataset": "torch.utils.data",
    "torch.utils.data.ChainDataset": "torch.utils.data",
    "torch.utils.data.StackDataset": "torch.utils.data",
    "torch.utils.data.Subset": "torch.utils.data",
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
ENTRY_POINTS = "exp.conf"


def closed_packages() -> set[str]:
    """Packages whose listed parts are open and whose others stay closed, whatever stands in the working directory."""
    return {name.split(".")[0] for name in LISTED}


def plugin_packages() -> set[str]:
    """Top-level packages that install an `exp.conf` entry point: installing one is allowing it."""
    return {point.module.split(".")[0] for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def stands_beside_conf(package: str, directory: Path | None = None) -> bool:
    """Whether a module or package of that name stands in the working directory beside the user's own ./conf.

    A name of the standard library, or of an installed package that Python would import instead, is not the user's.
    """
    directory = (directory or Path.cwd()).resolve()
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


def is_users_conf(directory: Path) -> bool:
    """Whether a ./conf is a user's own: it holds a group or file of exp's names, and it is not exp's own."""
    own = Path(__file__).parent.parent / "conf"
    if not directory.is_dir() or directory.resolve() == own.resolve():
        return False
    known = {path.name for path in own.iterdir()} | {"local"}
    return any(path.name in known for path in directory.iterdir())


def _same_file(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()
