"""Parse sizes of memory on a command line, such as 80GiB and 500 MB."""

from __future__ import annotations

import re

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}
EXPECTED = f"a number and a unit of {', '.join(UNITS)}"
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


def memory_bytes(text: str) -> int | None:
    """Return the number of bytes of a size such as 2GiB. Return None if the text is not a size, or if the size is 0."""
    match = _SIZE.fullmatch(text)
    if match is None or not float(match[1]):
        return None
    return int(float(match[1]) * UNITS[match[2]])
