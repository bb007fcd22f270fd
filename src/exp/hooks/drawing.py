"""Figures that hooks draw by hand, on the host: captions below pictures, and a table of coloured cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Told apart by those who see no red or no green, too (Okabe and Ito 2008).
RIGHT, WRONG = (0, 114, 178), (213, 94, 0)
INK, PAPER, PALE = (30, 30, 30), (255, 255, 255), (225, 225, 225)
TEXT_SIZE = 11
# TensorBoard's Images page stretches what is narrower, and leaves out lines of what is wider.
CARD = 350
# A cell of the first width holds a figure of three signs; with the widest, ten classes fit a card.
CELL_WITH_FIGURE, WIDEST_CELL = 20, 30
MARGIN = 6
PALEST = 0.2


@dataclass(frozen=True, kw_only=True)
class Caption:
    """Lines below a picture. right: whether the network was; None where that is not said."""

    lines: Sequence[str]
    right: bool | None = None


def captioned(pictures: np.ndarray, captions: Sequence[Caption], *, title: str, columns: int) -> np.ndarray:
    """Pictures in a grid, each in a frame with its caption below: blue where the network was right, red where wrong.

    pictures: uint8 `[N, H, W, 3]`, enlarged by whole pixels until they can be seen. captions: N.
    Returns: uint8 `[H', W', 3]`.
    """
    count, height, width, _ = pictures.shape
    factor = max(1, 64 // max(height, width))
    pictures = pictures.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = height * factor, width * factor
    font = ImageFont.load_default(TEXT_SIZE)
    lines = max(len(caption.lines) for caption in captions)
    texts = [font.getlength(line) for caption in captions for line in caption.lines]
    wide = int(max([width, *texts])) + 2 * MARGIN
    high = height + 2 * MARGIN + lines * (TEXT_SIZE + 3)
    columns = min(columns, count)
    rows = -(-count // columns)
    top = TEXT_SIZE + 2 * MARGIN
    sheet = Image.new(
        "RGB", (max(columns * wide, int(font.getlength(title)) + 2 * MARGIN, CARD), top + rows * high), PAPER
    )
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = place % columns * wide, top + place // columns * high
        colour = INK if caption.right is None else RIGHT if caption.right else WRONG
        left = x + (wide - width) // 2
        pen.rectangle((left - 3, y - 3, left + width + 2, y + height + 2), outline=colour, width=2)
        sheet.paste(Image.fromarray(picture), (left, y))
        for number, line in enumerate(caption.lines):
            pen.text((left - 3, y + height + 4 + number * (TEXT_SIZE + 3)), line, fill=colour, font=font)
    return np.array(sheet)


def matrix(counts: np.ndarray, *, normalised: bool, title: str) -> np.ndarray:
    """A confusion matrix as a picture: a row a target, a column a prediction, hits blue and misses red.

    A cell is as dark as the root of its share of its row, and PALEST at least, so that one miss among thousands is
    seen. Where a cell has room its figure is written: the count, or with `normalised` per cent of the row.

    counts: `[V, V]`, whole numbers, by target and prediction. Returns: uint8 `[H, W, 3]`, at most about 1,100 high.
    """
    classes = len(counts)
    rows = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(rows, 1)
    cell = max(1, min(WIDEST_CELL, 900 // classes))
    colours = _tinted(shares)
    font = ImageFont.load_default(TEXT_SIZE)
    side = cell * classes
    left = int(font.getlength(str(classes - 1))) + 3 * MARGIN + TEXT_SIZE
    top = 2 * (TEXT_SIZE + MARGIN) + 3 * MARGIN + TEXT_SIZE
    width = max(left + side + 2 * MARGIN, int(font.getlength(title)) + 2 * MARGIN, CARD)
    sheet = Image.new("RGB", (width, top + side + 2 * MARGIN), PAPER)
    sheet.paste(Image.fromarray(colours.repeat(cell, axis=0).repeat(cell, axis=1)), (left, top))
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    pen.text((left, top - 2 * (TEXT_SIZE + MARGIN)), "prediction", fill=INK, font=font)
    upright = Image.new("RGB", (int(font.getlength("target")) + 1, TEXT_SIZE + 3), PAPER)
    ImageDraw.Draw(upright).text((0, 0), "target", fill=INK, font=font)
    sheet.paste(upright.rotate(90, expand=True), (MARGIN // 2, top))
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if step * cell >= 2 * TEXT_SIZE)
    for place in range(0, classes, every):
        middle = place * cell + cell // 2
        pen.text((left + middle, top - 4), str(place), fill=INK, font=font, anchor="ms")
        pen.text((left - MARGIN, top + middle), str(place), fill=INK, font=font, anchor="rm")
    if cell >= 6:
        for line in range(classes + 1):
            at = line * cell
            pen.line((left, top + at, left + side, top + at), fill=PALE)
            pen.line((left + at, top, left + at, top + side), fill=PALE)
    if cell >= CELL_WITH_FIGURE:
        _write_figures(pen, counts, shares, at=(left, top), cell=cell, normalised=normalised)
    return np.array(sheet)


def _tinted(shares: np.ndarray) -> np.ndarray:
    """`[V, V]` from 0 to 1 as colours `[V, V, 3]`: from white to blue on the diagonal, to red beside it."""
    hue = np.where(np.eye(len(shares), dtype=bool)[..., None], RIGHT, WRONG)
    depth = np.where(shares > 0, np.sqrt(shares).clip(min=PALEST), 0)[..., None]
    return (255 - (255 - hue) * depth).round().astype(np.uint8)


def _write_figures(
    pen: ImageDraw.ImageDraw,
    counts: np.ndarray,
    shares: np.ndarray,
    *,
    at: tuple[int, int],
    cell: int,
    normalised: bool,
) -> None:
    font = ImageFont.load_default(TEXT_SIZE if cell == WIDEST_CELL else TEXT_SIZE - 2)
    for target, prediction in np.argwhere(counts):
        share = shares[target, prediction]
        figure = _per_cent(share) if normalised else short(int(counts[target, prediction]))
        ink = PAPER if share > 0.4 else INK
        middle = (at[0] + prediction * cell + cell // 2, at[1] + target * cell + cell // 2)
        pen.text(middle, figure, fill=ink, font=font, anchor="mm")


def _per_cent(share: float) -> str:
    """Only all is 100, and only nothing is 0."""
    whole = round(100 * share)
    return "<1" if whole == 0 else "99" if whole == 100 and share < 1 else str(whole)


def short(count: int) -> str:
    """A whole number in a few signs: 999, 1.2k, 45k, 3.1M."""
    if count < 1000:
        return str(count)
    size, unit = next((size, unit) for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if count >= size)
    scaled = count / size
    return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
