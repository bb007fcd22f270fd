"""Calls of Hydra: compose configs, and run the sweepers of Hydra's plug-ins.

Hydra merges the chosen options of config groups. exp.config.values then applies the overrides of single values, because
Hydra would stop at the first error. This module mostly uses Hydra's public API. Some parts depend on Hydra 1.3.8: the
patterns of messages, `compute_defaults_list` of the config loader, and the name of BasicSweeper.
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
# Hydra's job name. By default, it would be the name of the program.
JOB_NAME = "train"
# Beginnings of overrides of Hydra's own settings.
HYDRAS = ("hydra.", "hydra/")
# Exceptions that Hydra and OmegaConf raise for a wrong config. Some of them come from an assert or a type conversion.
HYDRA_ERRORS = (
    HydraException, OmegaConfBaseException, OSError, ValueError, TypeError, AssertionError, KeyError, AttributeError,
    RecursionError,
)  # fmt: skip
MAX_MESSAGE = 300
# Comment line in a config file that sets the key at which the file is merged, such as `# @package _global_`.
HEADER = re.compile(r"#\s*@package\s+(\S+)")
# Patterns of messages of Hydra 1.3.8 and 1.4.0rc3 about a chosen option that conflicts with the defaults list. Each has
# the texts `got`, `expected` and `fix` of exp's error.
REFUSED_CHOICES = {
    r"In '(?P<file>[^']+)': (Could not override|.*No earlier Group Default for) '(?P<group>[^'@]+)@": (
        "an `override` that applies only to the key of this file", "an `override` of the top-level group",
        "Begin the file with the line `# @package _global_`, and put its keys below the name of the group",
    ),
    r"In '(?P<file>[^']+)': (Could not override|.*No earlier Group Default for) '(?P<group>[^']+)'": (
        "`override /{group}` without an entry /{group} in the defaults list",
        "a group that the primary config chooses before this file",
        "Write `- /{group}/NAME` to add an option of the group, or correct the name",
    ),
    r"Could not override '(?P<group>[^']+)'.*To append to your default list use (?P<added>\S+)": (
        "= for a group that the defaults list does not contain", "+, which adds an option", "Write {added}",
    ),
    r"(?P<group>[\w/]+) appears more than once in the final defaults list": (
        "two entries in the defaults lists", "one entry, which other files override",
        "Write `- /{group}/NAME` in the file, so that the command line can still select an option",
    ),
    r"Multiple values for (?P<group>[\w/]+)\.": (
        "+ for a group that has an option", "= to select another option", "Write {group}=NAME, without the +",
    ),
}  # fmt: skip
# Cache of config files that were converted to configs, because the conversion takes a third of the time of a
# composition. The values are pickled configs, because a composition changes the configs.
_loaded: dict[tuple[object, ...], bytes] = {}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A config file that is merged into a config.

    Args:
        config_path: Path in the defaults list, such as `model/mlp`.
        package: Dotted key at which the file is merged, such as `model`. `_global_`: the file is merged at the top
            level.
        file: Path of the YAML file. None: the config is not from a file of exp's directories, but registered by a
            plug-in.
    """

    config_path: str
    package: str
    file: Path | None

    @property
    def text(self) -> str:
        """Text format of the layer, such as `model/mlp@model=/conf/model/mlp.yaml`."""
        return f"{self.config_path}@{self.package}={self.file}"

    @classmethod
    def of(cls, text: str) -> Layer:
        """Return the layer from its text format, such as `model/mlp@model=/conf/model/mlp.yaml`."""
        place, _, file = text.partition("=")
        config_path, _, package = place.partition("@")
        return cls(config_path=config_path, package=package, file=Path(file))


class ConfigFolder(ConfigSource):
    """Config source for Hydra that reads a directory of YAML files with exp's size limits and error messages."""

    @staticmethod
    def scheme() -> str:
        return "exp"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigLoadError(f"{file} cannot be read: {error}") from error
        state = (file, self.provider, Path.cwd(), status.st_mtime_ns, status.st_size, status.st_ino)
        if state in _loaded:
            return cast(ConfigResult, pickle.loads(_loaded[state]))
        result = self._read(file, config_path)
        _loaded[state] = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        return result

    def _read(self, file: Path, config_path: str) -> ConfigResult:
        content = read_yaml(file)
        if content is not None and not isinstance(content, dict | list):
            got = f"only the value {content!r}"
            raise config_error(config_path, got=got, expected="a mapping of keys to values", source=display_path(file))
        settings = content.get("hydra") if isinstance(content, dict) else None
        if isinstance(settings, dict) and "searchpath" in settings:
            raise ConfigError([searchpath_error(settings["searchpath"], source=display_path(file))])
        # exp accepts the line `# @package` after other comment lines. Hydra accepts it only as the first line.
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


