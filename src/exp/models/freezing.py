"""Parameters that do not learn, chosen by name pattern: `freeze: ["encoder.*"]`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from exp.errors import ConfigError
from exp.models.initialisation import unmatched


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Take the gradients from the parameters whose name matches. Raises ConfigError where a pattern matches nothing."""
    parameters = dict(network.named_parameters())
    for index, pattern in enumerate(patterns):
        matches = fnmatch.filter(parameters, pattern)
        if not matches:
            raise ConfigError([unmatched(f"freeze.{index}", pattern, list(parameters))])
        for name in matches:
            parameters[name].requires_grad_(False)
