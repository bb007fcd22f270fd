"""Composition by Hydra's public API, and the sweepers of Hydra's plug-ins.

Hydra composes the groups. `values` applies the other overrides afterwards, because Hydra's own merging stops at the
first error. The patterns of messages, `compute_defaults_list` and `repository` of the loader, and the name of
BasicSweeper are those of Hydra 1.3.8.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.grammar import VERSION_BASE, hydra_base, parse_override
from exp.config.plain_tree import leaves
from exp.config.reading import secrets_kept
from exp.config.search_path import OWN_CONF, Place, display_path
from exp.config.slots import ONE, nodes_in, package_of_flat
from exp.config.yaml_files import read_yaml
from exp.errors import COMMAND_LINE, ConfigError, ErrorDetails, chain_of, config_error, one_line, unknown_word

HYDRA_VERSION = hydra.__version__
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
OUR_SWEEPER = "hydra_plugins.exp.sweeper.ExpSweeper"
# Hydra names a job after the program.
JOB_NAME = "train"
# Overrides of Hydra's own settings.
HYDRAS = ("hydra.", "hydra/")
# Exceptions of Hydra and OmegaConf for a wrong config, some of them from an assert or a conversion.
HYDRA_ERRORS = (
    HydraException, OmegaConfBaseException, OSError, ValueError, TypeError, AssertionError, KeyError, AttributeError,
    RecursionError,
)  # fmt: skip
MAX_MESSAGE = 300
# The line that states where the values of a file belong.
HEADER = re.compile(r"#\s*@package\s+(\S+)")
# Messages of Hydra 1.3.8 and 1.4.0rc3 about a choice that the defaults list has no place for: got, expected, fix.
REFUSED_CHOICES = {
    r"In '(?P<file>[^']+)': (Could not override|.*No earlier Group Default for) '(?P<group>[^'@]+)@": (
        "an override of the file's own node", "an override of the whole config",
        "Begin the file with the line `# @package _global_`, and put its own keys below the name of its group",
    ),
    r"In '(?P<file>[^']+)': (Could not override|.*No earlier Group Default for) '(?P<group>[^']+)'": (
        "`override /{group}` without an entry /{group} in the defaults list",
        "a group that the primary config chooses before this file",
        "Write `- /{group}/NAME` to add an option of it, or correct the name",
    ),
    r"Could not override '(?P<group>[^']+)'.*To append to your default list use (?P<added>\S+)": (
        "= on a group without a choice in the defaults list", "+ to add to it", "Write {added}",
    ),
    r"In '(?P<file>(?P<group>[^'/]+)[^']*)': .*Cannot merge ((Dict|List)Config with|incompatible container)": (
        "a mapping for a list of another file, or a list for a mapping", "the same kind in both",
        "Write it on the command line, where it replaces the other",
    ),
    r"(?P<group>[\w/]+) appears more than once in the final defaults list": (
        "two entries of the defaults list", "one entry that the others override",
        "Write `- /{group}/NAME` in a file that selects an option which the command line may replace",
    ),
    r"Multiple values for (?P<group>[\w/]+)\.": (
        "chosen by the defaults list already", "= to choose another", "Write {group}=NAME, without the +",
    ),
}  # fmt: skip
# Making the configs of files is a third of a composition. They are kept pickled, because a composition changes them.
MOST_LOADED = 1_024
_loaded: dict[tuple[object, ...], bytes] = {}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A file of the defaults list, such as `model/mlp` merged at `model`."""

    config_path: str
    package: str
    file: Path | None

    @property
    def text(self) -> str:
        """Return the entry of Hydra's defaults list with the file: `model/mlp@model=/conf/model/mlp.yaml`."""
        return f"{self.config_path}@{self.package}={self.file}"

    @classmethod
    def of(cls, text: str) -> Layer:
        """Return the layer of a `text`."""
        place, _, file = text.partition("=")
        config_path, _, package = place.partition("@")
        return cls(config_path=config_path, package=package, file=Path(file))


