"""Parameters and bounds that the signatures of torch, Lightning and torchmetrics do not declare.

A bound excludes values that the constructor accepts, but that lead to wrong training or to a later exception. Values
that the constructor rejects need no bound. A test compares every name with the installed versions.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Predicate

from exp.config.annotations import EMPTY
from exp.errors import LIBRARIES, ErrorDetails, is_installed, unsuitable

# Parameters that constructors read from **kwargs, with their types, by class.
HIDDEN_NAMES: Mapping[str, Mapping[str, object]] = {
    # The strategy passes these arguments on to torch's DistributedDataParallel.
    "lightning.pytorch.strategies.ddp.DDPStrategy": {
        "broadcast_buffers": bool,
        "bucket_cap_mb": float,
        "find_unused_parameters": bool,
        "gradient_as_bucket_view": bool,
        "static_graph": bool,
    },
    "torchmetrics.metric.Metric": {
        "compute_on_cpu": bool,
        "compute_with_cache": bool,
        "dist_sync_on_step": bool,
        # YAML cannot express values of these parameters, so only null is allowed.
        "distributed_available_fn": type(None),
        "dist_sync_fn": type(None),
        "process_group": type(None),
        "sync_on_compute": bool,
    },
}

# For each class that needs an additional package: the module of the package, and the argument of pip install.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "lightning.pytorch.loggers.comet.CometLogger": ("comet_ml", "comet-ml"),
    "lightning.pytorch.loggers.mlflow.MLFlowLogger": ("mlflow", "'exp-framework[mlflow]'"),
    "lightning.pytorch.loggers.wandb.WandbLogger": ("wandb", "'exp-framework[wandb]'"),
    "lightning.pytorch.profilers.xla.XLAProfiler": ("torch_xla", "torch_xla"),
}
_SHARE, _BELOW_1 = Interval(ge=0, le=1), Interval(ge=0, lt=1)
# Bounds by class and parameter name. A bound applies to the class and to its subclasses in LIBRARIES.
BOUNDS: Mapping[str, Mapping[str, object]] = {
    "torch.optim.optimizer.Optimizer": {
        **dict.fromkeys(("lr", "eps", "weight_decay", "momentum_decay", "lr_decay", "lambd", "t0"), Ge(0)),
        **dict.fromkeys(("initial_accumulator_value", "tolerance_grad", "tolerance_change"), Ge(0)),
        **dict.fromkeys(("betas", "momentum", "alpha", "rho"), _BELOW_1),
        **dict.fromkeys(("history_size", "max_iter", "ns_steps"), Ge(1)),
        "differentiable": Annotated[bool, "false, because exp never differentiates a step", Predicate(operator.not_)],
        "dampening": _SHARE,
    },
    "torch.optim.lr_scheduler.LRScheduler": {
        **dict.fromkeys(("step_size", "T_max", "T_0", "T_mult", "total_iters", "total_steps", "milestones"), Ge(1)),
        **dict.fromkeys(("epochs", "steps_per_epoch", "step_size_up", "step_size_down"), Ge(1)),
        **dict.fromkeys(("gamma", "max_lr", "div_factor", "final_div_factor"), Gt(0)),
        **dict.fromkeys(("eta_min", "patience", "cooldown", "threshold", "min_lr", "base_lr", "power", "eps"), Ge(0)),
        **dict.fromkeys(("factor", "end_factor", "pct_start"), _SHARE),
        "start_factor": Interval(gt=0, le=1),
        "base_momentum": _BELOW_1,
        "max_momentum": _BELOW_1,
    },
    "torchmetrics.metric.Metric": {
        "average": Literal["micro", "macro", "weighted", "none"] | None,
        "multioutput": Literal["uniform_average", "variance_weighted", "raw_values"],
        "sync_on_compute": Annotated[
            bool, "true, because each rank has another value otherwise", Predicate(operator.truth)
        ],
        "top_k": Ge(1),
    },
    "lightning.pytorch.trainer.trainer.Trainer": dict.fromkeys(
        ("min_epochs", "min_steps", "fast_dev_run", "limit_predict_batches", "reload_dataloaders_every_n_epochs"), Ge(0)
    ),
    "lightning.pytorch.loggers.csv_logs.CSVLogger": {"flush_logs_every_n_steps": Ge(1)},
    "lightning.pytorch.callbacks.early_stopping.EarlyStopping": {"patience": Ge(0), "min_delta": Ge(0)},
    "lightning.pytorch.callbacks.callback.Callback": {
        "max_depth": Ge(-1),
        "refresh_rate": Ge(0),
        "annealing_epochs": Ge(0),
    },
    "torch.nn.modules.module.Module": {
        **dict.fromkeys(("in_features", "out_features", "in1_features", "in2_features", "num_features"), Ge(1)),
        **dict.fromkeys(("in_channels", "out_channels", "num_channels", "num_groups", "groups"), Ge(1)),
        **dict.fromkeys(("kernel_size", "stride", "dilation", "upscale_factor", "normalized_shape"), Ge(1)),
        **dict.fromkeys(("num_embeddings", "embedding_dim", "embed_dim", "num_heads", "nhead", "d_model"), Ge(1)),
        **dict.fromkeys(("input_size", "hidden_size", "dim_feedforward", "num_parameters"), Ge(1)),
        **dict.fromkeys(("num_layers", "num_encoder_layers", "num_decoder_layers"), Interval(ge=1, le=10_000)),
        **dict.fromkeys(("dropout", "label_smoothing"), _SHARE),
        **dict.fromkeys(("eps", "layer_norm_eps"), Ge(0)),
        "delta": Gt(0),
        "ignore_index": Interval(ge=-(2**31), le=2**31 - 1),
        "reduction": Literal["none", "mean", "sum", "batchmean"],
        "approximate": Literal["none", "tanh"],
    },
}


def with_bounds(target: type, name: str, annotation: object, default: object) -> object:
    """Return the annotation of a parameter, extended by the bound of the parameter in BOUNDS.

    The annotation is returned unchanged if BOUNDS has no such bound, or if the class is not from a library.

    Args:
        target: The class.
        name: Name of the parameter.
        annotation: Annotation in the signature.
        default: Default in the signature.
    """
    if target.__module__.partition(".")[0] not in LIBRARIES or hasattr(annotation, "__metadata__"):
        return annotation
    for base in target.__mro__:
        bound = BOUNDS.get(f"{base.__module__}.{base.__qualname__}", {}).get(name)
        if bound is not None:
            return _annotate(bound, annotation, default)
    return annotation


def missing_package(target: type, *, key: str) -> ErrorDetails | None:
    """Return an error if a class needs a package that is not installed. Otherwise return None."""
    for base in target.__mro__:
        package, install = PACKAGES.get(f"{base.__module__}.{base.__qualname__}", (None, ""))
        if package is not None and not is_installed(package):
            because = f"which needs the package {package}"
            return unsuitable(key, target.__name__, because, "an installed package", f"pip install {install}")
    return None


def _annotate(bound: Any, annotation: object, default: object) -> object:
    if not isinstance(bound, Ge | Gt | Interval):
        return bound if default is not None else bound | None
    if annotation is EMPTY or annotation is Any:
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        return Annotated[float, bound] if is_number else Annotated[Any, "a number", bound]
    return Annotated[annotation, bound]
