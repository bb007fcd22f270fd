"""A frozen config becomes objects. The only place where a `_target_` is called; config ends here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from exp.config.targets import resolve
from exp.data.data import Data
from exp.data.randomness import initialisation
from exp.errors import ConfigError, ExpError, Fault
from exp.models.inference import example_inputs, lazy_class, materialise
from exp.objectives.objective import Objective
from exp.optim.optimization import Optimization
from exp.types import DataSpec

# Keys of the optimizer and scheduler nodes that are ours, not the target's.
OPTIMIZER_KEYS = ("groups", "exempt_from_decay")
SCHEDULER_KEYS = ("interval", "monitor")
SPEC_KEYS = ("input_shape", "input_dtype", "num_outputs")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, before Lightning sees it."""

    data: Data
    network: nn.Module
    objective: Objective
    metrics: Mapping[str, Any]
    optimization: Optimization
    hooks: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    loggers: Mapping[str, Any]


def build_parts(config: DictConfig, directory: Path) -> Parts:
    """Builds every object that the config names.

    Raises: ConfigError where a constructor refuses its values.
    """
    plain = plain_config(config)
    data = build_data(plain)
    return Parts(
        data=data,
        network=build_network(plain, data.spec),
        objective=build_objective(plain),
        metrics=build_entries(plain, "metrics"),
        optimization=build_optimization(plain),
        hooks=build_entries(plain, "hooks"),
        callbacks=build_entries(plain, "callbacks"),
        loggers=build_entries(plain, "logger", directory=str(directory), save_dir=str(directory)),
    )


def plain_config(config: DictConfig) -> dict[str, Any]:
    """The config as plain dicts and lists with every interpolation resolved."""
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def describe(config: DictConfig) -> None:
    """Fills in, in place, what a data set's YAML leaves to the data: input shape and dtype, outputs, classes.

    Builds the data set only where one of them is null.

    Raises: ConfigError, RunError where the data set cannot be built.
    """
    if all(config.data[key] is not None for key in SPEC_KEYS):
        return
    # Resolved alone: other nodes may interpolate what is filled in here.
    data = OmegaConf.to_container(config.data, resolve=True, throw_on_missing=True)
    spec = build_data({"data": data, "seed": config.seed, "security": OmegaConf.to_container(config.security)}).spec
    config.data.input_shape = list(spec.input_shape)
    config.data.input_dtype = spec.input_dtype
    config.data.num_outputs = spec.num_outputs
    config.data.num_classes = spec.num_classes


def build_data(plain: Mapping[str, Any]) -> Data:
    return construct(plain["data"], key="data", allow=_allow(plain), seed=plain["seed"])


def build_network(plain: Mapping[str, Any], spec: DataSpec, *, device: str = "cpu") -> nn.Module:
    """The model, seeded, with its lazy layers sized by the data.

    device: "meta" builds it without memory, to check shapes.
    """
    initialisation(plain["seed"])
    with torch.device(device):
        network = construct(plain["model"], key="model", allow=_allow(plain))
        materialise(network, example_inputs(spec, device=device))
    return network


def build_objective(plain: Mapping[str, Any]) -> Objective:
    """The weighted sum of the named terms; a bare loss becomes a term of weight 1."""
    return Objective(terms=build_entries(plain, "objective"))


def build_optimization(plain: Mapping[str, Any]) -> Optimization:
    allow = _allow(plain)
    optimizer = {key: value for key, value in plain["optimizer"].items() if key not in OPTIMIZER_KEYS}
    scheduler = {key: value for key, value in plain["scheduler"].items() if key not in SCHEDULER_KEYS}
    return Optimization(
        optimizer_factory=construct({**optimizer, "_partial_": True}, key="optimizer", allow=allow),
        groups=plain["optimizer"]["groups"],
        exempt_from_decay=plain["optimizer"]["exempt_from_decay"],
        schedule_factory=construct({**scheduler, "_partial_": True}, key="scheduler", allow=allow),
        interval=plain["scheduler"]["interval"],
        monitor=plain["scheduler"]["monitor"],
    )


def build_entries(plain: Mapping[str, Any], group: str, **offers: Any) -> dict[str, Any]:
    """Every named entry of a group of many, such as hooks."""
    allow = _allow(plain)
    return {
        name: construct(node, key=f"{group}.{name}", allow=allow, **offers) for name, node in plain[group].items()
    }


def construct(node: Any, *, key: str, allow: Sequence[str], **offers: Any) -> Any:
    """Builds a plain config node and everything in it, innermost first.

    `{_target_: name, ...}` becomes an instance, with `_partial_: true` a functools.partial. `{repeat: n, layer: {...}}`
    becomes an nn.ModuleList of n layers built one by one. Other mappings and lists keep their kind.

    offers: values for parameters that the outermost target takes and the node leaves out.
    Raises: ConfigError where a constructor refuses its values, naming the key.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            return _call(node, key=key, allow=allow, offers=offers)
        if node.keys() == {"repeat", "layer"}:
            return nn.ModuleList(
                construct(node["layer"], key=f"{key}.layer", allow=allow) for _ in range(node["repeat"])
            )
        return {name: construct(value, key=f"{key}.{name}", allow=allow) for name, value in node.items()}
    if isinstance(node, list):
        return [construct(value, key=f"{key}.{index}", allow=allow) for index, value in enumerate(node)]
    return node


def _call(node: Mapping[str, Any], *, key: str, allow: Sequence[str], offers: Mapping[str, Any]) -> Any:
    target = resolve(node["_target_"], allow=allow)
    arguments = {
        name: construct(value, key=f"{key}.{name}", allow=allow)
        for name, value in node.items()
        if name not in ("_target_", "_partial_", "_args_")
    }
    positional = [construct(value, key=f"{key}._args_", allow=allow) for value in node.get("_args_") or ()]
    if offers:
        takes = inspect.signature(target).parameters
        arguments.update({name: value for name, value in offers.items() if name in takes and arguments.get(name) is None})
    if inspect.isclass(target) and issubclass(target, nn.Module) and not positional:
        target = lazy_class(target, set(arguments)) or target
    if node.get("_partial_"):
        return functools.partial(target, *positional, **arguments)
    try:
        return target(*positional, **arguments)
    except ExpError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError, OSError) as error:
        fault = Fault(
            key=key,
            got=f"{node['_target_']} refused its values ({type(error).__name__}: {error})",
            expected="values that it accepts",
        )
        raise ConfigError([fault]) from error


def _allow(plain: Mapping[str, Any]) -> Sequence[str]:
    return plain["security"]["allow"]
