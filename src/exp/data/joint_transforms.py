"""Transforms of several entries of a sample or batch, chosen by parameter name, or all as in torchvision's v2."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from exp.data.data_errors import data_error
from exp.data.entries import PAIR, TARGET, by_name, named_entries
from exp.nested import map_tensors, tensors_in
from exp.shared_types import Stage
from exp.spelling import among, did_you_mean

Transform = Callable[[Any], Any]
# The value of a config key such as data.transforms: a list, or a mapping of names to transforms.
Transforms = Mapping[str, Transform] | Sequence[Transform] | None


class SampleTransform(ABC):
    """A transform that receives and returns a whole sample or batch."""

    @abstractmethod
    def __call__(self, sample: object) -> object: ...


@dataclass(frozen=True, kw_only=True)
class JointTransform(SampleTransform):
    """Calls a transform with the entries that its parameter names select, and stores the returned values.

    The transform returns one value for each parameter, in order, or a mapping of changed or new entries.

    Args:
        transform: The transform.
        names: The names of the parameters.
        inputs: The names of a sample's values, from data.inputs.
        key: The config key below `data.`, for messages.
    """

    transform: Callable[..., object]
    names: tuple[str, ...]
    inputs: tuple[str, ...]
    key: str

    def __call__(self, sample: object) -> object:
        """Return the transformed sample.

        Raises:
            ConfigError: A parameter has the name of an entry that does not exist.
            TypeError: The transform returns a wrong number of values.
        """
        named = named_entries(sample, self.inputs)
        for name in self.names:
            if name not in named:
                got = f"{_name(self.transform)} with the parameter {name}"
                expected = f"parameters with names of the samples' entries, {among(named, word=name)}"
                raise data_error(self.key, got=got, expected=expected, fix=did_you_mean(name, named))
        found = self.transform(*[named[name] for name in self.names])
        if not isinstance(found, Mapping):
            values = found if isinstance(found, tuple | list) and len(self.names) > 1 else (found,)
            if len(values) != len(self.names):
                names = ", ".join(self.names)
                raise TypeError(f"{_name(self.transform)} returns {len(values)} values; expected one each for {names}")
            found = dict(zip(self.names, values, strict=True))
        changed = {**named, **found}
        if isinstance(by_name(sample, self.inputs), Mapping) or changed.keys() != named.keys():
            return changed
        return tuple(changed.values()) if len(named) > 1 else changed["input"]


@dataclass(frozen=True, kw_only=True)
class V2Transform(SampleTransform):
    """Calls a transform of torchvision.transforms.v2 like torchvision does.

    A sample with tv_tensors is passed completely, so that masks and boxes change with their picture. For other samples,
    only the input is passed. A batch transform such as CutMix or MixUp receives the input and the target.

    Args:
        transform: The transform.
        is_batch: Whether the transform receives batches.
        inputs: The names of a sample's values, from data.inputs.
    """

    transform: Callable[..., Any]
    is_batch: bool
    inputs: tuple[str, ...]

    def __call__(self, sample: object) -> object:
        """Return the transformed sample or batch.

        Raises:
            ConfigError: Several plain tensors have the size of the picture. Only one of them would be transformed.
        """
        if self.is_batch and isinstance(sample, Mapping) and sample.keys() >= {*PAIR}:
            return {**sample, **dict(zip(PAIR, self.transform(*(sample[name] for name in PAIR)), strict=True))}
        if self.is_batch and isinstance(sample, tuple | list) and len(sample) == len(PAIR):
            return tuple(self.transform(*sample))
        if not self.is_batch and any(map(is_tv_tensor, tensors_in(sample))):
            return self.transform(sample)
        if not self.is_batch:
            self._refuse_untyped(sample)
        return apply_to_input(sample, self.transform)

    def _refuse_untyped(self, sample: object) -> None:
        named = named_entries(sample, self.inputs).items()
        sizes = {name: value.shape[-2:] for name, value in named if isinstance(value, Tensor) and value.dim() > 1}
        alike = [name for name in sizes if list(sizes.values()).count(sizes[name]) > 1]
        if len(alike) > 1:
            got = f"{_name(self.transform)}, which would change only one of {' and '.join(alike)}, of the same size"
            fix = "Return torchvision.tv_tensors from the data set, because the transform ignores other plain tensors"
            raise data_error("transforms", got=got, expected="samples with tv_tensors, such as Image and Mask", fix=fix)


class StageTransforms:
    """The transforms of samples and of batches, by stage.

    Args:
        given: The transforms by config key.
        held: The names of a sample's values.
        names: The names of a batch's values.

    Attributes:
        steps: The transforms by config key, in order.
    """

    def __init__(self, given: Mapping[str, Transforms], *, held: Sequence[str], names: Sequence[str]) -> None:
        self.steps = {
            key: callables(one, key, names if "batch" in key else held, is_batch="batch" in key)
            for key, one in given.items()
        }

    def of(self, stage: Stage) -> tuple[Transform, ...]:
        """Return the transforms of samples in a stage, in order."""
        own = "train_transforms" if stage == "train" else "eval_transforms"
        return (*self.steps[own], *self.steps["transforms"])

    def of_batch(self, stage: Stage) -> tuple[Transform, ...]:
        """Return the transforms of batches in a stage, in order."""
        own = self.steps["train_batch_transforms"] if stage == "train" else ()
        return (*own, *self.steps["batch_transforms"])


def apply_transforms(sample: object, transforms: Sequence[Transform]) -> object:
    """Return a sample or batch after all transforms.

    A SampleTransform receives the whole sample. Other transforms receive the input; see apply_to_input.
    """
    for transform in transforms:
        is_whole = isinstance(transform, SampleTransform)
        sample = transform(sample) if is_whole else apply_to_input(sample, transform)
    return sample


def apply_to_input(sample: object, transform: Transform) -> object:
    """Return a sample after a transform of its input. The input is the first value of a pair, or the entry `input`.

    The transform receives the whole sample if the sample has more than two values, or no entry `input`.
    """
    if isinstance(sample, Mapping) and "input" in sample:
        return {**sample, "input": transform(sample["input"])}
    if isinstance(sample, tuple | list) and len(sample) <= 2:
        return (transform(sample[0]), *sample[1:])
    return transform(sample)


def is_tv_tensor(value: object) -> bool:
    """Return whether a value is a tv_tensor of torchvision, such as Image or Mask. torchvision is not imported."""
    module = sys.modules.get("torchvision.tv_tensors")
    return module is not None and isinstance(value, module.TVTensor)


def plain_tensors(data: object) -> object:
    """Return data with its tv_tensors converted to plain tensors."""
    if "torchvision.tv_tensors" not in sys.modules:
        return data
    return map_tensors(data, lambda tensor: tensor.as_subclass(Tensor) if is_tv_tensor(tensor) else tensor)


def callables(
    transforms: Transforms, key: str, inputs: Sequence[str], *, is_batch: bool = False
) -> tuple[Transform, ...]:
    """Return the transforms of a config key, in order.

    Transforms with several parameters become JointTransform objects.
    """
    given = transforms.values() if isinstance(transforms, Mapping) else transforms or ()
    return tuple(_joint(transform, key, tuple(inputs), is_batch) for transform in given)


def _joint(transform: Transform, key: str, inputs: tuple[str, ...], is_batch: bool) -> Transform:
    v2 = sys.modules.get("torchvision.transforms.v2")
    if v2 is not None and isinstance(transform, v2.Transform):
        return V2Transform(transform=transform, is_batch=is_batch, inputs=inputs)
    called = transform.forward if isinstance(transform, nn.Module) else transform
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:
        return transform  # a function in C, which has no signature
    names = tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty)
    if len(names) > 1 or names == (TARGET,):
        return JointTransform(transform=transform, names=names, inputs=inputs, key=key)
    return transform


def _name(transform: object) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
