"""Transforms that take entries of a sample or a batch by name, such as its input and its target together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from exp.data.entries import TARGET, by_name
from exp.data.faults import data_fault
from exp.spelling import among, did_you_mean

Transform = Callable[[Any], Any]
PAIR = ("input", TARGET)


@dataclass(frozen=True, kw_only=True)
class JointTransform:
    """Calls a transform with those entries that its parameters name, and puts back what it returns.

    It returns one value for each of them, in their order, or a mapping of those that it changes or adds.

    names: of the parameters. inputs: the names of a sample's values, data.inputs. key: of the config.
    """

    transform: Callable[..., Any]
    names: tuple[str, ...]
    inputs: tuple[str, ...]
    key: str

    def __call__(self, sample: object) -> object:
        """Raises: ConfigError where there is no such entry; TypeError where it returns something else."""
        named = by_name(sample, self.inputs)
        if isinstance(named, Mapping):
            return self._changed(named)
        values = list(named) if isinstance(named, tuple | list) else [named]
        changed = self._changed(dict(zip(PAIR, values, strict=False)))
        if changed.keys() <= {*PAIR[: len(values)]}:
            return tuple(changed.values()) if len(values) > 1 else changed["input"]
        return changed

    def _changed(self, named: Mapping[str, Any]) -> dict[str, Any]:
        for name in self.names:
            if name not in named:
                raise data_fault(
                    self.key,
                    got=f"{_name(self.transform)}, which takes {name}",
                    expected=f"parameters among the entries of a sample, {among(named, word=name)}",
                    cure=did_you_mean(name, named),
                )
        found = self.transform(*[named[name] for name in self.names])
        if isinstance(found, Mapping):
            return {**named, **found}
        values = found if isinstance(found, tuple | list) and len(self.names) > 1 else (found,)
        if len(values) != len(self.names):
            raise TypeError(
                f"{_name(self.transform)} returns {len(values)} values; expected {len(self.names)}, one each of "
                f"{', '.join(self.names)}, or a mapping of names"
            )
        return {**named, **dict(zip(self.names, values, strict=True))}


def callables(
    transforms: Mapping[str, Any] | Sequence[Any] | None, key: str, inputs: Sequence[str]
) -> tuple[Transform, ...]:
    """The transforms of one key of the config, in their order; those with several parameters by name."""
    given = transforms.values() if isinstance(transforms, Mapping) else transforms or ()
    return tuple(_joint(transform, key, tuple(inputs)) for transform in given)


def _joint(transform: Transform, key: str, inputs: tuple[str, ...]) -> Transform:
    names = _parameters(transform)
    if len(names) > 1 or names == (TARGET,):
        return JointTransform(transform=transform, names=names, inputs=inputs, key=key)
    return transform


def _parameters(transform: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that must be given by position."""
    called = transform.forward if isinstance(transform, nn.Module) else transform
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:
        return ()  # of C, which tells none
    return tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty)


def _name(transform: object) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
