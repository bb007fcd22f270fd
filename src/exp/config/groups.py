"""The words of a command line on one search path: config groups, their options, keys at the top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from exp.config.hydra_adapter import HYDRA_ERRORS, Loader, dotted_keys
from exp.config.hydra_node import USED_GROUPS
from exp.config.search_path import search_places
from exp.config.slots import AXIS, MANY
from exp.errors import ConfigError

COMMAND_LINE = "command line"
PRIMARY = "train"


class Vocabulary:
    """The words that a command line may use on one search path: groups, their options, keys at the top."""

    def __init__(self, loader: Loader, *, config_name: str) -> None:
        self.loader, self.config_name = loader, config_name
        self._default: DictConfig | None = None
        self._options: dict[str, list[str]] = {}
        keys, declared = loader.primary(config_name)
        groups = [group for group in declared if not group.startswith("hydra/")]
        # Of each group of which there is one, what is chosen where nobody chooses.
        self._chosen = {group: option for group, option in declared.items() if isinstance(option, str)}
        self.groups = sorted(set(groups))
        self.own = loader.own_groups
        self.keys = sorted((set(keys) | set(groups)) - {"experiment", "debug", "local", "hydra", "defaults"})

    def kind(self, group: str) -> str:
        """`one`, `many`, `axis` or `own`; a group that only the user's own train.yaml declares is a `one`.

        Of one that no train.yaml declares, a folder of the user's, Hydra's rules hold: + where nothing was chosen.
        """
        if group in MANY:
            return "many"
        if group not in self.groups and group.partition("/")[0] in self.own:
            return "own"
        return "axis" if group in AXIS else "one"

    def options(self, group: str) -> list[str]:
        if group not in self._options:
            self._options[group] = self.loader.options(group)
        return self._options[group]

    def keys_below(self) -> list[str]:
        """All dotted keys of the config without overrides; none where even that does not compose."""
        return dotted_keys(self._without_overrides())

    def default(self, key: str) -> Any:
        """What stands at a key without overrides; None where there is nothing, too."""
        try:
            return OmegaConf.select(self._without_overrides(), key)
        except HYDRA_ERRORS:
            return None

    def _without_overrides(self) -> DictConfig:
        if self._default is None:
            try:
                self._default = self.loader.compose(config_name=self.config_name, overrides=[])
            except (ConfigError, *HYDRA_ERRORS):
                # Asked for a proposal only; the composition itself will tell what is wrong.
                self._default = DictConfig({})
        return self._default

    def words(self) -> list[str]:
        return sorted({*self.groups, *self.keys, *self.own})

    def in_use(self, group: str) -> bool:
        return group in self.groups or group in USED_GROUPS or self.kind(group) == "own"

    def example(self, group: str) -> str:
        """A right command for this group."""
        options = self.options(group) or ["..."]
        if self.kind(group) == "many":
            return f"{group}=[{','.join(options[:2])}]"
        return f"{group}={self._chosen.get(group, options[0])}"


def open_search_path(
    *, config_dir: str | None, config_name: str, overrides: Sequence[str] = ()
) -> tuple[Loader, Vocabulary]:
    """The loader of this working directory and the words that its configs know.

    overrides: those that may read variables of .env.
    """
    places = search_places(config_dir=config_dir)
    if (Path.cwd() / ".env").is_file():
        from exp.config.env_file import load_env_file

        load_env_file([place.directory for place in places], overrides=overrides)
    loader = Loader(places)
    return loader, Vocabulary(loader, config_name=config_name)
