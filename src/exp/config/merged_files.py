"""The config that a command line's choices make, merged of the YAML files alone, for a completion: without Hydra.

Hydra takes half a second to import and to compose, and a key that is pressed has a third of one. What follows does with
a defaults list, with packages and with overrides what Hydra does (1.3.8) as far as configs go in practice. Of all else,
and of whatever is wrong, it raises NeedsHydra, and Hydra is asked. tests/command/test_completion.py compares the two
together.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from exp.config.group_kinds import AXIS, MANY, OF_CLASSES, package_of_flat
from exp.config.habits import cure_of_key

# More than any config asks for: such a defaults list leads back to itself.
MOST_FILES = 500
MAX_BYTES = 200_000
HEADER = re.compile(r"#\s*@package\s+(\S+)\s*")
PACKAGE = re.compile(r"[\w.]*")
CHOICE = re.compile(r"(\+?)([\w/]+)=(\[(?:[\w/-]+(?:,[\w/-]+)*)?\]|[\w/-]*)")
SETTING = re.compile(r"(\+\+|\+|~|)([A-Za-z_][\w.]*)(?:=(.*))?")
# Of the values that Hydra's grammar knows, those that are one word, or a list of such.
PLAIN = re.compile(r"[\w./:%+-]*|\[(?:[\w./:%+-]+(?:,[\w./:%+-]+)*)?\]")
# What it takes for another thing than a text.
NO_TEXT = re.compile(r"true|false|null|nan|[+-]?inf|[+-]?[\d_]+|[+-]?[\d_]*\.[\d_]*(e[+-]?\d+)?|.*\d+e[+-]?\d+", re.I)
# The line of a defaults list at which a file's own values go in.
OWN = "_self_"
# A place of groups of the user's own is none of these.
NO_GROUPS = ("hydra", "local", "module")


class NeedsHydra(Exception):
    """What is not merged here."""


class Default(NamedTuple):
    """A line of a defaults list.

    folder: of the option, below the file's own where it is not absolute. option: one, several, or none. package: where
    it is put, None where that is left to the option. is_group: whether another option may be chosen in its place.
    """

    folder: str
    option: str | list[str] | None
    package: str | None = None
    is_absolute: bool = False
    is_group: bool = False
    is_optional: bool = False
    is_override: bool = False

    def path(self, base: str) -> str:
        """The folder of the option from the top. base: that of the file whose defaults list it is."""
        return self.folder if self.is_absolute else "/".join(part for part in (base, self.folder) if part)

    def place(self, above: str, header: str | None = None) -> str:
        """The dotted key that the option is merged at. above: that of the file which names it."""
        own = self.package if self.package is not None else header
        parts = (above, self.folder.replace("/", ".") if own is None else own)
        whole = ".".join(part for part in parts if part)
        return whole.rpartition("_global_")[2].removeprefix(".")

    def key(self, base: str, above: str) -> str:
        """What an override names it by."""
        group, place = self.path(base), self.place(above)
        return group if place == group.replace("/", ".") else f"{group}@{place or '_global_'}"


class File(NamedTuple):
    """A YAML file of configs. header: the package that it names itself."""

    content: dict[Any, Any]
    defaults: list[Default]
    header: str | None


def merged(words: Sequence[str], *, places: Sequence[str], config_name: str) -> dict[Any, Any]:
    """The plain values of the config, Hydra's own node left out.

    words: overrides, each with one value alone. places: folders of configs, the best first.
    Raises: NeedsHydra.
    """
    try:
        files = _Files(places, config_name)
        choices, settings = _divided(words, files)
        tree = _Tree(files, choices)
        config: dict[Any, Any] = {}
        for content, place in tree.layers():
            for part in reversed(place.split(".") if place else []):
                content = {part: content}
            _merge(config, content)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # told by the command itself
        raise NeedsHydra from error
    if "searchpath" in (config.pop("hydra", None) or {}):
        raise NeedsHydra
    for setting in settings:
        _set(config, *setting)
    return config


class _Files:
    """The files below the places of configs, each read once."""

    def __init__(self, places: Sequence[str], config_name: str) -> None:
        self._places = places
        self._read: dict[str, File | None] = {}
        primary = self.load(config_name)
        if primary is None or "/" in config_name or primary.header is not None:
            raise NeedsHydra
        self.config_name, self.primary = config_name, primary
        # Groups that a primary config chooses of, its own or that of exp, from which it begins.
        self.declared: set[str] = set()
        self.keys: set[str] = set()
        waiting, seen = [config_name], set()
        while waiting:
            name = waiting.pop()
            file = self.load(name)
            if name in seen or file is None:
                continue
            seen.add(name)
            self.keys |= {str(key) for key in file.content}
            self.declared |= {one.folder for one in file.defaults if one.is_group}
            waiting += [f"{one.folder}/{one.option}".lstrip("/") for one in file.defaults if not one.is_group]

    def load(self, path: str) -> File | None:
        """A config by its path from a place of configs, without .yaml; None where it is not there."""
        if path not in self._read:
            file = next(filter(os.path.isfile, (f"{place}/{path}.yaml" for place in self._places)), None)
            self._read[path] = None if file is None else _file(path, file)
        return self._read[path]

    def is_group(self, name: str) -> bool:
        return any(os.path.isdir(f"{place}/{name}") for place in self._places)

    def is_own_group(self, name: str) -> bool:
        """Whether a group stands in no primary config and is not exp's, so that + adds of it."""
        top = name.partition("/")[0]
        ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), "conf")
        return name not in self.declared and top not in NO_GROUPS and not os.path.exists(os.path.join(ours, top))


