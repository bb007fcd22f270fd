"""Rules that convert the texts in a table to numbers, words and missing values.

Readers of all file formats use these rules.
"""

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
    """Texts and numbers that mean a missing value.

    `text in missing` is true if a text means a missing value.

    Args:
        texts: The texts that mean a missing value.
        numbers: The numbers that mean a missing value. All texts of a number match: -1 matches "-1" and "-1.0".
        decimal: The decimal sign of numbers, in the file and in `texts`. Default: a point.
    """

    texts: frozenset[str]
    numbers: frozenset[float]
    decimal: DecimalSign = "."

    @classmethod
    def of(cls, values: Iterable[object], *, decimal: DecimalSign = ".") -> Missing:
        """Return the missing values that a config option lists. An empty text is always a missing value.

        Args:
            values: The texts and numbers in the option.
            decimal: The decimal sign of numbers in the file. Default: a point.
        """
        given = [value if isinstance(value, str) else str(text_of(value)).replace(".", decimal) for value in values]
        numbers = (finite_number(text, decimal=decimal) for text in given)
        return cls(frozenset(["", *given]), frozenset(number for number in numbers if number is not None), decimal)

    def __contains__(self, text: str) -> bool:
        if text in self.texts:
            return True
        return bool(self.numbers) and finite_number(text, decimal=self.decimal) in self.numbers


class WordCodes(dict[str, int]):
    """Dictionary that assigns an integer code to each text when the text is first looked up.

    Words have the codes 0, 1, 2, ... in the order in which they are looked up. Missing values have the code -1. All
    texts of a number, such as 1 and 1.0, have the same code.

    Args:
        missing: The texts and numbers that mean a missing value.

    Attributes:
        words: The words in the order of their codes. If a word is a number with several texts, the first text is in
            the list, with a decimal point.
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
    """Return a text as a number.

    Args:
        text: The text. It must be ASCII without separators of thousands. `nan` and `inf` are numbers.
        decimal: The decimal sign. Default: a point.

    Raises:
        ValueError: The text is not a number.
    """
    if not text.isascii() or "_" in text or (decimal != "." and "." in text):
        raise ValueError(text)
    return float(text if decimal == "." else text.replace(decimal, "."))


def finite_number(text: str, *, decimal: str = ".") -> float | None:
    """Return a text as a number. Return None if the text is not a number, or if the number is not finite."""
    try:
        number = number_in(text, decimal=decimal)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def word_key(word: str) -> Decimal | str:
    """Return a dictionary key for a word.

    All texts of a number, such as 1 and 1.0, have the same key. Digits with leading zeros, such as a postal code, are
    not a number: 01 and 1 have different keys.
    """
    digits = word.lstrip("+-")
    is_code = digits[:1] == "0" and digits[1:2].isdecimal()
    return word if is_code or finite_number(word) is None else Decimal(word)


def text_of(value: object) -> str | None:
    """Return a value as the text that a CSV file would contain. Return None for a missing value: None or nan.

    Floats that are whole numbers have no decimal point: 3 and 3.0 both return "3".
    """
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else str(value)
    return str(value).strip()
