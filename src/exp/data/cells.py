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
    """Texts that stand for a missing value, and the numbers that some of them are, in any spelling.

    decimal: the sign before the fractions of numbers, in these texts and in the file's.
    """

    texts: frozenset[str]
    numbers: frozenset[float]
    decimal: DecimalSign = "."

    @classmethod
    def of(cls, values: Iterable[object], *, decimal: DecimalSign = ".") -> Missing:
        """Return the missing values of an option. An empty text is always one of them."""
        texts = frozenset(["", *(text_of(value, decimal=decimal) or str(value) for value in values)])
        numbers = (finite_number(text, decimal=decimal) for text in texts)
        return cls(texts, frozenset(number for number in numbers if number is not None), decimal)

    def __contains__(self, text: str) -> bool:
        if text in self.texts:
            return True
        return bool(self.numbers) and finite_number(text, decimal=self.decimal) in self.numbers


class WordCodes(dict[str, int]):
    """A code for each text: words are numbered from 0 in order of appearance, and a missing one is -1.

    words: an attribute, the words by code. A number has one code however it is written, and its first spelling, with a
        point before the fraction.
    """

    def __init__(self, missing: Missing | None = None) -> None:
        super().__init__()
        self.words: list[str] = []
        self._missing = missing or Missing.of(())
        self._codes: dict[Decimal | str, int] = {}

    def __missing__(self, text: str) -> int:
        word = text.strip()
        self[text] = -1
        if word not in self._missing:
            word = with_point(word, decimal=self._missing.decimal)
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


def with_point(text: str, *, decimal: str) -> str:
    """Return a text with a point before the fraction if it is a number."""
    is_other = decimal != "." and finite_number(text, decimal=decimal) is not None
    return text.replace(decimal, ".") if is_other else text


def word_key(word: str) -> Decimal | str:
    """Return what is equal for spellings of one word: its number, so that 1 is 1.0, or itself.

    Zeros in front belong to a word: postal codes are no numbers.
    """
    digits = word.lstrip("+-")
    is_code = digits[:1] == "0" and digits[1:2].isdecimal()
    return word if is_code or finite_number(word) is None else Decimal(word)


def text_of(value: object, *, decimal: str = ".") -> str | None:
    """Return a value of a typed format as a CSV file would have it, so that 3 and 3.0 are one word."""
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating):
        return (str(int(value)) if float(value).is_integer() else str(value)).replace(".", decimal)
    return str(value).strip()
