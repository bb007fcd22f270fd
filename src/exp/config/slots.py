"""Rules for the config keys that may contain a node with a `_target_`, such as the required base class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from exp.config.plain_tree import is_node, leaves
from exp.errors import ErrorDetails

MODULE = "torch.nn.Module"
# Base classes of the data sets that a function may return. `Samples` includes any class that reads samples by index.
DATA_SETS = ("torch.utils.data.Dataset", "exp.data.in_memory.Samples")
DATA_MODULE = "lightning.pytorch.LightningDataModule"
# Classes that a function at `data.source` (data=hf) may return: a data set, or a dict of splits by name.
SPLITS = (*DATA_SETS, "builtins.dict")
# Models of these classes define their own training step, which exp does not call.
LIGHTNING_MODULES = (
    "lightning.pytorch.core.module.LightningModule",
    "pytorch_lightning.core.module.LightningModule",
)
RESERVED_IN_NODE = ("_target_", "_partial_", "_args_")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Rules for the node at a config key that may contain a `_target_`.

    Args:
        pattern: Dotted key of the node. `*` matches one name.
        bases: Dotted names of classes. The target must be a subclass of at least one of them. Empty: any allowed class.
        filled: Parameters of the target for which exp passes a value if they are null or missing.
        reserved: Keys of the node that exp reads itself and does not pass to the target.
        refused: Parameters that the node must not set. Each is mapped to the config key to use instead.
    """

    pattern: str
    bases: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


TRAINER_REFUSED = {
    "accelerator": "launch.accelerator",
    "benchmark": "runtime.cudnn_benchmark",
    "barebones": "hooks=[] metrics=[] logger=[] for a run with few records; barebones also stops the report of exp",
    "callbacks": "the group callbacks",
    "default_root_dir": "hydra.run.dir",
    "deterministic": "runtime.deterministic",
    "devices": "launch.devices",
    "enable_checkpointing": "checkpoint.save_last and checkpoint.save_best",
    "logger": "the group logger",
    "num_nodes": "launch.nodes",
    "plugins": "the groups precision and strategy",
    "precision": "the group precision, such as precision=bf16",
    "strategy": "the group strategy, such as strategy=ddp",
    "sync_batchnorm": "strategy.sync_batchnorm, with strategy=ddp",
    "use_distributed_sampler": "data.batch_size, which is shared over the ranks by exp",
}
OPTIMIZER = Slot(
    pattern="optimizer",
    bases=("torch.optim.Optimizer",),
    filled=("params",),
    reserved=("groups", "exempt_from_decay"),
)
SCHEDULER = Slot(
    pattern="scheduler",
    bases=("torch.optim.lr_scheduler.LRScheduler",),
    filled=("optimizer", "total_steps"),
    reserved=("interval", "monitor"),
)
# A scheduler within torch's SequentialLR or ChainedScheduler, at any depth. All these schedulers use the same
# optimizer.
PART_OF_SCHEDULE = Slot(pattern="**.schedulers.*", bases=SCHEDULER.bases, filled=("optimizer",))
SAMPLER = Slot(
    pattern="data.sampler",
    bases=("torch.utils.data.Sampler",),
    filled=("data_source", "inputs", "num_classes"),
)
BATCH_SAMPLER = Slot(
    pattern="data.batch_sampler",
    bases=SAMPLER.bases,
    filled=("data_source", "inputs", "batch_size", "shuffle", "drop_last"),
)
SLOTS = (
    Slot(pattern="model", bases=(MODULE,)),
    Slot(pattern="data", bases=("exp.data.data.Data", DATA_MODULE), filled=("seed",)),
    Slot(pattern="module", bases=("lightning.pytorch.LightningModule",)),
    SAMPLER,
    BATCH_SAMPLER,
    OPTIMIZER,
    SCHEDULER,
    Slot(pattern="trainer", bases=("lightning.pytorch.Trainer",), refused=TRAINER_REFUSED),
    Slot(pattern="phases.*.optimizer", bases=OPTIMIZER.bases, filled=OPTIMIZER.filled, reserved=OPTIMIZER.reserved),
    Slot(pattern="phases.*.scheduler", bases=SCHEDULER.bases, filled=SCHEDULER.filled, reserved=SCHEDULER.reserved),
    Slot(
        pattern="strategy",
        bases=("exp.strategies.strategy.Strategy", "lightning.pytorch.strategies.Strategy"),
        filled=("name",),
        reserved=("name",),
    ),
    Slot(pattern="objective.*", bases=(MODULE,)),
    Slot(pattern="objective.*.loss", bases=(MODULE,)),
    Slot(
        pattern="metrics.*",
        bases=("torchmetrics.Metric", "torchmetrics.MetricCollection"),
        reserved=("output", "target", "inputs"),
    ),
    Slot(pattern="hooks.*", bases=("exp.hooks.hook.Hook",), filled=("workload",)),
    Slot(pattern="callbacks.*", bases=("lightning.pytorch.Callback",)),
    Slot(pattern="logger.*", bases=("lightning.pytorch.loggers.Logger",), filled=("directory", "save_dir")),
    Slot(pattern="trainer.profiler", bases=("lightning.pytorch.profilers.Profiler",)),
)
# A layer of a container, at any depth.
LAYER = Slot(pattern="model.**.layers.*", bases=(MODULE,))
ANYWHERE = Slot(pattern="**")

