"""Keys that versions of exp added and removed, so that runs and sweeps of earlier versions resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exp.config.plain_tree import are_same, leaves

# Keys that every config has now, with the value of a config that has none.
PRESENT: Mapping[str, Any] = {"vars": {}, "resolvers": {}, "runtime.compile_mode": None}
# Keys that change nothing at these values; configs of earlier versions do not have them.
ADDED: Mapping[str, Any] = {
    "runtime.compile_mode": None,
    "data.split": {"stratify": False, "group": None, "column": None, "folds": None, "fold": 0},
    "data.eval_transforms": {},
    "data.dataset.background": "white",
    "data.dataset.any_size": False,
}
# Keys that no longer exist, with the values that they had by default.
REMOVED: Mapping[str, Any] = {
    "precision.report": False,
    "runtime.cuda_graph": False,
    "runtime.out_of_memory": "stop",
    "runtime.rewind_factor": 0.5,
    "runtime.max_rewinds": 3,
    "runtime.warm": "auto",
    "sweep.storage": None,
}
# Values that keys no longer take, and what takes their place.
REMOVED_VALUES: Mapping[tuple[str, str], str | None] = {
    ("runtime.non_finite", "rewind"): "stop",
}
# Values that chose what a class of its own does now, and that class.
DDP = "exp.strategies.ddp.DDP"
CHOSEN_CLASSES: Mapping[tuple[str, str], str] = {
    ("strategy.inner", "layer_split"): "exp.extras.gallery.split_ddp.SplitDDP",
    ("strategy.communication_hook", "ring"): "exp.extras.gallery.ring_all_reduce.RingDDP",
}
# Parameters that classes no longer have, with the values that frozen configs of earlier versions always hold.
WRITTEN_PARAMETERS: Mapping[str, Mapping[str, Any]] = {"exp.extras.hf.hf.HuggingFace": {"files": None}}
REMOVED_HOOKS = ("exp.hooks.landscape.Landscape",)
# Modules and classes that moved, by their names in earlier versions.
MOVED: Mapping[str, str] = {
    "exp.data.domains": "exp.extras.gallery.domains",
    "exp.data.hf": "exp.extras.hf.hf",
    "exp.data.letter_names": "exp.extras.gallery.letter_names",
    "exp.engine.range_test": "exp.extras.finders.range_test",
    "exp.engine.size_trial": "exp.extras.finders.size_trial",
    "exp.functions.elementary": "exp.extras.gallery.custom_functions",
    "exp.hooks.clip_module": "exp.extras.research.clip_module",
    "exp.hooks.confusion": "exp.extras.evaluation.confusion",
    "exp.hooks.dtypes": "exp.extras.debugging.dtypes",
    "exp.hooks.features": "exp.extras.research.features",
    "exp.hooks.gradient_reversal": "exp.extras.research.gradient_reversal",
    "exp.hooks.gradient_transform": "exp.extras.research.gradient_transform",
    "exp.hooks.nan_guard": "exp.extras.debugging.nan_guard",
    "exp.hooks.operators": "exp.extras.debugging.operators",
    "exp.hooks.per_sample_gradients": "exp.extras.research.per_sample_gradients",
    "exp.hooks.pr_curve": "exp.extras.evaluation.pr_curve",
    "exp.hooks.profile": "exp.extras.debugging.profile",
    "exp.hooks.retain_gradients": "exp.extras.research.retain_gradients",
    "exp.hooks.samples": "exp.extras.evaluation.samples",
    "exp.hooks.scale_gradient": "exp.extras.research.scale_gradient",
    "exp.loggers.mlflow_store": "exp.extras.mlflow.mlflow_store",
    "exp.loggers.wandb_run": "exp.extras.wandb.wandb_run",
    "exp.models.ensemble": "exp.extras.gallery.ensemble",
    "exp.models.layers.Cube": "exp.extras.gallery.custom_functions.CubeLayer",
    "exp.models.layers.Exp": "exp.extras.gallery.custom_functions.ExpLayer",
    "exp.models.layers.GradientReversal": "exp.functions.gradient_layers.GradientReversal",
    "exp.models.layers.Linear": "exp.extras.gallery.custom_functions.LinearLayer",
    "exp.models.layers.MulConstant": "exp.extras.gallery.custom_functions.MulConstantLayer",
    "exp.models.layers.StraightThrough": "exp.extras.gallery.custom_functions.StraightThroughLayer",
    "exp.models.scalar_tensor": "exp.extras.gallery.scalar_tensor",
    "exp.strategies.data_parallel": "exp.extras.gallery.data_parallel",
    "exp.strategies.deepspeed": "exp.extras.deepspeed.deepspeed",
}
# Parameters that classes no longer have. The names of the classes are those of this version.
REMOVED_PARAMETERS: Mapping[str, Sequence[str]] = {
    "exp.data.delimited.Csv": ["packed"],
    "exp.extras.debugging.dtypes.Dtypes": ["every_n_steps"],
    "exp.extras.debugging.nan_guard.NanGuard": ["steps_in_flight"],
    "exp.extras.debugging.operators.Operators": ["every_n_steps"],
    "exp.extras.debugging.profile.Profile": ["rows"],
    "exp.extras.deepspeed.deepspeed.DeepSpeed": [
        *("offload_parameters", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "show_gradients"),
    ],
    "exp.extras.evaluation.confusion.Confusion": ["normalised"],
    "exp.extras.evaluation.pr_curve.PRCurve": ["positive_class", "thresholds"],
    "exp.extras.evaluation.samples.Samples": ["columns"],
    "exp.extras.hf.hf.HuggingFace": ["files"],
    "exp.extras.research.features.Features": ["columns"],
    "exp.extras.research.gradient_reversal.GradientReversal": ["steepness"],
    "exp.extras.research.retain_gradients.RetainGradients": ["histogram"],
    "exp.hooks.activations.Activations": ["unit_axis"],
    "exp.hooks.gradients.Gradients": ["shares_every_n_steps"],
    "exp.hooks.memory.Memory": ["record_history"],
    DDP: ["inner"],
    "exp.tensorboard.logger.TensorBoardLogger": ["graph"],
}


def with_present_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an earlier version with this version's keys, values and targets, without removed hooks."""
    found: dict[str, Any] = _with_targets(dict(content), current_target)
    for (key, value), chosen in CHOSEN_CLASSES.items():
        parent, _, name = key.rpartition(".")
        node = _node(found, parent)
        if node is not None and name in node and node[name] == value:
            del node[name]
            node["_target_"] = chosen
    for key in removed_keys(content):
        _remove(found, key)
    _replace_removed_values(found)
    for key, value in PRESENT.items():
        _add(found, key, value)
    return found