def _file(path: str, file: str) -> File:
    with open(file, encoding="utf-8") as opened:
        text = opened.read(MAX_BYTES + 1)
    # An anchor may stand for more values than there is memory for.
    if len(text) > MAX_BYTES or "&" in text:
        raise NeedsHydra
    content = yaml.load(text, _loader())
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise NeedsHydra
    comments = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines())
    headers = [found[1] for line in comments if (found := HEADER.match(line))]
    if not headers and (package := package_of_flat(path, content)):
        headers = [package]
    if len(headers) > 1 or not all(map(PACKAGE.fullmatch, headers)):
        raise NeedsHydra
    header = None if not headers else headers[0] if headers[0].startswith("_global_") else f"_global_.{headers[0]}"
    defaults = content.pop("defaults", [])
    if not isinstance(defaults, list):
        raise NeedsHydra
    return File(content, [one for line in defaults if (one := _default(line)) is not None], header)


def _default(line: object) -> Default | None:
    """A line of a defaults list; None of one that chooses of Hydra's own groups."""
    is_group = isinstance(line, dict)
    if isinstance(line, dict):
        if len(line) != 1:
            raise NeedsHydra
        ((written, option),) = line.items()
    else:
        written, option = line, None
    if not isinstance(written, str):
        raise NeedsHydra
    *marks, name = written.split(" ") if is_group else [written]
    name, at, package = name.partition("@")
    package = "" if package == "_here_" else package
    options = option if isinstance(option, list) else [option]
    texts = [name, package, *(one for one in options if one is not None)]
    if not all(isinstance(text, str) and re.fullmatch(r"[\w./-]*", text) for text in texts):
        raise NeedsHydra
    if not set(marks) <= {"optional", "override"} or "_group_" in package or "_name_" in package:
        raise NeedsHydra
    path = name.lstrip("/")
    if path.startswith("hydra/") and is_group and "override" in marks:
        return None
    if path.startswith("hydra/") or not path:
        raise NeedsHydra
    folder, option = (path, option) if is_group else (path.rpartition("/")[0], path.rpartition("/")[2])
    return Default(
        folder=folder, option=option, package=package if at else None, is_absolute=name.startswith("/"),
        is_group=is_group, is_optional="optional" in marks, is_override="override" in marks,
    )  # fmt: skip