# The three kinds of config group. They differ in the meaning of `=` and `+` in an override.
# one   An option sets the whole node of the group: model=mlp.
# many  The options are named entries. hooks=[gradients,memory] replaces all entries, and +hooks=memory adds an entry.
# axis  An option changes values that train.yaml declares. precision=bf16 and +precision=bf16 are equivalent.
ONE = ("model", "data", "optimizer", "scheduler", "strategy", "sweep")
MANY = ("hooks", "callbacks", "objective", "metrics", "phases", "logger")
AXIS = ("experiment", "debug", "precision", "local", "module")
# Nodes that may have a class of the user. The keys of these nodes are known only after the composition.
OF_CLASSES = (*ONE, *MANY, "module")
# The value of a key in NODES is a node with a `_target_`. The value of a key in COLLECTIONS is a mapping of names to
# such nodes.
NODES = ("model", "data", "optimizer", "scheduler", "trainer", "strategy")
COLLECTIONS = ("objective", "metrics", "hooks", "callbacks", "logger")
# Group in which an entry has no `_target_`. An entry is a mapping with keys of exp, and some of its values are nodes.
PHASES = "phases"


def slot_of(key: str) -> Slot:
    """Return the rules for the node at a dotted key. A key that no slot matches accepts any allowed class."""
    parts = key.split(".")
    for slot in SLOTS:
        wanted = slot.pattern.split(".")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            return slot
    if parts[-2:-1] == ["schedulers"] and "scheduler" in parts:
        return PART_OF_SCHEDULE
    return LAYER if parts[0] == "model" and is_layer(parts) else ANYWHERE


def returned_classes(key: str) -> tuple[str, ...]:
    """Return the allowed classes of an object that a function builds, if the `_target_` at a key is a function.

    Args:
        key: Dotted key of the node.

    Returns:
        Dotted names of classes. Empty: a function is not allowed at this key.
    """
    parts = key.split(".")
    if parts[0] == "model" or (parts[0] == "module" and parts[1:]) or slot_of(key).bases == (MODULE,):
        return (MODULE,)
    if parts[0] == "data" and parts[-1] == "source":
        return SPLITS
    holds_data = parts[-1] in ("dataset", "train", "val", "test") or parts[-2:-1] == ["datasets"]
    return DATA_SETS if parts[0] == "data" and holds_data else ()


def trains_itself(kind: type) -> bool:
    """Return whether a class is a LightningModule of the package `lightning` or `pytorch_lightning`.

    The names of base classes are compared. A comparison of the classes would require an import of Lightning.
    """
    return any(f"{base.__module__}.{base.__qualname__}" in LIGHTNING_MODULES for base in kind.__mro__)


def own_training_error(name: str, *, kind: str) -> ErrorDetails:
    """Return the error for a LightningModule in `model`, because exp would not call its training step.

    Args:
        name: Dotted name of the `_target_`: the class, or a function that builds the model.
        kind: Dotted name of the LightningModule's class.
    """
    got = f"{name}, a LightningModule, whose training_step, losses and optimizers exp does not call"
    fix = (
        f"To train this class unchanged, set the key module instead of model: 'module={{_target_: {kind}}}'. Move its "
        "YAML file from conf/model to conf/module. To train only its network, name the class of the network"
    )
    return ErrorDetails("model._target_", got, "a network, which is a plain torch.nn.Module", fix)


def own_loaders_error(name: str) -> ErrorDetails:
    """Return the error for a LightningDataModule in `data` if the config has no LightningModule in `module`.

    Args:
        name: Dotted name of the LightningDataModule's class.
    """
    got = f"{name}, a LightningDataModule, whose batches exp's model and objective cannot read"
    expected = "exp.data.data.Data around a torch Dataset, or a LightningModule to take its batches"
    fix = "Put the Dataset below data.dataset, or name a module: 'module={_target_: mine.LitNet}'"
    return ErrorDetails("data._target_", got, expected, fix)


def is_layer(parts: list[str]) -> bool:
    """Return whether a config key below `model` is the key of a layer.

    The key of a layer ends with `layers.NAME`. Within a repeat, it ends with `layers.NAME.layer`. Within a list, it
    ends with `layers.NAME.0`.

    Args:
        parts: Names in the dotted key.
    """
    if "layers" not in parts:
        return False
    below = parts[len(parts) - parts[::-1].index("layers") :]
    return len(below) == 1 or (len(below) == 2 and (below[1] == "layer" or below[1].isdecimal()))


def nodes_in(plain: object, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the value of each node with a `_target_` in a plain tree.

    A node is yielded before the nodes within it.

    Args:
        plain: Nested dicts and lists.
        key: Dotted key of `plain`. Each yielded key begins with it. Default: "".
    """
    for path, value in ((key, plain), *leaves(plain, key)):
        if is_node(value):
            yield path, value


def package_of_flat(config_path: str, content: object) -> str | None:
    """Return the key at which a config file is merged that contains a single entry without its name.

    In groups with named entries, such as `hooks`, exp's files contain `NAME: {_target_: ...}`. Files of other Hydra
    projects contain only `_target_: ...`. The name of such a file becomes the name of the entry.

    Args:
        config_path: Path of the file within the directory of configs, such as `hooks/memory`, with or without `.yaml`.
        content: Content of the file.

    Returns:
        Key such as `hooks.memory`. None for any other file.
    """
    folder, _, option = config_path.removesuffix(".yaml").rpartition("/")
    group = folder.partition("/")[0]
    if group not in MANY or not isinstance(content, dict):
        return None
    is_entry = "_target_" in content or (group == "phases" and isinstance(content.get("terms"), list))
    return f"{group}.{option}" if is_entry else None
