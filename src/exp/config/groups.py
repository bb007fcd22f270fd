"""Config groups, options and top-level keys that a command line may use, read from the directories of configs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from exp.config.hydra_adapter import compose_groups, registered_options
from exp.config.plain_tree import leaves
from exp.config.search_path import Place, options_in, own_groups, search_places
from exp.config.slots import AXIS, MANY
from exp.config.yaml_files import choices_of, read_yaml
from exp.errors import ConfigError, config_error
from exp.files import is_valid_path

PRIMARY = "train"
# The groups of Hydra that exp uses. Hydra's other groups have no effect in exp.
USED_GROUPS = ("hydra/launcher", "hydra/sweeper")


class Vocabulary:
    """Config groups, options and top-level keys that a command line may use.

    Args:
        places: Directories of configs, in the order of decreasing precedence.
        config_name: Name of the primary config, such as "train".

    Attributes:
        own: Config groups of users and plug-ins, which exp does not have.
        declared: Values by top-level key in the primary config and in the configs that it extends.
        groups: Config groups in the defaults lists of these configs, except Hydra's groups.
        keys: Top-level keys of these configs.
    """

    def __init__(self, places: Sequence[Place], *, config_name: str) -> None:
        self.places, self.config_name = places, config_name
        self.own = own_groups(places)
        contents = self._primaries()
        self.declared: dict[str, object] = {}
        for content in reversed(contents):
            self.declared |= {str(key): value for key, value in content.items() if key != "defaults"}
        choices = [choice for content in contents for choice in choices_of(content)]
        named = {choice.group for choice in choices if choice.group and not choice.group.startswith("hydra/")}
        # Chosen option by group, for the groups for which the primary config chooses exactly one option.
        self._chosen = {choice.group: choice.options[0] for choice in reversed(choices) if len(choice.options) == 1}
        self.groups = sorted(named)
        self.keys = sorted((set(self.declared) | named) - {"experiment", "debug", "local", "hydra"})

    def _primaries(self) -> list[dict[object, object]]:
        """Return the contents of the primary config and of the configs that it extends.

        A config extends each config that its defaults list names without a group, such as `train`.
        """
        contents: list[dict[object, object]] = []
        names = [self.config_name]
        for name in names:
            paths = [place.directory / f"{name}.yaml" for place in self.places] if is_valid_path(name) else []
            file = next((path for path in paths if path.is_file()), None)
            content = None if file is None else read_yaml(file) or {}
            if isinstance(content, dict):
                contents.append(content)
                extended = [choice.options[0].lstrip("/") for choice in choices_of(content) if not choice.group]
                names += [one for one in extended if one != "_self_" and one not in names]
        if not contents:
            raise config_error(
                "--config-name", got=f"there is no config named {self.config_name}",
                expected="train, or the name of a file in ./conf",
                fix=f"Write conf/{self.config_name}.yaml, with defaults: [train, _self_], or leave --config-name out",
            )  # fmt: skip
        return contents

    def kind(self, group: str) -> str:
        """Return the kind of a config group, which decides about the meaning of `=` and `+` in an override.

        Returns:
            "one", "many" or "axis", which are explained at the constants ONE, MANY and AXIS in exp.config.slots. If
            only the user's train.yaml declares the group, the kind is "one". If the group is a folder of the user that
            no train.yaml declares, the kind is "own". As in Hydra, an override chooses an option of this kind with `+`.
        """
        if group in MANY:
            return "many"
        if group not in self.groups and group.partition("/")[0] in self.own:
            return "own"
        return "axis" if group in AXIS else "one"

    def group_exists(self, group: str) -> bool:
        """Return whether a config group exists: as a folder in a directory of configs, or as a group in USED_GROUPS."""
        is_path = bool(group) and is_valid_path(group)
        return group in USED_GROUPS or (is_path and any((place.directory / group).is_dir() for place in self.places))

    def options(self, group: str) -> list[str]:
        """Return the options of a group.

        Files with a leading `_`, such as `_loader.yaml`, are not options. They contain values that options share.
        """
        found = {option for place in self.places for option in options_in(place.directory / group)}
        return sorted(found.union(registered_options(group) if group in USED_GROUPS else ()))

    def has_option(self, group: str, option: str) -> bool:
        """Return whether a group has an option. The option may be in a subfolder, as in `model=mine/small`."""
        if not option or option.startswith("/") or ".." in option.split("/") or not is_valid_path(option):
            return False
        return option in self.options(group) or any(
            (place.directory / group / f"{option}.yaml").is_file() for place in self.places
        )

    @functools.cached_property
    def keys_below(self) -> list[str]:
        """All dotted keys of the config that is composed without overrides. Empty if it cannot be composed."""
        try:
            config, _ = compose_groups(self.places, config_name=self.config_name, overrides=[])
        except ConfigError:  # the composition of the command reports the same error
            return []
        return dotted_keys(config)

    def words(self) -> list[str]:
        return sorted({*self.groups, *self.keys, *self.own})

    def in_use(self, group: str) -> bool:
        return group in self.groups or group in USED_GROUPS or self.kind(group) == "own"

    def example(self, group: str) -> str:
        """Return a valid override for a group, such as `model=mlp` or `hooks=[gradients,memory]`."""
        options = self.options(group) or ["..."]
        if self.kind(group) == "many":
            return f"{group}=[{','.join(options[:2])}]"
        return f"{group}={self._chosen[group] if group in self._chosen else options[0]}"


def dotted_keys(config: DictConfig) -> list[str]:
    """Return all dotted keys of a composed config, except the keys in the node `hydra`."""
    plain = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    assert isinstance(plain, dict)
    return [key for key, _ in leaves({name: value for name, value in plain.items() if name != "hydra"})]


def open_search_path(*, config_dir: str | None, config_name: str) -> Vocabulary:
    """Return the groups, options and top-level keys that a command line in the working directory may use.

    Args:
        config_dir: Directory of --config-dir. None: the flag is not given.
        config_name: Name of the primary config, with or without `.yaml`.
    """
    return Vocabulary(search_places(config_dir=config_dir), config_name=config_name.removesuffix(".yaml"))
