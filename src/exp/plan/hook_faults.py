"""Can the hooks live with this run, and are the modules there that they name?"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from exp.errors import ConfigError, Fault
from exp.hooks.hook import Hook
from exp.models.matching import matching
from exp.strategies.strategy import Planned


def hook_faults(hooks: Mapping[str, Hook], network: nn.Module, planned: Planned | None) -> list[Fault]:
    """What each hook cannot do.

    hooks: by name. network: on the meta device.
    planned: None where what hooks read of the config is wrong itself: then patterns that match nothing, alone.
    """
    faults: list[Fault] = []
    for name, hook in hooks.items():
        hook.name = name
        if planned is not None:
            faults += hook.faults(planned)
            continue
        try:
            matching(network, hook.modules, key=f"hooks.{name}.modules")
        except ConfigError as error:
            faults += error.faults
    return faults
