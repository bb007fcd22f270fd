"""Turn a node of a plain config into an object: the only place where a `_target_` is called.

`construct` builds any node; the functions behind it build those that make a run, each from the whole plain config.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import Strategy as LightningStrategy
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from exp.config.annotations import EMPTY, annotations_of, is_array
from exp.config.reading import secrets_kept
from exp.config.settings import Settings
from exp.config.slots import MODULE, SPLITS, nodes_in, own_training_error, returned_classes, slot_of, trains_itself
from exp.config.targets import TargetError, class_of, resolve, resolve_function
from exp.data.data import Data
from exp.data.labels import IGNORED
from exp.data.randomness import initialisation
from exp.engine.datamodule import fitted_in
from exp.engine.weight_files import read_weights
from exp.errors import (
    LIBRARIES,
    REFUSALS,
    ConfigError,
    ErrorDetails,
    ExpError,
    RunError,
    config_error,
    constructor_error,
    message_of,
)
from exp.loggers.run_logger import make_logger
from exp.models.containers import ProgramModel
from exp.models.freezing import Freezing, find_frozen
from exp.models.inference import example_inputs, lazy_class, materialise
from exp.models.initialisation import initialise
from exp.models.lora import adapt, is_adapted
from exp.models.syntax import ProgramError
from exp.models.weights import follow_saved_shapes, load_weights, match_weights
from exp.objectives.measures import Measure
from exp.objectives.objective import Objective
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase
from exp.precision.plugin import RunPrecision, build_precision
from exp.redaction import redact, reveal
from exp.shared_types import DataSpec
from exp.strategies.strategy import Strategy

Plain = Mapping[str, Any]
MADE_OF_A_PART = ("sampler", "batch_sampler")


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
    return _with_secrets(node, key=key) if isinstance(node, str) else node


def _call(node: Mapping[str, Any], *, key: str, allow: Sequence[str], offers: Mapping[str, Any]) -> Any:
    target = resolve(node["_target_"], returns=returned_classes(key), allow=allow)
    arguments = {
        name: construct(value, key=f"{key}.{name}", allow=allow)
        for name, value in node.items()
        if name not in ("_target_", "_partial_", "_args_")
    }
    positional = [construct(value, key=f"{key}._args_", allow=allow) for value in node.get("_args_") or ()]
    arguments = _for_torch(target, arguments)
    if offers:
        takes = inspect.signature(target).parameters
        arguments.update(
            {name: value for name, value in offers.items() if name in takes and arguments.get(name) is None}
        )
    if inspect.isclass(target) and issubclass(target, ProgramModel) and isinstance(arguments.get("functions"), Mapping):
        arguments["functions"] = _functions(arguments["functions"], key=f"{key}.functions", allow=allow)
    if inspect.isclass(target) and (lazy := lazy_class(target, set(arguments), positional=len(positional))) is not None:
        target = lazy
    if node.get("_partial_"):
        return functools.partial(target, *positional, **arguments)
    try:
        return _judged(target(*positional, **arguments), target, node["_target_"], key=key)
    except ProgramError as error:
        error.key = error.key or f"{key}.{error.place}"
        raise
    except ConfigError as error:
        raise ConfigError([_placed(error, key) for error in error.errors]) from error
    except ExpError:
        raise
    except ImportError as error:
        raise config_error(
            f"{key}._target_", got=f"{node['_target_']}: {error}", expected="an installed package"
        ) from error
    except (Exception, SystemExit) as error:
        is_known = isinstance(error, (*REFUSALS, MisconfigurationException, SystemExit))
        if not is_known and target.__module__.partition(".")[0] in LIBRARIES:
            raise  # a bug; code of the user's own may have exceptions of its own
        got = f"{node['_target_']} refused its values ({type(error).__name__}: {message_of(error)})"
        make = functools.partial(target, *positional, **arguments)
        detail = constructor_error(error, key=key, known=node, got=got, make=make)
        raise ConfigError([
            dataclasses.replace(detail, got=redact(detail.got), expected=redact(detail.expected))
        ]) from error  # fmt: skip


def _functions(named: Mapping[str, Any], *, key: str, allow: Sequence[str]) -> dict[str, Any]:
    """The functions of a forward program, by their names there. Raises: ConfigError."""
    found = {}
    for name, dotted in named.items():
        try:
            found[name] = resolve_function(dotted, allow=allow)
        except TargetError as error:
            raise ConfigError([dataclasses.replace(error.errors[0], key=f"{key}.{name}")]) from error
    return found


def _judged(made: Any, target: Any, name: str, *, key: str) -> Any:
    """What a target gave; of a function it must be of a class that its place takes."""
    if inspect.isclass(target):
        return made
    wanted = returned_classes(key)
    # What has a length and numbers its parts is no data set for that.
    other: tuple[type, ...] = (tuple, str) if MODULE in wanted else (tuple, str, nn.Module)
    other += () if wanted == SPLITS else (dict,)
    kind = f"{type(made).__module__}.{type(made).__qualname__}"
    if wanted and (isinstance(made, other) or not isinstance(made, tuple(map(class_of, wanted)))):
        got = f"{name}, which returned a {kind}"
        raise config_error(f"{key}._target_", got=got, expected=f"a function that returns a {wanted[0]}")
    if key == "model" and trains_itself(type(made)):
        raise ConfigError([own_training_error(name, kind=kind)])
    return made


def _for_torch(target: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with numbers as tensors and names as dtypes, where the target annotates these.

    Without an annotation, as torch's own layers leave `dtype`, a text that names one of torch's dtypes in full is it.
    """
    if not any(isinstance(value, str | list | int | float) for value in arguments.values()):
        return arguments
    annotations = annotations_of(target)
    return {name: _as_annotated(value, annotations.get(name, EMPTY), target) for name, value in arguments.items()}


