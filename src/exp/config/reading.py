"""A composed config as plain dicts and lists, every interpolation resolved, and an error for each leaf without a value.

A leaf that cannot be read becomes UNKNOWN, which every later stage lets pass, so that one mistake is one error.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from omegaconf.resolvers import oc

from exp.config.plain_tree import is_node, leaves
from exp.config.targets import is_of_a_target
from exp.config.yaml_files import MAX_DEPTH, MAX_NODES
from exp.errors import ErrorDetails
from exp.redaction import interpolation, is_secret
from exp.spelling import among, find_nearest

# References that one value may reach through others; `a: ${b}${b}`, `b: ${c}${c}` ... double at each step.
MAX_REFERENCES = 1_000
REFERENCE = re.compile(r"\$\{([^${}:]+)\}")
# Filled in from the data before a run; null until then, and other keys refer to them.
OF_DATA = re.compile(r"\$\{data\.(inputs|input_shape|input_dtype|num_outputs|num_classes)\b")
# What OmegaConf (2.3) says of a key that an interpolation does not find.
NOT_FOUND = re.compile(r"Interpolation key '([^']+)' not found")
ENVIRONMENT = re.compile(r"\$\{oc\.env:([^,}]+)")


ACCELERATOR = "launch.accelerator"
# Which kind of GPU a machine can have.
GPU = "mps" if sys.platform == "darwin" else "cuda"


class Unknown:
    """Stands in for a value that could not be read, so that one error is not reported twice."""

    def __repr__(self) -> str:
        return "(unknown)"


UNKNOWN = Unknown()


@contextlib.contextmanager
def secrets_kept() -> Iterator[None]:
    """Let interpolations give the name of a secret, `${oc.env:HF_TOKEN}`, and not its value; also as a decorator.

    Whatever resolves a config to write or to show it does so in here; construct.py has the value. Blocks may nest.
    """
    _resolvers.append(_named)
    OmegaConf.register_new_resolver("oc.env", _resolvers[-1], replace=True)
    try:
        yield
    finally:
        _resolvers.pop()
        OmegaConf.register_new_resolver("oc.env", _resolvers[-1], replace=True)


def _named(key: str, *default: Any) -> str | None:
    return interpolation(key) if is_secret(key) and key in os.environ else oc.env(key, *default)


# Of the blocks that are open, the innermost last.
_resolvers: list[Callable[..., str | None]] = [oc.env]


# The plain values of a config, and the errors of what could not be read.
Reading = tuple[dict[str, Any], list[ErrorDetails]]


@secrets_kept()
def read(config: DictConfig, *, is_data_read: bool = False) -> Reading:
    """The plain values, and the errors of missing values, of interpolations to nowhere and of size.

    is_data_read: whether the config has what the data knows: what is null then stays null.
    """
    reader = _Reader(config, is_data_read=is_data_read)
    return reader.mapping(config, reader.raw, "", 0), _by_cause(reader.errors)


def _by_cause(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors, and one error for all keys of a node with the same interpolation to nowhere."""
    groups: dict[object, list[ErrorDetails]] = {}
    for error in errors:
        told = (error.key.partition(".")[0], error.got, error.expected, error.fix)
        groups.setdefault(told if "${" in error.got else error, []).append(error)
    return [
        replace(first, got=f"{first.got}, also at {among([one.key for one in others])}") if others else first
        for first, *others in groups.values()
    ]


def name_gpu(config: DictConfig) -> None:
    """Replace Lightning's accelerator `gpu` by the GPU of this platform, `cuda` or `mps`.

    An interpolation is left to `read`: it may call a function, whose name has to be checked first.
    """
    raw = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    if Values(cast("dict[str, Any]", raw))[ACCELERATOR] == "gpu":
        OmegaConf.update(config, ACCELERATOR, GPU)


@secrets_kept()
def plain_values(config: DictConfig) -> dict[str, Any]:
    """The plain values of a config without errors; an interpolation that waits for the data stays the text it is."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException:
        raw = OmegaConf.to_container(config, resolve=False)
        return cast(dict[str, Any], _with_texts(read(config)[0], raw))


def _with_texts(value: Any, raw: Any) -> Any:
    """The values, and in the place of UNKNOWN what is written there; `raw` says which keys."""
    if value is UNKNOWN:
        return raw
    if isinstance(value, dict) and isinstance(raw, dict):
        return {key: _with_texts(value[key], text) for key, text in raw.items()}
    if isinstance(value, list) and isinstance(raw, list):
        return [_with_texts(inner, text) for inner, text in zip(value, raw, strict=True)]
    return value


def is_open(data: Mapping[str, object]) -> bool:
    """Whether a data node leaves something to the data: its inputs, by name or alone, or the number of outputs."""
    left = {name for name in ("inputs", "input_shape", "input_dtype", "num_outputs") if data.get(name) is None}
    return "num_outputs" in left or ("inputs" in left and bool(left & {"input_shape", "input_dtype"}))


class Values:
    """The plain config, asked by dotted key; UNKNOWN where a key is not there."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self.plain = plain

    def __getitem__(self, key: str) -> Any:
        node: Any = self.plain
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return UNKNOWN
            node = node[part]
        return node

    def entries(self, key: str) -> dict[str, Any]:
        """The named nodes of a group, those that could not be read left out."""
        node = self[key]
        return {name: value for name, value in node.items() if is_node(value)} if isinstance(node, dict) else {}