@functools.cache
def _loader() -> Any:
    """OmegaConf's dialect, as far as keys and switches go; NeedsHydra for a key that it reads in another way."""
    base: Any = vars(yaml).get("CSafeLoader", yaml.SafeLoader)

    def construct_mapping(loader: Any, node: yaml.MappingNode, deep: bool = False) -> Any:
        texts = [key.value for key, _ in node.value]
        tags = {key.tag.rpartition(":")[2] for key, _ in node.value}
        if not tags <= {"str", "int"} or not all(map(str, texts)) or len(set(map(str, texts))) < len(texts):
            raise NeedsHydra
        return base.construct_mapping(loader, node, deep=deep)

    return type("_Loader", (base,), {"construct_mapping": construct_mapping})


class _Tree:
    """The defaults lists of a config, as the choices on the command line change them.

    choices: of each group that was typed the option or options, and of `+` those to add.
    """

    def __init__(self, files: _Files, choices: _Choices) -> None:
        self._files = files
        self._chosen: dict[str, str | list[str] | None] = dict(choices.replaced)
        self._added = choices.added
        self._used: set[str] = set()
        self._known: set[str] = set()
        self._count = 0

    def layers(self) -> list[tuple[dict[Any, Any], str]]:
        """The files in the order of merging, and where each is merged."""
        found = self._layers(Default("", self._files.config_name), base="", above="", added=self._added)
        if set(self._chosen) != self._used:
            raise NeedsHydra
        return found

    def _layers(
        self, default: Default, *, base: str, above: str, added: Sequence[Default] = ()
    ) -> list[tuple[dict[Any, Any], str]]:
        """Those of one option, from the last of its defaults list to the first: a later line overrides an earlier."""
        self._count += 1
        if self._count > MOST_FILES:
            raise NeedsHydra
        if default.is_group:
            self._note(default.key(base, above))
        if default.option is None:
            return []
        group = default.path(base)
        file = self._files.load(f"{group}/{default.option}" if group else str(default.option))
        if file is None:
            if default.is_optional:
                return []
            raise NeedsHydra
        place = default.place(above, file.header)
        lines = [*_with_own(file, is_primary=file is self._files.primary), *added]
        for line in lines:
            if line.is_override:
                self._chosen.setdefault(line.key(group, place), line.option)
        found: list[list[tuple[dict[Any, Any], str]]] = []
        for line in reversed(lines):
            if line.option == OWN and not line.is_group:
                found.append([(file.content, place)])
            elif not line.is_override:
                found += [self._layers(one, base=group, above=place) for one in self._options(line, group, place)]
        return [*itertools.chain.from_iterable(reversed(found))] if found else [(file.content, place)]

    def _options(self, line: Default, group: str, place: str) -> Iterator[Default]:
        """What is chosen for a line of a defaults list, the last first."""
        key = line.key(group, place)
        if line.is_group and key in self._chosen:
            self._used.add(key)
            line = line._replace(option=self._chosen[key])
        if not isinstance(line.option, list):
            yield line
            return
        for option in reversed(line.option):
            folder, _, name = f"{line.folder}/{option}".rpartition("/")
            yield line._replace(folder=folder, option=name, is_group=False)

    def _note(self, key: str) -> None:
        if key in self._known:  # where the two differ, that is an error
            raise NeedsHydra
        self._known.add(key)


def _with_own(file: File, *, is_primary: bool) -> list[Default]:
    """A defaults list with the line of the file's own values, which stand last where it does not name them."""
    lines = file.defaults
    others = [line for line in lines if not line.is_override]
    owns = [line for line in others if line.option == OWN and not line.is_group]
    marks = [line.is_override for line in lines if line not in owns]
    is_in_order = marks == sorted(marks)  # a choice for others stands behind all of the file's own
    if len(owns) > 1 or not is_in_order or (is_primary and others and not owns and file.content):
        raise NeedsHydra
    return lines if owns or (lines and not others) else [*lines, Default("", OWN)]


class _Choices(NamedTuple):
    """replaced: of each group the option or options. added: those behind a +, as lines of the primary config."""

    replaced: dict[str, str | list[str]]
    added: list[Default]


