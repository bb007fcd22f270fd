"""Conversion of pictures to tensors.

The steps are: rotate by the EXIF orientation, convert to gray or RGB, resize, crop and normalize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from exp.data.data_errors import SampleError, data_detail, data_error
from exp.errors import ErrorDetails

Mode = Literal["L", "RGB"]
# The parameters of PictureForm.
OPTIONS = ("resize", "crop", "mode", "mean", "std")
# pillow's modes that need no conversion.
KEPT = ("L", "RGB")
# pillow's modes with at most 8 bits per channel. Only these modes are supported.
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
# The EXIF orientations for which width and height are exchanged.
ON_ITS_SIDE = (5, 6, 7, 8)
# The keys under which pillow stores the EXIF data of a PNG file.
EXIF_OF_PNG = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"}
# The exceptions that pillow raises if a file is not a picture, or is truncated.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class PictureForm:
    """Conversion of pictures to tensors, float32 `[C, H, W]`.

    Pixels are scaled to the range 0 to 1 and then normalized: (pixel - mean) / std. Transparent pixels are drawn on
    white.

    Args:
        resize: The size in pixels to which pictures are resized: the length of the shorter side, or [H, W]. Default:
            None, which does not resize pictures.
        crop: The size in pixels of the rectangle that is cut from the center after resizing: the side of a square, or
            [H, W]. Default: None, which does not crop pictures.
        mode: The mode to which pictures are converted: "RGB", or "L" for gray. Default: None, which requires that all
            pictures are RGB or all are gray.
        mean: The mean of each channel. Default: None, which does not normalize pixels.
        std: The standard deviation of each channel. Default: None, which does not normalize pixels.

    Raises:
        ConfigError: A size is invalid, or only one of `mean` and `std` is set.
    """

    def __init__(
        self,
        *,
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        self.resize = resize if resize is None or isinstance(resize, int) else pair_of("resize", resize)
        self.crop = None if crop is None else pair_of("crop", [crop, crop] if isinstance(crop, int) else crop)
        self.mode, self.mean, self.std = mode, mean, std
        if (mean is None) != (std is None):
            key, other = ("mean", "std") if mean is None else ("std", "mean")
            got = f"null, although data.dataset.{other} is set"
            raise data_error(f"dataset.{key}", got=got, expected="both values or none")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PictureForm:
        """Return the conversion that a data set's options in the config describe.

        Args:
            options: The options by name. Missing options have their default. Options that do not describe the
                conversion are ignored.
        """
        return cls(**{name: options[name] for name in OPTIONS if name in options})

    def read(self, source: str | Path | BinaryIO | Image.Image, *, named: str, key: str = "dataset.path") -> Tensor:
        """Return a picture as a tensor, float32 `[C, H, W]`.

        Args:
            source: The path of a file, an open file, or a pillow image.
            named: The name of the picture, for messages.
            key: The config key below `data.`, for messages. Default: `dataset.path`.

        Raises:
            SampleError: The file cannot be read, has more than 8 bits per channel, or its mode needs data.dataset.mode.
        """
        if isinstance(source, Image.Image):
            return self._pixels(source, named=named, key=key)
        try:
            with Image.open(source) as opened:
                return self._pixels(opened, named=named, key=key)
        except UNREADABLE as error:
            raise SampleError(unreadable_picture(named, error, key=key)) from error

    def _pixels(self, opened: Image.Image, *, named: str, key: str) -> Tensor:
        mode = stored_mode(opened)
        opened.load()  # Raises OSError if the file is truncated. NumPy would accept a truncated picture.
        # exif_transpose copies the picture, so it is called only for rotated pictures.
        is_turned = opened.getexif().get(ExifTags.Base.Orientation, 1) != 1
        upright = ImageOps.exif_transpose(opened) if is_turned else opened
        picture = self._resize_and_crop(self._convert(upright, mode, named, key))
        rows = np.asarray(picture)
        # The bytes are transposed before conversion, because floats are four times as large.
        pixels = np.ascontiguousarray(rows.reshape(*rows.shape[:2], -1).transpose(2, 0, 1)).astype(np.float32)
        pixels /= 255
        channels = torch.from_numpy(pixels)
        if self.mean is None or self.std is None:
            return channels
        mean, std = (torch.tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (self.mean, self.std))
        return (channels - mean) / std

    def size_of(self, picture: Image.Image) -> tuple[int, int]:
        """Return the width and height of a picture after rotation and resizing. Only the header is read."""
        width, height = picture.size
        # For a PNG without EXIF data in its header, getexif would decode all pixels to search the end of the file.
        is_silent = picture.format == "PNG" and not EXIF_OF_PNG & picture.info.keys()
        is_on_its_side = not is_silent and picture.getexif().get(ExifTags.Base.Orientation) in ON_ITS_SIDE
        return self._size_after_resize((height, width) if is_on_its_side else (width, height))

    def _convert(self, picture: Image.Image, mode: str, named: str, key: str) -> Image.Image:
        if mode not in EIGHT_BITS:
            raise SampleError(deep_picture(named, mode, key=key))
        if self.mode is None and picture.mode not in KEPT:
            raise SampleError(mode_error(f"{named} is of mode {picture.mode}"))
        wanted = self.mode or picture.mode
        if picture.has_transparency_data:
            paper = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(paper, picture.convert("RGBA"))
        return picture if picture.mode == wanted else picture.convert(wanted)

    def _resize_and_crop(self, picture: Image.Image) -> Image.Image:
        size = self._size_after_resize(picture.size)
        if size != picture.size:
            # pillow's resize uses antialiasing, as torchvision does.
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        if self.crop is None:
            return picture
        height, width = self.crop
        left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
        return picture.crop((left, top, left + width, top + height))

    def _size_after_resize(self, size: tuple[int, int]) -> tuple[int, int]:
        if self.resize is None:
            return size
        if not isinstance(self.resize, int):
            return self.resize[1], self.resize[0]
        short = min(size)
        width, height = (int(self.resize * side / short) for side in size)
        return width, height


def stored_mode(picture: Image.Image) -> str:
    """Return the mode in which a file stores its picture.

    The modes of pictures with 16 bits per channel have a suffix, as in RGB;16B. The attribute `mode` of a pillow image
    does not have this suffix, because pillow reduces 16 bits to 8 bits without a warning (observed in pillow 13.0).
    """
    tiles = picture.tile if isinstance(picture, ImageFile.ImageFile) else []
    for codec, _, _, given in tiles:
        form, *numbers = given if isinstance(given, tuple) else (given,)
        if str(form).endswith((";16B", ";16L", ";16N")):
            return str(form)
        if codec.startswith("ppm") and any(number > 255 for number in numbers):
            return f"{form};16"
    return picture.mode


def unreadable_picture(named: str, error: BaseException, *, key: str = "dataset.path") -> ErrorDetails:
    """Return the details of the error for a picture that pillow cannot read.

    Args:
        named: The name of the picture.
        error: The exception that pillow raised.
        key: The config key below `data.`. Default: `dataset.path`.
    """
    reason = "the format is unknown" if isinstance(error, UnidentifiedImageError) else str(error)
    got = f"{named}, which cannot be read: {reason}"
    return data_detail(key, got=got, expected="undamaged pictures", fix="Replace the file, or leave it out")


def deep_picture(named: str, mode: str, *, key: str = "dataset.path") -> ErrorDetails:
    """Return the details of the error for a picture with more than 8 bits per channel.

    Args:
        named: The name of the picture.
        mode: The mode in which the file stores the picture.
        key: The config key below `data.`. Default: `dataset.path`.
    """
    got = f"{named} of pillow's mode {mode}, with more than 8 bits per channel"
    fix = "Convert the pictures to 8 bits, or save the pixels as arrays and set data=npy"
    return data_detail(key, got=got, expected="pictures of 8 bits per channel", fix=fix)


def mode_error(found: str) -> ErrorDetails:
    """Return the details of the error for pictures that need the option data.dataset.mode.

    Args:
        found: A description of the pictures and their modes.
    """
    expected = "RGB or L, unless all pictures are RGB or all are gray (L)"
    fix = "Set data.dataset.mode=RGB, or data.dataset.mode=L"
    return data_detail("dataset.mode", got=f"null, although {found}", expected=expected, fix=fix)


def pair_of(key: str, size: Sequence[int]) -> tuple[int, int]:
    """Return the height and the width in the value of a config key.

    Args:
        key: The config key below `data.dataset.`, for messages.
        size: The value of the key.

    Raises:
        ConfigError: The value does not consist of two positive integers.
    """
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise data_error(f"dataset.{key}", got=str(list(size)), expected="a number of pixels, or [height, width]")
    return size[0], size[1]
