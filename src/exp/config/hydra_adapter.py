"""Hydra's private parts, known here and nowhere else: its composition, its flags and answers, its sweepers.

Seen: Hydra 1.3.8. tests/config/test_hydra_adapter.py says what is relied upon: ConfigLoaderImpl, ConfigRepository,
FileConfigSource, the override parser and its functions, Plugins, HydraConfig, VersionBase, ConfigStore;
get_args_parser, Hydra.show_cfg, show_info, hydra_help, Callbacks. Of Python 3.11: ArgumentParser._actions, for there
is no other way to an action that was added by somebody else.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import logging
import math
import pickle
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.grammar.grammar_functions import cast_int
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import HydraContext, RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from exp.config.copying import copied
from exp.config.habits import cure_of_key
from exp.config.plain_tree import leaves
from exp.config.reading import secrets_kept
from exp.config.resolvers import held, use_resolvers
from exp.config.search_path import Place, own_groups, shown
from exp.config.slots import ONE, nodes_in, package_of_flat
from exp.config.yaml_files import read_yaml
from exp.errors import ConfigError, Fault, chain_of, one_line
from exp.files import can_be_a_path
from exp.spelling import among, did_you_mean, is_slip

HYDRA_VERSION = hydra.__version__
VERSION_BASE = "1.3"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
OUR_SWEEPER = "hydra_plugins.exp.sweeper.ExpSweeper"
# Hydra names a job after the program.
JOB_NAME = "train"
# What Hydra and OmegaConf raise on a faulty config or override, by intent, or out of an assert or a conversion.
HYDRA_ERRORS = (
    HydraException, OmegaConfBaseException, OSError, ValueError, TypeError, AssertionError, KeyError, AttributeError,
    RecursionError,
)  # fmt: skip
MAX_MESSAGE = 300
# A longer range, listed, would fill the memory before the sweep is refused as too large.
MAX_NUMBERS = 1_000_000
# What says where a file's values belong, in its first characters.
HEADER = re.compile(r"#\s*@package\s")
MOST_HEADER = 2_000
# `1e3` and `1.5e3`; beyond so many, a float no longer counts one by one.
WITH_EXPONENT = re.compile(r"[+-]?[\d_]+(\.\d*)?[eE]\+?\d+")
MOST_EXACT = 2**53
# What Hydra says of a choice that it cannot place (1.3.8).
UNPLACED = re.compile(
    r"(In '(?P<file>[^']+)': )?Could not override '(?P<key>[^']+)'\."
    r"(.*?\nTo append to your default list use (?P<added>\S+))?",
    re.DOTALL,
)
CHOSEN_ALREADY = "Write {group}=NAME, without the +"
LISTED_TWICE = re.compile(r"(?P<key>[\w/]+) appears more than once in the final defaults list")
CHOSEN_TWICE = re.compile(r"Multiple values for (?P<key>[\w/]+)\.")
# How often the defaults lists that come to an end may ask for one config.
MAX_VISITS = 20
# A third of a composition is making configs of the same files, which it then changes: pickled, by file and its state.
_loaded: dict[tuple[object, ...], bytes] = {}
MOST_LOADED = 1_024


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One file of the defaults list, in the order of merging: `model/mlp` merged at `model`."""

    config_path: str
    package: str
    file: Path | None

    @property
    def text(self) -> str:
        """As Hydra writes it in a defaults list, with its file: `model/mlp@model=/conf/model/mlp.yaml`."""
        return f"{self.config_path}@{self.package}={self.file}"

    @classmethod
    def of(cls, text: str) -> Layer:
        """The layer of a `text`."""
        place, _, file = text.partition("=")
        config_path, _, package = place.partition("@")
        return cls(config_path=config_path, package=package, file=Path(file))


