"""Decode a picture into a tensor: upright, of one mode, one size and normalised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, ImageColor, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from exp.data.data_errors import SampleError, data_error
from exp.errors import ErrorDetails

Mode = Literal["L", "RGB"]
# Those that a picture may stay in.
KEPT = ("L", "RGB")
# pillow's modes that hold 8 bits a channel, and may be converted.
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
# Of EXIF's orientations, those that turn width into height.
ON_ITS_SIDE = (5, 6, 7, 8)
# What pillow calls it in a PNG.
EXIF_OF_PNG = {"exif", "Raw profile type exif", "XML:com.adobe.xmp"}
# What pillow raises for a file that is no picture, or breaks off.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class PictureForm:
    """Form to which pictures are brought: float32 `[C, H, W]` from 0 to 1, less the mean and over the deviation.

    resize: pixels of the shorter side, or [H, W]. crop: pixels of a square, or [H, W], cut from the middle, after that.
    mode: "RGB" or "L" (grey), to which all are converted; None keeps what they are, which must be one of both.
    mean, std: of each channel; None leaves the pixels.
    background: a CSS color, on which a picture with transparent parts is laid.

    Raises: ConfigError for sizes and colors that are none, and for a mean without a deviation.
    """

    def __init__(
        self,
        *,
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        background: str = "white",
    ) -> None:
        self.resize = resize if resize is None or isinstance(resize, int) else pair_of("resize", resize)
        self.crop = None if crop is None else pair_of("crop", [crop, crop] if isinstance(crop, int) else crop)
        self.mode, self.mean, self.std, self.background = mode, mean, std, background
        try:
            self._paper = ImageColor.getrgb(background)[:3]
        except ValueError as error:
            expected = "a color such as white, black or '#808080'"
            raise data_error("dataset.background", got=background, expected=expected) from error
        if (mean is None) != (std is None):
            key, other = ("mean", "std") if mean is None else ("std", "mean")
            raise data_error(f"dataset.{key}", got=f"null beside data.dataset.{other}", expected="both")

    def read(
        self, source: str | Path | BinaryIO | Image.Image, *, named: str, key: str = "data.dataset.path"
    ) -> Tensor:
        """Return a picture as a tensor.

        source: a file, or a picture that pillow has opened. named: the picture in words. key: of the config, at which
        errors are reported.
        Raises: SampleError if the file cannot be read, has more than 8 bits a channel or is of a mode to convert.
        """
        if isinstance(source, Image.Image):
            return self._pixels(source, named=named, key=key)
        try:
            with Image.open(source) as opened:
                return self._pixels(opened, named=named, key=key)
        except UNREADABLE as error:
            raise SampleError(broken(named, error, key=key)) from error

    def _pixels(self, opened: Image.Image, *, named: str, key: str) -> Tensor:
        mode = stored_mode(opened)
        opened.load()  # NumPy would make nothing of what breaks off, and say nothing
        # A camera that was not held upright says so in the file; of others pillow would make a copy.
        is_turned = opened.getexif().get(ExifTags.Base.Orientation, 1) != 1
        upright = ImageOps.exif_transpose(opened) if is_turned else opened
        picture = self._sized(self._converted(upright, mode, named, key))
        rows = np.asarray(picture)
        # Turned while they are bytes: of numbers four times as much would be moved.
        pixels = np.ascontiguousarray(rows.reshape(*rows.shape[:2], -1).transpose(2, 0, 1)).astype(np.float32)
        pixels /= 255
        channels = torch.from_numpy(pixels)
        if self.mean is None or self.std is None:
            return channels
        mean, std = (torch.tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (self.mean, self.std))
        return (channels - mean) / std

    def size_of(self, picture: Image.Image) -> tuple[int, int]:
        """Return the width and height of an upright picture after resizing, without decoding the picture."""
        width, height = picture.size
        # Of a PNG that says nothing before its pixels, getexif would decode them to look behind.
        is_silent = picture.format == "PNG" and not EXIF_OF_PNG & picture.info.keys()
        is_on_its_side = not is_silent and picture.getexif().get(ExifTags.Base.Orientation) in ON_ITS_SIDE
        return self._resized((height, width) if is_on_its_side else (width, height))

    def _converted(self, picture: Image.Image, mode: str, named: str, key: str) -> Image.Image:
        if mode not in EIGHT_BITS:
            raise SampleError(deep(named, mode, key=key))
        if self.mode is None and picture.mode not in KEPT:
            raise SampleError(
                ErrorDetails(
                    key="data.dataset.mode",
                    got=f"null, and {named} is of mode {picture.mode}",
                    expected="pictures in RGB alone or in grey (L) alone, or a mode to convert them to",
                    fix="Write data.dataset.mode=RGB, or data.dataset.mode=L",
                )
            )
        wanted = self.mode or picture.mode
        if picture.has_transparency_data:
            paper = Image.new("RGBA", picture.size, self._paper)
            picture = Image.alpha_composite(paper, picture.convert("RGBA"))
        return picture if picture.mode == wanted else picture.convert(wanted)

    def _sized(self, picture: Image.Image) -> Image.Image:
        size = self._resized(picture.size)
        if size != picture.size:
            # As torchvision's, with antialiasing.
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        if self.crop is None:
            return picture
        height, width = self.crop
        left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
        return picture.crop((left, top, left + width, top + height))

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        if self.resize is None:
            return size
        if not isinstance(self.resize, int):
            return self.resize[1], self.resize[0]
        short = min(size)
        width, height = (int(self.resize * side / short) for side in size)
        return width, height


def stored_mode(picture: Image.Image) -> str:
    """Return the mode of an opened picture; of one whose file has 16 bits a channel the file's own, such as RGB;16B.

    pillow cuts 16 bits to 8 as it reads them, and says nothing (seen in 13.0).
    """
    tiles = picture.tile if isinstance(picture, ImageFile.ImageFile) else []
    for codec, _, _, given in tiles:
        form, *numbers = given if isinstance(given, tuple) else (given,)
        if str(form).endswith((";16B", ";16L", ";16N")):
            return str(form)
        if codec.startswith("ppm") and any(number > 255 for number in numbers):
            return f"{form};16"
    return picture.mode


def broken(named: str, error: BaseException, *, key: str = "data.dataset.path") -> ErrorDetails:
    """Return the error of a picture that pillow cannot read."""
    reason = "not of a format that pillow knows" if isinstance(error, UnidentifiedImageError) else str(error)
    got = f"{named}, which cannot be read: {reason}"
    return ErrorDetails(key=key, got=got, expected="whole pictures", fix="Replace the file, or leave it out")


def deep(named: str, mode: str, *, key: str = "data.dataset.path") -> ErrorDetails:
    """Return the error of a picture whose mode holds more than a byte a channel."""
    return ErrorDetails(
        key=key,
        got=f"{named} of pillow's mode {mode}, with more than 8 bits a channel",
        expected="pictures of 8 bits a channel",
        fix="Convert them, or give their numbers as arrays: data=npy",
    )


def pair_of(key: str, size: Sequence[int]) -> tuple[int, int]:
    """Return the height and width of a config. key: below `data.dataset.`.

    Raises: ConfigError if they are not two whole numbers above 0.
    """
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise data_error(f"dataset.{key}", got=str(list(size)), expected="pixels, or [height, width]")
    return size[0], size[1]
