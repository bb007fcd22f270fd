"""Functions that read YAML files of limited size, find the lines of keys, and write YAML."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from exp.config.search_path import display_path
from exp.errors import ConfigError, ErrorDetails, config_error, raise_errors

# Limits of the number of nodes, of nested levels and of bytes in a file. They are needed because 180 bytes of nested
# anchors expand to a billion nodes. The limit of nodes is 20 times the size of the largest known config.
MAX_NODES = 20_000
MAX_DEPTH = 60
MAX_BYTES = 1_000_000
# libyaml reads only texts with fewer characters that open a level. It recurses in C, so too many levels would crash the
# process.
MAX_FAST_SIGNS = 3_000
# Values without quotes that YAML 1.1 and YAML 1.2 read differently: yes, 012, 0b101, 1:30. PyYAML implements YAML 1.1.
MISREAD = re.compile(r"(?i:yes|no|on|off)|[-+]?(0[0-7_]+|0b[01_]+|[\d_]+(:[0-5]?\d)+(\.[\d_]*)?)")
TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}
TEXT, DATE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp"
# Numbers such as 1e3 and 1e-3. They are floats in YAML 1.2, but PyYAML would read them as texts.
FLOAT = re.compile(r"[-+]?(\d+(_\d+)*\.[\d_]*([eE][-+]?\d+)?|\d+(_\d+)*[eE][-+]?\d+|\.\d+(_\d+)*[eE][-+]\d+)$")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Line and column at which the text of a value begins in a YAML file.

    A quoted text begins after the quote. A block text (`forward: |`) begins on the line after the `|`, without the
    indentation. Line n of a block text is therefore line `line + n - 1` of the file. Column n of the text is column
    `column + n - 1` of the file.

    Args:
        file: Path of the file, as messages show it.
        line: Line in the file, from 1.
        column: Column in the line, from 1.
    """

    file: str
    line: int
    column: int


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file as plain values; None for an empty file.

    The result is cached, so callers must not change it.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or exceeds the limits.
    """
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise _error(display_path(path), f"cannot be read: {error.strerror or error}", "a readable file") from error


# Cached, because a sweep reads the same files for every job.
@functools.lru_cache(maxsize=512)
def _read(path: Path, _changed: int, size: int) -> Any:
    if size > MAX_BYTES:
        raise _error(display_path(path), f"{size} bytes", f"at most {MAX_BYTES} bytes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _error(display_path(path), str(error), "valid YAML in UTF-8") from error
    return parse_yaml(text, name=display_path(path))


def parse_yaml(text: str, *, name: str) -> Any:
    """Return the content of YAML text as plain values; None for an empty text.

    Args:
        text: YAML text.
        name: Name of the file, for error messages.

    Raises:
        ConfigError: The text is not YAML, or exceeds the limits.
    """
    if len(text) > MAX_BYTES:
        raise _error(name, f"{len(text)} characters", f"at most {MAX_BYTES} characters")
    try:
        loader = _loader(fast=sum(map(text.count, "[{-?")) < MAX_FAST_SIGNS)(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check(name, root)
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _error(name, f"{where}{error.problem or error.context}", "valid YAML") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise _error(name, " ".join(str(error).split()), "valid YAML in UTF-8") from error
    except RecursionError as error:
        raise _depth_error(name) from error


class Choice(NamedTuple):
    """An entry of a defaults list.

    Args:
        group: Config group. "": the entry is only the name of a config, such as `train` or `_self_`.
        options: Options that the entry chooses, or the name of the config.
    """

    group: str
    options: tuple[str, ...]


def choices_of(content: object) -> list[Choice]:
    """Return the entries in the defaults list of a config file.

    Args:
        content: Content of the file. If it has no defaults list, the result is empty.
    """
    lines = content["defaults"] if isinstance(content, dict) and "defaults" in content else None
    found = []
    for line in lines if isinstance(lines, list) else ():
        for words, value in line.items() if isinstance(line, dict) else [("", line)]:
            # An entry such as `override /model: mlp` has the group after the word `override`.
            group = str(words).rpartition(" ")[2].lstrip("/").partition("@")[0]
            options = value if isinstance(value, list) else [] if value is None else [value]
            found.append(Choice(group, tuple(map(str, options))))
    return found


def split(key: str) -> tuple[str, ...]:
    """Return the names in a dotted key: a, b, 0 and c for `a.b[0].c`."""
    return tuple(part for part in re.split(r"[.\[\]]+", key) if part)


def position_of(path: Path, keys: Sequence[str]) -> Position | None:
    """Return the position at which a value begins in a file; None if the file does not contain the value.

    Args:
        path: YAML file.
        keys: Names in the value's key, from the outermost mapping to the value.
    """
    text = path.read_text(encoding="utf-8")
    node = _tree(text)
    for key in keys:
        _, node = _child(node, key)
        if node is None:
            return None
    assert node is not None
    line, column = node.start_mark.line, node.start_mark.column
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        lines = text.splitlines()
        line += 1
        first = next((row for row in lines[line:] if row.strip()), "")
        column = len(first) - len(first.lstrip())
    elif isinstance(node, yaml.ScalarNode) and node.style in ("'", '"'):
        column += 1
    return Position(file=display_path(path), line=line + 1, column=column + 1)


def line_of(path: Path, keys: Sequence[str]) -> int | None:
    """Return the line of a key in a file, from 1; None if the file does not contain the key.

    Args:
        path: YAML file.
        keys: Names in the key, from the outermost mapping to the innermost. The result is the line of the last name.
    """
    node, place = _tree(path.read_text(encoding="utf-8")), None
    for key in keys:
        place, node = _child(node, key)
    return None if place is None else int(place.start_mark.line) + 1


# Cached, because several errors in one file need the lines of their keys.
@functools.lru_cache(maxsize=8)
def _tree(text: str) -> yaml.Node | None:
    tree: yaml.Node | None = yaml.compose(text, Loader=_loader(fast=False))
    return tree


def _child(node: yaml.Node | None, key: str) -> tuple[yaml.Node | None, yaml.Node | None]:
    """Return the YAML node of a key and the YAML node of its value. Both are None if the key does not exist.

    For an element of a list, both are the node of the element.

    Args:
        node: Mapping or list.
        key: Key in the mapping, or index in the list.
    """
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value == key:
                return name, value
    if isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
        return node.value[int(key)], node.value[int(key)]
    return None, None


def _check(name: str, root: yaml.Node) -> None:
    """Raise ConfigError if a file exceeds the limits, or contains a value that YAML 1.1 and 1.2 read differently.

    Args:
        name: Name of the file, for error messages.
        root: Outermost YAML node of the file.
    """
    sizes: dict[int, int] = {}
    errors: list[ErrorDetails] = []

    def size_of(node: yaml.Node, key: str, above: tuple[int, ...]) -> int:
        if id(node) in above or len(above) > MAX_DEPTH:
            raise _depth_error(name)
        if id(node) in sizes:
            return sizes[id(node)]
        inner: list[tuple[str, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            labels = [label.value if isinstance(label, yaml.ScalarNode) else "" for label, _ in node.value]
            inner = [(f"{key}.{label}", one) for label, pair in zip(labels, node.value, strict=True) for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = [(f"{key}.{place}", one) for place, one in enumerate(node.value)]
        # A plain scalar has the style "" in libyaml, and None in PyYAML.
        elif not node.style and node.tag != TEXT and MISREAD.fullmatch(node.value):
            errors.append(_misread_error(name, key.removeprefix("."), node))
        sizes[id(node)] = 1 + sum(size_of(one, below, (*above, id(node))) for below, one in inner)
        return sizes[id(node)]

    size = size_of(root, "", ())
    if size > MAX_NODES:
        raise _error(name, f"{size} nodes after its anchors are expanded", f"at most {MAX_NODES} nodes")
    raise_errors(errors)


def _misread_error(name: str, key: str, node: yaml.ScalarNode) -> ErrorDetails:
    text = node.value
    value = TRUTH.get(text.lower()) or (str(int(text)) if text.lstrip("+-").isdecimal() else "a decimal number")
    return ErrorDetails(
        key or name, f"{text}, which YAML 1.1 and YAML 1.2 read differently", "a value that both read in the same way",
        f"Write {value}, or '{text}' in quotes for the text", source=f"{name}, line {node.start_mark.line + 1}",
    )  # fmt: skip


@functools.cache
def _loader(*, fast: bool) -> Any:
    """Return a YAML loader class that reads the same values as OmegaConf.

    In contrast to PyYAML's loaders, 1e-3 is a number, a repeated key is an error, and dates are texts.

    Args:
        fast: Use libyaml if it is installed. libyaml needs a tenth of the time of PyYAML's own parser. Half of the time
            of --cfg job is for reading YAML.
    """
    base = yaml.CSafeLoader if fast and yaml.__with_libyaml__ else yaml.SafeLoader

    class Loader(base):  # type: ignore[misc, valid-type]  # a base chosen at run time
        yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
            sign: [(tag, pattern) for tag, pattern in resolvers if tag != DATE]
            for sign, resolvers in base.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            seen = set()
            for key in (key for key, _ in node.value if key.tag == TEXT):
                if key.value in seen:
                    problem = f"found duplicate key {key.value}"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
            found: dict[object, object] = super().construct_mapping(node, deep=deep)
            return found

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))
    return Loader


def _depth_error(name: str) -> ConfigError:
    return _error(name, "nested too deeply, or an anchor that contains itself", f"at most {MAX_DEPTH} levels")


def _error(name: str, got: str, expected: str) -> ConfigError:
    return config_error(name, got=got, expected=expected, source=name)


def yaml_text(plain: object) -> str:
    """Return plain values as YAML text, in the format of OmegaConf.to_yaml.

    Only the line breaks of long quoted texts differ. OmegaConf.to_yaml is not used, because it first converts the
    values to a config, which takes 12 ms for a whole config.
    """
    text: str = yaml.dump(plain, Dumper=_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


@functools.cache
def _dumper() -> Any:
    base = yaml.CDumper if yaml.__with_libyaml__ else yaml.Dumper
    # Two interpolations may return the same object. It is written twice, instead of once with an anchor.
    dumper: Any = type("_Dumper", (base,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(str, _represent_text)
    return dumper


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    """Return the YAML node of a text. As in OmegaConf, a text that YAML could read as a boolean or number is quoted."""
    style = "'" if text.lower() in (*TRUTH, "true", "false", "y", "n") else None
    with contextlib.suppress(ValueError):
        float(text)
        style = "'"
    node: yaml.ScalarNode = dumper.represent_scalar(TEXT, text, style=style)
    return node