class BoundedFileSource(FileConfigSource):
    """Hydra's reader of files, with our bounds on a YAML file and our messages."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        content = read_yaml(file)
        if content is not None and not isinstance(content, dict | list):
            raise ConfigError([Fault(
                key=config_path, got=f"one value, {content!r}", expected="keys and values", source=shown(file)
            )])  # fmt: skip
        with file.open(encoding="utf-8") as opened:
            header = ConfigSource._get_header_dict(_headers(opened.read(MOST_HEADER)))
        if header["package"] is None:
            header["package"] = package_of_flat(config_path, content)
        try:
            config = OmegaConf.create({} if content is None else content)
        except OmegaConfBaseException as error:
            raise ConfigError([Fault(
                key=str(error.full_key or config_path), got=str(error).splitlines()[0],
                expected="a value that OmegaConf can read", source=shown(file),
            )]) from error  # fmt: skip
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)

    def file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)


class _Repository(ConfigRepository):
    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        for element in config_search_path.get_path():
            # What a config or a command adds; `pkg://NAME` would import NAME.
            added = str(element.provider).startswith("hydra.searchpath")
            if added and "://" in element.path and not element.path.startswith("file://"):
                raise ConfigError([Fault(
                    key="hydra.searchpath", got=element.path, expected="a directory, as a path or file://PATH"
                )])  # fmt: skip
        super().initialize_sources(config_search_path)
        # By scheme, not by class: Hydra's scanner executes its modules a second time, which makes a second class.
        self.sources = [
            BoundedFileSource(source.provider, source.full_path()) if source.scheme() == "file" else source
            for source in self.sources
        ]

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        state = None if source is None else _state(source, config_path)
        if state is not None and state in _loaded:
            return cast(ConfigResult, pickle.loads(_loaded[state]))
        result = super().load_config(config_path)
        if state is not None and len(_loaded) < MOST_LOADED:
            _loaded[state] = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        return result


def _state(source: ConfigSource, config_path: str) -> tuple[object, ...] | None:
    """What a config of this source is the same by: that of a file, or of Hydra's own package; None of another one."""
    place = source.provider, source.path, config_path
    if isinstance(source, BoundedFileSource):
        try:
            status = source.file(config_path).stat()
        except OSError:
            return None  # told where it is read
        return *place, Path.cwd(), status.st_mtime_ns, status.st_size, status.st_ino
    return place if source.scheme() == "pkg" and source.path == "hydra.conf" else None


class _Visits:
    """Counts how often the defaults lists of a composition ask a repository for each config."""

    def __init__(self, repository: CachingConfigRepository) -> None:
        self._counts: Counter[str] = Counter()
        self._load = repository.load_config
        # Not a subclass, whose constructor would copy all that this one holds.
        vars(repository)["load_config"] = self._counted

    def _counted(self, config_path: str) -> ConfigResult | None:
        self._counts[config_path] += 1
        return self._load(config_path)

    def files_in_circle(self) -> list[Path]:
        """The files that a composition without an end asked for again and again: they name each other."""
        most = max(self._counts.values(), default=0)
        circle = [path for path, count in self._counts.items() if 2 * count > most > MAX_VISITS]
        return [file for path in circle if (file := _file_of(self._load(path), path)) is not None]