class ConfigFolder(ConfigSource):
    """Reads the YAML files of a place of configs, with exp's limits and messages."""

    # The file that was read last.
    last: Path | None = None

    @staticmethod
    def scheme() -> str:
        return "exp"

    def load_config(self, config_path: str) -> ConfigResult:
        file = ConfigFolder.last = self._file(config_path)
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigLoadError(f"{file} cannot be read: {error}") from error
        state = (file, self.provider, Path.cwd(), status.st_mtime_ns, status.st_size, status.st_ino)
        if state in _loaded:
            return cast(ConfigResult, pickle.loads(_loaded[state]))
        result = self._read(file, config_path)
        if len(_loaded) >= MOST_LOADED:
            _loaded.clear()
        _loaded[state] = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        return result

    def _read(self, file: Path, config_path: str) -> ConfigResult:
        content = read_yaml(file)
        if content is not None and not isinstance(content, dict | list):
            got = f"one value, {content!r}"
            raise config_error(config_path, got=got, expected="keys and values", source=display_path(file))
        settings = content.get("hydra") if isinstance(content, dict) else None
        if isinstance(settings, dict) and "searchpath" in settings:
            raise ConfigError([searchpath_error(settings["searchpath"], source=display_path(file))])
        # Hydra looks for the header in the first line alone.
        with file.open(encoding="utf-8") as lines:
            comments = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), lines)
            package = next((found[1] for line in comments if (found := HEADER.match(line))), None)
        try:
            config = OmegaConf.create({} if content is None else content)
        except OmegaConfBaseException as error:
            raise config_error(
                str(error.full_key or config_path), got=str(error).splitlines()[0],
                expected="a value that OmegaConf can read", source=display_path(file),
            ) from error  # fmt: skip
        header = {"package": package or package_of_flat(config_path, content)}
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        entries = sorted((Path(self.path) / config_path).iterdir())
        groups = [path.name for path in entries if path.is_dir()]
        configs = [path.stem for path in entries if path.suffix == ".yaml"]
        wanted = {ObjectType.GROUP: groups, ObjectType.CONFIG: configs}
        return [*groups, *configs] if results_filter is None else wanted[results_filter]


class Repository:
    """Loads each config once for a composition and for its defaults list, which Hydra computes separately."""

    def __init__(self, repository: Any) -> None:
        self._repository = repository
        self._loaded: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._repository, name)

    def __deepcopy__(self, memo: object) -> Repository:
        return self

    def load_config(self, config_path: str) -> object:
        """Return the config that the search path has, or None."""
        if config_path not in self._loaded:
            self._loaded[config_path] = self._repository.load_config(config_path)
        return self._loaded[config_path]


class OpenPlaces(SearchPathPlugin):
    """Puts the places of exp's configs into Hydra's search path while exp composes."""

    places: Sequence[Place] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in OpenPlaces.places:
            path = f"{ConfigFolder.scheme()}://{place.directory}"
            search_path.prepend(place.provider, path, SearchPathQuery(provider="main"))


def hydra_error(key: str, got: str, expected: str, fix: str | None = None, source: str | None = None) -> ErrorDetails:
    """Return the error of a setting of Hydra, or of a composition."""
    return ErrorDetails(key, got, expected, fix, source=source)


def searchpath_error(value: object, *, source: str | None = None) -> ErrorDetails:
    """Return the error of `hydra.searchpath`, which may name packages that Hydra would import."""
    got = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    expected = "--config-dir DIR, or a package with an entry point exp.conf"
    return hydra_error("hydra.searchpath", got, expected, source=source)


@contextlib.contextmanager
def open_hydra(places: Sequence[Place]) -> Iterator[None]:
    """Initialize Hydra with the places of configs, and restore its global state afterwards."""
    with hydra_base():
        _load_plugins()
        kept = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        OpenPlaces.places = places
        ConfigFolder.last = None
        try:
            with hydra.initialize_config_dir(str(OWN_CONF), job_name=JOB_NAME, version_base=VERSION_BASE):
                yield
        finally:
            OpenPlaces.places = ()
            GlobalHydra.instance().hydra = kept


