"""How a batch goes into the network, and by which names terms and metrics find what went in and what came out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from exp.errors import RunError


def input_names(network: nn.Module) -> tuple[str, ...]:
    """The parameters of a network's forward that a batch's entries may fill by name."""
    return tuple(
        name
        for name, parameter in inspect.signature(network.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def network_call(network: nn.Module) -> Callable[[Callable[..., Any], Mapping[str, Tensor]], Any]:
    """How a network, or what runs it, is called with a batch that is a mapping: with the entries its forward names.

    Where it names none of them, with the entry `input` alone.
    """
    names = input_names(network)

    def call(run_network: Callable[..., Any], data: Mapping[str, Tensor]) -> Any:
        named = {name: data[name] for name in names if name in data}
        if named:
            return run_network(**named)
        if "input" in data:
            return run_network(data["input"])
        raise RunError(
            f"the batch has {sorted(data)}, and the network's forward takes {list(names)}; expected a name in common, "
            "or an entry called input"
        )

    return call


def forward_by_name(network: nn.Module) -> Callable[[Callable[..., Any], Any], dict[str, Any]]:
    """One forward pass: what runs the network and a batch's data become the values by name.

    They are the batch's own entries (`input` and `target` where they have no names), what the network returns by name,
    and `output`, which is all that it returns unless it names one so.
    """
    call = network_call(network)

    def forward(run_network: Callable[..., Any], data: Any) -> dict[str, Any]:
        if isinstance(data, Mapping):
            output = call(run_network, data)
            values = dict(data)
        else:
            values = _named(data)
            output = run_network(values["input"])
        if isinstance(output, Mapping):
            values.update(output)
            if "output" not in output:
                values["output"] = output
        else:
            values["output"] = output
        return values

    return forward


def target_of(values: Mapping[str, Any]) -> Any:
    """What metrics compare the output with."""
    if "target" in values:
        return values["target"]
    raise RunError(
        f"metrics compare output with target, which the batch does not give; there are {', '.join(sorted(values))}. "
        "Name the entry `target` in the data set, or take the metrics out with metrics=[]"
    )


def _named(data: Any) -> dict[str, Any]:
    """The values of a batch without names: input and target, or input alone where the data set has no targets."""
    if type(data) in (tuple, list) and len(data) == 2:
        return {"input": data[0], "target": data[1]}
    if isinstance(data, Tensor):
        return {"input": data}
    if isinstance(data, Sequence) and 1 <= len(data) <= 2:
        return dict(zip(("input", "target"), data, strict=False))
    got = f"{len(data)} values" if isinstance(data, Sequence) else f"a {type(data).__name__}"
    raise RunError(
        f"the data set gives {got} for a sample; expected (input, target), the input alone, or a mapping of names"
    )