def _as_annotated(value: Any, annotation: Any, target: Any) -> Any:
    kinds = typing.get_args(annotation) or (annotation,)
    if isinstance(value, str):
        is_named = value.startswith("torch.") and annotation is EMPTY
        dtype = vars(torch).get(value.removeprefix("torch.")) if torch.dtype in kinds or is_named else None
        return dtype if isinstance(dtype, torch.dtype) else value
    is_number = isinstance(value, int | float) and not {bool, int, float} & set(kinds)
    if Tensor in kinds and (is_number or isinstance(value, list)) and is_array(value):
        # The losses of torch take weights of floating numbers alone.
        is_torchs = str(target.__module__).startswith("torch.")
        return torch.tensor(value, dtype=torch.get_default_dtype() if is_torchs else None)
    return value


def _with_secrets(text: str, *, key: str) -> str:
    try:
        return reveal(text)
    except LookupError as error:
        raise config_error(
            key, got=error.args[0], expected="a secret in the environment of each process of the run"
        ) from error


def _placed(error: ErrorDetails, key: str) -> ErrorDetails:
    """An error of a constructor names its own parameter; the config's key is that of the node before it."""
    inside = error.key == key or error.key.startswith(f"{key.split('.')[0]}.")
    return error if inside else dataclasses.replace(error, key=f"{key}.{error.key}")


