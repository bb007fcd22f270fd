"""What a hook's class says of itself: the words for what it needs of a run, and mistakes in its methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from types import FunctionType
from typing import TYPE_CHECKING

from exp.errors import Fault
from exp.precision.words import HALF, WORDS
from exp.spelling import did_you_mean, nearest

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned

NEEDS = {
    "whole_parameters": "each rank holds whole weights and whole gradients",
    "whole_outputs": "what a layer returns is whole, and so is the gradient that flows back into it",
    "all_layers": "each rank runs every layer, on whole micro-batches",
    "whole_state_dict": "checkpoints are made of the modules' own state dicts",
    "one_rank": "one rank sees the whole batch",
    "one_thread": "no replicas run at once in threads of one process",
    "own_backward": "the backward and the optimizer's step are the run's own, not a foreign engine's",
    "gradient_flow": "gradients can be changed while they flow back",
    "python_in_step": "Python runs within a step",
    "one_objective": "one objective trains the whole network in each step",
    "one_batch_a_step": "an optimizer step sees one micro-batch",
    "one_step_a_call": "Lightning's own loop makes each step; without it nothing is refused",
    "vmap": "torch.func.vmap understands every layer",
    "float32": "the network computes in float32 or more",
}
# What a word of `refuses`, which hooks had before, is called now.
FORMER = {
    "fsdp": "whole_parameters", "tensor_parallel": "whole_outputs", "hybrid": "whole_outputs",
    "deepspeed": "own_backward", "pipeline": "all_layers", "ddp": "one_rank", "data_parallel": "one_thread",
    "compile": "gradient_flow", "cuda_graph": "python_in_step", "phases": "one_objective",
    "accumulation": "one_batch_a_step", "steps_per_execution": "one_step_a_call", "fp8": "vmap",
    "bf16": "float32", "fp16": "float32",
}  # fmt: skip
_PARTS = "it takes whole weights and gradients, and ranks hold parts of them"
_LAYERS = "ranks hold parts of one network, its layers, run parts of a batch, and the first one alone writes values"
_STATE = "its checkpoints are put together from parts, past a module's state dict"
_ENGINE = "its engine runs the backward, scales, clips and steps where no hook is told of it"
# For each need what excludes it, a trait of a strategy or a switch of a run, and why.
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
    "whole_state_dict": dict.fromkeys(("shards_parameters", "splits_tensors", "splits_layers", "owns_step"), _STATE),
    "one_rank": {"ranks": "each of several ranks sees a part of the batch"},
    "one_thread": {"replicates_in_threads": "its replicas run at once, in threads of their own; use ddp"},
    "gradient_flow": {
        "compile": "the backward of a compiled network is one function, into which no gradient can be put; write it as "
        "a torch.autograd.Function in `forward`"
    },
    "python_in_step": {"cuda_graph": "a captured step calls no Python, and so no hook inside it"},
    "one_objective": {"phases": "each phase has a loss of its own, for parts of the network"},
    "one_batch_a_step": {"accumulation": "an optimizer step takes the gradients of several micro-batches"},
    "vmap": {"float8": "its linear layers have no rule for torch.func.vmap"},
    "float32": {"half": "it computes in half precision"},
}


def need_faults(needs: Set[str], planned: Planned, *, key: str, kind: str) -> Iterator[Fault]:
    """One fault for each thing in a run that excludes one of `needs`, and for each word that is none of NEEDS.

    key: of the part in the config, such as `hooks.memory`. kind: the name of its class.
    """
    for word in sorted(needs - NEEDS.keys()):
        got = f"a {kind} hook that needs {word!r}"
        yield Fault(key=key, got=got, expected=f"words among {', '.join(NEEDS)}", cure=did_you_mean(word, NEEDS))
    present, told = conditions(planned), set()
    for need in (need for need in EXCLUDED if need in needs):
        for trait, reason in EXCLUDED[need].items():
            if trait in present and present[trait] not in told:
                told.add(present[trait])
                cure = f"Leave the hook out with ~{key}, or change {present[trait].partition('=')[0]}"
                expected = f"a run without it: {reason}"
                yield Fault(key=key, got=f"a {kind} hook with {present[trait]}", expected=expected, cure=cure)


def conditions(planned: Planned) -> dict[str, str]:
    """What a run has that may exclude a need: the word in EXCLUDED to how the config says it."""
    config, runtime = planned.config, planned.config["runtime"]
    strategy = f"strategy={config['strategy']['name']}"
    found = dict.fromkeys(planned.traits, strategy)
    word = WORDS[planned.precision]
    if word.compute in HALF:
        found["half"] = f"precision={planned.precision}"
    if word.float8:
        found["float8"] = f"precision={planned.precision}"
    if planned.placement.world_size > 1:
        found["ranks"] = strategy
    found |= {switch: f"runtime.{switch}=true" for switch in ("compile", "cuda_graph") if runtime.get(switch)}
    if config["phases"]:
        found["phases"] = "phases"
    count = config["trainer"].get("accumulate_grad_batches")
    if isinstance(count, int) and count > 1:
        found["accumulation"] = f"trainer.accumulate_grad_batches={count}"
    return found


def class_faults(kind: type, base: type, *, key: str) -> Iterator[Fault]:
    """Methods of a subclass of `base` that look mistyped, that cannot be called as the base's, or that are not there.

    key: of the part in the config. Those of `base` that are called before or around a run count as no method.
    """
    known = _methods(base)
    own = {name: one for each in reversed(kind.__mro__) if _derives(each, base) for name, one in _methods(each).items()}
    faults = []
    for name, method in own.items():
        if name in known:
            problem = _misfit(name, method, known[name])
            faults += [problem] if problem else []
        elif near := nearest(name, known, likeness=0.85):
            faults.append((f"a method {name}, which nothing calls", f"{near[0]}, or another name"))
    acting = known.keys() - {"faults", "fault", "due", "overrides", "attach", "engaged", "disengage", "detach"}
    if not faults and not own.keys() & acting:
        methods = ", ".join(sorted(acting))
        faults.append(("a class that overrides no method of Hook", f"one or more of {methods}"))
    for got, expected in faults:
        yield Fault(key=key, got=f"{kind.__name__} with {got}", expected=expected)
    refused = getattr(kind, "refuses", None)
    if refused is not None:
        words = sorted({FORMER[word] for word in refused if word in FORMER})
        yield Fault(
            key=key,
            got=f"{kind.__name__} with `refuses`, which nothing reads",
            expected=f"`needs`, a frozenset of words among {', '.join(NEEDS)}",
            cure=f"Write needs = frozenset({set(words) if words else '...'}), or judge the run in `faults`",
        )


def _methods(kind: type) -> dict[str, FunctionType]:
    return {name: one for name, one in vars(kind).items() if inspect.isfunction(one) and name[0] != "_"}


def _derives(kind: type, base: type) -> bool:
    return issubclass(kind, base) and kind is not base


def _misfit(name: str, method: FunctionType, base: FunctionType) -> tuple[str, str] | None:
    """What is wrong with the parameters of an overridden method, and how it is to be written."""
    signature, parameters = inspect.signature(method), list(inspect.signature(base).parameters)
    try:
        signature.bind(*parameters)
    except TypeError as error:
        return f"{name}{signature}: {error}", f"def {name}({', '.join(parameters)})"
    return None
