"""What a command is composed of: the search path, the words that its configs know, its overrides, its files."""

from __future__ import annotations

from collections.abc import Sequence

from exp.config.environment import load_env_file
from exp.config.groups import Vocabulary
from exp.config.hydra_adapter import Layer, Loader
from exp.config.overrides import Line, for_hydra, line_faults, read_lines
from exp.config.search_path import make_importable, search_places
from exp.errors import ConfigError, Fault

PRIMARY = "train"


def layers_of(overrides: Sequence[str], *, config_dir: str | None, config_name: str) -> list[Layer]:
    """The files that a command without faults composes, in the order of merging.

    Raises: ConfigError, or one of HYDRA_ERRORS, where it has some.
    """
    loader, vocabulary = open_search_path(config_dir=config_dir, config_name=config_name)
    lines, faults = checked_lines(overrides, vocabulary, multirun=False)
    if faults:
        raise ConfigError(faults)
    loader.compose(config_name=config_name, overrides=for_hydra(lines, vocabulary))
    return loader.layers


def open_search_path(*, config_dir: str | None, config_name: str) -> tuple[Loader, Vocabulary]:
    """The loader of this working directory and the words that its configs know."""
    load_env_file()
    make_importable()
    loader = Loader(search_places(config_dir=config_dir))
    return loader, Vocabulary(loader, config_name=config_name)


def checked_lines(
    overrides: Sequence[str], vocabulary: Vocabulary, *, multirun: bool
) -> tuple[list[Line], list[Fault]]:
    """The overrides that may be right, and the faults of the others."""
    lines, faults = read_lines(overrides, vocabulary)
    wrong = line_faults(lines, vocabulary, multirun=multirun)
    refused = [line for line, _ in wrong]
    return [line for line in lines if line not in refused], [*faults, *(fault for _, fault in wrong)]
