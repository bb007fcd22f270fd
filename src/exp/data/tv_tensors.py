"""Say of the entries of a sample what they are to torchvision's v2 transforms: a picture, a mask, boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL.Image import Image

from exp.data.data_errors import data_error, require_extra
from exp.data.joint_transforms import JointTransform, is_tv_tensor
from exp.spelling import did_you_mean, show

PICTURES = ("image", "video")
# As torchvision calls them, in small letters. The last three are boxes that are turned.
BOXES = ("xyxy", "xywh", "cxcywh", "xywhr", "cxcywhr", "xyxyxyxy")
WORDS = (*PICTURES, "mask", "keypoints", *BOXES)
KEY = "tv_tensors"
# The picture of a sample that says of none.
DEFAULT = {"input": "image"}


class TVTensors:
    """Wraps entries of a sample as tv_tensors.

    kinds: by entry, `image` `[C, H, W]`, `video` `[T, C, H, W]`, `mask` `[..., H, W]`, `keypoints` `[..., 2]`, or the
    format of boxes `[N, 4]`, xyxy, xywh or cxcywh (turned ones: xywhr, cxcywhr, xyxyxyxy); of an entry that is a
    mapping a mapping. The first picture is what boxes and keypoints lie in.
    """

    def __init__(self, kinds: Mapping[str, Any]) -> None:
        self.kinds = kinds

    def __call__(self, *values: object) -> object:
        """The entries wrapped, or the only one. values: them, in the order of the kinds.

        Raises: ConfigError for an entry of a mapping that is not there; TypeError for one that is no tensor or array.
        """
        size = next((found for found in map(_size, self.kinds.values(), values) if found is not None), None)
        named = zip(self.kinds.items(), values, strict=True)
        wrapped = tuple(_wrapped(value, kind, f"{KEY}.{name}", size) for (name, kind), value in named)
        return wrapped if len(wrapped) > 1 else wrapped[0]


def wrapping(kinds: Mapping[str, Any], *, inputs: Sequence[str]) -> JointTransform:
    """The transform that wraps the entries of a sample, before all others.

    kinds: data.tv_tensors; without a picture among them the entry `input` is one. inputs: the names of its values.
    Raises: ConfigError for another word, and where torchvision is not installed.
    """
    require_extra("torchvision", feature="data.tv_tensors", extra="vision", key=KEY)
    _refuse_other_words(kinds, KEY)
    whole = dict(kinds) if _holds_picture(kinds) else {**DEFAULT, **kinds}
    # The picture first: without one that is wrapped, v2 takes the first tensor for it.
    return JointTransform(transform=TVTensors(whole), names=tuple(whole), inputs=tuple(inputs), key=KEY)


def _refuse_other_words(kinds: Mapping[str, Any], key: str) -> None:
    for name, kind in kinds.items():
        if isinstance(kind, Mapping):
            _refuse_other_words(kind, f"{key}.{name}")
        elif kind not in WORDS:
            fix = did_you_mean(str(kind), WORDS)
            raise data_error(f"{key}.{name}", got=show(kind), expected=f"one of {', '.join(WORDS)}", fix=fix)


def _holds_picture(kinds: Mapping[str, Any]) -> bool:
    return any(_holds_picture(kind) if isinstance(kind, Mapping) else kind in PICTURES for kind in kinds.values())


def _size(kind: Any, value: Any) -> tuple[int, int] | None:
    """Height and width of the first picture in a value."""
    if isinstance(kind, Mapping):
        inside = (_size(one, value[name]) for name, one in kind.items() if isinstance(value, Mapping) and name in value)
        return next((found for found in inside if found is not None), None)
    if kind not in PICTURES:
        return None
    if isinstance(value, Image):
        return value.height, value.width
    height, width = value.shape[-2:]
    return int(height), int(width)


def _wrapped(value: Any, kind: Any, key: str, size: tuple[int, int] | None) -> object:
    from torchvision import tv_tensors

    if isinstance(kind, Mapping):
        if not isinstance(value, Mapping):
            expected = f"the word for a {type(value).__name__}"
            raise data_error(key, got="a mapping", expected=expected, fix=f"One of {', '.join(WORDS)}")
        for name in kind:
            if name not in value:
                expected = f"one of {', '.join(map(str, value))}, which the entry holds"
                raise data_error(f"{key}.{name}", got=name, expected=expected, fix=did_you_mean(name, value))
        return {**value, **{name: _wrapped(value[name], one, f"{key}.{name}", size) for name, one in kind.items()}}
    if is_tv_tensor(value) or isinstance(value, Image):
        return value
    tensor = torch.as_tensor(value)
    if kind in BOXES:
        made: Callable[..., object] = tv_tensors.BoundingBoxes
        return made(tensor, format=kind.upper(), canvas_size=size)
    if kind == "keypoints":
        return tv_tensors.KeyPoints(tensor, canvas_size=size)
    return {"image": tv_tensors.Image, "video": tv_tensors.Video, "mask": tv_tensors.Mask}[kind](tensor)
