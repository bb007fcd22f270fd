"""Linear layers in float8, by torchao, which is an extra: imported only where the word fp8 is chosen."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from torch import nn

from exp.errors import MissingExtraError

# The kernels take matrices whose sides are multiples of this.
MULTIPLE = 16


def refuse_without_torchao() -> None:
    """Raises: MissingExtraError."""
    if find_spec("torchao") is None:
        raise MissingExtraError(feature="precision=fp8", package="torchao", extra="fp8")


def convert_linear(network: nn.Module, *, kept: Collection[str] = (), emulated: bool = False) -> list[str]:
    """Puts torchao's Float8Linear in the place of nn.Linear below `network`; the parameters stay the same objects.

    Left as they are: layers in `kept`, those whose sides are not multiples of 16, and subclasses of nn.Linear.
    emulated: compute in float32 with numbers rounded to float8, on any device: to try, not to train.
    Returns: the names of what was converted.
    """
    refuse_without_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = [name for name, module in network.named_modules() if name and name not in kept and _fits(module)]
    if names:
        convert_to_float8_training(
            network,
            module_filter_fn=lambda module, name: name in names,
            config=Float8LinearConfig(emulate=emulated),
        )
    return names


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
