"""Say what goes with what: parts declare what they need, a run has traits, one table says which trait excludes a need.

A hook's needs are its class's and those of its methods (hooks/declarations.py), a strategy's traits its attributes
(strategies/strategy.py), a callback or an optimizer is judged by its class. Nothing is judged by the text of a name.
What depends on more than a need and a trait is a method of the part: `Hook.faults`, `Strategy.faults`.
docs/make_compatibility.py makes the site's compatibility page from this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelPruning,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from exp.errors import Fault
from exp.hooks.declarations import NEEDS as HOOK_NEEDS
from exp.hooks.hook import Hook
from exp.models.freezing import held_norms
from exp.precision.words import HALF, WORDS
from exp.spelling import among, did_you_mean
from exp.strategies.strategy import Blueprint, averages_weights

# Lightning's callbacks that copy the module to one device, and those that replace weights or what an optimizer holds.
COPYING = (StochasticWeightAveraging, WeightAveraging)
REPLACING = (ModelPruning, BaseFinetuning, LearningRateFinder, BatchSizeFinder)
# Callbacks that no run can have: what they do that it cannot follow, and what to take instead.
REFUSED: Mapping[type[Callback], tuple[str, str]] = {
    LearningRateFinder: (
        "which trains within the run's own start, and puts back what it can of it",
        "python -m exp.find_lr, with the overrides of the run, makes the test before it, and prints the run's command",
    ),
    BatchSizeFinder: (
        "which changes the batch size of a run that is decided",
        "python -m exp.find_batch, with the overrides of the run, tries sizes before it, and prints the run's command",
    ),
    BackboneFinetuning: (
        "which asks the training module for a `backbone`, and adds to an optimizer whose parameters are decided",
        "freeze.parameters and freeze.unfreeze hold layers of any name until an epoch, and "
        "optimizer.groups gives them a rate of their own",
    ),
    SpikeDetection: (
        "which keeps a state that lightning 2.6 cannot read back from a checkpoint",
        "runtime.non_finite=skip leaves out a step that is not finite, and hooks=[nan_guard] says where it began",
    ),
    BasePredictionWriter: (
        "which is called by predict alone, never by training",
        "hooks=[samples] shows what the network gives in validation",
    ),
}
# What these do to a number depends on that number's own history alone, so that it may be done to parts of a weight.
ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adadelta, Adagrad, ASGD, RMSprop, Rprop)
# Why an optimizer cannot work on parts of a weight.
REASONS: Mapping[type[Optimizer], str] = {
    LBFGS: "it searches along all weights together",
    Adafactor: "it keeps sums over whole rows and columns",
    Muon: "it makes whole matrices orthogonal",
    SparseAdam: "it takes sparse gradients",
}
UNKNOWN = "nothing says that it treats each number of a weight by itself"

NEEDS: Mapping[str, str] = {
    **HOOK_NEEDS,
    "own_passes": "terms of the objective call the network, or parts of it, themselves",
    "mean_over_samples": "terms of the objective divide by weights of their targets, which ranks add up",
    "several_sizes": "data.batch_sampler makes batches of several sizes",
    "several_backwards": "phases have backwards and optimizers of their own",
    "several_steps": "a step is as many backwards and optimizer steps as the phases have",
    "one_program": "torch.compile takes the whole network",
    "module_copy": "a callback copies the module to one device",
    "fixed_weights": "a callback replaces weights, or what the optimizer holds",
    "whole_average": "a callback averages all weights",
    "whole_tensors": "an optimizer looks at whole weights, not at each number by itself",
    "all_parameters": "an optimizer looks at all parameters together",
    "new_statistics": "a callback takes BatchNorm's statistics anew",
    "whole_weights": "lora puts a sum in the place of a layer's weight",
    "other_parameters": "freeze.unfreeze changes which parameters learn",
    "whole_module": "a LightningModule of the user's own runs its own training_step",
    "lasting_writes": "a layer with max_norm writes into its weight in its forward",
}

_PARTS = "it needs whole weights and gradients, and ranks hold parts of them"
_LAYERS = "ranks hold parts of one network, its layers, run parts of a batch, and the first one alone writes values"
_ENGINE = "its engine runs the backward, scales, clips and steps where no hook is told of it"
_SHARDS = ("shards_parameters", "splits_tensors", "owns_step")
_TERMS = "terms of one forward and one backward"
STRATEGY_DDP = "Write strategy=ddp"
_KEEP = "callbacks that leave weights and optimizer where they are"

# For each need what excludes it, a trait of the strategy or a switch of the run, and why.
EXCLUDED: Mapping[str, Mapping[str, str]] = {
    "own_backward": {"owns_step": _ENGINE},
    "whole_parameters": {
        "shards_parameters": _PARTS,
        "splits_tensors": _PARTS,
        "splits_layers": _LAYERS,
        "owns_step": "its engine keeps gradients, and their scale, to itself",
    },
    "whole_outputs": {
        "splits_tensors": "ranks hold parts of what a layer returns, and of the gradient that flows back into it"
    },
    "all_layers": {"splits_layers": _LAYERS},
    "one_rank": {"ranks": "each of several ranks sees a part of the batch"},
    "one_thread": {"replicates_in_threads": "its replicas run at once, in threads of their own; use ddp"},
    "gradient_flow": {
        "compile": "the backward of a compiled network is one function, into which no gradient can be put; write it as "
        "a torch.autograd.Function in `forward`"
    },
    "one_objective": {
        "phases": "each phase has a loss of its own, for parts of the network",
        "module": "its losses are made within its training_step",
    },
    "known_values": {"module": "what its steps compute has no names there; it can give it to self.log itself"},
    "known_step": {"module": "its training_step may do anything, and is run once"},
    "one_batch_a_step": {"accumulation": "an optimizer step takes the gradients of several micro-batches"},
    "vmap": {"float8": "its linear layers have no rule for torch.func.vmap"},
    "float32": {"half": "it computes in half precision"},
    "own_passes": {
        **dict.fromkeys(_SHARDS, _TERMS),
        "splits_tensors": f"{_TERMS}: torch differentiates gradients of a DTensor wrongly",
        "splits_layers": f"{_TERMS}, which a schedule orders",
        "splits_devices": "terms of one forward pass: others call the network's layers themselves",
    },
    "mean_over_samples": {"splits_layers": "means over samples, which micro-batches add up to"},
    "several_sizes": {
        "splits_layers": "null: a schedule is made for micro-batches of one size",
    },
    "several_backwards": {
        **dict.fromkeys(_SHARDS, "gradients of parts are put together once a step"),
        "splits_layers": "a schedule makes one backward a step",
        "splits_devices": "a phase calls parts of the network itself",
        "replicates_in_threads": "its replicas know the network's own forward alone",
    },
    "several_steps": {"steps_once": "ddp, single or auto: another takes one backward a step"},
    "one_program": {
        **dict.fromkeys(_SHARDS, "a compiled network was not seen to gather its parts in time"),
        "splits_layers": "stages are not compiled",
        "splits_devices": "the parts run one by one",
    },
    "whole_average": {
        "splits_layers": "no average of the weights: rank 0 would keep that of its own layers alone",
        "averages_between_steps": "no average of the weights: between two meetings each rank would average weights of "
        "its own, and a checkpoint would hold rank 0's; or strategy.local_sgd.every_n_steps=null",
    },
    "module_copy": dict.fromkeys((*_SHARDS, "splits_layers", "splits_devices"), _KEEP),
    "fixed_weights": dict.fromkeys((*_SHARDS, "splits_layers"), _KEEP),
    "whole_tensors": dict.fromkeys(_SHARDS, "each rank has a part of a weight"),
    "all_parameters": {
        "splits_layers": "an optimizer that updates each parameter by itself: no rank has all of them (the network's "
        "layers are in several ranks)"
    },
    "new_statistics": {
        "frozen_statistics": "statistics that move: it sets them to 0 and 1, and averages them over an epoch"
    },
    "whole_weights": {
        "splits_tensors": "its layers are cut along their weights, which are sums",
        "splits_layers": "stages were not seen to hold layers whose weights are sums",
        "splits_devices": "parts were not seen to hold layers whose weights are sums",
        "owns_step": "its engine was not seen to hold layers whose weights are sums",
        "replicates_in_threads": "torch does not copy layers whose weights are sums into threads",
        "float8": "a layer in float8 reads its weight past the sum",
    },
    "other_parameters": {
        **dict.fromkeys(_SHARDS, "ranks have shared out what learnt at the start"),
        "splits_layers": "a stage's backward is made for what learnt at the start",
        "averages_between_steps": "ranks that are apart average what learns alike",
        "phases": "the phases say what learns",
    },
    "whole_module": {
        **dict.fromkeys(
            ("shards_parameters", "splits_tensors", "owns_step"),
            "ddp, single or auto: others gather parts of weights around the forward of a network that they know",
        ),
        "splits_layers": "ddp, single or auto: a schedule needs the layers of a network, and one loss",
        "splits_devices": "ddp, single or auto: layers are laid over devices by the network's own forward",
        "replicates_in_threads": "ddp, single or auto: replicas know a network's forward alone, and no training_step",
        "averages_between_steps": "ddp without local_sgd: its optimizers step as it likes",
    },
    "lasting_writes": {
        "shards_parameters": "ranks gather copies of weights, in which a write is lost",
        "splits_tensors": "ranks hold parts of weights",
        "splits_layers": "a step is several forwards, of micro-batches",
        "replicates_in_threads": "replicas are copies, in which a write is lost",
        "owns_step": "its engine keeps weights of its own, in which a write is lost",
        "ranks": "ranks write what their own shares of a batch say, and their weights drift apart",
    },
}
# Where the network is, for a run that is told what it cannot have.
PLACES: Mapping[str, str] = {
    "shards_parameters": ", which has parts of the weights in each rank",
    "splits_tensors": ", which has parts of the weights in each rank",
    "owns_step": ", which has parts of the weights in each rank",
    "splits_layers": ", which has the network's layers in several ranks",
    "splits_devices": ", with layers split over devices",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run, and what it needs of the rest.

    key: in the config. named: how a message begins. needs: words of NEEDS.
    without: what a message expects, with `{reason}` in it. cure: what to write, with `{switch}` in it.
    """

    key: str
    named: str
    needs: frozenset[str]
    without: str = "{reason}"
    cure: str | None = None