class Loader(ConfigLoaderImpl):
    """Hydra's own loader on our search path.

    Of its last composition it remembers the layers, and the config as it was before values were set in it; None where
    not even the choices of groups compose.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        with hydra_base():
            with _plugins_as_faults():
                Plugins.instance()  # which imports every plug-in, the first time
                path = create_config_search_path(None)
            schema = path.get_path().pop()
            for place in places:
                path.append(place.provider, f"file://{place.directory}")
            path.append(schema.provider, schema.path)
            super().__init__(path)
            self.repository = _Repository(path)
        self.layers: list[Layer] = []
        self.own_groups = own_groups(places)
        self.chosen: DictConfig | None = None
        self.tries_jobs = True
        self._declared: Container | None = None
        self._overrides: list[Override] = []
        self._numbered: list[str] = []
        self._loaded: dict[int, ConfigResult] = {}
        self._visits: _Visits | None = None

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        self._overrides, repo = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        self._visits = _Visits(repo)
        return self._overrides, repo

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        self.layers = [self._layer(default, repo) for default in defaults]
        own = [repo.load_config(default.config_path or "") for default in defaults if default.primary]
        # A copy, for Hydra merges the others into it.
        has_whole_node = any(map(_is_whole_node, self._overrides))
        self._declared = copy.deepcopy(own[0].config) if has_whole_node and own and own[0] is not None else None
        try:
            config = super()._compose_config_from_defaults_list(defaults=defaults, repo=repo)
        except HydraException:
            self._loaded = {id(default): self._load_single_config(default, repo) for default in defaults}
            layers = [one.config for one in self._loaded.values() if isinstance(one.config, DictConfig)]
            plain = [OmegaConf.to_container(layer, resolve=False) for layer in layers]
            # Each is emptied, whichever was the first.
            emptied = [_empty(layer, later) for place, later in enumerate(plain) for layer in layers[:place]]
            if not any(emptied):
                raise
            config = super()._compose_config_from_defaults_list(defaults=defaults, repo=repo)
        finally:
            self._loaded = {}
        # A fifteenth of what it takes to compose once more, where a value cannot be set.
        self.chosen = copied(config) if self._overrides else config
        OmegaConf.set_struct(self.chosen, True)
        for override in self._overrides:
            self._make_ready(config, override)
        return config

    def _make_ready(self, config: DictConfig, override: Override) -> None:
        """Change a composed config so that Hydra, which merges, does what the override means."""
        # `freeze.unfreeze.10`: a key of text names no entry that YAML reads as a number, until _restore_numbers.
        path = _numbered(config, override.key_or_group)
        if path is not None:
            _rename(config, path, str)
            self._numbered.append(path)
        declare_parameter(config, override)
        key = override.key_or_group
        override._value = whole_number(config, override)
        if _is_node(override, OverrideType.ADD):
            # There for the overrides behind it, `'+module={_target_: mine.Lit}' module.lr=1`; Hydra adds it once more.
            with open_dict(config), contextlib.suppress(OmegaConfBaseException):  # told where it is applied
                if OmegaConf.select(config, key) is None:
                    OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
        value = None if override.is_sweep_override() or override.is_delete() else override.value()
        parent, _, name = key.rpartition(".")
        try:
            holder = OmegaConf.select(config, parent) if parent else config
            chooses = isinstance(value, list) and self.group_exists(key)
            if isinstance(holder, DictConfig) and not chooses:
                _empty(holder, {name: value})
            if not _is_whole_node(override):
                return
            node = OmegaConf.select(config, key)
            declared = None if self._declared is None else OmegaConf.select(self._declared, key)
        except OmegaConfBaseException:
            return  # told where the override is applied
        # `'model={_target_: mine.Net}'` has nothing of the layers of the model that the groups chose. What the primary
        # config declares stays, for exp itself reads it.
        if isinstance(node, DictConfig) and "_target_" in node:
            with open_dict(config):
                OmegaConf.update(config, key, {} if declared is None else copy.deepcopy(declared), merge=False)
                OmegaConf.update(config, key, override.value(), merge=True, force_add=True)

    def _restore_numbers(self, config: DictConfig) -> None:
        """Make numbers of the names of entries that are numbers in YAML, those too that an override added."""
        for path in self._numbered:
            _rename(config, path, _as_number)
        self._numbered.clear()

    def own_groups_chosen(self) -> list[str]:
        """The folders of the user's own of which an option was merged under their name."""
        chosen = {
            layer.package.partition(".")[0]
            for layer in self.layers
            if layer.config_path.partition("/")[0] == layer.package.partition(".")[0]
        }
        return [group for group in self.own_groups if group in chosen]

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        """Hydra's, with what an option says of its own place, `${model.width}`, led to the place where it is put."""
        if id(default) in self._loaded:
            return self._loaded[id(default)]
        loaded = super()._load_single_config(default, repo)
        group = (default.config_path or "").rpartition("/")[0].partition("/")[0]
        place = default.package or ""
        is_moved = group in ONE and place not in ("", "_global_", group) and not place.startswith(f"{group}/")
        if is_moved and loaded.header["package"] is None:
            plain = OmegaConf.to_container(loaded.config, resolve=False)
            loaded.config = OmegaConf.create(_moved(plain, rf"\$\{{{group}\.", f"${{{place}."))
        return loaded

    def _layer(self, default: ResultDefault, repo: IConfigRepository) -> Layer:
        config_path = default.config_path or ""
        file = _file_of(repo.load_config(config_path), config_path)
        return Layer(config_path=config_path, package=default.package or "", file=file)

    def compose(self, *, config_name: str, overrides: Sequence[str], multirun: bool = False) -> DictConfig:
        """The whole config, the hydra node included. Raises one of HYDRA_ERRORS or ConfigError."""
        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        self.chosen = None
        with hydra_base(), _warnings_as_faults():
            setup_globals()
            try:
                return self.load_configuration(config_name=config_name, overrides=list(overrides), run_mode=mode)
            except RecursionError as error:
                circle = [] if self._visits is None else self._visits.files_in_circle()
                if not circle:
                    raise
                raise ConfigError([_circle_fault(circle)]) from error

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        """Of whoever composes: a command, a job of a sweep, `--cfg`."""
        self._numbered.clear()
        config = super().load_configuration(*args, **kwargs)
        self._restore_numbers(config)
        config.hydra.job.name = JOB_NAME
        use_resolvers(config, allow=sorted(packages_allowed_by(line.input_line or "" for line in self._overrides)))
        return config

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        # A sweeper composes every job for a try and stops at the first fault; our launcher lists those of all jobs.
        return super().load_sweep_config(master_config, sweep_overrides) if self.tries_jobs else master_config

    def apply(self, override: Override, config: DictConfig) -> None:
        """Changes a composed config by one override that is no choice of a group."""
        override = copy.copy(override)  # which others hold, too
        self._make_ready(config, override)
        try:
            with hydra_base():
                self._apply_overrides_to_config([override], config)
        finally:
            self._restore_numbers(config)

    def primary(self, config_name: str) -> tuple[list[str], dict[str, str | list[str] | None]]:
        """Top-level keys that the primary config declares, and groups with what it chooses of each.

        Those too of the configs that its own defaults list names, as `train` in that of one that changes exp's.
        """
        with hydra_base():
            loaded = self.repository.load_config(config_name) if can_be_a_path(config_name) else None
        if loaded is None:
            raise ConfigError([Fault(
                key="--config-name", got=f"{config_name} is on no search path", expected="train, or a config in ./conf",
                cure=f"Write conf/{config_name}.yaml, with defaults: [train, _self_], or leave the flag out",
            )])  # fmt: skip
        keys: list[str] = []
        groups: dict[str, str | list[str] | None] = {}
        seen, waiting = {config_name}, [loaded]
        while waiting:
            config = waiting.pop()
            keys += [str(key) for key in config.config]
            for default in config.defaults_list or []:
                if isinstance(default, GroupDefault) and default.group is not None:
                    groups.setdefault(default.group.lstrip("/"), default.value)
                path = default.path if isinstance(default, ConfigDefault) else None
                if path not in (None, "_self_", *seen):
                    seen.add(str(path))
                    with hydra_base():
                        inner = self.repository.load_config(str(path).lstrip("/"))
                    waiting += [] if inner is None else [inner]
        return list(dict.fromkeys(keys)), groups

    def group_exists(self, group: str) -> bool:
        if not can_be_a_path(group):
            return False
        with hydra_base():
            return self.repository.group_exists(group)

    def options(self, group: str) -> list[str]:
        with hydra_base():
            options = self.repository.get_group_options(group, ObjectType.CONFIG)
        # `_loader` is a part that other options include, not a choice.
        return [option for option in options if not option.startswith("_")]

    def has_option(self, group: str, option: str) -> bool:
        """Whether a group holds an option; of a folder within it, too (`model=mine/small`)."""
        if not option or option.startswith("/") or ".." in option.split("/") or not can_be_a_path(option):
            return False
        with hydra_base():
            return self.repository.config_exists(f"{group}/{option}")


