"""Initialization of parameters that are selected by name or by type.

Example: initialisation: {"*.weight": {name: normal, std: 0.02}, LayerNorm.weight: ones}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from exp.errors import config_error
from exp.models.matching import find_parameters
from exp.spelling import did_you_mean

NAMES = (
    "constant", "dirac", "eye", "kaiming_normal", "kaiming_uniform", "normal", "ones", "orthogonal", "sparse",
    "trunc_normal", "uniform", "xavier_normal", "xavier_uniform", "zeros",
)  # fmt: skip
SCHEMES: dict[str, Callable[..., object]] = {name: getattr(nn.init, f"{name}_") for name in NAMES}

Scheme = str | Mapping[str, object]


def initialise(network: nn.Module, patterns: Mapping[str, Scheme]) -> None:
    """Initialize the parameters that match patterns. If several patterns match a parameter, the last pattern is used.

    The vector of an embedding's padding index keeps its values.

    Args:
        network: The network.
        patterns: Scheme of each pattern (see `find_parameters`). A scheme is a name in SCHEMES, or a mapping with
            `name` and the arguments of the function in torch.nn.init.

    Raises:
        ConfigError: A pattern matches no parameter, or a scheme is unknown. The keys of the errors begin with
            `initialisation`.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    chosen: dict[Tensor, str] = {}  # by tensor, because a tied parameter has several names
    for pattern in patterns:
        meant = find_parameters(network, pattern, key=f"initialisation.{pattern}")
        chosen.update({parameters[name]: pattern for name in meant})
    tables = [module for module in network.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    padding = {table.weight: table.padding_idx for table in tables if table.padding_idx is not None}
    for parameter, pattern in chosen.items():
        row = padding.get(parameter)
        kept = None if row is None else parameter[row].detach().clone()
        fill(parameter, patterns[pattern], key=f"initialisation.{pattern}")
        if kept is not None:
            parameter.data[row] = kept


def fill(parameter: Tensor, scheme: Scheme, *, key: str = "initialisation") -> None:
    """Initialize a parameter.

    Args:
        parameter: The parameter.
        scheme: The initialization scheme, as in `initialise`.
        key: The config key of the scheme, for error messages.

    Raises:
        ConfigError: The scheme is unknown or does not support the parameter's shape.
    """
    name, options = (scheme, {}) if isinstance(scheme, str) else (scheme.get("name"), dict(scheme))
    options.pop("name", None)
    if name not in SCHEMES:
        fix = did_you_mean(str(name), SCHEMES)
        raise config_error(key, got=f"the scheme {name!r}", expected=f"one of {', '.join(SCHEMES)}", fix=fix)
    function = SCHEMES[name]
    try:
        with torch.no_grad():
            function(parameter, **options)
    except (TypeError, ValueError) as error:
        got = f"{name} of a parameter of shape {list(parameter.shape)}: {error}"
        raise config_error(key, got=got, expected="a scheme and arguments that this parameter supports") from None
