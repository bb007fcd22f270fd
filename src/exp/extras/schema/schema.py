"""python -m exp.schema: writes JSON schemas, with which editors complete and check config files.

    python -m exp.schema                  writes .exp/schema/*.json, and prints the text for .vscode/settings.json
    python -m exp.schema --allow mine     also imports the package `mine`, so that its classes are completed

The schemas contain the config keys of exp, the parameters of classes of torch and exp, and the classes that ./conf
names.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from exp.config.search_path import search_places
from exp.config.slots import AXIS, MANY, ONE, nodes_in
from exp.config.yaml_files import read_yaml
from exp.errors import ConfigError, RunError
from exp.files import write_atomic
from exp.output import exit_status

FOLDER = Path(".exp", "schema")
# Editors complete the classes of these modules even if no YAML file names the classes.
LIBRARIES = ("torch.optim", "torch.optim.lr_scheduler", "torch.nn")
# Groups with files that may set any key of the config. The files of other groups set only the keys of the group.
WHOLE = ("experiment", "debug", "local")
GROUPS = tuple(group for group in (*ONE, *MANY, *AXIS) if group not in ("sweep", *WHOLE))


def main(argv: Sequence[str] | None = None, *, libraries: Sequence[str] = LIBRARIES) -> int:
    """Write the schemas, and print the settings for VS Code.

    Args:
        argv: Arguments of the command line. None: sys.argv without the program.
        libraries: Modules with classes that editors complete even if no YAML file names the classes.

    Returns:
        Exit status: 0, or 1 if the schemas cannot be written.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv, libraries))


def _command(argv: Sequence[str], libraries: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m exp.schema", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    about = "a package whose classes are imported, as in security.allow"
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help=about)
    schemas = make_schemas(allow=parser.parse_args(argv).allow, libraries=libraries)
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, schema in schemas.items():
            write_atomic(FOLDER / f"{name}.json", json.dumps(schema, separators=(",", ":")), is_synced=False)
    except OSError as error:
        raise RunError(f"{error.filename}: {error.strerror}. Run the command in a writable directory") from error
    print(f"{len(schemas)} schemas in {FOLDER}/")
    print("For VS Code with the extension YAML, in .vscode/settings.json:")
    print(json.dumps({"yaml.schemas": settings()}, indent=2))
    return 0


def make_schemas(*, allow: Sequence[str] = (), libraries: Sequence[str] = LIBRARIES) -> dict[str, dict[str, object]]:
    """Return the schemas for the configs of the working directory.

    Args:
        allow: Packages from which classes may be imported, as in security.allow.
        libraries: Modules with classes that editors complete even if no YAML file names the classes.

    Returns:
        Schemas by name. The names are "train" for train.yaml, and the names of all config groups.
    """
    from exp.extras.schema.json_schema import Schemas  # imported here, because the module imports torch

    schemas = Schemas([*_named_targets(), *_library_targets(libraries)], allow=allow)
    return {"train": schemas.train(), **{group: schemas.group(group) for group in GROUPS}}


def _named_targets() -> Iterator[str]:
    """Yield every `_target_` in the YAML files of the search path."""
    for place in search_places():
        for file in sorted(place.directory.rglob("*.yaml")):
            try:
                content = read_yaml(file)
            except ConfigError:
                continue  # an editor shows this error
            if isinstance(content, dict):
                yield from (str(node["_target_"]) for _, node in nodes_in(content))


def _library_targets(libraries: Sequence[str]) -> Iterator[str]:
    import importlib

    import torch

    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.nn.Module)
    for name in libraries:
        for word, found in vars(importlib.import_module(name)).items():
            if inspect.isclass(found) and issubclass(found, kinds) and not word.startswith("_"):
                yield f"{name}.{word}"


def settings() -> dict[str, list[str]]:
    """Return the VS Code setting `yaml.schemas`.

    Returns:
        Path patterns of YAML files, by path of the schema that applies to the files.
    """
    files = {group: [f"conf/{group}/**/*.yaml"] for group in GROUPS}
    files["train"] = ["conf/*.yaml", *(f"conf/{group}/**/*.yaml" for group in WHOLE)]
    return {f"./{FOLDER.as_posix()}/{name}.json": globs for name, globs in files.items()}