def _moved(plain: Any, reference: str, place: str) -> Any:
    """Return plain values with another place in their interpolations. reference: a pattern of what they begin with."""
    if isinstance(plain, dict):
        return {name: _moved(value, reference, place) for name, value in plain.items()}
    if isinstance(plain, list):
        return [_moved(value, reference, place) for value in plain]
    return re.sub(reference, lambda _: place, plain) if isinstance(plain, str) else plain


def _empty(node: DictConfig, given: Any) -> bool:
    """Set to null each list of a node for which `given` has a mapping, and each mapping for which it has a list.

    OmegaConf merges neither into the other. Return whether there was any.
    """
    is_any = False
    for name, value in given.items():
        there = None if name == "hydra" else held(node, name)
        if there is None or not isinstance(value, dict | list):
            continue
        if isinstance(there, DictConfig) is not isinstance(value, dict):
            node[name] = None
            is_any = True
        elif isinstance(there, DictConfig):
            is_any |= _empty(there, value)
    return is_any


def _headers(text: str) -> str:
    """The lines `# @package ...` among the comments that a file begins with: Hydra takes the very first line alone."""
    comments = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines())
    return "\n".join(line for line in comments if HEADER.match(line))


def declare_parameter(config: DictConfig, override: Override) -> None:
    """Give a node the key that an override is about to set or delete, where the node takes keys that no file shows.

    That is a node with a `_target_`, whose class says what it takes, and an entry of `phases`: a file says only what it
    changes, and Hydra would ask for a `+` before everything else. The check says later whether there is such a
    parameter. A slip of a key that is there is left for Hydra to refuse, and so is a word of other frameworks that the
    class does not have.
    """
    parent, _, name = override.key_or_group.rpartition(".")
    is_hydras = parent.partition(".")[0] in ("", "hydra")
    if override.type not in (OverrideType.CHANGE, OverrideType.DEL) or override.is_sweep_override() or is_hydras:
        return
    try:
        node = OmegaConf.select(config, parent)
    except OmegaConfBaseException:
        return  # told where the override is applied
    is_phase = parent.startswith("phases.") and parent.count(".") == 1
    if not isinstance(node, DictConfig) or name in node or not (is_phase or "_target_" in node):
        return
    key, target = override.key_or_group, "" if is_phase else str(node["_target_"])
    # No class of exp or torch has a parameter of such a name; what others have, the check knows.
    is_habit = cure_of_key(key, "") is not None and target.partition(".")[0] in ("exp", "torch")
    if not is_habit and not is_slip(name, map(str, node)):
        with open_dict(node):
            node[name] = ""  # not null: Hydra takes a null that is to be deleted for nothing


