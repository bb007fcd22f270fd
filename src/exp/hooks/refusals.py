"""What a hook cannot live with, told before the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.errors import Fault
from exp.precision.words import WORDS
from exp.spelling import did_you_mean, nearest

if TYPE_CHECKING:
    from exp.hooks.hook import Hook
    from exp.strategies.strategy import Planned

SWITCHES = ("compile", "cuda_graph", "phases", "accumulation", "steps_per_execution")
STRATEGIES = ("single", "ddp", "data_parallel", "layer_split")
# Where ranks hold parts of one network.
IN_PARTS = ("fsdp", "tensor_parallel", "hybrid", "pipeline", "deepspeed")
PART_OF_A_GRADIENT = (
    "ranks hold parts of one network, and what flows back in one of them is no gradient of a whole tensor"
)


def faults_of(hook: Hook, planned: Planned) -> list[Fault]:
    """A fault for each thing in a run that the hook refuses, and for a word that looks like one that is mistyped."""
    present = conditions(planned)
    reasons = {**general_refusals(hook), **hook.refuses}
    known = {*SWITCHES, *IN_PARTS, *STRATEGIES, *WORDS, *present}
    mistyped = [
        Fault(
            key=f"hooks.{hook.name}",
            got=f"a {type(hook).__name__} hook that refuses {word!r}",
            expected=f"one of {', '.join(SWITCHES)}, or the word of a strategy or a precision",
            cure=did_you_mean(word, known),
        )
        for word in reasons
        if word not in known and nearest(word, known)
    ]
    return mistyped + [
        Fault(
            key=f"hooks.{hook.name}",
            got=f"a {type(hook).__name__} hook with {present[word]}",
            expected=f"a run without it: {reason}",
            cure=f"Leave the hook out with ~hooks.{hook.name}, or change {present[word].partition('=')[0]}",
        )
        for word, reason in reasons.items()
        if word in present
    ]


def general_refusals(hook: Hook) -> dict[str, str]:
    """What follows from the methods that a hook has."""
    reasons: dict[str, str] = {}
    in_backward = ("full_backward", "tensor_gradient", "post_accumulate_grad")
    if hook.transforms and any(hook.overrides(method) for method in in_backward[:2]):
        reasons["compile"] = (
            "the backward of a compiled network is one function, into which no gradient can be put; write it as a "
            "torch.autograd.Function in `forward`"
        )
    if not hook.transforms and (
        hook.is_at_modules or any(hook.overrides(one) for one in ("after_forward", "evaluated"))
    ):
        reasons["pipeline"] = "ranks hold different layers, run parts of a batch, and the first one alone writes values"
        reasons["cuda_graph"] = "a captured step calls no Python, and so no hook inside it"
    if hook.overrides("state_dict_save") or hook.overrides("state_dict_load"):
        reasons |= dict.fromkeys(IN_PARTS, "its checkpoints are put together from parts, past a module's state dict")
    return reasons


def conditions(planned: Planned) -> dict[str, str]:
    """What there is in a run that a hook may refuse: the word to how the config says it."""
    config = planned.config
    strategy, word = config["strategy"]["name"], config["precision"]["word"]
    # Decided where the config says auto.
    found = {planned.placement.strategy: f"strategy={strategy}", word: f"precision={word}"}
    runtime = config["runtime"]
    for switch in {"compile", "cuda_graph"} & runtime.keys():
        if runtime[switch]:
            found[switch] = f"runtime.{switch}=true"
    if strategy == "hybrid" and config["strategy"]["pipeline"] > 1:
        found["pipeline"] = f"strategy.pipeline={config['strategy']['pipeline']}"
    if config["phases"]:
        found["phases"] = "phases"
    count = config["trainer"].get("accumulate_grad_batches")
    if isinstance(count, int) and count > 1:
        found["accumulation"] = f"trainer.accumulate_grad_batches={count}"
    return found
