"""Transforms that take more of a sample or a batch than its input: entries by name, or all, as torchvision's v2."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from exp.data.entries import TARGET, by_name
from exp.data.faults import data_fault
from exp.nested import tensors_in
from exp.spelling import among, did_you_mean

Transform = Callable[[Any], Any]
PAIR = ("input", TARGET)


class SampleTransform(ABC):
    """A transform that is given a sample or a batch whole, and gives it back."""

    @abstractmethod
    def __call__(self, sample: object) -> object: ...


@dataclass(frozen=True, kw_only=True)
class JointTransform(SampleTransform):
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


@dataclass(frozen=True, kw_only=True)
class V2Transform(SampleTransform):
    """Calls a transform of torchvision.transforms.v2 as torchvision does.

    With a whole sample that holds one of torchvision's tv_tensors, so that masks and boxes move with their picture, and
    with its input where it holds none. With a batch's input and target, which CutMix and MixUp mix both.

    is_batch: whether it is of batches. inputs: the names of a sample's values, data.inputs.
    """

    transform: Callable[..., Any]
    is_batch: bool
    inputs: tuple[str, ...]

    def __call__(self, sample: object) -> object:
        """Raises: ConfigError where something of a picture's size lies beside it, and nobody says what it is."""
        if self.is_batch:
            return self._mixed(sample)
        if any(map(is_tv_tensor, tensors_in(sample))):
            return self.transform(sample)
        self._refuse_left_behind(sample)
        return apply_to_input(sample, self.transform)

    def _mixed(self, batch: object) -> object:
        if isinstance(batch, Mapping) and batch.keys() >= {*PAIR}:
            return {**batch, **dict(zip(PAIR, self.transform(*(batch[name] for name in PAIR)), strict=True))}
        if isinstance(batch, tuple | list) and len(batch) == len(PAIR):
            return tuple(self.transform(*batch))
        return apply_to_input(batch, self.transform)

    def _refuse_left_behind(self, sample: object) -> None:
        named = by_name(sample, self.inputs)
        if not isinstance(named, Mapping):
            values = named if isinstance(named, tuple | list) else (named,)
            named = dict(zip(PAIR, values, strict=False))
        held = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.dim() > 1}
        sizes = {name: value.shape[-2:] for name, value in held.items()}
        alike = [name for name in sizes if list(sizes.values()).count(sizes[name]) > 1]
        if len(alike) > 1:
            raise data_fault(
                "tv_tensors",
                got=f"null, and {' and '.join(alike)} of one size beside {_name(self.transform)}, which would move one",
                expected="what each of them is: image, mask or the format of boxes",
                cure=f"Write data.tv_tensors: {{{alike[0]}: image, {alike[1]}: mask}}; what it leaves out stays",
            )


def apply_to_input(sample: object, transform: Transform) -> object:
    """The sample with a transform applied to its input: the first of a pair, the entry `input` of a mapping.

    A mapping without such an entry, and more values than two, are given to it whole.
    """
    if isinstance(sample, Mapping) and "input" in sample:
        return {**sample, "input": transform(sample["input"])}
    if isinstance(sample, tuple | list) and len(sample) <= 2:
        return (transform(sample[0]), *sample[1:])
    return transform(sample)


def is_tv_tensor(value: object) -> bool:
    """Whether it is an Image, a Mask, BoundingBoxes or the like of torchvision. Nothing is imported."""
    module = sys.modules.get("torchvision.tv_tensors")
    return module is not None and isinstance(value, module.TVTensor)


def callables(
    transforms: Mapping[str, Any] | Sequence[Any] | None, key: str, inputs: Sequence[str], *, is_batch: bool = False
) -> tuple[Transform, ...]:
    """The transforms of one key of the config, in their order; those with several parameters by name."""
    given = transforms.values() if isinstance(transforms, Mapping) else transforms or ()
    return tuple(_joint(transform, key, tuple(inputs), is_batch) for transform in given)


def _joint(transform: Transform, key: str, inputs: tuple[str, ...], is_batch: bool) -> Transform:
    v2 = sys.modules.get("torchvision.transforms.v2")
    if v2 is not None and isinstance(transform, v2.Transform):
        return V2Transform(transform=transform, is_batch=is_batch, inputs=inputs)
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