def whole_number(config: DictConfig, override: Override) -> Any:
    """The value of an override; of `1e3`, which Hydra takes for 1000.0, the whole number where one stands, or null."""
    value = override.value()
    text = (override.input_line or "").partition("=")[2]
    if not isinstance(value, float) or not value.is_integer() or abs(value) > MOST_EXACT:
        return value
    if WITH_EXPONENT.fullmatch(text) is None:
        return value
    try:
        node = OmegaConf.select(config, override.key_or_group, default=0.0)
    except OmegaConfBaseException:
        return value  # told where the override is applied
    # Of Lightning's limits 1.0 is all of them, and 1 is one batch.
    is_number = type(node) is int or (node is None and abs(value) > 1)
    return int(value) if is_number else value


def _numbered(config: DictConfig, key: str) -> str | None:
    """The path of a mapping on the way to a key, and the key a number there, where all that it holds are numbers."""
    node: Any = config
    parts = key.split(".")
    for index, part in enumerate(parts):
        if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, part):
            return None
        if part.isdecimal() and all(type(name) is int for name in node):
            return ".".join(parts[:index])
        node = None if part not in node or OmegaConf.is_interpolation(node, part) else node[part]
    return None


def _rename(config: DictConfig, path: str, renamed: Callable[[Any], Any]) -> None:
    """Give the entries of a mapping other names, if it is still there."""
    node = OmegaConf.select(config, path)
    if not isinstance(node, DictConfig):
        return
    entries = OmegaConf.to_container(node, resolve=False)
    assert isinstance(entries, dict)
    with open_dict(node):
        for name in entries:
            del node[name]
        for name, value in entries.items():
            node[renamed(name)] = value


def _as_number(name: Any) -> Any:
    return int(name) if isinstance(name, str) and name.isdecimal() else name


def _is_whole_node(override: Override) -> bool:
    """Whether an override without a sign gives a mapping with a `_target_`."""
    return _is_node(override, OverrideType.CHANGE)


def _is_node(override: Override, kind: OverrideType) -> bool:
    value = None if override.is_sweep_override() else override.value()
    return override.type is kind and isinstance(value, dict) and "_target_" in value


@functools.lru_cache(maxsize=4096)
def parse_override(text: str) -> Override:
    """Raises: HydraException where it is none, RecursionError where it nests too deeply. Do not change the result."""
    with hydra_base():
        return _parser().parse_overrides([text])[0]


@functools.cache
def _parser() -> OverridesParser:
    parser = OverridesParser.create()
    parser.functions.functions["int"] = _whole
    parser.functions.functions["range"] = _numbers
    return parser


class Numbers(ChoiceSweep):
    """The numbers of a range, in order."""


@dataclass(frozen=True)
class _Listed(Sequence[float]):
    """The numbers `start + place * step`, exact, and listed only if there are at most MAX_NUMBERS."""

    start: Fraction
    step: Fraction
    size: int
    kind: type[int] | type[float]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __iter__(self) -> Iterator[float]:
        if self.size > MAX_NUMBERS:
            raise ValueError(f"{self.size:,} numbers are more than {MAX_NUMBERS:,}")
        return (self.kind(self.start + place * self.step) for place in range(self.size))