def as_before(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as the earliest version would have it: equal for all versions that compute the same."""
    found: dict[str, Any] = _with_targets(dict(plain), _earlier_target)
    _replace_removed_values(found)
    for (key, value), chosen in CHOSEN_CLASSES.items():
        parent, _, name = key.rpartition(".")
        node = _node(found, parent)
        if node is not None and node.get("_target_") == chosen:
            node |= {"_target_": DDP, name: value}
    for key, target in list(leaves(found)):
        if key.endswith("._target_") and isinstance(target, str):
            for name, value in WRITTEN_PARAMETERS.get(current_target(target), {}).items():
                _add(found, f"{key.removesuffix('_target_')}{name}", value)
    for key, value in ADDED.items():
        parent, _, name = key.rpartition(".")
        node = _node(found, parent)
        if node is not None and name in node and are_same(node[name], value):
            del node[name]
    for key, value in REMOVED.items():
        _add(found, key, value)
    return found


def removed_keys(content: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys that the config of an earlier version may have and that no longer exist."""
    targets = {
        key: value["_target_"] for key, value in leaves(content) if isinstance(value, dict) and "_target_" in value
    }
    hooks = [key for key, target in targets.items() if target in REMOVED_HOOKS]
    now = {key: current_target(target) for key, target in targets.items() if isinstance(target, str)}
    parameters = [
        f"{key}.{parameter}"
        for key, target in now.items()
        if target in REMOVED_PARAMETERS
        for parameter in REMOVED_PARAMETERS[target]
    ]
    return [*REMOVED, *hooks, *parameters]


def current_target(dotted: str) -> str:
    """Return the name that a class or function has in this version."""
    module, _, name = dotted.rpartition(".")
    return MOVED[dotted] if dotted in MOVED else f"{MOVED[module]}.{name}" if module in MOVED else dotted


def _earlier_target(dotted: str) -> str:
    module, _, name = dotted.rpartition(".")
    earlier = {now: before for before, now in MOVED.items()}
    return earlier[dotted] if dotted in earlier else f"{earlier[module]}.{name}" if module in earlier else dotted


def _with_targets(value: Any, rename: Callable[[str], str]) -> Any:
    """Return a copy of a tree in which each `_target_`, and each function of a `functions`, is renamed."""
    if isinstance(value, list):
        return [_with_targets(one, rename) for one in value]
    if not isinstance(value, dict):
        return copy.copy(value)
    renamed: dict[str, Any] = {
        key: rename(one) if key == "_target_" and isinstance(one, str) else _with_targets(one, rename)
        for key, one in value.items()
    }
    functions = renamed.get("functions")
    if isinstance(functions, dict):
        renamed["functions"] = {name: rename(one) if isinstance(one, str) else one for name, one in functions.items()}
    return renamed


def _node(tree: dict[str, Any], key: str) -> dict[str, Any] | None:
    node: Any = tree
    for name in key.split(".") if key else ():
        node = node[name] if isinstance(node, dict) and name in node else None
    return node if isinstance(node, dict) else None


def _add(tree: dict[str, Any], key: str, value: Any) -> None:
    parent, _, name = key.rpartition(".")
    node = _node(tree, parent)
    if node is not None and name not in node:
        node[name] = copy.deepcopy(value)


def _replace_removed_values(tree: dict[str, Any]) -> None:
    for (key, removed), value in REMOVED_VALUES.items():
        parent, _, name = key.rpartition(".")
        node = _node(tree, parent)
        if node is not None and name in node and node[name] == removed:
            node[name] = value


def _remove(tree: dict[str, Any], key: str) -> None:
    parent, _, name = key.rpartition(".")
    node = _node(tree, parent)
    if node is not None:
        node.pop(name, None)
