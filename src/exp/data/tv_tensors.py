"""Types of a sample's entries for torchvision's v2 transforms: picture, mask, boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL.Image import Image

from exp.data.data_errors import data_error, name_error, require_extra
from exp.data.joint_transforms import JointTransform, is_tv_tensor
from exp.spelling import show

PICTURES = ("image", "video")
# The names of torchvision in lower case. The last three are rotated boxes.
BOXES = ("xyxy", "xywh", "cxcywh", "xywhr", "cxcywhr", "xyxyxyxy")
WORDS = (*PICTURES, "mask", "keypoints", *BOXES)
KEY = "tv_tensors"
# The type of each entry, or a mapping of types for an entry that is a mapping.
Kinds = Mapping[str, object]
# The type if no entry is a picture.
DEFAULT = {"input": "image"}


class TVTensors:
    """Wraps entries of a sample as tv_tensors. Boxes and keypoints are relative to the first picture.

    Args:
        kinds: The type of each entry: `image` `[C, H, W]`, `video` `[T, C, H, W]`, `mask` `[..., H, W]`, `keypoints`
            `[..., 2]`, or a format of boxes `[N, 4]`: xyxy, xywh, cxcywh (rotated: xywhr, cxcywhr, xyxyxyxy). For an
            entry that is a mapping, a mapping of types.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds

    def __call__(self, *values: object) -> object:
        """Return the wrapped entries, or the only one.

        Args:
            values: The entries in the order of the types.

        Raises:
            ConfigError: An entry of a mapping does not exist.
            TypeError: An entry is not a tensor or an array.
        """
        size = next((found for found in map(_size, self.kinds.values(), values) if found is not None), None)
        named = zip(self.kinds.items(), values, strict=True)
        wrapped = tuple(_wrapped(value, kind, f"{KEY}.{name}", size) for (name, kind), value in named)
        return wrapped if len(wrapped) > 1 else wrapped[0]


def wrapping(kinds: Kinds, *, inputs: Sequence[str]) -> JointTransform:
    """Return the transform that wraps the entries of a sample, before all other transforms.

    Args:
        kinds: The value of data.tv_tensors. Without a picture in it, the entry `input` is one.
        inputs: The names of a sample's values.

    Raises:
        ConfigError: A type is unknown, or torchvision is not installed.
    """
    require_extra("torchvision", feature="data.tv_tensors", extra="vision", key=KEY)
    _refuse_other_words(kinds, KEY)
    whole = dict(kinds) if _holds_picture(kinds) else {**DEFAULT, **kinds}
    # The picture first: without a wrapped picture, v2 transforms the first tensor.
    return JointTransform(transform=TVTensors(whole), names=tuple(whole), inputs=tuple(inputs), key=KEY)


def _refuse_other_words(kinds: Kinds, key: str) -> None:
    for name, kind in kinds.items():
        if isinstance(kind, Mapping):
            _refuse_other_words(kind, f"{key}.{name}")
        elif kind not in WORDS:
            raise name_error(f"{key}.{name}", show(kind), WORDS, expected="a type of tv_tensors")


def _holds_picture(kinds: Kinds) -> bool:
    return any(_holds_picture(kind) if isinstance(kind, Mapping) else kind in PICTURES for kind in kinds.values())


def _size(kind: object, value: Any) -> tuple[int, int] | None:
    """Return the height and width of the first picture in a value."""
    if isinstance(kind, Mapping):
        inside = (_size(one, value[name]) for name, one in kind.items() if isinstance(value, Mapping) and name in value)
        return next((found for found in inside if found is not None), None)
    if kind not in PICTURES:
        return None
    if isinstance(value, Image):
        return value.height, value.width
    height, width = value.shape[-2:]
    return int(height), int(width)


def _wrapped(value: object, kind: object, key: str, size: tuple[int, int] | None) -> object:
    from torchvision import tv_tensors

    if isinstance(kind, Mapping):
        if not isinstance(value, Mapping):
            expected = f"the type of a {type(value).__name__}"
            raise data_error(key, got="a mapping", expected=expected, fix=f"One of {', '.join(WORDS)}")
        for name in kind:
            if name not in value:
                raise name_error(f"{key}.{name}", name, list(map(str, value)), expected="a part of the entry")
        return {**value, **{name: _wrapped(value[name], one, f"{key}.{name}", size) for name, one in kind.items()}}
    if is_tv_tensor(value) or isinstance(value, Image):
        return value
    tensor = torch.as_tensor(value)
    if kind in BOXES:
        made: Callable[..., object] = tv_tensors.BoundingBoxes
        return made(tensor, format=str(kind).upper(), canvas_size=size)
    if kind == "keypoints":
        return tv_tensors.KeyPoints(tensor, canvas_size=size)
    return {"image": tv_tensors.Image, "video": tv_tensors.Video, "mask": tv_tensors.Mask}[str(kind)](tensor)