def compatibility_faults(parts: Iterable[Part], planned: Blueprint) -> Iterator[Fault]:
    """A fault for each part of a run and each thing in the run that excludes one of its needs."""
    present = conditions(planned)
    for part in parts:
        for word in sorted(part.needs - NEEDS.keys()):
            got = f"{part.named} that needs {word!r}"
            expected = f"words among {', '.join(HOOK_NEEDS)}"
            yield Fault(key=part.key, got=got, expected=expected, cure=did_you_mean(word, HOOK_NEEDS))
        told = set()
        for need in (need for need in EXCLUDED if need in part.needs):
            for trait, reason in EXCLUDED[need].items():
                if trait not in present or present[trait] in told:
                    continue
                told.add(present[trait])
                place = "" if part.key.startswith("hooks.") else PLACES.get(trait, "")
                switch = present[trait].partition("=")[0]
                yield Fault(
                    key=part.key,
                    got=f"{part.named} with {present[trait]}{place}",
                    expected=part.without.format(reason=reason),
                    cure=None if part.cure is None else part.cure.format(switch=switch),
                )


def conditions(planned: Blueprint) -> Mapping[str, str]:
    """What a run has that may exclude a need: the word in EXCLUDED to how the config says it."""
    config, runtime = planned.config, planned.config["runtime"]
    strategy = f"strategy={config['strategy']['name']}"
    found = dict.fromkeys(planned.traits, strategy)
    placement, word = planned.placement, WORDS[planned.precision]
    stages = config["strategy"].get("pipeline")
    if "splits_layers" in found and isinstance(stages, int):
        found["splits_layers"] = f"strategy.pipeline={stages}"
    if "averages_between_steps" in found:
        found["averages_between_steps"] = "local_sgd"
    if placement.world_size == 1 and placement.layers == 1:
        found.pop("steps_once", None)  # nothing is reduced
    if word.compute in HALF:
        found["half"] = f"precision={planned.precision}"
    if word.float8:
        found["float8"] = f"precision={planned.precision}"
    if placement.world_size > 1:
        found["ranks"] = strategy
    if runtime.get("compile"):
        found["compile"] = "runtime.compile=true"
    if config["phases"]:
        found["phases"] = "phases"
    if config["module"] is not None:
        found["module"] = "module"
    if held_norms(planned.network):
        found["frozen_statistics"] = "freeze.batch_norm=eval"
    count = config["trainer"]["accumulate_grad_batches"]
    if isinstance(count, int) and count > 1:
        found["accumulation"] = f"trainer.accumulate_grad_batches={count}"
    return found