@secrets_kept()
def plain_config(config: DictConfig) -> dict[str, Any]:
    """The config as plain dicts and lists with every interpolation resolved, but for those of secrets."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def build_data(settings: Settings, *, keeps_raw: bool = False) -> Data:
    """The data set with its parts; its samples are read where a loader asks for them.

    A run that goes on from a checkpoint takes from it what the training part told, not from a file changed since.

    keeps_raw: as of Data.
    """
    ignored = set(_whole_numbers("ignore_index", [settings.objective, settings.metrics]))
    # exp's own leave nothing out unless told so; others may, as torch's do.
    losses = [str(node["_target_"]) for _, node in nodes_in(settings.objective)]
    if not all(name.startswith("exp.objectives.") for name in losses):
        ignored.add(IGNORED)
    earlier = functools.partial(_fitted, settings.resume)
    offers = {
        "seed": settings.seed,
        "ignored_labels": sorted(ignored),
        "earlier": earlier,
        "keeps_doubles": settings.precision.word == "fp64",
        "keeps_raw": keeps_raw,
    }
    # Made by the data, once it has the part that they are of.
    partial = {
        name: {**settings.data[name], "_partial_": True}
        for name in MADE_OF_A_PART
        if isinstance(settings.data.get(name), Mapping)
    }
    data: Data = construct({**settings.data, **partial}, key="data", allow=settings.security.allow, **offers)
    return data


def _fitted(resume: object) -> Mapping[str, Any] | None:
    if not isinstance(resume, str):
        return None  # null, or an error of its own
    try:
        return fitted_in(Path(resume))
    except RunError:
        return None  # the check of the checkpoint itself tells what is wrong with it


def _whole_numbers(key: str, node: object) -> Iterator[int]:
    """The whole numbers that stand at a key, at any depth."""
    if isinstance(node, Mapping):
        yield from (value for name, value in node.items() if name == key and isinstance(value, int))
    if isinstance(node, Mapping | list):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _whole_numbers(key, value)


def build_network(settings: Settings, spec: DataSpec, *, device: str = "cpu") -> nn.Module:
    """The model, seeded, with its lazy layers sized by the data.

    device: "meta" builds it without memory.
    """
    network = build_unsized_network(settings, device=device)
    with torch.device(device):
        materialise(network, example_inputs(spec, device=device))
        prepare(network, settings)
    follow_saved_shapes(network)
    return network


def build_module(settings: Settings, *, device: str = "cpu") -> LightningModule:
    """The LightningModule of the user's own, seeded as a model is.

    A network of exp's that it is given, `net: ${model}`, has its lazy layers sized by exp's data.

    device: "meta" builds it without memory.
    Raises: ConfigError where its constructor refuses its values.
    """
    initialisation(settings.seed)
    with torch.device(device):
        with warnings.catch_warnings():
            # Of save_hyperparameters(): checkpoints of exp leave layers out by themselves.
            warnings.filterwarnings("ignore", "Attribute '.+' is an instance of `nn.Module` and is already saved")
            module: LightningModule = construct(settings.module, key="module", allow=settings.security.allow)
        if "_modules" not in vars(module):
            got = f"{type(module).__name__}, whose __init__ does not call super().__init__()"
            raise config_error("module", got=got, expected="that call, in which Lightning and torch make the module")
        for child in () if settings.has_own_loaders else module.children():
            if isinstance(child, ProgramModel):
                materialise(child, example_inputs(DataSpec.of(settings.data), device=device))
    return module


def build_data_module(settings: Settings) -> LightningDataModule:
    """The LightningDataModule of the user's own. Raises: ConfigError where its constructor refuses its values."""
    data: LightningDataModule = construct(settings.data, key="data", allow=settings.security.allow)
    return data


def prepare(network: nn.Module, settings: Settings) -> None:
    """Initialise, adapt and freeze any network, a foreign one, too, as the config asks.

    One that does not have all of its shapes yet is frozen alone.

    Raises: ConfigError for a pattern that means nothing.
    """
    is_sized, lora = not any(map(is_lazy, network.parameters())), settings.lora
    if is_adapted(network):
        return  # all of it is done
    if is_sized:
        initialise(network, settings.initialisation)
    if not lora.layers:
        build_freezing(network, settings).apply(network)
    elif is_sized:
        adapt(network, **vars(lora), batch_norm=settings.freeze.batch_norm)


def build_freezing(network: nn.Module, settings: Settings) -> Freezing:
    """What of the network does not learn, and until when."""
    return find_frozen(network, **vars(settings.freeze))


def build_starting_network(settings: Settings, spec: DataSpec) -> nn.Module:
    """The model as a run begins with it: from the weights that the config names, where it names any.

    Raises: RunError where they cannot be read.
    """
    network, node = build_network(settings, spec), settings.weights
    if node.from_ is not None:
        weights = read_weights(Path(node.from_), averaged=node.averaged)
        load_weights(network, weights, match_weights(weights, network, keys=node.keys))
    return network


def build_unsized_network(settings: Settings, *, device: str = "cpu") -> nn.Module:
    """The model, seeded; layers whose input size is left to the data get theirs in their first forward."""
    initialisation(settings.seed)
    with torch.device(device):
        network: nn.Module = construct(settings.model, key="model", allow=settings.security.allow)
    return network


def build_objective(settings: Settings) -> Objective:
    """The weighted sum of the named terms; a bare loss becomes a term of weight 1."""
    return Objective(terms=build_entries(settings, "objective"))


