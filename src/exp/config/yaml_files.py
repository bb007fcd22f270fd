"""Reading a YAML file with a bound on what it may grow to, finding where in it a key stands, and writing one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from exp.config.search_path import shown
from exp.errors import ConfigError, ErrorDetails, config_error, raise_errors

# Twenty times the largest config seen. 180 bytes of nested anchors grow to a billion nodes.
MAX_NODES = 20_000
MAX_DEPTH = 60
MAX_BYTES = 1_000_000
# Signs that open a level. libyaml's binding recurses in C, where too many levels are a crash and no exception.
MAX_FAST_SIGNS = 3_000
# Scalars that YAML 1.1, which PyYAML reads, takes for another value than YAML 1.2 does, and how to write what is meant.
MISREAD = {
    "a truth value": re.compile(r"yes|no|on|off", re.IGNORECASE),
    "an octal number": re.compile(r"[-+]?0[0-7_]+"),
    "a binary number": re.compile(r"[-+]?0b[01_]+"),
    "a number to the base 60": re.compile(r"[-+]?[\d_]+(:[0-5]?\d)+(\.[\d_]*)?"),
}
TEXT = "tag:yaml.org,2002:str"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a value begins: the file as shown to a reader, line and column from 1.

    Of a block scalar (`forward: |`) and of a quoted one these are those of its first character of text: line n of the
    text is line `line + n - 1` of the file, and its columns are shifted by `column - 1`.
    """

    file: str
    line: int
    column: int


def read_yaml(path: Path) -> Any:
    """The content of a YAML file as plain values; None for an empty file. Callers must not change it.

    Raises: ConfigError where it cannot be read, is no YAML, or grows beyond the bounds.
    """
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise _refused(shown(path), f"cannot be read: {error.strerror or error}", "a readable file") from error


