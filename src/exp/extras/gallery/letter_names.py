"""Data set of texts that needs no download: Unicode names of letters and syllables of eight scripts."""

from __future__ import annotations

import re
import unicodedata

import torch

from exp.data.entries import ValueNames
from exp.data.in_memory import Tensors

SCRIPTS = ("ARABIC", "CYRILLIC", "ETHIOPIC", "GREEK", "HANGUL", "MONGOLIAN", "VAI", "YI")
# The number of a character is its index in this text. The number 0 pads names on the left.
ALPHABET = "\0 -'ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NAME = re.compile(rf"({'|'.join(SCRIPTS)}) (?:CAPITAL |SMALL )?(?:LETTER|SYLLABLE) ([A-Z' -]+)")
# Code points of Unicode's basic plane, which has almost all letters of these scripts.
CODES = range(0x10000)


class LetterNames(Tensors):
    """Data set of the Unicode names of letters, such as ALPHA WITH OXIA. The class is the script, such as GREEK.

    The input is int64 `[T]`: indices into ALPHABET, padded with 0 on the left. The target is an index into SCRIPTS.
    Some names, such as BA, occur in several scripts. The names are from Python's unicodedata and depend on the Python
    version.

    Args:
        length: Number of characters T of a sample. Longer names are cut. Default: 20.
        most: Largest number of names per script. If a script has more names, evenly spaced names in alphabetical order
            are chosen. Hangul has 11,244 names. Default: 250.
    """

    def __init__(self, *, length: int = 20, most: int = 250) -> None:
        found: dict[str, set[str]] = {script: set() for script in SCRIPTS}
        for code in CODES:
            match = NAME.fullmatch(unicodedata.name(chr(code), ""))
            if match:
                found[match[1]].add(match[2][:length])
        rows, targets = [], []
        for number, script in enumerate(SCRIPTS):
            names = sorted(found[script])
            for name in names[:: -(-len(names) // most)]:
                rows.append([0] * (length - len(name)) + [ALPHABET.index(letter) for letter in name])
                targets.append(number)
        super().__init__(entries=(torch.tensor(rows), torch.tensor(targets)), num_classes=len(SCRIPTS))
        self.value_names = ValueNames(classes={"target": tuple(script.capitalize() for script in SCRIPTS)})
