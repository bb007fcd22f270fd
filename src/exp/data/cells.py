"""Texts of a file as numbers, words and missing values, the same in every format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

import numpy as np

DecimalSign = Literal[".", ","]


@dataclass(frozen=True)
class Missing:
    """The texts and numbers that mean a missing value.

    Args:
        texts: The texts.
        numbers: The numbers, which match in any spelling.
        decimal: The decimal sign, here and in the file.
    """

    texts: frozenset[str]
    numbers: frozenset[float]
    decimal: DecimalSign = "."

    @classmethod
    def of(cls, values: Iterable[object], *, decimal: DecimalSign = ".") -> Missing:
        """Return the missing values of an option. An empty text is always one of them."""
        given = [value if isinstance(value, str) else str(text_of(value)).replace(".", decimal) for value in values]
        numbers = (finite_number(text, decimal=decimal) for text in given)
        return cls(frozenset(["", *given]), frozenset(number for number in numbers if number is not None), decimal)

    def __contains__(self, text: str) -> bool:
        if text in self.texts:
            return True
        return bool(self.numbers) and finite_number(text, decimal=self.decimal) in self.numbers


class WordCodes(dict[str, int]):
    """A code for each text: words are numbered from 0 in order of appearance, and a missing one is -1.

    All spellings of a number have one code.

    Attributes:
        words: The words by code. A number has its first spelling, with a decimal point.
    """

    def __init__(self, missing: Missing) -> None:
        super().__init__()
        self.words: list[str] = []
        self._missing = missing
        self._codes: dict[Decimal | str, int] = {}

    def __missing__(self, text: str) -> int:
        word, decimal = text.strip(), self._missing.decimal
        self[text] = -1
        if word not in self._missing:
            if decimal != "." and finite_number(word, decimal=decimal) is not None:
                word = word.replace(decimal, ".")
            self[text] = self._codes.setdefault(word_key(word), len(self.words))
            self.words += [word] * (self[text] == len(self.words))
        return self[text]


def number_in(text: str, *, decimal: str = ".") -> float:
    """Return the number that a text contains, in ASCII digits without separators.

    Args:
        text: The text.
        decimal: The decimal sign.

    Raises:
        ValueError: The text is not a number.
    """
    if not text.isascii() or "_" in text or (decimal != "." and "." in text):
        raise ValueError(text)
    return float(text if decimal == "." else text.replace(decimal, "."))


def finite_number(text: str, *, decimal: str = ".") -> float | None:
    """Return the finite number that a text contains, or None."""
    try:
        number = number_in(text, decimal=decimal)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def word_key(word: str) -> Decimal | str:
    """Return a key that is equal for all spellings of a word, such as 1 and 1.0.

    A number with leading zeros, such as a postal code, is a word.
    """
    digits = word.lstrip("+-")
    is_code = digits[:1] == "0" and digits[1:2].isdecimal()
    return word if is_code or finite_number(word) is None else Decimal(word)


def text_of(value: object) -> str | None:
    """Return the text of a value as a CSV file would have it, so that 3 and 3.0 are one word. None for nan."""
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else str(value)
    return str(value).strip()