def _load_plugins() -> None:
    """Have Hydra import its plug-ins, and add exp's.

    Raises:
        ConfigError: An installed plug-in fails when it is imported.
    """
    try:
        plugins = Plugins.instance()
    except (Exception, SystemExit) as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        files += [error.filename or ""] if isinstance(error, SyntaxError) else []
        of_plugins = [file for file in files if "hydra_plugins" in Path(file).parts]
        raise config_error(
            "hydra_plugins", got=f"a plug-in of Hydra that fails with {' '.join(one_line(error).split())}",
            expected="plug-ins that can be imported", fix="Fix it, or uninstall the package that brings it",
            source=of_plugins[-1] if of_plugins else None,
        ) from error  # fmt: skip
    for plugin in (ConfigFolder, OpenPlaces):
        plugins.register(plugin)


def compose_groups(
    places: Sequence[Place], *, config_name: str, overrides: Sequence[str]
) -> tuple[DictConfig, list[Layer]]:
    """Compose the primary config and the options that overrides choose.

    Returns:
        The config with the hydra node, and its files in the order of merging.

    Raises:
        ConfigError: The choices do not compose, or a file cannot be read.
    """
    with open_hydra(places):
        try:
            loader = cast(Any, GlobalHydra.instance().config_loader())
            loader.repository = Repository(loader.repository)
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
            defaults = loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults
        except RecursionError as error:
            if ConfigFolder.last is None:
                raise
            # A circle begins at the last file that was not read before.
            raise config_error(
                "defaults", got="a defaults list that leads back to itself",
                expected="configs that do not include each other", source=display_path(ConfigFolder.last),
            ) from error  # fmt: skip
        except HYDRA_ERRORS as error:
            raise ConfigError([error_of(error)]) from error
    layers = [_layer(places, one.config_path or "", one.package or "") for one in defaults]
    for layer in layers:
        _lead_references(config, layer)
    return config, layers


def _layer(places: Sequence[Place], config_path: str, package: str) -> Layer:
    files = (place.directory / f"{config_path}.yaml" for place in places)
    file = next((file for file in files if file.is_file()), None)
    return Layer(config_path=config_path, package=package, file=file)


def _lead_references(config: DictConfig, layer: Layer) -> None:
    """Make `${model.width}` in an option refer to the option's node if `model@vars.teacher` merges it elsewhere."""
    group, place = layer.config_path.partition("/")[0], layer.package
    if group not in ONE or place in ("", "_global_", group) or place.startswith(f"{group}/"):
        return
    node = OmegaConf.select(config, place)
    plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else {}
    for key, text in leaves(plain):
        if isinstance(text, str) and f"${{{group}." in text:
            OmegaConf.update(node, key, text.replace(f"${{{group}.", f"${{{place}."))


def error_of(error: Exception) -> ErrorDetails:
    """Return one error for an exception of Hydra or OmegaConf."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_config_error(error, error.missing_cfg_file)
    for pattern, words in REFUSED_CHOICES.items():
        found = re.search(pattern, str(error), re.DOTALL)
        if found is not None:
            named = found.groupdict()
            got, expected, fix = (text.format(**named) for text in words)
            of_command = COMMAND_LINE if "added" in named else None
            source = f"{named['file']}.yaml" if "file" in named else of_command
            return hydra_error(named["group"], got, expected, fix, source)
    causes = list(chain_of(error, explicit=True))
    if any(isinstance(cause, RecursionError) for cause in causes):
        return hydra_error("config", "nested too deeply, or into itself", "a few levels")
    texts = [text for text in map(_short, causes) if text]
    key = next((cause.full_key for cause in causes if isinstance(cause, OmegaConfBaseException) and cause.full_key), "")
    detail = "; ".join(dict.fromkeys(texts)) or type(error).__name__
    return hydra_error(str(key) or "config", detail, "a config that can be composed")


def _missing_config_error(error: MissingConfigException, path: str) -> ErrorDetails:
    group, _, option = path.rpartition("/")
    named_by = re.match(r"In '([^']+)'", str(error))
    source = f"defaults list of {named_by[1]}" if named_by else None
    got = f"there is no option {option!r}" if group else "no such config"
    return unknown_word(group or path, option, error.options or [], got=got, source=source)


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).partition("\nConfig search path:")[0].splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(kept)[:MAX_MESSAGE]


@contextlib.contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Let `${hydra:...}` find the hydra node of this config, and restore the earlier one afterwards."""
    kept = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    # Hydra makes the node read-only.
    OmegaConf.set_readonly(config.hydra, False)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = kept