def callback_faults(
    callbacks: Mapping[str, type[Callback]], *, nodes: Mapping[str, Any], shows_bar: bool
) -> Iterator[Fault]:
    """The callbacks that no run can have, whatever else it has.

    callbacks, nodes: their classes and what the config says of them, by name. shows_bar: trainer.enable_progress_bar.
    """
    for name, kind in callbacks.items():
        key = f"callbacks.{name}"
        for refused, (why, cure) in REFUSED.items():
            if issubclass(kind, refused):
                yield Fault(key=key, got=f"{kind.__name__}, {why}", expected="a callback of one run", cure=cure)
        if issubclass(kind, ModelPruning) and nodes[name].get("make_pruning_permanent") is False:
            expected = "true: a checkpoint with weights and masks apart does not fit the network that is tested"
            yield Fault(key=f"{key}.make_pruning_permanent", got="false", expected=expected)
        if kind is BaseFinetuning:
            expected = "a class of yours that says what it freezes"
            yield Fault(key=key, got="BaseFinetuning itself", expected=expected, cure="Or write freeze.unfreeze")
        if issubclass(kind, ProgressBar) and not shows_bar:
            expected = "no bar, or trainer.enable_progress_bar=true"
            got = f"{kind.__name__} with trainer.enable_progress_bar=false"
            yield Fault(key=key, got=got, expected=expected, cure=f"Leave it out with ~{key}")
    bars = [name for name, kind in callbacks.items() if issubclass(kind, ProgressBar)]
    for name in bars[1:]:
        got = f"a second bar beside callbacks.{bars[0]}"
        yield Fault(key=f"callbacks.{name}", got=got, expected="one", cure=f"Leave it out with ~callbacks.{name}")


