"""What a hook's class says of itself: the words for what it needs of a run, and mistakes in its methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType

from exp.errors import Fault
from exp.spelling import nearest

NEEDS = {
    "whole_parameters": "each rank holds whole weights and whole gradients",
    "whole_outputs": "what a layer returns is whole, and so is the gradient that flows back into it",
    "all_layers": "each rank runs every layer, on whole micro-batches",
    "whole_state_dict": "checkpoints are made of the modules' own state dicts",
    "one_rank": "one rank sees the whole batch",
    "one_thread": "no replicas run at once in threads of one process",
    "own_backward": "the backward and the optimizer's step are the run's own, not a foreign engine's",
    "gradient_flow": "gradients can be changed while they flow back",
    "one_objective": "one objective trains the whole network in each step",
    "one_batch_a_step": "an optimizer step sees one micro-batch",
    "one_step_a_call": "Lightning's own loop makes each step; without it nothing is refused",
    "known_values": "what the network was given and returned is known by name",
    "known_step": "a step's forward and backward can be run again, apart from the run",
    "vmap": "torch.func.vmap understands every layer",
    "float32": "the network computes in float32 or more",
}
# What a word of `refuses`, which hooks had before, is called now.
FORMER = {
    "fsdp": "whole_parameters", "tensor_parallel": "whole_outputs", "hybrid": "whole_outputs",
    "deepspeed": "own_backward", "pipeline": "all_layers", "ddp": "one_rank", "data_parallel": "one_thread",
    "compile": "gradient_flow", "phases": "one_objective",
    "accumulation": "one_batch_a_step", "steps_per_execution": "one_step_a_call", "fp8": "vmap",
    "bf16": "float32", "fp16": "float32",
}  # fmt: skip


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
