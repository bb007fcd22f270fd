"""Build objects from nodes of a plain config. This is the only module that calls the `_target_` of a node.

`construct` builds any node. The other functions build the objects of a run from its settings.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from exp.engine.checkpoint import read_weights
from exp.engine.datamodule import fitted_in
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
BUILT_BY_DATA = ("sampler", "batch_sampler")
# Keys of `data` that the check sets to the values of the data set, if the config leaves them null.
READ_FROM_DATA = ("input_shape", "input_dtype", "num_outputs", "num_classes")


def construct(node: object, *, key: str, allow: Sequence[str], **offers: object) -> Any:
    """Build the object that a config node describes. Nodes inside the node are built first.

    - `{_target_: name, ...}` becomes an instance of the class or, with `_partial_: true`, a functools.partial.
    - `{repeat: n, layer: {...}}` becomes an nn.ModuleList of n layers.
    - Other mappings and lists become dicts and lists of built objects.

    Args:
        node: Plain value of the node.
        key: Dotted key of the node. It appears in error messages and decides which classes are allowed.
        allow: Packages that the command line allows.
        **offers: Additional arguments by parameter name. An argument is passed to the `_target_` of the outermost node
            only if the class has the parameter and the node does not set it.

    Raises:
        ConfigError: A constructor rejects its arguments.
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


def _call(node: Plain, *, key: str, allow: Sequence[str], offers: Mapping[str, object]) -> Any:
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
        return _check_result(target(*positional, **arguments), target, node["_target_"], key=key)
    except ProgramError as error:
        for one in (error, *error.others):
            one.key = one.key or f"{key}.{one.place}"
        raise
    except ConfigError as error:
        raise ConfigError([_add_key(one, key) for one in error.errors]) from error
    except ExpError:
        raise
    except ImportError as error:
        raise config_error(
            f"{key}._target_", got=f"{node['_target_']}: {error}", expected="an installed package"
        ) from error
    except (Exception, SystemExit) as error:
        is_known = isinstance(error, (*REFUSALS, MisconfigurationException, SystemExit))
        if not is_known and target.__module__.partition(".")[0] in LIBRARIES:
            raise  # a bug; a user's code may raise any exception
        got = f"{node['_target_']} refused its values ({type(error).__name__}: {message_of(error)})"
        make = functools.partial(target, *positional, **arguments)
        detail = constructor_error(error, key=key, known=node, got=got, make=make)
        raise ConfigError([
            dataclasses.replace(detail, got=redact(detail.got), expected=redact(detail.expected))
        ]) from error  # fmt: skip


def _functions(named: Mapping[str, str], *, key: str, allow: Sequence[str]) -> dict[str, object]:
    """Return the Python functions that a model's forward program declares, by their names in the program.

    Args:
        named: Dotted Python name of each function, such as `mine.square`, by its name in the program.
        key: Dotted config key of this mapping.
        allow: Packages that the command line allows.

    Raises:
        ConfigError: A function is not allowed.
    """
    found = {}
    for name, dotted in named.items():
        try:
            found[name] = resolve_function(dotted, allow=allow)
        except TargetError as error:
            raise ConfigError([dataclasses.replace(error.errors[0], key=f"{key}.{name}")]) from error
    return found


def _check_result(made: object, target: object, name: str, *, key: str) -> object:
    """Return `made` unchanged if its class is allowed at the key.

    Args:
        made: Object that calling the `_target_` returned.
        target: Class or function that was called. If it is a class, nothing is checked.
        name: Dotted Python name of the target.
        key: Dotted key of the node.

    Raises:
        ConfigError: A function returned an object of a class that is not allowed at the key.
    """
    if inspect.isclass(target):
        return made
    wanted = returned_classes(key)
    # Tuples, texts and dicts have a length and items like a data set, and are refused explicitly.
    other: tuple[type, ...] = (tuple, str) if MODULE in wanted else (tuple, str, nn.Module)
    other += () if wanted == SPLITS else (dict,)
    kind = f"{type(made).__module__}.{type(made).__qualname__}"
    if wanted and (isinstance(made, other) or not isinstance(made, tuple(map(class_of, wanted)))):
        got = f"{name}, which returned a {kind}"
        raise config_error(f"{key}._target_", got=got, expected=f"a function that returns a {wanted[0]}")
    if key == "model" and trains_itself(type(made)):
        raise ConfigError([own_training_error(name, kind=kind)])
    return made