class OpenPlaces(SearchPathPlugin):
    """Hydra plug-in that adds directories of configs to Hydra's search path.

    Attributes:
        places: Directories to add. `open_hydra` sets them while exp composes a config.
    """

    places: Sequence[Place] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in OpenPlaces.places:
            path = f"{ConfigFolder.scheme()}://{place.directory}"
            search_path.prepend(place.provider, path, SearchPathQuery(provider="main"))


def searchpath_error(value: object, *, source: str | None = None) -> ErrorDetails:
    """Return the error for the setting `hydra.searchpath`.

    The setting is refused, because Hydra would import the packages in its value.

    Args:
        value: Value of the setting.
        source: File that contains the setting. Default: None, the source is unknown.
    """
    got = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    expected = "--config-dir DIR, or a package with an entry point exp.conf"
    return ErrorDetails("hydra.searchpath", got, expected, source=source)


@contextlib.contextmanager
def open_hydra(places: Sequence[Place]) -> Iterator[None]:
    """Initialize Hydra with directories of configs within the context. Hydra's previous global state is restored."""
    with hydra_base():
        _load_plugins()
        kept = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        OpenPlaces.places = places
        try:
            with hydra.initialize_config_dir(str(OWN_CONF), job_name=JOB_NAME, version_base=VERSION_BASE):
                yield
        finally:
            OpenPlaces.places = ()
            GlobalHydra.instance().hydra = kept


def _load_plugins() -> None:
    """Import the installed plug-ins of Hydra, and register exp's plug-ins.

    Raises:
        ConfigError: The import of an installed plug-in fails.
    """
    try:
        plugins = Plugins.instance()
    except (Exception, SystemExit) as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        files += [error.filename or ""] if isinstance(error, SyntaxError) else []
        of_plugins = [file for file in files if "hydra_plugins" in Path(file).parts]
        raise config_error(
            "hydra_plugins", got=f"a plug-in of Hydra that fails with {' '.join(one_line(error).split())}",
            expected="plug-ins that can be imported", fix="Fix the plug-in, or uninstall its package",
            source=of_plugins[-1] if of_plugins else None,
        ) from error  # fmt: skip
    for plugin in (ConfigFolder, OpenPlaces):
        plugins.register(plugin)


def compose_groups(
    places: Sequence[Place], *, config_name: str, overrides: Sequence[str]
) -> tuple[DictConfig, list[Layer]]:
    """Compose the primary config with the options that overrides choose.

    Args:
        places: Directories of configs.
        config_name: Name of the primary config, such as "train".
        overrides: Overrides that choose options of groups, such as `model=mlp`.

    Returns:
        Composed config, with the node `hydra`.
        Files that were merged, in the order of merging.

    Raises:
        ConfigError: The chosen options conflict with each other or do not exist, or a file cannot be read.
    """
    with open_hydra(places):
        try:
            loader = cast(Any, GlobalHydra.instance().config_loader())
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
            defaults = loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults
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
    """Change the interpolations in an option that is merged at another key, as in `model@vars.teacher=mlp`.

    In this example, `${model.width}` in the option becomes `${vars.teacher.width}`. Otherwise the option would refer to
    a value of the node `model`.

    Args:
        config: Composed config, which is changed in place.
        layer: File of the option.
    """
    group, place = layer.config_path.partition("/")[0], layer.package
    if group not in ONE or place in ("", "_global_", group) or place.startswith(f"{group}/"):
        return
    node = OmegaConf.select(config, place)
    plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else {}
    for key, text in leaves(plain):
        if isinstance(text, str) and f"${{{group}." in text:
            OmegaConf.update(node, key, text.replace(f"${{{group}.", f"${{{place}."))


