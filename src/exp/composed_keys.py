"""The keys of a config as far as a command line says it, and the words that their values may be, for a completion.

They are merged of the YAML files alone, at each key that is pressed. What only Hydra knows takes half a second, so that
it is kept in a file, with what it was made of: the folders of configs as they were. Names of keys alone are kept, for a
value may be a secret.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import types
import typing
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from exp.config.plain_tree import is_node
from exp.config.search_path import search_places

ENV_FILE = ".env"
# Of the command lines that were completed last.
MOST_KEPT = 30
SEVERAL = re.compile(r"(\+?[\w/]+=[\w/]+)(,[\w/]+)+")


class Keys(NamedTuple):
    """The keys of a config.

    nodes: names, each with the same below it, and with None where it is a value. switches: the dotted keys of values
    that are true or false. targets: of a node its `_target_`.
    """

    nodes: dict[str, Any]
    switches: Sequence[str]
    targets: dict[str, str]

    @classmethod
    def of(cls, plain: dict[Any, Any]) -> Keys:
        """The keys of a config of plain values."""
        values = dict(_values(plain))
        return cls(
            nodes=_names(plain) or {},
            switches=[key for key, value in values.items() if isinstance(value, bool)],
            targets={key: str(value["_target_"]) for key, value in values.items() if is_node(value)},
        )

    def below(self, key: str) -> dict[str, Any]:
        """What is below a dotted key, what its class takes included; nothing where it is a value, or is not there."""
        _, node = self._at(key)
        return {**(node or {}), **dict.fromkeys(self._parameters(key, without=node or {}))}

    def words_of(self, key: str) -> list[str]:
        """The words that the value of a dotted key may be, where these are few.

        Those of what exp declares of it, else of what it is now, else of what the class takes at whose node it stands.
        """
        parent, _, name = key.rpartition(".")
        is_there, _ = self._at(key)
        words = _declared_words(key) if is_there else []
        if not words and key in self.switches:
            words = ["true", "false"]
        return words or self._parameters(parent).get(name, [])

    def _at(self, key: str) -> tuple[bool, dict[str, Any] | None]:
        """Whether a dotted key is there, and the names below it."""
        node: Any = self.nodes
        for part in key.split(".") if key else ():
            if not isinstance(node, dict) or part not in node:
                return False, None
            node = node[part]
        return True, node

    def _parameters(self, key: str, *, without: Container[str] = ()) -> dict[str, list[str]]:
        from exp.config.slots import slot_of
        from exp.source_signature import parameters_in_source

        if key not in self.targets:
            return {}
        # What exp gives itself, or has another key for.
        slot = slot_of(key)
        hidden = {*slot.filled, *slot.refused}
        found = parameters_in_source(self.targets[key])
        return {name: words for name, words in found.items() if name not in hidden and name not in without}


def keys_of(words: Sequence[str], *, config_dir: str | None, config_name: str, asked: str) -> Keys:
    """The keys of the config that these overrides make; those that are wrong are left out.

    asked: the key of which something is to be known. Hydra's own node is there where it is one below that.
    """
    from exp.config.merged_files import NeedsHydra, merged

    places = [str(place.directory) for place in search_places(config_dir=config_dir)]
    words = [word for word in words if _may_change_keys(word)]
    of_hydra = asked.partition(".")[0] == "hydra"
    if not of_hydra and not any(word.startswith("from_run=") for word in words):
        try:
            first = [SEVERAL.sub(r"\1", word) for word in words]  # of a sweep the first choice
            return Keys.of(merged(first, places=places, config_name=config_name))
        except NeedsHydra:
            pass
    return _kept_keys(words, places, config_dir=config_dir, config_name=config_name)


def _kept_keys(words: Sequence[str], places: Sequence[str], *, config_dir: str | None, config_name: str) -> Keys:
    """The keys by Hydra, or as they are kept in the file."""
    asked = json.dumps([__file__, os.stat(__file__).st_mtime_ns, os.getcwd(), places, config_name, words])
    name = hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()
    kept = _read()
    found = kept.pop(name, None)
    if found is None or any(_state(place) != state for place, state in found["made_of"].items()):
        # As they are before they are read: a file that changes meanwhile is read again the next time.
        states = {place: _state(place) for place in (*places, ENV_FILE)}
        keys, others = _composed(words, config_dir=config_dir, config_name=config_name)
        found = {"made_of": states | {place: _state(place) for place in others}, **keys._asdict()}
    _write({**kept, name: found})
    return Keys(nodes=found["nodes"], switches=found["switches"], targets=found["targets"])


def _may_change_keys(word: str) -> bool:
    """Whether an override may add or take away keys: what gives a dotted key a plain value does not."""
    key, _, value = word.partition("=")
    is_plain = "." in key and key[0] not in "+~" and {"{", "$"}.isdisjoint(value)
    return not is_plain or key.startswith("hydra.") or key.endswith("_target_")


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exp" / "completion.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is torn: it is made again
        return {}
    return found if isinstance(found, dict) else {}


def _write(kept: dict[str, Any]) -> None:
    """Keep what is known of the last command lines, whole or not at all; where that cannot be, it takes longer."""
    file = _file()
    last = dict(list(kept.items())[-MOST_KEPT:])
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps(last, separators=(",", ":")), encoding="utf-8")
        new.replace(file)
    except OSError:
        pass


def _state(place: str) -> str:
    """What changes when a YAML file in a folder, or a file, does."""
    seen = hashlib.sha256()
    # A folder of that name is a virtual environment, of thousands of files.
    walked = () if place == ENV_FILE else os.walk(place)
    files = [os.path.join(folder, name) for folder, _, names in walked for name in sorted(names)]
    for file in sorted(name for name in files if name.endswith(".yaml")) or [place]:
        try:
            found = os.stat(file)
        except OSError:
            continue
        seen.update(f"{file}\0{found.st_mtime_ns}\0{found.st_size}\0".encode("utf-8", "surrogateescape"))
    return seen.hexdigest()


def _composed(words: Sequence[str], *, config_dir: str | None, config_name: str) -> tuple[Keys, list[str]]:
    """The keys, and the further folders of configs that the config itself asks for."""
    from omegaconf import OmegaConf

    from exp.config.groups import open_search_path
    from exp.config.hydra_adapter import HYDRA_ERRORS
    from exp.config.overrides import checked_lines, diagnose, for_hydra
    from exp.errors import ConfigError

    overrides: Sequence[str] = [SEVERAL.sub(r"\1", word) for word in words]  # of a sweep the first choice
    if any(word.startswith("from_run=") for word in overrides):
        overrides = _of_found_run(overrides, config_dir=config_dir, config_name=config_name)
    loader, vocabulary = open_search_path(config_dir=config_dir, config_name=config_name, overrides=overrides)
    lines, _ = checked_lines(overrides, vocabulary, multirun=True)
    try:
        given = for_hydra(lines, vocabulary)
        config = loader.compose(config_name=config_name, overrides=given, multirun=True)
    except (ConfigError, *HYDRA_ERRORS):
        chosen = diagnose(loader, lines).config
        config = OmegaConf.create({}) if chosen is None else chosen
    plain = cast(dict[Any, Any], OmegaConf.to_container(config, resolve=False, enum_to_str=True))
    paths = [str(element.path).removeprefix("file://") for element in loader.get_search_path().get_path()]
    return Keys.of(plain), [path for path in paths if os.path.isdir(path)]


def _of_found_run(overrides: Sequence[str], *, config_dir: str | None, config_name: str) -> Sequence[str]:
    from exp.config.compose import expanded
    from exp.errors import ExpError

    try:
        return expanded(overrides, config_dir=config_dir, config_name=config_name, multirun=True)
    except ExpError:  # of a run that is not there
        return [word for word in overrides if not word.startswith("from_run=")]


def _names(node: Any) -> Any:
    return {str(key): _names(value) for key, value in node.items()} if isinstance(node, dict) and node else None


def _values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{key}.")


def _declared_words(key: str) -> list[str]:
    """The words that exp declares of the value of a key."""
    from exp.check.keys import SCHEMA, VALUES

    declared: Any = SCHEMA
    for part in key.split("."):
        declared = declared.get(part) if isinstance(declared, dict) else None
    if declared is None:
        patterns = (
            pattern for pattern in VALUES if re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), key)
        )
        declared = next((VALUES[pattern] for pattern in patterns), None)
    return list(_literals(declared))


def _literals(declared: Any) -> Iterator[str]:
    origin = typing.get_origin(declared)
    if declared is bool:
        yield from ("true", "false")
    elif origin is Literal:
        yield from map(str, typing.get_args(declared))
    elif origin is typing.Annotated:
        yield from _literals(typing.get_args(declared)[0])
    elif origin in (typing.Union, types.UnionType):
        inner = [word for one in typing.get_args(declared) for word in _literals(one)]
        yield from dict.fromkeys([*inner, *(["null"] if inner and type(None) in typing.get_args(declared) else [])])