def hook_parts(hooks: Mapping[str, Hook]) -> Iterator[Part]:
    """The hooks of a run, by their names in the config."""
    for name, hook in hooks.items():
        yield Part(
            key=f"hooks.{name}",
            named=f"a {type(hook).__name__} hook",
            needs=hook.all_needs,
            without="a run without it: {reason}",
            cure=f"Leave the hook out with ~hooks.{name}, or change {{switch}}",
        )


def other_parts(planned: Blueprint) -> Iterator[Part]:
    """What needs something of the rest beside hooks: terms, phases, compilation, callbacks, optimizers."""
    config, ddp = planned.config, "Or write strategy=ddp"
    yield from _term_parts(planned, ddp)
    if "batch_sampler" in config["data"] and config["data"]["batch_sampler"] is not None:
        needs = frozenset({"several_sizes"})
        cure = "Change {switch}, or leave the batch sampler out"
        yield Part(key="data.batch_sampler", named="batches of several sizes", needs=needs, cure=cure)
    if config["module"] is not None:
        name = str(config["module"]["_target_"])
        yield Part(key="strategy", named=f"the module {name}", needs=frozenset({"whole_module"}), cure=STRATEGY_DDP)
    if config["phases"]:
        yield Part(
            key="phases",
            named=among(config["phases"]),
            needs=frozenset({"several_backwards"}),
            without="none: {reason}",
            cure="Write strategy=ddp",
        )
        yield Part(key="strategy", named="phases", needs=frozenset({"several_steps"}), cure="Write strategy=ddp")
    if config["runtime"].get("compile"):
        needs = frozenset({"one_program"})
        yield Part(key="runtime.compile", named="true", needs=needs, without="false: {reason}", cure=ddp)
    if config["lora"]["layers"]:
        needs, cure = frozenset({"whole_weights"}), "Write strategy=ddp or fsdp, without precision=fp8"
        yield Part(key="lora.layers", named="LoRA", needs=needs, without="[]: {reason}", cure=cure)
    if any(config["freeze"]["unfreeze"]):  # with epoch 0 alone nothing changes
        yield Part(
            key="freeze.unfreeze",
            named=f"epochs {among(map(str, config['freeze']['unfreeze']))}",
            needs=frozenset({"other_parameters"}),
            without="{{}}: {reason}",
            cure="Freeze for the whole run, or change {switch}",
        )
    if names := [path for path, one in planned.network.named_modules() if getattr(one, "max_norm", None) is not None]:
        yield Part(
            key="strategy",
            named=f"{', '.join(names)} with max_norm, which writes into the weight in each forward",
            needs=frozenset({"lasting_writes"}),
            without="single, or a layer without max_norm: {reason}",
            cure="Write strategy=single",
        )
    for name, callback in planned.callbacks.items():
        yield from _callback_parts(name, callback)
    for kind in planned.optimizers:
        yield from _optimizer_parts(kind)


