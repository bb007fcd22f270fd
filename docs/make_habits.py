"""Page habits.md of the site, made from tests/config/habits.txt. `python docs/make_habits.py` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "config" / "habits.txt"
HEAD = """# Habits: commands of Hydra, Lightning and lightning-hydra-template

*Reference*: commands of other programs, and what to write in exp.

Most of the commands run unchanged. The others end with exit status 2 and print a command that runs:

    python -m exp.train trainer=ddp          # ... Write strategy=ddp

The tables are made from `tests/config/habits.txt` by `python docs/make_habits.py`. A test runs each line, applies the
fix of the message, and compares the result with this table and with the check. For a sweep, the test compares the
values that all jobs share. The left column follows `python train.py`, `main.py` or `my_app.py`. The right column
follows `python -m exp.train`. Quotes are for a shell. In the test, `./conf` has a group `db` and a primary config
`small`. [From lightning-hydra-template](from-lightning-hydra-template.md) describes a whole project. See
[configuration](configuration.md#custom-values-groups-and-functions) for custom values, groups and resolvers.
"""
WORDS = {"runs": "runs", "leave out": "leave it out"}


def page() -> str:
    return "\n".join([HEAD, *_tables()]).rstrip() + "\n"


def _tables() -> Iterator[str]:
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            yield f"\n{line}\n\n| you type there | here |\n|---|---|"
        elif line and not line.startswith("#"):
            typed, here = (part.strip() for part in line.split(" | "))
            yield f"| {_code(typed)} | {WORDS[here] if here in WORDS else _code(here)} |"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
