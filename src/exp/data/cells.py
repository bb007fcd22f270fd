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
    """Texts that stand for a missing value, and the numbers that some of the texts are, in any spelling.

    Args:
        texts: the texts.
        numbers: the numbers.
        decimal: the sign before the fraction of a number, here and in the file.
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

    words: an attribute, the words by code. A number has one code however it is written, and its first spelling, with a
        point before the fraction.
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
    """Return the number that a text is, in ASCII digits and without signs between them.

    decimal: the sign before a fraction.
    Raises: ValueError.
    """
    if not text.isascii() or "_" in text or (decimal != "." and "." in text):
        raise ValueError(text)
    return float(text if decimal == "." else text.replace(decimal, "."))


def finite_number(text: str, *, decimal: str = ".") -> float | None:
    """Return the finite number that a text is, or None."""
    try:
        number = number_in(text, decimal=decimal)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def word_key(word: str) -> Decimal | str:
    """Return what is equal for spellings of one word: its number, so that 1 is 1.0, or itself.

    Zeros in front belong to a word: postal codes are no numbers.
    """
    digits = word.lstrip("+-")
    is_code = digits[:1] == "0" and digits[1:2].isdecimal()
    return word if is_code or finite_number(word) is None else Decimal(word)


def text_of(value: object) -> str | None:
    """Return a value of a typed format as a CSV file would have it, so that 3 and 3.0 are one word."""
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else str(value)
    return str(value).strip()
