"""Where in a config a `_target_` may stand, what it must be there, and what exp itself gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from exp.config.plain_tree import is_node, leaves
from exp.errors import ErrorDetails

MODULE = "torch.nn.Module"
# Of functions that give a data set, whose class may be anybody's: what reads samples by number.
DATA_SETS = ("torch.utils.data.Dataset", "exp.data.in_memory.Samples")
DATA_MODULE = "lightning.pytorch.LightningDataModule"
# And of one whose parts stand in it by name, which data=hf takes.
SPLITS = (*DATA_SETS, "builtins.dict")
# A model of these has a training of its own, which nobody would call.
LIGHTNING_MODULES = (
    "lightning.pytorch.core.module.LightningModule",
    "pytorch_lightning.core.module.LightningModule",
)
RESERVED_IN_NODE = ("_target_", "_partial_", "_args_")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One place for a node.

    pattern: of its dotted key; `*` is one name.
    bases: dotted names of classes, of one of which it must be; empty where any allowed class fits.
    filled: parameters that exp gives, so that a config need not; a null leaves them to exp, too.
    reserved: keys beside the target's own parameters that exp reads.
    refused: parameters that exp decides elsewhere, with the key to use instead.
    """

    pattern: str
    bases: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


TRAINER_REFUSED = {
    "accelerator": "launch.accelerator",
    "benchmark": "runtime.cudnn_benchmark",
    "barebones": "hooks=[] metrics=[] logger=[] for little beside the training; barebones would stop exp's recording",
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
# A part of torch's SequentialLR or ChainedScheduler, at any depth: of the same optimizer.
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

# The three kinds of config group: `=` replaces, `+` adds.
# one   owns the node of its name: model=mlp
# many  named entries: hooks=[gradients,memory] replaces the set, +hooks=memory adds one
# axis  tunes what train.yaml declares whole: precision=bf16 and +precision=bf16 are one command
ONE = ("model", "data", "optimizer", "scheduler", "strategy", "sweep")
MANY = ("hooks", "callbacks", "objective", "metrics", "phases", "logger")
AXIS = ("experiment", "debug", "precision", "local", "module")
# Nodes of a class that may be the user's own, which has its own words: the composed config says what is there.
OF_CLASSES = (*ONE, *MANY, "module")
# One-groups own the node of their name; many-groups hold named entries, each a node.
NODES = ("model", "data", "optimizer", "scheduler", "trainer", "strategy")
COLLECTIONS = ("objective", "metrics", "hooks", "callbacks", "logger")
# A many-group whose entries are mappings of exp's own keys, some of them nodes.
PHASES = "phases"


def slot_of(key: str) -> Slot:
    """The slot of a dotted key; one that takes any allowed class where none is its own."""
    parts = key.split(".")
    for slot in SLOTS:
        wanted = slot.pattern.split(".")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            return slot
    if parts[-2:-1] == ["schedulers"] and "scheduler" in parts:
        return PART_OF_SCHEDULE
    return LAYER if parts[0] == "model" and is_layer(parts) else ANYWHERE


def returned_at(key: str) -> tuple[str, ...]:
    """Dotted names of the classes of which a function at this key returns one; empty where no function may stand."""
    parts = key.split(".")
    if parts[0] == "model" or (parts[0] == "module" and parts[1:]) or slot_of(key).bases == (MODULE,):
        return (MODULE,)
    if parts[0] == "data" and parts[-1] == "source":
        return SPLITS
    holds_data = parts[-1] in ("dataset", "train", "val", "test") or parts[-2:-1] == ["datasets"]
    return DATA_SETS if parts[0] == "data" and holds_data else ()


def trains_itself(kind: type) -> bool:
    """Whether a class is a LightningModule, of either of Lightning's two names. Nothing is imported."""
    return any(f"{base.__module__}.{base.__qualname__}" in LIGHTNING_MODULES for base in kind.__mro__)


def own_training_error(name: str, *, kind: str) -> ErrorDetails:
    """The error of a LightningModule as the model. name: of the class, or of what makes it. kind: of the class."""
    return ErrorDetails(
        key="model._target_",
        got=f"{name}, a LightningModule, whose training_step, losses and optimizers exp does not call",
        expected="the bare network, a torch.nn.Module",
        fix="Move its file from conf/model to conf/module and write module in the place of model, and Lightning's "
        f"Trainer runs it as it is: 'module={{_target_: {kind}}}'; or name the class of the network that it holds",
    )


def own_loaders_error(name: str) -> ErrorDetails:
    """The error of a LightningDataModule as the data of exp's own model. name: of the class."""
    return ErrorDetails(
        key="data._target_",
        got=f"{name}, a LightningDataModule, of whose batches exp's model and objective know nothing",
        expected="exp.data.data.Data around a torch Dataset, or a LightningModule to take its batches",
        fix="Put the Dataset below data.dataset, or name a module: 'module={_target_: mine.LitNet}'",
    )


def is_layer(parts: list[str]) -> bool:
    """Whether a key names a layer: `layers.name`, of a repeat `layers.name.layer`, of a list `layers.name.0`."""
    if "layers" not in parts:
        return False
    below = parts[len(parts) - parts[::-1].index("layers") :]
    return len(below) == 1 or (len(below) == 2 and (below[1] == "layer" or below[1].isdecimal()))


def nodes_in(plain: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping with a `_target_`, outermost first, with its dotted key."""
    for path, value in ((key, plain), *leaves(plain, key)):
        if is_node(value):
            yield path, value


def package_of_flat(config_path: str, content: object) -> str | None:
    """Where a file of a group of many that holds one entry itself stands: under its own name.

    Options of Hydra's own groups are written so. config_path: with the ending or without.
    Returns: None of any other file.
    """
    folder, _, option = config_path.removesuffix(".yaml").rpartition("/")
    group = folder.partition("/")[0]
    if group not in MANY or not isinstance(content, dict):
        return None
    is_entry = "_target_" in content or (group == "phases" and isinstance(content.get("terms"), list))
    return f"{group}.{option}" if is_entry else None