def _numbers(start: float, stop: float | None = None, step: float = 1) -> Numbers:
    """Return the numbers `start + i * step` before `stop`, computed in decimals as they are typed.

    Hydra adds the step in binary, so that its `range(0.01,0.05,0.01)` contains 0.05. Its `sort` of a range with
    `reverse` gives numbers that are not in the range. Listed numbers are sorted, shuffled and converted correctly.

    Raises: ValueError if a number is infinite or nan, or if the step is 0.
    """
    if stop is None:
        start, stop = 0, start
    if not all(map(math.isfinite, (start, stop, step))) or step == 0:
        raise ValueError("a number is infinite or nan, or the step is 0")
    first, end, distance = (Fraction(repr(number)) for number in (start, stop, step))
    count = min(sys.maxsize, max(0, math.ceil((end - first) / distance)))
    kind = int if all(isinstance(number, int) for number in (start, stop, step)) else float
    return Numbers(list=cast("list[Any]", _Listed(first, distance, count, kind)))


def _whole(*args: Any, **kwargs: Any) -> Any:
    """Hydra's int(...), which takes only what it changes nothing of; of an interval it gives the whole numbers inside.

    Raises: ValueError on a fraction, of which Hydra would leave the places behind the point out, as of an interval's
        ends; on an interval without a whole number.
    """
    given = [*args, *kwargs.values()]
    if len(given) == 1 and isinstance(given[0], IntervalSweep):
        low, high = given[0].start, given[0].end
        if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("an interval of whole numbers has two ends")
        # The wrong way round, that is told as of any interval.
        if math.ceil(low) > math.floor(high) and low <= high:
            raise ValueError(f"there is no whole number from {low:g} to {high:g}")
        start, end = (math.ceil(low), math.floor(high)) if low <= high else (math.floor(low), math.ceil(high))
        return IntervalSweep(start=start, end=end, tags=set(given[0].tags))
    for number in _floats_in(given):
        if not number.is_integer():
            raise ValueError(f"{number:g} is no whole number")
    return cast_int(*args, **kwargs)


def _floats_in(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, ChoiceSweep):
        yield from _floats_in(value.list)
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _floats_in(inner)


@contextlib.contextmanager
def hydra_base() -> Iterator[None]:
    """Hydra keeps the behaviour it emulates in a global; another Hydra program in this process keeps its own."""
    kept = version.VersionBase.instance().version_base
    version.setbase(VERSION_BASE)
    try:
        yield
    finally:
        version.VersionBase.instance().version_base = kept


@contextlib.contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Lets `${hydra:...}` find the hydra node of this config, and puts back what was there."""
    kept = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = kept


@contextlib.contextmanager
def _plugins_as_faults() -> Iterator[None]:
    """Faults for what a plug-in raises when Hydra imports it, or asks it for folders.

    Of an ImportError Hydra warns, and leaves the plug-in out.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        files = [*(frame.filename for frame in frames), error.filename if isinstance(error, SyntaxError) else None]
        of_plugins = [file for file in files if file is not None and "hydra_plugins" in Path(file).parts]
        said = " ".join(one_line(error).split())
        got = f"a plug-in of Hydra that fails with {said}"
        raise ConfigError([Fault(
            key="hydra_plugins", got=got, expected="plug-ins that can be imported",
            cure="Mend it, or uninstall the package that brings it", source=of_plugins[-1] if of_plugins else None,
        )]) from error  # fmt: skip


@contextlib.contextmanager
def _warnings_as_faults() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    # Hydra's own warnings (a search path that is not there, a defaults list without _self_) are plain UserWarnings.
    told = [warning for warning in caught if warning.category is UserWarning]
    if told:
        raise ConfigError([
            Fault(key="config", got=" ".join(str(warning.message).split()), expected="a config without this")
            for warning in told
        ])  # fmt: skip


def packages_allowed_by(overrides: Iterable[str]) -> set[str]:
    """The packages that overrides of `security.allow`, or of `security` as a whole, name one by one."""
    found: set[str] = set()
    for text in overrides:
        if "security" not in text:
            continue
        try:
            parsed = parse_override(text)
        except HYDRA_ERRORS:
            continue  # told where the overrides are read
        value = parsed.value() if not parsed.is_sweep_override() else None
        if parsed.key_or_group == "security" and isinstance(value, dict):
            value = next((inner for name, inner in value.items() if str(name) == "allow"), None)
        elif parsed.key_or_group != "security.allow":
            continue
        if isinstance(value, list):
            found |= {str(package) for package in value}
    return found


def registered_targets() -> set[str]:
    """Every `_target_` that installed Hydra plug-ins brought with them, and the plug-in classes themselves."""
    found = set(Plugins.instance().class_name_to_class)

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            for value in node.values():
                collect(value)
        elif hasattr(node, "node"):
            plain = OmegaConf.to_container(node.node, resolve=False, throw_on_missing=False)
            found.update(str(inner["_target_"]) for _, inner in nodes_in(plain))

    with hydra_base():
        collect(ConfigStore.instance().repo["hydra"])
    return found


