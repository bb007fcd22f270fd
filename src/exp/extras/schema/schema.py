"""python -m exp.schema: writes JSON schemas, by which an editor completes and checks the YAML of configs.

    python -m exp.schema                  .exp/schema/*.json, and what to put into .vscode/settings.json
    python -m exp.schema --modelines      and a line in each YAML file of ./conf that names its schema
    python -m exp.schema --allow mine     with the classes of a package, which is imported

The schemas know exp's keys, what torch's and exp's classes take, and the classes that your own ./conf names.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exp.config.search_path import search_places
from exp.config.slots import AXIS, MANY, ONE, nodes_in
from exp.config.yaml_files import read_yaml
from exp.errors import ConfigError, RunError
from exp.files import write_whole
from exp.output import exit_status

FOLDER = Path(".exp", "schema")
MODELINE = "# yaml-language-server: $schema="
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
# Whose classes are worth a completion, though no YAML names them yet.
LIBRARIES = ("torch.optim", "torch.optim.lr_scheduler", "torch.nn")
# Whose files set keys of the whole config.
WHOLE = ("experiment", "debug", "local")
GROUPS = tuple(group for group in (*ONE, *MANY, *AXIS) if group not in ("sweep", *WHOLE))


def main(argv: Sequence[str] | None = None, *, libraries: Sequence[str] = LIBRARIES) -> int:
    """Write the schemas, and print how an editor finds them.

    libraries: modules with classes that no YAML file names yet.
    Returns: 0; 1 where they cannot be written; 2 where a YAML file cannot be read for its line.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv, libraries))


def _command(argv: Sequence[str], libraries: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    schemas = made(allow=arguments.allow, libraries=libraries)
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, schema in schemas.items():
            write_whole(FOLDER / f"{name}.json", json.dumps(schema, separators=(",", ":")), is_synced=False)
        written = write_modelines(Path("conf")) if arguments.modelines else []
    except OSError as error:
        raise RunError(f"{error.filename}: {error.strerror}. Run it where you may write") from error
    print(f"{len(schemas)} schemas in {FOLDER}/")
    if arguments.modelines:
        print(f"{len(written)} files of conf/ name theirs now, for every editor with a YAML language server")
    print("For VS Code with the extension YAML, in .vscode/settings.json:")
    print(json.dumps({"yaml.schemas": settings()}, indent=2))
    return 0


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m exp.schema", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    more = "write the line that names its schema into each YAML file of ./conf; it changes a line that is there"
    found.add_argument("--modelines", action="store_true", help=more)
    more = "as security.allow: read the classes of a package that your YAML names"
    found.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help=more)
    return found


def made(*, allow: Sequence[str] = (), libraries: Sequence[str] = LIBRARIES) -> dict[str, dict[str, Any]]:
    """The schemas of this working directory by name: train, and each group."""
    from exp.extras.schema.json_schema import Schemas  # which imports torch

    schemas = Schemas([*_named(), *_of_libraries(libraries)], allow=allow)
    return {"train": schemas.train(), **{group: schemas.group(group) for group in GROUPS}}


def _named() -> Iterator[str]:
    """Every `_target_` in the YAML files of the search path."""
    for place in search_places():
        for file in sorted(place.directory.rglob("*.yaml")):
            try:
                content = read_yaml(file)
            except ConfigError:
                continue  # which an editor shows by itself
            if isinstance(content, dict):
                yield from (str(node["_target_"]) for _, node in nodes_in(content))


def _of_libraries(libraries: Sequence[str]) -> Iterator[str]:
    import importlib

    import torch

    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.nn.Module)
    for name in libraries:
        for word, found in vars(importlib.import_module(name)).items():
            if inspect.isclass(found) and issubclass(found, kinds) and not word.startswith("_"):
                yield f"{name}.{word}"


def schema_of(file: Path, conf: Path) -> str | None:
    """The name of the schema of a YAML file below a folder of configs; None for what none is written for."""
    parts = file.relative_to(conf).parts
    package = PACKAGE.search(file.read_text(encoding="utf-8"))
    if package is not None:
        return "train" if package[1] == "_global_" else None
    return "train" if len(parts) == 1 else parts[0] if parts[0] in GROUPS else None


def write_modelines(conf: Path) -> list[Path]:
    """Name its schema in each YAML file of a folder, behind the comment that it begins with. Returns: those changed.

    Raises: OSError.
    """
    changed = []
    for file in sorted(conf.rglob("*.yaml")):
        name = schema_of(file, conf)
        if name is None:
            continue
        text = file.read_text(encoding="utf-8")
        path = os.path.relpath(FOLDER / f"{name}.json", file.parent)
        new = with_modeline(text, f"{MODELINE}{Path(path).as_posix()}")
        if new != text:
            write_whole(file, new.encode(), is_synced=False)
            changed.append(file)
    return changed


def with_modeline(text: str, line: str) -> str:
    """A YAML text with the line, in the place of an older one or behind its first comment."""
    lines = text.splitlines(keepends=True)
    kept = [one for one in lines if not one.startswith(MODELINE)]
    first = next((index for index, one in enumerate(kept) if not one.startswith("# @package")), len(kept))
    at = first + 1 if first < len(kept) and kept[first].startswith("#") else first
    return "".join([*kept[:at], f"{line}\n", *kept[at:]])


def settings() -> dict[str, list[str]]:
    """`yaml.schemas` of VS Code: which files each schema is for."""
    files = {group: [f"conf/{group}/**/*.yaml"] for group in GROUPS}
    files["train"] = ["conf/*.yaml", *(f"conf/{group}/**/*.yaml" for group in WHOLE)]
    return {f"./{FOLDER.as_posix()}/{name}.json": globs for name, globs in files.items()}
