"""Keys, values and classes that changed between versions of exp.

Configs of earlier versions are converted to this version, so that runs and sweeps of earlier versions can be resumed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from exp.config.plain_tree import Plain, are_same, is_node, leaves, value_at

# Keys that every config has in this version of exp. The value is added to a config of an earlier version without the
# key.
PRESENT: Mapping[str, object] = {"vars": {}, "resolvers": {}, "runtime.compile_mode": None}
# Keys that do not exist in configs of earlier versions, with the value at which a key has no effect.
ADDED: Mapping[str, object] = {
    "runtime.compile_mode": None,
    "data.split": {"stratify": False, "group": None, "column": None, "folds": None, "fold": 0},
    "data.eval_transforms": {},
    "data.dataset.background": "white",
    "data.dataset.any_size": False,
    "data.dataset.parts_seed": 0,
    "data.parts_seed": 0,
}
# Keys that no longer exist, with their former default values.
REMOVED: Mapping[str, object] = {
    "checkpoint.keep": 1,
    "launch.high_priority_stream": False,
    "launch.network_interface": None,
    "precision.report": False,
    "runtime.cuda_graph": False,
    "runtime.out_of_memory": "stop",
    "runtime.rewind_factor": 0.5,
    "runtime.max_rewinds": 3,
    "runtime.warm": "auto",
    "sweep.storage": None,
}
# Values that are no longer allowed, by key and value. Each is mapped to the value that replaces it.
REMOVED_VALUES: Mapping[tuple[str, str], str | None] = {
    ("launch.accelerator", "gpu"): "cuda",
    ("runtime.non_finite", "rewind"): "stop",
    **{
        ("strategy.schedule", name): "interleaved_1f1b"
        for name in ("looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v")
    },
}
# Values that selected a behavior in earlier versions, by key and value. Each is mapped to the class that now has this
# behavior.
DDP = "exp.strategies.ddp.DDP"
CHOSEN_CLASSES: Mapping[tuple[str, str], str] = {
    ("strategy.inner", "layer_split"): "exp.extras.gallery.split_ddp.SplitDDP",
    ("strategy.communication_hook", "ring"): "exp.extras.gallery.ring_all_reduce.RingDDP",
}
REMOVED_HOOKS = ("exp.hooks.landscape.Landscape",)
# Present names of modules and classes, by their names in earlier versions.
GALLERY = "exp.extras.gallery"
MOVED: Mapping[str, str] = {
    **{f"exp.hooks.{name}": f"exp.extras.{folder}.{name}" for folder, names in {
        "debugging": ("activations", "dtypes", "nan_guard", "operators", "profile"),
        "evaluation": ("confusion", "pr_curve", "samples"),
        "research": ("clip_module", "features", "gradient_reversal", "gradient_transform", "per_sample_gradients",
                     "retain_gradients", "scale_gradient"),
    }.items() for name in names},
    **{f"exp.{name}": f"{GALLERY}.{name.partition('.')[2]}" for name in (
        "data.domains", "data.letter_names", "models.ensemble", "models.scalar_tensor", "strategies.data_parallel",
        "strategies.layer_split",
    )},
    **{f"exp.models.layers.{name}": f"{GALLERY}.custom_functions.{name}Layer" for name in (
        "Cube", "Exp", "Linear", "MulConstant", "StraightThrough",
    )},
    "exp.functions.elementary": f"{GALLERY}.custom_functions",
    "exp.data.hf": "exp.extras.hf.hf",
    "exp.data.parquet.Parquet": "exp.data.delimited.Csv",
    "exp.data.token_file": "exp.extras.tokenizers.token_file",
    "exp.data.tokens": "exp.extras.tokenizers.tokens",
    "exp.engine.range_test": "exp.extras.finders.range_test",
    "exp.engine.size_trial": "exp.extras.finders.size_trial",
    "exp.loggers.mlflow_store": "exp.extras.mlflow.mlflow_store",
    "exp.loggers.wandb_run": "exp.extras.wandb.wandb_run",
    "exp.models.layers.GradientReversal": "exp.functions.gradient_layers.GradientReversal",
    "exp.strategies.deepspeed": "exp.extras.deepspeed.deepspeed",
}  # fmt: skip
# Names of modules and classes in earlier versions, by their present names.
EARLIER: Mapping[str, str] = {now: before for before, now in MOVED.items()}


class Removed(NamedTuple):
    """Rules for a parameter that was removed from a class, in a config of an earlier version.

    Args:
        values: Values that are ignored. Any other value is an error. Default: None, all values are ignored.
        is_written: Whether frozen configs of earlier versions always contain the parameter. Its default value there is
            the first of `values`. Default: false.
    """

    values: Sequence[object] | None = None
    is_written: bool = False


# Rules for removed parameters, by the present dotted name of the class and the name of the parameter.
REMOVED_PARAMETERS: Mapping[str, Mapping[str, Removed]] = {
    "exp.data.batch_samplers.LengthBuckets": {"boundaries": Removed([None]), "lengths": Removed([None])},
    "exp.data.batch_samplers.TokenBatches": {"lengths": Removed([None]), "max_samples": Removed([None])},
    "exp.data.collate.Pad": {"length": Removed([None])},
    # shuffle_window is ignored with any value, because it had no effect without shuffle_block.
    "exp.data.data.Data": {
        "shuffle_block": Removed([None]),
        "shuffle_window": Removed(),
        "tv_tensors": Removed([None]),
    },
    "exp.data.delimited.Csv": {"packed": Removed()},
    "exp.data.images.Images": {"background": Removed(["white"])},
    "exp.data.samplers.BalancedSampler": {"replacement": Removed([True])},
    "exp.data.samplers.SubsetSampler": {"indices": Removed([None]), "shuffle": Removed([True])},
    "exp.data.samplers.WeightedSampler": {"replacement": Removed([True])},
    "exp.data.shards.Shards": {
        "background": Removed(["white"]),
        "count": Removed([False], is_written=True),
        "index": Removed([False], is_written=True),
        "parts_seed": Removed(),
    },
    "exp.engine.ema.ExponentialMovingAverage": {"every_n_steps": Removed([1]), "start_step": Removed([1])},
    "exp.extras.debugging.activations.Activations": {"unit_axis": Removed()},
    "exp.extras.debugging.dtypes.Dtypes": {"every_n_steps": Removed()},
    "exp.extras.debugging.nan_guard.NanGuard": {"steps_in_flight": Removed()},
    "exp.extras.debugging.operators.Operators": {"every_n_steps": Removed()},
    "exp.extras.debugging.profile.Profile": {"rows": Removed()},
    "exp.extras.deepspeed.deepspeed.DeepSpeed": dict.fromkeys(
        ("offload_parameters", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "show_gradients"),
        Removed(),
    )
    | {"offload_optimizer": Removed([False])},
    "exp.extras.evaluation.confusion.Confusion": {"normalised": Removed()},
    "exp.extras.evaluation.pr_curve.PRCurve": {"positive_class": Removed(), "thresholds": Removed()},
    "exp.extras.evaluation.samples.Samples": {"columns": Removed()},
    # 4.0 is ignored, because the range test still ends at 4 times the lowest loss.
    "exp.extras.finders.range_test.RangeTest": {"stop_factor": Removed([4.0])},
    "exp.extras.hf.hf.HuggingFace": {"background": Removed(["white"]), "files": Removed([None], is_written=True)},
    "exp.extras.research.features.Features": {"columns": Removed()},
    "exp.extras.research.gradient_reversal.GradientReversal": {"steepness": Removed([10.0])},
    "exp.extras.research.retain_gradients.RetainGradients": {"histogram": Removed()},
    "exp.hooks.gradients.Gradients": {"shares_every_n_steps": Removed()},
    "exp.hooks.memory.Memory": {"record_history": Removed()},
    "exp.models.layers.Noise": {"distribution": Removed(["normal"])},
    "exp.objectives.consistency.Consistency": {"probabilities": Removed([True])},
    **{
        f"exp.objectives.penalties.{name}": {"precision": Removed(["step"])}
        for name in ("JacobianNorm", "R1", "WGANGP")
    },
    "exp.objectives.metrics.R2": {"multioutput": Removed(["uniform_average"])},
    DDP: {
        **dict.fromkeys(("inner", "gradient_as_bucket_view", "static_graph"), Removed()),
        "powersgd": Removed([{"_target_": "exp.strategies.ddp.PowerSGD"}, None], is_written=True),
        "local_sgd": Removed([{"_target_": "exp.strategies.ddp.LocalSGD"}, None], is_written=True),
    },
    "exp.strategies.fsdp.FSDP": {"min_parameters": Removed(), "no_sync": Removed([False])},
    # `sequence` is ignored with any value, because the placement of activations does not change results.
    "exp.strategies.hybrid.Hybrid": {
        "sequence": Removed(),
        "stages_per_rank": Removed([None, 1, 2]),
        "vocabulary": Removed([False]),
    },
    "exp.strategies.pipeline.Pipeline": {"stages_per_rank": Removed([None, 1, 2])},
    "exp.strategies.tensor_parallel.TensorParallel": {"sequence": Removed(), "vocabulary": Removed([False])},
    "exp.tensorboard.logger.TensorBoardLogger": {"graph": Removed()},
}


def with_present_keys(content: Mapping[str, object]) -> Plain:
    """Return a config of an earlier version of exp, converted to this version.

    Names of classes and values are updated. Keys and hooks that were removed from exp are left out. Missing keys are
    added.

    Args:
        content: Plain values of the config.
    """
    found: Plain = _with_targets(dict(content), current_target)
    for (key, value), chosen in CHOSEN_CLASSES.items():
        node, name = _place(found, key)
        if name in node and node[name] == value:
            del node[name]
            node["_target_"] = chosen
    for key in removed_keys(content):
        node, name = _place(found, key)
        node.pop(name, None)
    _replace_removed_values(found)
    for key, default in PRESENT.items():
        _add(found, key, default)
    return found


def as_before(plain: Mapping[str, object]) -> Plain:
    """Return a config converted to the earliest version of exp, to compare configs of different versions.

    If two configs compute the same results, they are equal after this conversion.

    Args:
        plain: Plain values of a config of any version.
    """
    found: Plain = _with_targets(dict(plain), _earlier_target)
    _replace_removed_values(found)
    for (key, value), chosen in CHOSEN_CLASSES.items():
        node, name = _place(found, key)
        if node.get("_target_") == chosen:
            node |= {"_target_": DDP, name: value}
    for key, target in list(leaves(found)):
        if key.endswith("._target_") and isinstance(target, str):
            for name, removed in REMOVED_PARAMETERS.get(current_target(target), {}).items():
                if removed.is_written and removed.values:
                    _add(found, f"{key.removesuffix('_target_')}{name}", removed.values[0])
    for key, default in ADDED.items():
        node, name = _place(found, key)
        if name in node and are_same(node[name], default):
            del node[name]
    for key, default in REMOVED.items():
        _add(found, key, default)
    return found


def removed_keys(content: Mapping[str, object]) -> list[str]:
    """Return the dotted keys that do not exist in this version of exp, for a config of an earlier version.

    They are keys of exp, hooks, and parameters of classes. A parameter with a value that changes the results is not
    returned, so that it causes an error.

    Args:
        content: Plain values of the config.
    """
    nodes = {key: value for key, value in leaves(content) if is_node(value) and isinstance(value["_target_"], str)}
    hooks = [key for key, node in nodes.items() if node["_target_"] in REMOVED_HOOKS]
    parameters = [
        f"{key}.{parameter}"
        for key, node in nodes.items()
        for parameter, removed in REMOVED_PARAMETERS.get(current_target(node["_target_"]), {}).items()
        if removed.values is None or parameter not in node or node[parameter] in removed.values
    ]
    return [*REMOVED, *hooks, *parameters]


def current_target(dotted: str) -> str:
    """Return the present dotted name of a class or function.

    Args:
        dotted: Dotted name in this version or in an earlier version of exp.
    """
    return _rename(dotted, MOVED)


def _earlier_target(dotted: str) -> str:
    return _rename(dotted, EARLIER)


def _rename(dotted: str, names: Mapping[str, str]) -> str:
    """Return the new dotted name of a class.

    Args:
        dotted: Old dotted name. It is returned unchanged if neither the class nor its module is in `names`.
        names: New names of classes and modules, by their old names.
    """
    module, _, name = dotted.rpartition(".")
    return names[dotted] if dotted in names else f"{names[module]}.{name}" if module in names else dotted


def _with_targets(value: Any, rename: Callable[[str], str]) -> Any:
    """Return a copy of a plain tree in which classes and functions are renamed.

    The dotted names are the value of each `_target_`, and the values in each mapping with the key `functions`.

    Args:
        value: Plain tree.
        rename: Function that returns the new dotted name.
    """
    if isinstance(value, list):
        return [_with_targets(one, rename) for one in value]
    if not isinstance(value, dict):
        return copy.copy(value)
    renamed: Plain = {
        key: rename(one) if key == "_target_" and isinstance(one, str) else _with_targets(one, rename)
        for key, one in value.items()
    }
    functions = renamed.get("functions")
    if isinstance(functions, dict):
        renamed["functions"] = {name: rename(one) if isinstance(one, str) else one for name, one in functions.items()}
    return renamed


def _place(tree: Plain, key: str) -> tuple[Plain, str]:
    """Return the mapping that contains a dotted key, and the last name of the key.

    If the mapping does not exist in the tree, a new empty dict is returned. Changes to this dict have no effect.
    """
    parent, _, last = key.rpartition(".")
    node = value_at(tree, parent) if parent else tree
    return (node if isinstance(node, dict) else {}), last


def _add(tree: Plain, key: str, value: object) -> None:
    node, name = _place(tree, key)
    node.setdefault(name, copy.deepcopy(value))


def _replace_removed_values(tree: Plain) -> None:
    for (key, removed), value in REMOVED_VALUES.items():
        node, name = _place(tree, key)
        if name in node and node[name] == removed:
            node[name] = value