def _divided(words: Sequence[str], files: _Files) -> tuple[_Choices, list[tuple[str, str, str | None]]]:
    """The choices of groups, and of the others sign, key and value; without those that exp refuses."""
    replaced: dict[str, str | list[str]] = {}
    added: dict[str, list[str]] = {}
    settings = []
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if re.match(r"hydra[./]", key):
            if "searchpath" in word:
                raise NeedsHydra
            continue  # what changes Hydra's own node alone
        choice = CHOICE.fullmatch(word)
        if choice is not None and files.is_group(key):
            _choose(choice[1], key, choice[3], files=files, replaced=replaced, added=added)
            continue
        setting = SETTING.fullmatch(word)
        if setting is None or files.is_group(key) or PLAIN.fullmatch(setting[3] or "") is None:
            raise NeedsHydra
        settings.append((setting[1], key, setting[3]))
    lines = []
    for group, options in added.items():
        if group in MANY and group in replaced:
            first = replaced[group]
            replaced[group] = list(dict.fromkeys([*([first] if isinstance(first, str) else first), *options]))
        else:
            option = list(dict.fromkeys(options)) if group in MANY else options[0]
            lines.append(Default(group, option, is_group=True))
    return _Choices(replaced, lines), [one for one in settings if _is_taken(*one, files=files)]


def _choose(
    sign: str, group: str, value: str, *, files: _Files, replaced: dict[str, str | list[str]],
    added: dict[str, list[str]],
) -> None:  # fmt: skip
    """Note the choice of a word, unless one of its options is not there."""
    is_list = value.startswith("[")
    options = [option for option in value.strip("[]").split(",") if option or not is_list]
    is_axis, is_many, is_own = group in AXIS, group in MANY, files.is_own_group(group)
    is_usual = group in files.declared and (is_many or (not is_list and (is_axis or not sign)))
    is_new = group not in replaced and group not in added
    if any(map(NO_TEXT.fullmatch, options)) or not (is_usual or (is_own and sign and not is_list)):
        raise NeedsHydra
    if not is_new and not is_many and (is_axis or is_own):
        raise NeedsHydra
    if any(files.load(f"{group}/{option}") is None for option in options):
        return
    if sign and not is_axis:
        added.setdefault(group, []).extend(options)
    else:
        replaced[group] = options if is_list else options[0]


def _is_taken(sign: str, key: str, text: str | None, *, files: _Files) -> bool:
    """Whether exp takes an override of a key, as far as its name says."""
    top, dot, _ = key.partition(".")
    if files.is_group(top) and files.is_own_group(top):
        raise NeedsHydra
    has_own_words = bool(dot) and top in OF_CLASSES
    is_habit = not has_own_words and cure_of_key(key, text or "") is not None
    return top in files.keys | files.declared and not is_habit and (bool(dot) or sign != "~")


def _set(config: dict[Any, Any], sign: str, key: str, text: str | None) -> None:
    """Set, add or take away a value, as Hydra does where it can be done."""
    *parents, name = key.split(".")
    node: Any = config
    for part in parents:
        if part not in node and sign.startswith("+"):
            node[part] = {}
        node = node.get(part)
        if not isinstance(node, dict) or part.isdecimal():
            raise NeedsHydra
    there = node.get(name)
    is_there, is_text = name in node, isinstance(there, str) and ("${" in there or there == "???")
    if sign == "~":
        if text is not None or there is None or is_text:
            raise NeedsHydra
        del node[name]
        return
    is_wrong = (sign == "+" and is_there) or (sign == "" and not is_there)
    if text is None or is_wrong or isinstance(there, dict) or name.isdecimal():
        raise NeedsHydra
    node[name] = {"true": True, "false": False, "null": None}.get(text.lower(), text)


def _merge(into: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Merge mappings, as exp has OmegaConf do: lists and values take the place of what is there, ??? takes none."""
    for key, value in content.items():
        there = into.get(key)
        is_reference = isinstance(there, str) and "${" in there
        if value == "???" and key in into:
            if is_reference:
                raise NeedsHydra
        elif not isinstance(value, dict):
            into[key] = value
        else:
            if is_reference:
                raise NeedsHydra
            into[key] = there if isinstance(there, dict) else {}
            _merge(into[key], value)