def registered_targets() -> set[str]:
    """Return every `_target_` that installed Hydra plug-ins registered, and the names of the plug-in classes."""
    found = set(Plugins.instance().class_name_to_class)

    def collect(node: object) -> None:
        if isinstance(node, dict):
            for value in node.values():
                collect(value)
        elif hasattr(node, "node"):
            plain = OmegaConf.to_container(node.node, resolve=False, throw_on_missing=False)
            found.update(str(inner["_target_"]) for _, inner in nodes_in(plain))

    with hydra_base():
        collect(ConfigStore.instance().repo["hydra"])
    return found


def registered_options(group: str) -> list[str]:
    """Return the options that Hydra and its plug-ins registered for a group."""
    _load_plugins()
    return [name.removesuffix(".yaml") for name in ConfigStore.instance().list(group)]


class JobConfigs:
    """Replaces Hydra's config loader, with which a sweeper composes each job. exp composes jobs later."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        return master_config


@secrets_kept()
def run_sweeper(config: DictConfig, task: Any, *, directory: Path) -> None:
    """Run the configured sweeper, which names the jobs. exp's launcher runs them."""
    with hydra_base(), hydra_config(config):
        config.hydra.mode = RunMode.MULTIRUN
        config.hydra.sweep.dir = str(directory)
        context = HydraContext(config_loader=cast(Any, JobConfigs()), callbacks=cast(Any, None))
        try:
            sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
        except RuntimeError as error:
            got = f"{config.hydra.sweeper['_target_']}, and {one_line(error)}"
            raise config_error("hydra.sweeper", got=got, expected="a sweeper that can be made") from error
        sweeper.sweep(arguments=recorded_overrides(config))


def swept_texts(config: DictConfig) -> list[str] | None:
    """Return the overrides that exp's or Hydra's own sweeper combines; None for another sweeper."""
    sweeper = config.hydra.sweeper
    if sweeper["_target_"] not in (BASIC_SWEEPER, OUR_SWEEPER):
        return None
    params = sweeper.params if "params" in sweeper and sweeper.params is not None else {}
    return [*(f"{key}={params[key]}" for key in params), *recorded_overrides(config)]


def record_overrides(config: DictConfig, overrides: Iterable[str]) -> None:
    """Record the typed overrides in the hydra node, and set `hydra.job.override_dirname`."""
    own = [text for text in overrides if not text.lstrip("+~").startswith(HYDRAS)]
    config.hydra.overrides.task = own
    config.hydra.overrides.hydra = [text for text in overrides if text not in own]
    words = config.hydra.job.config.override_dirname
    named = sorted(text for text in own if parse_override(text).key_or_group not in words.exclude_keys)
    config.hydra.job.override_dirname = words.item_sep.join(named).replace("=", words.kv_sep)


def recorded_overrides(config: DictConfig, kind: str = "task") -> list[str]:
    """Return the overrides as typed, so that each job resolves `name=a${seed}`. kind: hydra for Hydra's own."""
    return cast(list[str], OmegaConf.to_container(config.hydra.overrides[kind], resolve=False))


def job_return(*, overrides: Sequence[str], config: DictConfig | None, directory: str, value: float) -> JobReturn:
    """Return the result of a job for a sweeper. Its status is completed: with another one, a sweeper ends the sweep."""
    result = JobReturn(overrides=list(overrides), cfg=config, working_dir=directory, status=JobStatus.COMPLETED)
    result.return_value = value
    return result
