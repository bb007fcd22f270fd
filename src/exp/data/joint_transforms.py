"""Transforms that change several entries of a sample or batch together.

An entry is a named value of a sample, such as `input` or `target`. A transform of the user receives the entries that
have the names of its parameters. A transform of torchvision.transforms.v2 receives all entries.
"""

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
# The type of data.transforms and similar config keys: a list of transforms, or a mapping from names to transforms.
Transforms = Mapping[str, Transform] | Sequence[Transform] | None


class SampleTransform(ABC):
    """Base class of transforms that receive and return a whole sample or batch instead of its input."""

    @abstractmethod
    def __call__(self, sample: object) -> object: ...


@dataclass(frozen=True, kw_only=True)
class JointTransform(SampleTransform):
    """Adapter that calls a user's transform with the entries that have the names of its parameters.

    The transform returns a mapping of changed or new entries, or one value for each parameter in the order of the
    parameters. The returned values replace the entries of the sample.

    Args:
        transform: The user's transform.
        names: The names of its parameters.
        inputs: The names of a sample's values, from data.inputs. Empty if the values have no names.
        key: The config key of the transform below `data.`, for messages.
    """

    transform: Callable[..., object]
    names: tuple[str, ...]
    inputs: tuple[str, ...]
    key: str

    def __call__(self, sample: object) -> object:
        """Return the transformed sample.

        Raises:
            ConfigError: The sample has no entry with the name of a parameter.
            TypeError: The number of returned values differs from the number of parameters.
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
                raise TypeError(f"{_name(self.transform)} returns {len(values)} values; expected values for {names}")
            found = dict(zip(self.names, values, strict=True))
        changed = {**named, **found}
        if isinstance(by_name(sample, self.inputs), Mapping) or changed.keys() != named.keys():
            return changed
        return tuple(changed.values()) if len(named) > 1 else changed["input"]


@dataclass(frozen=True, kw_only=True)
class V2Transform(SampleTransform):
    """Adapter that calls a transform of torchvision.transforms.v2.

    If a sample contains tv_tensors, the transform receives the whole sample, so that masks and boxes change together
    with their picture. If a sample contains no tv_tensors, the transform receives only the input. A transform of
    batches, such as CutMix or MixUp, receives the input and the target.

    Args:
        transform: The transform of torchvision.
        is_batch: Whether the transform receives batches instead of samples.
        inputs: The names of a sample's values, from data.inputs. Empty if the values have no names.
    """

    transform: Callable[..., Any]
    is_batch: bool
    inputs: tuple[str, ...]

    def __call__(self, sample: object) -> object:
        """Return the transformed sample or batch.

        Raises:
            ConfigError: A sample without tv_tensors has several tensors of the same height and width, such as a picture
                and its mask. torchvision would transform only one of them.
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
            got = f"{_name(self.transform)}, which would change only one of {' and '.join(alike)} of equal sizes"
            fix = "Return torchvision.tv_tensors from the data set, because the transform ignores other plain tensors"
            raise data_error("transforms", got=got, expected="samples with tv_tensors, such as Image and Mask", fix=fix)


class StageTransforms:
    """Transforms of the samples and of the batches of each split.

    Args:
        given: The transforms in the config, by key below `data.`, such as `train_transforms`.
        held: The names of a sample's values before collation.
        names: The names of a batch's values after collation. They include masks and lengths that Pad adds.

    Attributes:
        steps: The transforms in the order of their application, by key below `data.`.
    """

    def __init__(self, given: Mapping[str, Transforms], *, held: Sequence[str], names: Sequence[str]) -> None:
        self.steps = {
            key: callables(one, key, names if "batch" in key else held, is_batch="batch" in key)
            for key, one in given.items()
        }

    def of(self, stage: Stage) -> tuple[Transform, ...]:
        """Return the transforms of the samples in a split, in the order of their application."""
        own = "train_transforms" if stage == "train" else "eval_transforms"
        return (*self.steps[own], *self.steps["transforms"])

    def of_batch(self, stage: Stage) -> tuple[Transform, ...]:
        """Return the transforms of the batches of a split, in the order of their application."""
        own = self.steps["train_batch_transforms"] if stage == "train" else ()
        return (*own, *self.steps["batch_transforms"])


def apply_transforms(sample: object, transforms: Sequence[Transform]) -> object:
    """Return a sample or batch after several transforms, applied in order.

    A SampleTransform receives the whole sample. Other transforms receive only the input; see apply_to_input.
    """
    for transform in transforms:
        is_whole = isinstance(transform, SampleTransform)
        sample = transform(sample) if is_whole else apply_to_input(sample, transform)
    return sample


def apply_to_input(sample: object, transform: Transform) -> object:
    """Return a sample after a transform of its input.

    The input is the entry `input` of a mapping, or the first value of a pair. Other samples have no single input, and
    the transform receives the whole sample.
    """
    if isinstance(sample, Mapping) and "input" in sample:
        return {**sample, "input": transform(sample["input"])}
    if isinstance(sample, tuple | list) and len(sample) <= 2:
        return (transform(sample[0]), *sample[1:])
    return transform(sample)


def is_tv_tensor(value: object) -> bool:
    """Return whether a value is a tv_tensor of torchvision, such as Image or Mask.

    torchvision is not imported. If no other code has imported it, there are no tv_tensors.
    """
    module = sys.modules.get("torchvision.tv_tensors")
    return module is not None and isinstance(value, module.TVTensor)


def plain_tensors(data: object) -> object:
    """Return a sample or batch with torchvision's tv_tensors converted to plain tensors."""
    if "torchvision.tv_tensors" not in sys.modules:
        return data
    return map_tensors(data, lambda tensor: tensor.as_subclass(Tensor) if is_tv_tensor(tensor) else tensor)


def callables(
    transforms: Transforms, key: str, inputs: Sequence[str], *, is_batch: bool = False
) -> tuple[Transform, ...]:
    """Return the transforms of a config key in the order of their application.

    Transforms with several parameters, or with the single parameter `target`, are wrapped in a JointTransform.
    Transforms of torchvision.transforms.v2 are wrapped in a V2Transform.

    Args:
        transforms: The value of the config key.
        key: The config key below `data.`, for messages.
        inputs: The names of the values that the transforms receive.
        is_batch: Whether the transforms receive batches instead of samples. Default: False.
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
        return transform  # Functions written in C may have no signature.
    names = tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty)
    if len(names) > 1 or names == (TARGET,):
        return JointTransform(transform=transform, names=names, inputs=inputs, key=key)
    return transform


def _name(transform: object) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