def build_optimization(
    settings: Settings, *, optimizer: str = "optimizer", scheduler: str = "scheduler"
) -> Optimization:
    """optimizer, scheduler: the dotted keys of their nodes."""
    factories: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key in (optimizer, scheduler):
        group, *path = key.split(".")
        node: Plain = functools.reduce(lambda node, name: node[name], path, getattr(settings, group))
        # What exp itself reads there is not the target's.
        own = {name: node[name] for name in slot_of(key).reserved if name in node}
        target = {name: value for name, value in node.items() if name not in own}
        factories[key] = construct(_until_optimizer(target), key=key, allow=settings.security.allow)
        options |= own
    return Optimization(
        optimizer_factory=factories[optimizer],
        schedule_factory=factories[scheduler],
        begins_late=any(settings.freeze.unfreeze),
        **options,
    )


def _until_optimizer(node: Plain) -> dict[str, Any]:
    """A node, and the schedules that it is made of, as partials: each waits for its optimizer."""
    parts = {"schedulers": list(map(_until_optimizer, node["schedulers"]))} if "schedulers" in node else {}
    return {**node, **parts, "_partial_": True}


def build_phases(settings: Settings) -> list[Phase]:
    """In their order; an optimizer or a schedule that is not a phase's own is made from the one at the top."""
    phases = []
    for name, entry in settings.phases.items():
        keys = {node: f"phases.{name}.{node}" for node in ("optimizer", "scheduler") if entry.get(node) is not None}
        rest = {key: value for key, value in entry.items() if key not in ("optimizer", "scheduler")}
        if isinstance(rest["parameters"], str):
            rest["parameters"] = [rest["parameters"]]
        optimization = build_optimization(settings, **keys)
        owns_optimizer, owns_scheduler = "optimizer" in keys, "scheduler" in keys
        phases.append(
            Phase(
                name=name,
                optimization=optimization,
                owns_optimizer=owns_optimizer,
                owns_scheduler=owns_scheduler,
                **rest,
            )
        )
    return phases


def build_entries(settings: Settings, group: str, **offers: Any) -> dict[str, Any]:
    """Every named entry of a group of many, such as hooks."""
    allow = settings.security.allow
    return {
        name: construct(node, key=f"{group}.{name}", allow=allow, **offers)
        for name, node in getattr(settings, group).items()
    }


def build_loggers(settings: Settings, directory: Path) -> dict[str, Logger]:
    """Return the loggers of a run by name, except loggers that cannot be made. directory: Run directory."""
    offers = {"directory": str(directory), "save_dir": str(directory)}
    found: dict[str, Logger] = {}
    for name, node in settings.logger.items():
        key = f"logger.{name}"
        logger = make_logger(
            functools.partial(construct, node, key=key, allow=settings.security.allow, **offers), name=key
        )
        if logger is not None:
            found[name] = logger
    return found


def build_measures(settings: Settings) -> dict[str, Measure]:
    """Every named metric, with the values that it looks at.

    Raises: ConfigError.
    """
    found = {}
    for name, node in settings.metrics.items():
        key = f"metrics.{name}"
        # What exp itself reads there is not the metric's.
        own = {word: node[word] for word in slot_of(key).reserved if word in node}
        metric = construct(
            {word: node[word] for word in node if word not in own}, key=key, allow=settings.security.allow
        )
        try:
            found[name] = Measure(name=name, metric=metric, **own)
        except ValueError as error:
            raise ConfigError([constructor_error(error, key=key, known=own, got=message_of(error))]) from error
    return found


def build_run_precision(settings: Settings, *, device_type: str) -> RunPrecision:
    """The precision plugin, with the scaler that it asks for and runtime.matmul."""
    precision, runtime = settings.precision, settings.runtime
    return build_precision(
        precision.word,
        keep=precision.keep,
        **vars(precision.scaler),
        device_type=device_type,
        matmul=runtime.matmul,
        skips=runtime.non_finite == "skip",
    )


def build_strategy(settings: Settings) -> Strategy | LightningStrategy:
    """Cheap: nothing is placed and no process started yet."""
    node = settings.strategy
    if not issubclass(resolve(node["_target_"], allow=settings.security.allow), Strategy):
        # The name is the report's word; a class of Lightning's own takes none, or anything.
        node = {key: value for key, value in node.items() if key != "name"}
    strategy: Strategy | LightningStrategy = construct(node, key="strategy", allow=settings.security.allow)
    return strategy