class _Reader:
    def __init__(self, config: DictConfig, *, is_data_read: bool) -> None:
        self.config, self.count, self.is_data_read = config, 0, is_data_read
        self.errors: list[ErrorDetails] = []
        raw = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
        self.raw = cast(dict[str, Any], raw)
        self.values = Values(self.raw)
        self.costs: dict[str, int] = {}

    def mapping(self, node: DictConfig, raw: dict[Any, Any], key: str, depth: int) -> dict[str, Any]:
        return {name: self.child(node, name, raw, f"{key}.{name}" if key else str(name), depth) for name in raw}

    def sequence(self, node: ListConfig, raw: list[Any], key: str, depth: int) -> list[Any]:
        return [self.child(node, index, raw, f"{key}.{index}", depth) for index in range(len(raw))]

    def child(self, node: DictConfig | ListConfig, name: Any, raw: Any, key: str, depth: int) -> Any:
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            return self.too_large(key)
        text = raw[name]
        if isinstance(text, str) and text == "???":
            self.error(key, got="??? (no value yet)", expected="a value", fix=f"Add {key}=VALUE to the command")
            return UNKNOWN
        if not isinstance(text, dict | list):
            value = self.resolved(node, name, text, key) if isinstance(text, str) and "${" in text else text
            # An interpolation may lead to a node.
            holds = isinstance(value, DictConfig | ListConfig)
            inner: Any = OmegaConf.to_container(value, resolve=False) if holds else None
        else:
            value, inner = node[name], text
        if isinstance(value, DictConfig):
            return self.mapping(value, inner, key, depth + 1)
        if isinstance(value, ListConfig):
            return self.sequence(value, inner, key, depth + 1)
        return value

    def resolved(self, node: DictConfig | ListConfig, name: Any, text: str, key: str) -> Any:
        if self.awaits_data(text) and not key.startswith("data."):
            return UNKNOWN
        if self.cost(text, (key,)) > MAX_REFERENCES:
            return self.too_large(key)
        try:
            value = node[name]
            return GPU if key == ACCELERATOR and value == "gpu" else value
        except InterpolationToMissingValueError:
            return UNKNOWN  # the error is the other key's
        except (OmegaConfBaseException, RecursionError) as error:
            self.unresolved(key, text, error)
            return UNKNOWN

    def awaits_data(self, text: str) -> bool:
        """Whether it refers to what is read from the data and has not been yet. A known null of num_classes is null."""
        data = self.raw.get("data")
        if self.is_data_read or not isinstance(data, dict):
            return False
        return is_open(data) and any(name in data and data[name] is None for name in OF_DATA.findall(text))

    def unresolved(self, key: str, text: str, error: Exception) -> None:
        if is_of_a_target(error) or self.refers_to_a_error(text):
            return  # told at the key of the resolver, or at the key that is referred to
        for variable in ENVIRONMENT.findall(text):
            if "environment variable" in str(error).lower():
                self.error(
                    key,
                    got=f"{text}, and {variable} is not set",
                    expected="an environment variable that is set",
                    fix=f"Set it, or give a default: ${{oc.env:{variable},DEFAULT}}",
                )
                return
        fixes = [f"Did you mean ${{{near}}}?" for name in REFERENCE.findall(text) if (near := self.near(name, key))]
        reason = (str(error).splitlines() or ["it refers to itself"])[0]
        expected = "an interpolation that leads to a value"
        if REFERENCE.search(text) is None or not fixes:
            expected += f" ({reason})"
        self.error(key, got=text, expected=expected, fix=fixes[0] if fixes else None)

    def refers_to_a_error(self, text: str) -> bool:
        """Return whether a text refers to another interpolation, to a key or a variable that is not there."""
        values = {name: self.values[name] for name in REFERENCE.findall(text)}
        for name in (name for name, value in values.items() if isinstance(value, str) and "${" in value):
            try:
                OmegaConf.select(self.config, name)
            except OmegaConfBaseException as error:
                if NOT_FOUND.match(str(error)) or "environment variable" in str(error).lower():
                    return True
        return False

    def near(self, reference: str, key: str) -> str | None:
        """The existing key most like one that leads nowhere: a sibling first, then any key but `key`, which asks."""
        known = [path for path, _ in leaves(self.raw)]
        if reference.startswith(".") or reference in known:
            return None
        if reference.partition("[")[0] in known:
            return None  # the list is there, and too short
        parent, _, word = reference.rpartition(".")
        siblings = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == parent}
        found = find_nearest(word, siblings)
        if found:
            return siblings[found[0]]
        # A part of the key itself is like it, and no help.
        others = [path for path in known if not reference.startswith(f"{path}.") and path != key]
        alike = [path for path in others if path.rpartition(".")[2] == word]
        return next(iter([*alike, *find_nearest(reference, others, likeness=0.8)]), None)

    def cost(self, text: str, trail: tuple[str, ...]) -> int:
        """References that resolving a text follows, at least; a circle ends where it closes."""
        total = 0
        for reference in REFERENCE.findall(text):
            if reference in trail or reference.startswith("."):
                continue
            if reference not in self.costs:
                text = self.values[reference]
                self.costs[reference] = self.cost(text, (*trail, reference)) if isinstance(text, str) else 0
            total += 1 + self.costs[reference]
        return total

    def too_large(self, key: str) -> Any:
        if not any("too large" in error.got for error in self.errors):
            self.error(
                key,
                got="too large: the config grows without end from here",
                expected=f"at most {MAX_NODES} nodes, {MAX_DEPTH} deep",
                fix="Look for an anchor or an interpolation that holds itself",
            )
        return UNKNOWN

    def error(self, key: str, *, got: str, expected: str, fix: str | None = None) -> None:
        self.errors.append(ErrorDetails(key=key, got=got, expected=expected, fix=fix))
