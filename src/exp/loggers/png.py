"""Pictures as PNG (RFC 2083), by zlib alone: no image library is needed to write one."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
from torch import Tensor

_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_GAP = 1


def grid(pixels: Tensor, *, columns: int | None = None) -> np.ndarray:
    """Pictures `[N, C, H, W]`, uint8, beside and below each other, a black line between: `[H', W', C]`.

    columns: pictures a row; None makes the grid as square as it goes.
    """
    pictures = pixels.permute(0, 2, 3, 1).numpy()
    count, height, width, channels = pictures.shape
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), np.uint8)
    for place, picture in enumerate(pictures):
        top, left = place // columns * (height + _GAP), place % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = picture
    return sheet


def png(sheet: np.ndarray) -> bytes:
    """One picture, uint8 `[H, W, C]` with C of 1, 3 or 4, as the bytes of a PNG file."""
    height, width, channels = sheet.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    # Each row begins with its filter's number: 0, none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), sheet.reshape(height, -1)], axis=1)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