def fault_of(error: Exception) -> Fault:
    """Return one error for an exception of Hydra or OmegaConf."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_config_fault(error, error.missing_cfg_file)
    refused = _refused_choice(str(error))
    if refused is not None:
        return refused
    causes = list(chain_of(error, explicit=True))
    if any(isinstance(cause, RecursionError) for cause in causes):
        return Fault(key="config", got="nested too deeply, or into itself", expected="a few levels")
    told = [text for text in (_short(cause) for cause in causes) if text]
    key = next((cause.full_key for cause in causes if isinstance(cause, OmegaConfBaseException) and cause.full_key), "")
    detail = "; ".join(dict.fromkeys(told)) or type(error).__name__
    return Fault(key=str(key) or "config", got=detail, expected="a config that can be composed")


def _refused_choice(message: str) -> Fault | None:
    """The fault of a choice that has no place in the defaults list, by what Hydra says of it; None of another error."""
    found = UNPLACED.match(message)
    if found is not None and found["file"] is not None and "@" in found["key"]:
        node = found["file"].partition("/")[0]
        return Fault(
            key=found["key"].partition("@")[0], got=f"an override below {node}, where the file stands",
            expected="an override of the whole config", source=f"{found['file']}.yaml",
            cure=f"Begin the file with the line `# @package _global_`, and put its own keys below {node}:",
        )  # fmt: skip
    if found is not None and found["file"] is not None:
        key = found["key"]
        return Fault(
            key=key, got=f"`override /{key}`, and no entry /{key} of the defaults list that it could replace",
            expected="a group that the primary config chooses before this file", source=f"{found['file']}.yaml",
            cure=f"Write `- /{key}/NAME` to add an option of it, or correct the name",
        )  # fmt: skip
    if found is not None and found["added"] is not None:
        return Fault(
            key=found["key"], got="= on a group of which the defaults list chooses nothing", expected="+ to add to it",
            cure=f"Write {found['added']}", source="command line",
        )  # fmt: skip
    found = LISTED_TWICE.match(message)
    if found is not None:
        return Fault(
            key=found["key"], got="two entries of the defaults list", expected="one entry that the others override",
            cure=f"Write `- /{found['key']}/NAME` in a file that selects an option which the command line may replace",
        )  # fmt: skip
    found = CHOSEN_TWICE.match(message)
    if found is not None:
        return Fault(
            key=found["key"], got="chosen by the defaults list already", expected="= to choose another",
            cure=CHOSEN_ALREADY.format(group=found["key"]),
        )  # fmt: skip
    return None


def _missing_config_fault(error: MissingConfigException, path: str) -> Fault:
    group, _, option = path.rpartition("/")
    options = error.options or []
    named_by = re.match(r"In '([^']+)'", str(error))
    return Fault(
        key=group or path, got=f"there is no option {option!r}" if group else "no such config",
        expected=f"one of {among(options, word=option)}" if options else "a config on the search path",
        cure=did_you_mean(option, options), source=f"defaults list of {named_by[1]}" if named_by else None,
    )  # fmt: skip


def _short(error: BaseException) -> str:
    text = str(error).partition("\nConfig search path:")[0].partition("\nTo append to your")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(kept)[:MAX_MESSAGE]


def dotted_keys(config: DictConfig) -> list[str]:
    """Return every key of a composed config, at any depth, except those of the hydra node."""
    return [key for key, _ in _written(config)]


def text_values(config: DictConfig) -> list[tuple[str, str]]:
    """Return key and text of every text and interpolation of a composed config, except those of the hydra node."""
    return [(key, value) for key, value in _written(config) if isinstance(value, str)]


def _written(config: DictConfig) -> Iterator[tuple[str, Any]]:
    plain = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False, throw_on_missing=False))
    return leaves({name: value for name, value in plain.items() if name != "hydra"})


def _circle_fault(files: Sequence[Path]) -> Fault:
    """The fault of a composition that does not come to its end. files: those that name each other."""
    return Fault(
        key="defaults",
        got="a defaults list that leads back to itself",
        expected="configs that do not include each other",
        cure="Take one of them out of the other's list" if len(files) > 1 else "Take it out of its own list",
        source=", ".join(map(shown, files)),
    )


def _file_of(loaded: ConfigResult | None, config_path: str) -> Path | None:
    if loaded is None or not loaded.path.startswith("file://"):
        return None
    return BoundedFileSource(loaded.provider, loaded.path.removeprefix("file://")).file(config_path)


def argument_parser(program: str, *, version: str = HYDRA_VERSION) -> argparse.ArgumentParser:
    """Hydra's parser of the command line, which raises ConfigError on a wrong flag.

    version: what --version says in the place of Hydra's own.
    """
    parser = get_args_parser()
    parser.prog = program

    def error(message: str) -> None:
        raise ConfigError([Fault(key="command line", got=message, expected="the flags of --help, and key=value")])

    (action,) = [action for action in parser._actions if "--version" in action.option_strings]
    action.version = version  # type: ignore[attr-defined]  # of the action "version" alone
    parser.error = error  # type: ignore[method-assign, assignment]  # the one way to its words
    return parser


def answer(loader: Loader, arguments: argparse.Namespace, *, config_name: str, overrides: list[str]) -> None:
    """Hydra's own answers to --cfg, --info and --hydra-help. Raises one of HYDRA_ERRORS."""
    from hydra._internal.hydra import Hydra

    root = logging.getLogger()
    kept = root.level, list(root.handlers), HydraConfig.instance().cfg
    with hydra_base():
        program = Hydra(task_name=config_name, config_loader=loader)
        try:
            if arguments.hydra_help:
                program.hydra_help(config_name=config_name, args_parser=argument_parser("exp"), args=arguments)
            elif arguments.cfg is not None:
                program.show_cfg(
                    config_name=config_name, overrides=overrides, cfg_type=arguments.cfg, package=arguments.package,
                    resolve=arguments.resolve,
                )  # fmt: skip
            else:
                program.show_info(arguments.info, config_name=config_name, overrides=overrides)
        finally:
            root.setLevel(kept[0])
            root.handlers[:] = kept[1]
            HydraConfig.instance().cfg = kept[2]


