"""The compatibility of the parts of a run, such as its strategy, hooks, callbacks and optimizer.

A hook, a callback or an optimizer has needs. A strategy has traits. The table EXCLUDED lists the traits and the
switches of a run, such as runtime.compile, that exclude each need.

    needs of a hook                       declared by its class and its methods (hooks/declarations.py)
    needs of a callback, an optimizer     derived from its class, not from its name
    traits of a strategy                  attributes of the strategy (strategies/strategy.py)

Some checks depend on more than one need and one trait. These checks are methods: `Hook.errors` and `Strategy.errors`.
docs/make_compatibility.py generates the compatibility page of the documentation from EXCLUDED.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning.pytorch import Callback, callbacks
from torch import optim

from exp.errors import ErrorDetails, not_supported_with, unsuitable
from exp.hooks.declarations import NEEDS as HOOK_NEEDS
from exp.hooks.hook import Hook
from exp.precision.words import HALF, WORDS
from exp.spelling import among, did_you_mean
from exp.strategies.strategy import Blueprint, averages_weights

# Callbacks that no run supports. Each has the reason and an alternative.
REFUSED: Mapping[type[Callback], tuple[str, str]] = {
    callbacks.LearningRateFinder: (
        "which trains the network before the run starts, and restores only a part of the state afterwards",
        "Run python -m exp.find_lr with the overrides of this run first. It prints the command of the run",
    ),
    callbacks.BatchSizeFinder: (
        "which changes the batch size after the check has used it",
        "Run python -m exp.find_batch with the overrides of this run first. It prints the command of the run",
    ),
    callbacks.BackboneFinetuning: (
        "which needs a `backbone` in the training module, and adds parameters to the optimizer during the run",
        "Freeze layers until an epoch with freeze.parameters and freeze.unfreeze, and set the learning rates of layers "
        "with optimizer.groups",
    ),
    callbacks.WeightAveraging: (
        "which exp replaces by its callback ema",
        "callbacks=[ema] averages the weights, and validation, best.ckpt and the test use the average",
    ),
    callbacks.StochasticWeightAveraging: (
        "which exp replaces by its callback ema",
        "callbacks=[ema] averages the weights, and validation, best.ckpt and the test use the average",
    ),
    callbacks.ModelPruning: (
        "which changes the weights after a validation, so that best.ckpt would have other weights",
        "Prune the weights of a finished run with torch.nn.utils.prune",
    ),
    callbacks.GradientAccumulationScheduler: (
        "which changes the number of optimizer steps in an epoch during the run",
        "Set one number for the whole run with trainer.accumulate_grad_batches",
    ),
    callbacks.SpikeDetection: (
        "which stores a state that Lightning 2.6 cannot read from a checkpoint",
        "runtime.non_finite=skip skips steps with a value that is not finite, and hooks=[nan_guard] finds the "
        "first such value",
    ),
    callbacks.BasePredictionWriter: (
        "which works only in Lightning's predict, and never in training",
        "hooks=[samples] shows outputs of the network in validation",
    ),
}
# Optimizers that need whole weights instead of shards. Each has the reason.
WHOLE: Mapping[type[optim.Optimizer], str] = {
    optim.LBFGS: "it computes one search direction for all weights together",
    optim.Adafactor: "it stores sums over whole rows and columns of a weight",
    optim.Muon: "it orthogonalizes whole matrices",
    optim.SparseAdam: "it needs sparse gradients",
}
UNKNOWN = "it may read whole weights, unlike AdamW and SGD of torch"

NEEDS: Mapping[str, str] = {
    **HOOK_NEEDS,
    "own_passes": "terms of the objective run the network, or a submodule of it, again",
    "mean_over_samples": "terms of the objective divide by weights of targets, which are summed over ranks",
    "several_sizes": "data.batch_sampler makes batches of different sizes",
    "several_backwards": "each phase has its own backward pass and optimizer",
    "several_steps": "a step has a backward pass and an optimizer step for each phase",
    "one_program": "torch.compile compiles the whole network",
    "fixed_weights": "a callback changes the parameters of the optimizer during the run",
    "whole_average": "a callback averages all weights",
    "whole_tensors": "an optimizer reads whole weights, not each element separately",
    "all_parameters": "an optimizer reads all parameters together",
    "whole_weights": "LoRA replaces the weight of a layer by a sum",
    "other_parameters": "freeze.unfreeze changes the set of trained parameters during the run",
    "whole_module": "a LightningModule of the user runs its own training_step",
    "lasting_writes": "a layer with max_norm changes its weight in its forward",
}
_SHARDS = ("shards_parameters", "splits_tensors", "owns_step")
# For each need, the traits of strategies and the switches of a run that exclude this need.
EXCLUDED: Mapping[str, Sequence[str]] = {
    "own_backward": ("owns_step",),
    "whole_parameters": (*_SHARDS, "splits_layers"),
    "whole_outputs": ("splits_tensors",),
    "all_layers": ("splits_layers",),
    "one_rank": ("ranks",),
    "one_thread": ("replicates_in_threads",),
    "gradient_flow": ("compile",),
    "one_objective": ("phases", "module"),
    "known_values": ("module",),
    "known_step": ("module",),
    "one_batch_a_step": ("accumulation",),
    "vmap": ("float8",),
    "float32": ("half",),
    "own_passes": (*_SHARDS, "splits_layers", "splits_devices"),
    "mean_over_samples": ("splits_layers",),
    "several_sizes": ("splits_layers",),
    "several_backwards": (*_SHARDS, "splits_layers", "splits_devices", "replicates_in_threads"),
    "several_steps": ("steps_once",),
    "one_program": (*_SHARDS, "splits_layers", "splits_devices"),
    "whole_average": ("splits_layers",),
    "fixed_weights": (*_SHARDS, "splits_layers"),
    "whole_tensors": _SHARDS,
    "all_parameters": ("splits_layers",),
    "whole_weights": (
        "splits_tensors",
        "splits_layers",
        "splits_devices",
        "owns_step",
        "replicates_in_threads",
        "float8",
    ),
    "other_parameters": (*_SHARDS, "splits_layers", "phases"),
    "whole_module": (*_SHARDS, "splits_layers", "splits_devices", "replicates_in_threads"),
    "lasting_writes": (*_SHARDS, "splits_layers", "replicates_in_threads", "ranks"),
}
# For each trait or switch, the reason why the trait or switch excludes needs.
REASONS: Mapping[str, str] = {
    "shards_parameters": "each rank stores only a part of each weight and gradient",
    "splits_tensors": "each rank stores only a part of each weight, and computes only a part of each output",
    "splits_layers": "each rank has only some of the layers, and runs them on micro-batches",
    "splits_devices": "the layers are on several devices and run one after another",
    "replicates_in_threads": "copies of the network run at the same time in threads",
    "owns_step": "the engine of the strategy stores weights and gradients, and runs backward and optimizer steps",
    "steps_once": "the strategy supports only one backward pass per step",
    "ranks": "each rank sees only a part of the batch",
    "compile": "gradients cannot be changed inside the backward of a compiled network, except by a "
    "torch.autograd.Function in its forward",
    "phases": "each phase has its own loss and parameters",
    "module": "the training_step of the module computes the loss, and exp does not know its values",
    "accumulation": "an optimizer step uses the gradients of several micro-batches",
    "float8": "float8 layers support neither torch.func.vmap nor weights that are sums",
    "half": "the run computes in half precision",
}


class Part(NamedTuple):
    """A part of a run, such as a hook or an optimizer, and its needs.

    Attributes:
        key: Config key of the part.
        named: Description of the part at the start of an error message.
        needs: Needs of the part, which are keys of NEEDS.
        fix: Fix in an error message. The config key that excludes the need replaces `{switch}`. Default: no fix.
        more: Text after the expected value in an error message. Default: no text.
    """

    key: str
    named: str
    needs: Collection[str]
    fix: str | None = None
    more: str = ""


def compatibility_errors(parts: Iterable[Part], planned: Blueprint) -> Iterator[ErrorDetails]:
    """Yield an error for each unknown need, and for each need that a trait or switch of the run excludes.

    Args:
        parts: Parts of the run.
        planned: Description of the run.
    """
    present = conditions(planned)
    for part in parts:
        for word in sorted(set(part.needs) - NEEDS.keys()):
            got, expected = f"{part.named} with the unknown need {word!r}", f"one of {', '.join(HOOK_NEEDS)}"
            yield ErrorDetails(key=part.key, got=got, expected=expected, fix=did_you_mean(word, HOOK_NEEDS))
        excluding: dict[str, str] = {}
        for need in (need for need in EXCLUDED if need in part.needs):
            for trait in EXCLUDED[need]:
                if trait in present:
                    excluding.setdefault(present[trait], trait)
        for said, trait in excluding.items():
            fix = None if part.fix is None else part.fix.format(switch=said.partition("=")[0])
            expected = f"only one of the two: {REASONS[trait]}{part.more}"
            yield not_supported_with(part.key, part.named, said, expected, fix)


def conditions(planned: Blueprint) -> Mapping[str, str]:
    """Return the traits and switches of a run that may exclude a need.

    Returns:
        For each trait or switch, the override that sets it, such as `runtime.compile=true`.
    """
    settings, placement, word = planned.settings, planned.placement, WORDS[planned.precision]
    strategy, precision = f"strategy={settings.strategy['name']}", f"precision={planned.precision}"
    stages, count = settings.strategy.get("pipeline"), settings.trainer.accumulate_grad_batches
    found = dict.fromkeys(planned.traits, strategy)
    if "splits_layers" in found and isinstance(stages, int):
        found["splits_layers"] = f"strategy.pipeline={stages}"
    if placement.world_size == 1 and placement.layers == 1:
        found.pop("steps_once", None)  # a single rank averages no gradients, so it may run several backward passes
    switches = {
        "half": (word.compute in HALF, precision),
        "float8": (word.float8, precision),
        "ranks": (placement.world_size > 1, strategy),
        "compile": (settings.runtime.compile, "runtime.compile=true"),
        "phases": (settings.phases, "phases"),
        "module": (settings.module, "module"),
        "accumulation": (count > 1, f"trainer.accumulate_grad_batches={count}"),
    }
    return found | {name: override for name, (is_set, override) in switches.items() if is_set}


def callback_errors(kinds: Mapping[str, type[Callback]], *, shows_bar: bool) -> Iterator[ErrorDetails]:
    """Yield the errors of callbacks that no run supports, of a second progress bar, and of a disabled progress bar.

    Args:
        kinds: Class of each callback, by the callback's name in the config.
        shows_bar: Value of trainer.enable_progress_bar.
    """
    bars = [name for name, kind in kinds.items() if issubclass(kind, callbacks.ProgressBar)]
    for name, kind in kinds.items():
        key = f"callbacks.{name}"
        for refused, (why, fix) in REFUSED.items():
            if issubclass(kind, refused):
                yield unsuitable(key, kind.__name__, why, "a callback that exp supports", fix)
        if kind is callbacks.BaseFinetuning:
            got, expected = "BaseFinetuning, which freezes nothing", "a subclass that defines what to freeze"
            yield ErrorDetails(key=key, got=got, expected=expected, fix="To freeze layers, use freeze.unfreeze")
        if name in bars and (not shows_bar or name != bars[0]):
            got = (
                f"{kind.__name__} with trainer.enable_progress_bar=false" if not shows_bar else "a second progress bar"
            )
            expected = "one progress bar, with trainer.enable_progress_bar=true"
            yield ErrorDetails(key=key, got=got, expected=expected, fix=f"Remove the callback with ~{key}")


def hook_parts(hooks: Mapping[str, Hook]) -> Iterator[Part]:
    """Yield a Part for each hook of a run.

    Args:
        hooks: Hooks by their name in the config.
    """
    for name, hook in hooks.items():
        fix = f"Remove the hook with ~hooks.{name}, or change {{switch}}"
        yield Part(f"hooks.{name}", f"a {type(hook).__name__} hook", hook.all_needs, fix)


def other_parts(planned: Blueprint) -> Iterator[Part]:
    """Yield a Part for each part of a run that has needs and is not a hook.

    Examples are terms of the objective, phases, torch.compile, callbacks and optimizers.
    """
    settings, ddp = planned.settings, "Write strategy=ddp"
    unmet, weighed = planned.needs - planned.meets, ", ".join(planned.weighed)
    if unmet:
        more = f". It supports only terms with the needs {', '.join(sorted(planned.meets))}" if planned.meets else ""
        yield Part("objective", f"terms with the needs {', '.join(sorted(unmet))}", ["own_passes"], ddp, more)
    if "parameter_gradients" in planned.needs:
        named = "a term that needs the gradients of a whole batch by the parameters (parameter_gradients)"
        yield Part("objective", named, ["one_rank", "one_batch_a_step"], "Leave the term out, or change {switch}")
    if weighed:
        named = f"{weighed}, a loss that divides by weights of targets because of class weights or ignored targets,"
        fix = "Use exp.objectives.terms.CrossEntropy without class_weights and ignore_index: it is a mean over samples"
        yield Part("objective", named, ["mean_over_samples"], fix)
    if "batch_sampler" in settings.data and settings.data["batch_sampler"] is not None:
        fix = "Change {switch}, or leave the batch sampler out"
        yield Part("data.batch_sampler", "batches of different sizes", ["several_sizes"], fix)
    if settings.module is not None:
        yield Part("strategy", f"the module {settings.module['_target_']}", ["whole_module"], ddp)
    if settings.phases:
        yield Part("phases", among(settings.phases), ["several_backwards"], ddp)
        yield Part("strategy", "phases", ["several_steps"], ddp)
    if settings.runtime.compile:
        yield Part("runtime.compile", "true", ["one_program"], ddp)
    if settings.lora.layers:
        yield Part("lora.layers", "LoRA", ["whole_weights"], "Write strategy=ddp or fsdp, without precision=fp8")
    if any(settings.freeze.unfreeze):  # unfreezing in epoch 0 takes place before the first step
        named = f"unfreezing in the epochs {among(map(str, settings.freeze.unfreeze))}"
        yield Part("freeze.unfreeze", named, ["other_parameters"], "Freeze for the whole run, or change {switch}")
    if names := [path for path, one in planned.network.named_modules() if getattr(one, "max_norm", None) is not None]:
        named = f"{', '.join(names)}, which changes its weight in each forward because of max_norm,"
        yield Part("strategy", named, ["lasting_writes"], "Write strategy=single, or remove max_norm from the layer")
    for name, callback in planned.callbacks.items():
        yield from _callback_parts(name, callback)
    for kind in planned.optimizers:
        needs = [*(["all_parameters"] if issubclass(kind, optim.LBFGS) else []), "whole_tensors"]
        # The other optimizers of torch update each number of a weight separately. A subclass may read whole weights.
        if kind in WHOLE or not kind.__module__.startswith("torch.optim."):
            why = next((WHOLE[base] for base in WHOLE if issubclass(kind, base)), UNKNOWN)
            yield Part("optimizer._target_", f"{kind.__name__} ({why})", needs, ddp)


def _callback_parts(name: str, kind: type[Callback]) -> Iterator[Part]:
    needs = {"whole_average": averages_weights(kind), "fixed_weights": issubclass(kind, callbacks.BaseFinetuning)}
    fix = f"Remove the callback with ~callbacks.{name}"
    yield Part(f"callbacks.{name}", kind.__name__, [need for need, has in needs.items() if has], fix)