def error_of(error: Exception) -> ErrorDetails:
    """Return exp's error for an exception that Hydra or OmegaConf raised."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_config_error(error, error.missing_cfg_file)
    for pattern, words in REFUSED_CHOICES.items():
        found = re.search(pattern, str(error), re.DOTALL)
        if found is not None:
            named = found.groupdict()
            got, expected, fix = (text.format(**named) for text in words)
            of_command = COMMAND_LINE if "added" in named else None
            source = f"{named['file']}.yaml" if "file" in named else of_command
            return ErrorDetails(named["group"], got, expected, fix, source=source)
    causes = list(chain_of(error, explicit=True))
    if any(isinstance(cause, RecursionError) for cause in causes):
        got = "files that include each other in their defaults lists, or values nested too deeply"
        return ErrorDetails("config", got, "at most 60 levels")
    texts = [text for text in map(_short, causes) if text]
    key = next((cause.full_key for cause in causes if isinstance(cause, OmegaConfBaseException) and cause.full_key), "")
    detail = "; ".join(dict.fromkeys(texts)) or type(error).__name__
    return ErrorDetails(str(key) or "config", detail, "a config that can be composed")


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
    """Resolve interpolations such as `${hydra:job.num}` from this config within the context.

    Hydra's previous config is restored at the end.

    Args:
        config: Composed config, with the node `hydra`.
    """
    kept = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    # Hydra makes the node read-only.
    OmegaConf.set_readonly(config.hydra, False)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = kept


def registered_targets() -> set[str]:
    """Return the dotted names of all classes that installed Hydra plug-ins provide.

    They are the plug-in classes, and the classes in each `_target_` of the configs that the plug-ins have registered.
    """
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
    """Return the options that Hydra and its plug-ins registered for a config group, such as `hydra/launcher`."""
    _load_plugins()
    return [name.removesuffix(".yaml") for name in ConfigStore.instance().list(group)]


class JobConfigs:
    """Replacement of Hydra's config loader for sweepers. It does not compose the configs of jobs.

    A sweeper asks the loader for the config of each job. This class returns the config of the sweep unchanged, because
    exp composes the config of the job later, from the overrides that the sweeper selects.
    """

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        return master_config


@secrets_kept()
def run_sweeper(config: DictConfig, task: Any, *, directory: Path) -> None:
    """Run the Hydra sweeper in the config. The sweeper chooses the overrides of each job, and exp runs the jobs.

    Args:
        config: Composed config of the sweep, with the node `hydra`.
        task: Task function that is passed to the sweeper.
        directory: Directory of the sweep.

    Raises:
        ConfigError: The sweeper cannot be built.
    """
    with hydra_base(), hydra_config(config):
        config.hydra.mode = RunMode.MULTIRUN
        config.hydra.sweep.dir = str(directory)
        context = HydraContext(config_loader=cast(Any, JobConfigs()), callbacks=cast(Any, None))
        try:
            sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
        except RuntimeError as error:
            got = f"{config.hydra.sweeper['_target_']}, which failed with {one_line(error)}"
            raise config_error("hydra.sweeper", got=got, expected="a sweeper that can be built") from error
        sweeper.sweep(arguments=recorded_overrides(config))


def swept_texts(config: DictConfig) -> list[str] | None:
    """Return the overrides of a sweep from `hydra.sweeper.params` and from the command line.

    Args:
        config: Composed config of the sweep, with the node `hydra`.

    Returns:
        Overrides as typed. None if the sweeper is neither exp's nor Hydra's BasicSweeper.
    """
    sweeper = config.hydra.sweeper
    if sweeper["_target_"] not in (BASIC_SWEEPER, OUR_SWEEPER):
        return None
    params = sweeper.params if "params" in sweeper and sweeper.params is not None else {}
    return [*(f"{key}={params[key]}" for key in params), *recorded_overrides(config)]


def record_overrides(config: DictConfig, overrides: Iterable[str]) -> None:
    """Write the overrides of the command to the node `hydra` of a config, in place.

    The keys are `hydra.overrides` and `hydra.job.override_dirname`, a text of the overrides for directory names.
    """
    own = [text for text in overrides if not text.lstrip("+~").startswith(HYDRAS)]
    config.hydra.overrides.task = own
    config.hydra.overrides.hydra = [text for text in overrides if text not in own]
    words = config.hydra.job.config.override_dirname
    named = sorted(text for text in own if parse_override(text).key_or_group not in words.exclude_keys)
    config.hydra.job.override_dirname = words.item_sep.join(named).replace("=", words.kv_sep)


def recorded_overrides(config: DictConfig, kind: str = "task") -> list[str]:
    """Return the overrides that `record_overrides` wrote.

    Interpolations in overrides, as in `name=a${seed}`, are not resolved, because their values differ between jobs.

    Args:
        config: Composed config, with the node `hydra`.
        kind: "task" for overrides of exp's keys, "hydra" for overrides of Hydra's settings. Default: "task".
    """
    return cast(list[str], OmegaConf.to_container(config.hydra.overrides[kind], resolve=False))


def job_return(*, overrides: Sequence[str], config: DictConfig | None, directory: str, value: float) -> JobReturn:
    """Return the result of a job for Hydra's sweeper.

    The status is always COMPLETED, because sweepers stop the whole sweep at any other status.

    Args:
        overrides: Overrides of the job.
        config: Config of the job. None: it could not be composed.
        directory: Run directory of the job.
        value: Value that the sweeper optimizes.
    """
    result = JobReturn(overrides=list(overrides), cfg=config, working_dir=directory, status=JobStatus.COMPLETED)
    result.return_value = value
    return result
