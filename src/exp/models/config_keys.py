"""Where in the config a layer stands that the network knows by its path: `blocks.0.query` is
`model.layers.blocks.layer.layers.query`."""

from __future__ import annotations

from torch import nn

from exp.models.containers import ProgramModel


def config_key(network: nn.Module, path: str, *, root: str = "model") -> str:
    """The dotted config key of the submodule at `path`; below a layer that is not ours, its own path goes on."""
    key, module = root, network
    for name in path.split(".") if path else ():
        if isinstance(module, ProgramModel):
            key = f"{key}.layers.{name}"
        elif isinstance(module, nn.ModuleList) and module.__dict__.get("repeated"):
            key = f"{key}.layer"
        else:
            key = f"{key}.{name}"
        module = module.get_submodule(name)
    return key


def path_of(network: nn.Module, module: nn.Module) -> str:
    """The path of a submodule, of several the first. Raises KeyError where the network does not hold it."""
    paths = {held: path for path, held in reversed(list(network.named_modules()))}
    return paths[module]
