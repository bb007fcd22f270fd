"""The site's page habits.md, made from tests/config/habits.txt. `python docs/make_habits.py` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "config" / "habits.txt"
HEAD = """# Habits: what Hydra, Lightning and lightning-hydra-template have you type

*Reference*: what is typed elsewhere, word by word, and what runs here.

Most of it runs as it stands. What does not is answered with exit status 2 and the line that runs, which you can paste:

    python -m exp.train trainer=ddp          # ... Write strategy=ddp

The tables are made from `tests/config/habits.txt` by `python docs/make_habits.py`. A test types each line, puts what
the answer says in the place of what was wrong, and holds what then stands there against this table and against the
check (of a sweep, what all jobs share). On the left is what stands behind `python train.py`, `main.py` or `my_app.py`;
on the right what stands behind `python -m exp.train`. Quotes are for a shell. Where it is typed, `./conf` holds a group
`db` and a primary config `small` of one's own. [From lightning-hydra-template](from-lightning-hydra-template.md) says
more of a whole project, [configuration](configuration.md#custom-values-groups-and-functions) of values, groups and resolvers of your own.
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
