"""A run directory's own words about the run, as Markdown: the config, the command, and the revision with its diff."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from exp.config.freeze import read_overrides

# A page that shows a longer one stands still; provenance.json has the whole.
MAX_DIFF_CHARACTERS = 100_000


def texts(directory: Path) -> dict[str, str]:
    """By name, from what `freeze` wrote: `config`, `command` and, of a run inside a repository, `git`."""
    provenance = json.loads((directory / "provenance.json").read_text(encoding="utf-8"))
    command = shlex.join(["python", "-m", "exp.train", *read_overrides(directory)])
    versions = "\n".join(f"| {name} | {version} |" for name, version in provenance["versions"].items())
    table = f"| package | version |\n|---|---|\n{versions}"
    found = {
        "config": fenced((directory / "config.yaml").read_text(encoding="utf-8"), language="yaml"),
        "command": f"{fenced(command)}\n\nin `{provenance['working_directory']}`\n\n{table}",
    }
    if git := provenance["git"]:
        diff = git["diff"]
        if len(diff) > MAX_DIFF_CHARACTERS:
            diff = diff[:MAX_DIFF_CHARACTERS] + "\n... cut here; provenance.json has the whole diff\n"
        shown = fenced(diff, language="diff") if diff else "Nothing was changed since."
        found["git"] = f"Revision `{git['revision']}`\n\n{shown}"
    return found


def fenced(text: str, *, language: str = "") -> str:
    """A Markdown block of code, its fence longer than any in the text."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
