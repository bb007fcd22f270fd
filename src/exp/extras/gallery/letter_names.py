"""Names of letters and syllables of eight scripts, as Unicode has them: texts to classify that every Python ships."""

from __future__ import annotations

import re
import unicodedata

import torch

from exp.data.in_memory import Tensors
from exp.data.value_names import ValueNames

SCRIPTS = ("ARABIC", "CYRILLIC", "ETHIOPIC", "GREEK", "HANGUL", "MONGOLIAN", "VAI", "YI")
# A character's number is its place; 0 fills up in front of a name.
ALPHABET = "\0 -'ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NAME = re.compile(rf"({'|'.join(SCRIPTS)}) (?:CAPITAL |SMALL )?(?:LETTER|SYLLABLE) ([A-Z' -]+)")
# The basic plane, where all letters of these scripts have been for long but for a few.
CODES = range(0x10000)


class LetterNames(Tensors):
    """Names such as ALPHA WITH OXIA and the scripts of their letters, here GREEK.

    Input int64 `[T]`, a number of ALPHABET for each character, filled up with 0 in front, so that the last number is
    the name's end; target the script's number in SCRIPTS. Some names, such as BA, stand in several scripts. The
    names are those of unicodedata, whose tables grow with Python's versions.

    length: characters of a sample, T; of longer names the end is cut off.
    most: names of a script, evenly spaced in the order of the alphabet; Hangul has 11,244, the others up to 1,165.
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