def _for_torch(target: Callable[..., object], arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert numbers, lists and texts to tensors and dtypes if the parameters are annotated with these types.

    Parameters without an annotation, such as `dtype` of torch's layers, also accept texts such as `torch.float16`.

    Args:
        target: Class or function to call.
        arguments: Arguments by parameter name.

    Returns:
        Arguments by parameter name, with converted values.
    """
    if not any(isinstance(value, str | list | int | float) for value in arguments.values()):
        return arguments
    annotations = annotations_of(target)
    return {name: _as_annotated(value, annotations.get(name, EMPTY), target) for name, value in arguments.items()}


def _as_annotated(value: object, annotation: object, target: Callable[..., object]) -> object:
    kinds = typing.get_args(annotation) or (annotation,)
    if isinstance(value, str):
        is_named = value.startswith("torch.") and annotation is EMPTY
        dtype = vars(torch).get(value.removeprefix("torch.")) if torch.dtype in kinds or is_named else None
        return dtype if isinstance(dtype, torch.dtype) else value
    is_number = isinstance(value, int | float) and not {bool, int, float} & set(kinds)
    if Tensor in kinds and (is_number or isinstance(value, list)) and is_array(value):
        # A list of integers becomes a floating-point tensor, because torch's losses require floating-point weights.
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


def _add_key(error: ErrorDetails, key: str) -> ErrorDetails:
    """Return an error with a full config key, such as `model.width` for the parameter `width` of the node `model`.

    An error that already has a full key is returned unchanged.

    Args:
        error: Error of a constructor. Its key is usually only the name of a parameter.
        key: Dotted key of the node.
    """
    inside = error.key == key or error.key.startswith(f"{key.split('.')[0]}.")
    return error if inside else dataclasses.replace(error, key=f"{key}.{error.key}")


@secrets_kept()
def plain_config(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain dicts and lists. Interpolations are resolved, except interpolations of secrets."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def build_data(settings: Settings, *, keeps_raw: bool = False) -> Data:
    """Build the data set of a run and its splits. The data loaders read the samples later.

    Values fitted to the training split, such as mean and standard deviation, are computed in a new run. A resumed run
    reads these values from its checkpoint.

    Args:
        settings: Settings of the run.
        keeps_raw: Keep the splits before transforms in the attribute `raw` of the result.
    """
    offers = {**_data_offers(settings), "earlier": functools.partial(_read_fitted, settings.resume)}
    # Passed as partials, because the data set builds its samplers after its splits.
    partial = {
        name: {**settings.data[name], "_partial_": True}
        for name in BUILT_BY_DATA
        if isinstance(settings.data.get(name), Mapping)
    }
    data: Data = _build(settings, {**settings.data, **partial}, "data", **offers, keeps_raw=keeps_raw)
    return data


def _data_offers(settings: Settings) -> dict[str, object]:
    ignored = set(_whole_numbers("ignore_index", [settings.objective, settings.metrics]))
    # exp's losses ignore a label only if ignore_index is set. Other losses, such as torch's, ignore IGNORED by default.
    losses = [str(node["_target_"]) for _, node in nodes_in(settings.objective)]
    if not all(name.startswith("exp.objectives.") for name in losses):
        ignored.add(IGNORED)
    keeps_doubles = settings.precision.word == "fp64"
    return {"seed": settings.seed, "ignored_labels": sorted(ignored), "keeps_doubles": keeps_doubles}


def has_equal_data(first: Settings, second: Settings) -> bool:
    """Return whether `build_data` returns equal data for two configs.

    The keys in READ_FROM_DATA, such as `data.input_shape`, are not compared, because a config may leave them null.
    """
    values = [
        {
            **{name: value for name, value in one.data.items() if name not in READ_FROM_DATA},
            **_data_offers(one),
            "resume": one.resume,
            "allow": one.security.allow,
        }
        for one in (first, second)
    ]
    return values[0] == values[1]


def _read_fitted(resume: object) -> Plain | None:
    if not isinstance(resume, str):
        return None  # null, or an invalid value
    try:
        return fitted_in(Path(resume))
    except RunError:
        return None  # the check of the checkpoint reports the error


def _whole_numbers(key: str, node: object) -> Iterator[int]:
    """Yield the integers stored under the name `key`, at any depth of nested dicts and lists."""
    if isinstance(node, Mapping):
        yield from (value for name, value in node.items() if name == key and isinstance(value, int))
    if isinstance(node, Mapping | list):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _whole_numbers(key, value)


def build_network(settings: Settings, spec: DataSpec, *, device: str = "cpu") -> nn.Module:
    """Build the model with weights initialized from the run's seed. Sizes of lazy layers are inferred from the data.

    Args:
        settings: Settings of the run.
        spec: Shapes and dtypes of the data.
        device: Device of the weights. "meta" builds the model without allocating memory.
    """
    network = build_unsized_network(settings, device=device)
    with torch.device(device):
        materialise(network, example_inputs(spec, device=device))
        prepare(network, settings)
    follow_saved_shapes(network)
    return network


def build_module(settings: Settings, *, device: str = "cpu") -> LightningModule:
    """Build the user's LightningModule with weights initialized from the run's seed.

    If a parameter of the module is a network of exp, as in `net: ${model}`, the sizes of its lazy layers are inferred
    from the data.

    Args:
        settings: Settings of the run.
        device: Device of the weights. "meta" builds the module without allocating memory.

    Raises:
        ConfigError: The constructor rejects its arguments.
    """
    initialisation(settings.seed)
    with torch.device(device):
        with warnings.catch_warnings():
            # save_hyperparameters() warns that it saves layers twice. exp's checkpoints do not contain the second copy.
            warnings.filterwarnings("ignore", "Attribute '.+' is an instance of `nn.Module` and is already saved")
            module: LightningModule = _build(settings, settings.module, "module")
        if "_modules" not in vars(module):
            got = f"{type(module).__name__}, whose __init__ does not call super().__init__()"
            raise config_error("module", got=got, expected="an __init__ with this call, which initializes the module")
        for child in () if settings.has_own_loaders else module.children():
            if isinstance(child, ProgramModel):
                materialise(child, example_inputs(DataSpec.of(settings.data), device=device))
    return module


def build_data_module(settings: Settings) -> LightningDataModule:
    """Build the user's LightningDataModule.

    Raises:
        ConfigError: The constructor rejects its arguments.
    """
    data: LightningDataModule = _build(settings, settings.data, "data")
    return data


def prepare(network: nn.Module, settings: Settings) -> None:
    """Initialize weights, add LoRA layers and freeze parameters of a network in place, as the settings specify.

    If a lazy layer has no shape yet, only the freezing is done. A network that already has LoRA layers is not changed.

    Args:
        network: Network to change.
        settings: Settings of the run.

    Raises:
        ConfigError: A pattern matches no parameter or layer.
    """
    is_sized, lora = not any(map(is_lazy, network.parameters())), settings.lora
    if is_adapted(network):
        return
    if is_sized:
        initialise(network, settings.initialisation)
    if not lora.layers:
        build_freezing(network, settings).apply(network)
    elif is_sized:
        adapt(network, **vars(lora), batch_norm=settings.freeze.batch_norm)


def build_freezing(network: nn.Module, settings: Settings) -> Freezing:
    """Return the parameters of a network that the config node `freeze` selects, with the epochs that unfreeze them."""
    return find_frozen(network, **vars(settings.freeze))


def build_starting_network(settings: Settings, spec: DataSpec) -> nn.Module:
    """Build the model with its initial weights.

    If `weights.from` is set, the weights are loaded from this file. Otherwise they are initialized from the run's seed.

    Raises:
        RunError: The weights cannot be read.
    """
    network, node = build_network(settings, spec), settings.weights
    if node.from_ is not None:
        weights = read_weights(Path(node.from_), averaged=node.averaged)
        load_weights(network, weights, match_weights(weights, network, keys=node.keys))
    return network


def build_unsized_network(settings: Settings, *, device: str = "cpu") -> nn.Module:
    """Build the model with weights initialized from the run's seed. Lazy layers have no shape before the first forward.

    Args:
        settings: Settings of the run.
        device: Device of the weights. "meta" builds the model without allocating memory.
    """
    initialisation(settings.seed)
    with torch.device(device):
        network: nn.Module = _build(settings, settings.model, "model")
    return network


def build_objective(settings: Settings) -> Objective:
    """Build the objective of a run: the weighted sum of the terms in the group `objective`.

    A torch loss in the group becomes a term with the weight 1.
    """
    return Objective(terms=build_entries(settings, "objective"))


def build_optimization(
    settings: Settings, *, optimizer: str = "optimizer", scheduler: str = "scheduler"
) -> Optimization:
    """Return an Optimization: the functions that create the optimizer and the learning rate schedule later.

    Args:
        settings: Settings of the run.
        optimizer: Dotted key of the optimizer's node.
        scheduler: Dotted key of the schedule's node.
    """
    factories: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key in (optimizer, scheduler):
        group, *path = key.split(".")
        node: Plain = functools.reduce(lambda node, name: node[name], path, getattr(settings, group))
        own, target = _split_reserved(node, key)
        factories[key] = _build(settings, _as_partial(target), key)
        options |= own
    return Optimization(
        optimizer_factory=factories[optimizer],
        schedule_factory=factories[scheduler],
        begins_late=any(settings.freeze.unfreeze),
        **options,
    )


def _build(settings: Settings, node: object, key: str, **offers: object) -> Any:
    return construct(node, key=key, allow=settings.security.allow, **offers)


def _split_reserved(node: Plain, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a node into two dicts by its keys.

    Returns:
        Values that exp reads itself.
        Values that are passed to the `_target_`.
    """
    own = {name: node[name] for name in slot_of(key).reserved if name in node}
    return own, {name: value for name, value in node.items() if name not in own}


def _as_partial(node: Plain) -> dict[str, Any]:
    """Return a copy of a node with `_partial_: true`. Nodes in its list `schedulers` are changed in the same way.

    The node then builds a functools.partial, because a schedule needs the optimizer, which needs the parameters.
    """
    parts = {"schedulers": list(map(_as_partial, node["schedulers"]))} if "schedulers" in node else {}
    return {**node, **parts, "_partial_": True}


def build_phases(settings: Settings) -> list[Phase]:
    """Build the phases of a run, in order.

    A phase without an optimizer uses the optimizer of the run. A phase without a schedule uses the schedule of the run.
    """
    phases = []
    for name, entry in settings.phases.items():
        keys = {node: f"phases.{name}.{node}" for node in ("optimizer", "scheduler") if entry.get(node) is not None}
        rest = {key: value for key, value in entry.items() if key not in ("optimizer", "scheduler")}
        if isinstance(rest["parameters"], str):
            rest["parameters"] = [rest["parameters"]]
        phases.append(
            Phase(
                name=name,
                optimization=build_optimization(settings, **keys),
                owns_optimizer="optimizer" in keys,
                owns_scheduler="scheduler" in keys,
                **rest,
            )
        )
    return phases


def build_entries(settings: Settings, group: str, **offers: object) -> dict[str, Any]:
    """Build the objects of a config group with named entries, such as `hooks`.

    Args:
        settings: Settings of the run.
        group: Name of the group.
        **offers: Additional arguments by parameter name. See `construct`.

    Returns:
        Objects by the name of their entry.
    """
    entries: Plain = getattr(settings, group)
    return {name: _build(settings, node, f"{group}.{name}", **offers) for name, node in entries.items()}


def build_loggers(settings: Settings, directory: Path) -> dict[str, Logger]:
    """Build the loggers of a run. A logger that cannot be created is skipped with a warning.

    Args:
        settings: Settings of the run.
        directory: Run directory.

    Returns:
        Loggers by name.
    """
    offers = {"directory": str(directory), "save_dir": str(directory)}
    found: dict[str, Logger] = {}
    for name, node in settings.logger.items():
        key = f"logger.{name}"
        logger = make_logger(functools.partial(_build, settings, node, key, **offers), name=key)
        if logger is not None:
            found[name] = logger
    return found


def build_measures(settings: Settings) -> dict[str, Measure]:
    """Build the metrics of a run.

    Returns:
        Measures by name. A Measure is a metric with the names of the output and the target that it compares.

    Raises:
        ConfigError: A constructor rejects its arguments.
    """
    found = {}
    for name, node in settings.metrics.items():
        key = f"metrics.{name}"
        own, target = _split_reserved(node, key)
        metric = _build(settings, target, key)
        try:
            found[name] = Measure(name=name, metric=metric, **own)
        except ValueError as error:
            raise ConfigError([constructor_error(error, key=key, known=own, got=message_of(error))]) from error
    return found


def build_run_precision(settings: Settings, *, device_type: str) -> RunPrecision:
    """Build Lightning's precision plug-in from the config nodes `precision` and `runtime`.

    Args:
        settings: Settings of the run.
        device_type: "cpu", "cuda" or "mps".
    """
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
    """Build the strategy of a run. No process is started, and no model is moved to a device."""
    node = settings.strategy
    if not issubclass(resolve(node["_target_"], allow=settings.security.allow), Strategy):
        # `name` is only for the report. Lightning's strategies do not have this parameter.
        node = {key: value for key, value in node.items() if key != "name"}
    strategy: Strategy | LightningStrategy = _build(settings, node, "strategy")
    return strategy