# A sweep composes the same files for every job.
@functools.lru_cache(maxsize=512)
def _read(path: Path, _changed: int, size: int) -> Any:
    if size > MAX_BYTES:
        raise _refused(shown(path), f"{size} bytes", f"at most {MAX_BYTES} bytes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _refused(shown(path), str(error), "valid YAML in UTF-8") from error
    return parse_yaml(text, name=shown(path))


def parse_yaml(text: str, *, name: str) -> Any:
    """The content of YAML text. name: of its file, for messages. Raises: ConfigError, as read_yaml."""
    if len(text) > MAX_BYTES:
        raise _refused(name, f"{len(text)} characters", f"at most {MAX_BYTES}")
    try:
        loader = _loader(fast=sum(map(text.count, "[{-?")) < MAX_FAST_SIGNS)(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _bound(name, root)
        _refuse_misread(name, root)
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _refused(name, f"{where}{error.problem or error.context}", "valid YAML") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise _refused(name, " ".join(str(error).split()), "valid YAML in UTF-8") from error
    except RecursionError as error:
        raise _too_deep(name) from error


class Choice(NamedTuple):
    """One entry of a defaults list: options of a group, or without a group the path of a config.

    number: of the line in the list, from 0.
    """

    group: str
    options: tuple[str, ...]
    is_override: bool
    number: int


def choices_of(content: Any) -> list[Choice]:
    """Return the entries of the defaults list of a file's content."""
    lines = content["defaults"] if isinstance(content, dict) and "defaults" in content else None
    found = []
    for number, line in enumerate(lines if isinstance(lines, list) else ()):
        for words, value in line.items() if isinstance(line, dict) else [("", line)]:
            *signs, group = str(words).split() or [""]
            options = value if isinstance(value, list) else [] if value is None else [value]
            group = group.lstrip("/").partition("@")[0]
            found.append(Choice(group, tuple(map(str, options)), "override" in signs, number))
    return found


def split(key: str) -> tuple[str, ...]:
    """`a.b[0].c` as (a, b, 0, c)."""
    return tuple(part for part in re.split(r"[.\[\]]+", key) if part)


def position_of(path: Path, keys: Sequence[str]) -> Position | None:
    """Where the value under nested `keys` begins in a file; None where the file does not hold it."""
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
    return Position(file=shown(path), line=line + 1, column=column + 1)


def line_of(path: Path, keys: Sequence[str]) -> int | None:
    """The line, from 1, on which nested `keys` end in a file; None where the file does not hold them."""
    node, place = _tree(path.read_text(encoding="utf-8")), None
    for key in keys:
        place, node = _child(node, key)
    return None if place is None else int(place.start_mark.line) + 1


# Several errors of one file ask for their lines.
@functools.lru_cache(maxsize=8)
def _tree(text: str) -> yaml.Node | None:
    tree: yaml.Node | None = yaml.compose(text, Loader=_loader(fast=False))
    return tree


def _child(node: yaml.Node | None, key: str) -> tuple[yaml.Node | None, yaml.Node | None]:
    """The node of a key, an element itself in a list, and that of its value."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value == key:
                return name, value
    if isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
        return node.value[int(key)], node.value[int(key)]
    return None, None


def _bound(name: str, root: yaml.Node) -> None:
    sizes: dict[int, int] = {}

    def size_of(node: yaml.Node, above: tuple[int, ...]) -> int:
        if id(node) in above or len(above) > MAX_DEPTH:
            raise _too_deep(name)
        if id(node) not in sizes:
            inner: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                inner = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                inner = node.value
            sizes[id(node)] = 1 + sum(size_of(part, (*above, id(node))) for part in inner)
        return sizes[id(node)]

    size = size_of(root, ())
    if size > MAX_NODES:
        raise _refused(name, f"its anchors make {size} nodes of it", f"at most {MAX_NODES}")


def _refuse_misread(name: str, root: yaml.Node) -> None:
    """Raise ConfigError for plain scalars such as `yes`, `012` or `1:30`, which YAML 1.1 and 1.2 read differently."""
    errors: list[ErrorDetails] = []
    seen: set[int] = set()

    def visit(node: yaml.Node, key: str) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for label, value in node.value:
                below = label.value if isinstance(label, yaml.ScalarNode) else ""
                visit(label, f"{key}{below}")
                visit(value, f"{key}{below}.")
        elif isinstance(node, yaml.SequenceNode):
            for place, value in enumerate(node.value):
                visit(value, f"{key}{place}.")
        elif not node.style and node.tag != TEXT:  # libyaml says "" of a plain scalar, PyYAML None
            errors.extend(_misread(name, key.rstrip("."), node))

    visit(root, "")
    raise_errors(errors)


def _misread(name: str, key: str, node: yaml.ScalarNode) -> Iterator[ErrorDetails]:
    text = node.value
    for meaning, pattern in MISREAD.items():
        if pattern.fullmatch(text):
            value = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text.lower())
            value = value or (str(int(text)) if meaning == "an octal number" else "the number in decimal digits")
            yield ErrorDetails(
                key=key or name,
                got=f"{text}, which YAML 1.1 reads as {meaning} and YAML 1.2 does not",
                expected="a value that both read alike",
                fix=f"Write {value}, or '{text}' in quotes for the text",
                source=f"{name}, line {node.start_mark.line + 1}",
            )


@functools.cache
def _loader(*, fast: bool) -> Any:
    # OmegaConf's own dialect: 1e-3 is a number, a key that stands twice is an error, dates are text.
    from omegaconf._utils import get_yaml_loader

    dialect = get_yaml_loader()
    if not (fast and yaml.__with_libyaml__):
        return dialect

    class FastLoader(yaml.cyaml.CParser, dialect):  # type: ignore[misc, valid-type]  # a base of C, without types
        """The dialect on libyaml's parser, a tenth of the time: half of what --cfg job takes is reading YAML."""

        def __init__(self, stream: str) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return FastLoader


def _too_deep(name: str) -> ConfigError:
    return _refused(name, "nested too deeply, or into itself", f"at most {MAX_DEPTH} levels")


def _refused(name: str, got: str, expected: str) -> ConfigError:
    return config_error(name, got=got, expected=expected, source=name)


def yaml_text(plain: object) -> str:
    """Plain values as YAML, as OmegaConf.to_yaml has them, by libyaml where it is installed.

    Long quoted texts are folded at other places.

    OmegaConf's own takes 12 ms for a whole config, most of it to make a config of the values once more.
    """
    text: str = yaml.dump(plain, Dumper=_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


@functools.cache
def _dumper() -> Any:
    # Private of OmegaConf (2.3), and tested: which texts it quotes, so that they come back as texts.
    from omegaconf._utils import get_omega_conf_dumper

    by_omegaconf = get_omega_conf_dumper()
    base = yaml.CDumper if yaml.__with_libyaml__ else by_omegaconf
    # What an interpolation gives a second time is no anchor.
    return type(
        "_Dumper",
        (base,),
        {"yaml_representers": by_omegaconf.yaml_representers, "ignore_aliases": lambda self, data: True},
    )