@secrets_kept()
def run_sweeper(config: DictConfig, loader: Loader, task: Any, *, directory: Path) -> None:
    """Lets the configured sweeper name the jobs and the configured launcher run them. No Hydra callbacks are made."""
    with hydra_base(), hydra_config(config):
        setup_globals()
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.mode = RunMode.MULTIRUN
        config.hydra.sweep.dir = str(directory)
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        try:
            sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
        except RuntimeError as error:
            got = f"{config.hydra.sweeper._target_}, and {one_line(error)}"
            raise ConfigError([Fault(key="hydra.sweeper", got=got, expected="a sweeper that can be made")]) from error
        sweeper.sweep(arguments=task_overrides(config))


def swept_texts(config: DictConfig) -> list[str] | None:
    """The overrides that Hydra's own sweeper or exp's will combine; None of another one, which may have others."""
    sweeper = config.hydra.sweeper
    if sweeper._target_ not in (BASIC_SWEEPER, OUR_SWEEPER):
        return None
    params = sweeper.params if "params" in sweeper and sweeper.params is not None else {}
    return [*(f"{key}={params[key]}" for key in params), *task_overrides(config)]


def task_overrides(config: DictConfig) -> list[str]:
    """The overrides of a composed config that are not Hydra's own, as typed: each job resolves `name=a${seed}`."""
    return recorded_overrides(config, "task")


def recorded_overrides(config: DictConfig, kind: str) -> list[str]:
    """Hydra's record of the overrides that a config was composed with. kind: hydra, or task for the others."""
    return cast(list[str], OmegaConf.to_container(config.hydra.overrides[kind], resolve=False))


def name_folder(config: DictConfig, overrides: Iterable[str]) -> None:
    """Set the name that Hydra makes for a folder of the overrides, `hydra.job.override_dirname`."""
    said = config.hydra.job.config.override_dirname
    config.hydra.job.override_dirname = get_overrides_dirname(
        [parse_override(text) for text in overrides],
        exclude_keys=said.exclude_keys, item_sep=said.item_sep, kv_sep=said.kv_sep,
    )  # fmt: skip


def job_return(*, overrides: Sequence[str], config: DictConfig | None, directory: str, value: float) -> JobReturn:
    """What a sweeper gets of one job: completed always, with nan for a failed one, or it would end the sweep."""
    result = JobReturn(overrides=list(overrides), cfg=config, working_dir=directory, status=JobStatus.COMPLETED)
    result.return_value = value
    return result