def _term_parts(planned: Blueprint, ddp: str) -> Iterator[Part]:
    unmet = planned.needs - planned.meets
    if unmet:
        more = f", or that need {', '.join(sorted(planned.meets))}" if planned.meets else ""
        named = f"terms that need {', '.join(sorted(unmet))}"
        yield Part(key="objective", named=named, needs=frozenset({"own_passes"}), without=f"{{reason}}{more}", cure=ddp)
    if "parameter_gradients" in planned.needs:
        yield Part(
            key="objective",
            named="terms of a batch as a whole (they need parameter_gradients)",
            needs=frozenset({"one_rank", "one_batch_a_step"}),
            without="one process and one batch a step: {reason}",
            cure="Leave the term out, or change {switch}",
        )
    if planned.weighed:
        yield Part(
            key="objective",
            named=f"{', '.join(planned.weighed)}, which divides by weights of its targets (class weights, ignored "
            "targets),",
            needs=frozenset({"mean_over_samples"}),
            cure="exp.objectives.terms.CrossEntropy without class_weights and ignore_index counts samples",
        )


def _callback_parts(name: str, kind: type[Callback]) -> Iterator[Part]:
    needs = set()
    if averages_weights(kind) or issubclass(kind, COPYING):
        needs.add("whole_average")
    if issubclass(kind, COPYING):
        needs.add("module_copy")
    if issubclass(kind, StochasticWeightAveraging):
        needs.add("new_statistics")
    if issubclass(kind, REPLACING):
        needs.add("fixed_weights")
    if needs:
        cure = f"Leave it out with ~callbacks.{name}"
        if issubclass(kind, COPYING):
            cure = "callbacks=[ema] averages parts, too, but for those of a pipeline"
        yield Part(key=f"callbacks.{name}", named=kind.__name__, needs=frozenset(needs), cure=cure)


def _optimizer_parts(kind: type[Optimizer]) -> Iterator[Part]:
    needs = set()
    if issubclass(kind, LBFGS):
        needs.add("all_parameters")
    if kind not in ELEMENTWISE:
        needs.add("whole_tensors")
    if needs:
        names = ", ".join(one.__name__ for one in ELEMENTWISE)
        reason = next((REASONS[base] for base in REASONS if issubclass(kind, base)), UNKNOWN)
        yield Part(
            key="optimizer._target_",
            named=f"{kind.__name__} ({reason})",
            needs=frozenset(needs),
            without=f"one of {names} of torch.optim: {{reason}}",
            cure="Or write strategy=ddp",
        )
