"""Conversion of the texts in a file to numbers, words and missing values. Every file format uses the same rules."""

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
        texts: The texts that mean a missing value.
        numbers: The numbers that mean a missing value, in any spelling: -1 also matches -1.0.
        decimal: The decimal sign of numbers, in the file and in `texts`.
    """

    texts: frozenset[str]
    numbers: frozenset[float]
    decimal: DecimalSign = "."

    @classmethod
    def of(cls, values: Iterable[object], *, decimal: DecimalSign = ".") -> Missing:
        """Return the missing values of a config option. An empty text is always a missing value."""
        given = [value if isinstance(value, str) else str(text_of(value)).replace(".", decimal) for value in values]
        numbers = (finite_number(text, decimal=decimal) for text in given)
        return cls(frozenset(["", *given]), frozenset(number for number in numbers if number is not None), decimal)

    def __contains__(self, text: str) -> bool:
        if text in self.texts:
            return True
        return bool(self.numbers) and finite_number(text, decimal=self.decimal) in self.numbers


class WordCodes(dict[str, int]):
    """A dictionary of the code of each text.

    Words are numbered from 0 in order of appearance; a missing value has the code -1.

    All spellings of a number, such as 1 and 1.0, have the same code.

    Attributes:
        words: The words in the order of their codes. A number has its first spelling, with a decimal point.
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
    """Return the number that a text contains. Only ASCII digits without separators are accepted.

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
    """Return the finite number that a text contains; None if the text contains no finite number."""
    try:
        number = number_in(text, decimal=decimal)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def word_key(word: str) -> Decimal | str:
    """Return a key that is equal for all spellings of a number, such as 1 and 1.0, and different for different words.

    A number with leading zeros, such as a postal code, is a word.
    """
    digits = word.lstrip("+-")
    is_code = digits[:1] == "0" and digits[1:2].isdecimal()
    return word if is_code or finite_number(word) is None else Decimal(word)


def text_of(value: object) -> str | None:
    """Return the text that a CSV file would contain for a value; None for None and nan.

    3 and 3.0 have the same text.
    """
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else str(value)
    return str(value).strip()
