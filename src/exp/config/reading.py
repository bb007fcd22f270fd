"""Read a composed config as plain dicts and lists with interpolations resolved.

Missing values and interpolations that fail are reported as errors, and are replaced by UNKNOWN. All later checks accept
UNKNOWN, so that one mistake causes only one error.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from omegaconf.resolvers import oc

from exp.config.plain_tree import ABSENT, Plain, is_node, leaves, value_at
from exp.config.targets import is_of_a_target
from exp.config.yaml_files import MAX_DEPTH, MAX_NODES
from exp.errors import ErrorDetails
from exp.redaction import interpolation, is_secret
from exp.spelling import find_nearest

# Maximum number of references that are followed to resolve one value. With `a: ${b}${b}`, `b: ${c}${c}` and so on, the
# number doubles with each key.
MAX_REFERENCES = 1_000
REFERENCE = re.compile(r"\$\{([^${}:]+)\}")
# References to the keys of `data` that are null until exp reads their values from the data.
OF_DATA = re.compile(r"\$\{data\.(inputs|input_shape|input_dtype|num_outputs|num_classes)\b")
# Parts of messages of OmegaConf 2.3.
NOT_FOUND = re.compile(r"Interpolation key '([^']+)' not found")
NOT_SET = "environment variable"
ENVIRONMENT = re.compile(r"\$\{oc\.env:([^,}]+)")


class Unknown:
    """Type of UNKNOWN, which replaces a value that could not be read. The cause is reported as a separate error."""

    def __repr__(self) -> str:
        return "(unknown)"


UNKNOWN = Unknown()
# Plain values of a config, and the errors for values that cannot be read.
Reading = tuple[Plain, list[ErrorDetails]]


def raw_values(config: DictConfig) -> Plain:
    """Return a config as plain dicts and lists. Interpolations are not resolved."""
    return cast(Plain, OmegaConf.to_container(config, resolve=False))


def copy_config(config: DictConfig) -> DictConfig:
    """Return a deep copy of a whole config.

    The config is copied by pickle, in an eighth of the time of copy.deepcopy. OmegaConf's cache is copied separately,
    because it may contain objects of users that cannot be pickled.
    """
    cache = OmegaConf.get_cache(config)
    kept = dict(cache)
    cache.clear()
    try:
        made = cast(DictConfig, pickle.loads(pickle.dumps(config, pickle.HIGHEST_PROTOCOL)))
    except (pickle.PicklingError, AttributeError, TypeError):  # the class of a value is not importable
        made = copy.deepcopy(config)
    finally:
        cache.update(kept)
    OmegaConf.get_cache(made).update(copy.deepcopy(kept))
    return made


@contextlib.contextmanager
def secrets_kept() -> Iterator[None]:
    """Keep interpolations of secrets, such as `${oc.env:HF_TOKEN}`, as text while a config is resolved.

    This function is a context manager and a decorator. Use it where configs are written or shown. Only construct.py
    replaces the text by the secret value. Contexts may be nested.
    """
    _resolvers.append(_name_secret)
    OmegaConf.register_new_resolver("oc.env", _resolvers[-1], replace=True)
    try:
        yield
    finally:
        _resolvers.pop()
        OmegaConf.register_new_resolver("oc.env", _resolvers[-1], replace=True)


def _name_secret(key: str, *default: str | None) -> str | None:
    return interpolation(key) if is_secret(key) and key in os.environ else oc.env(key, *default)


# Resolvers of `oc.env`: OmegaConf's own, and one for each context of `secrets_kept` that is active. The last one is
# registered.
_resolvers: list[Callable[..., str | None]] = [oc.env]


@secrets_kept()
def read(config: DictConfig, *, is_data_read: bool = False) -> Reading:
    """Return the plain values of a config, and the errors in it.

    Errors are missing values, interpolations that cannot be resolved, and a config that is too large.

    Args:
        config: Composed config.
        is_data_read: Whether exp has already read values such as `data.input_shape` from the data. If true, a null at
            these keys is their final value. Default: false.
    """
    reader = _Reader(config, is_data_read=is_data_read)
    return reader.mapping(config, reader.raw, "", 0), reader.errors


def held_node(config: DictConfig, name: str) -> DictConfig | ListConfig | None:
    """Return the mapping or list at a top-level key of a config.

    Args:
        config: Config.
        name: Top-level key.

    Returns:
        The node. None if the key does not exist or has another value, such as a text, `???` or an interpolation.
    """
    if name not in list(config) or OmegaConf.is_interpolation(config, name) or OmegaConf.is_missing(config, name):
        return None
    value = config[name]
    return value if isinstance(value, DictConfig | ListConfig) else None


@secrets_kept()
def plain_values(config: DictConfig) -> Plain:
    """Return the plain values of a config that has passed the check. Interpolations are resolved.

    Interpolations of values that exp reads from the data later, such as `${data.num_classes}`, are kept as text.
    """
    try:
        return cast(Plain, OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException:
        return cast(Plain, _with_texts(read(config)[0], raw_values(config)))


def _with_texts(value: object, raw: object) -> object:
    """Return a plain tree in which each UNKNOWN is replaced by the text of its interpolation.

    Args:
        value: Plain tree with resolved interpolations. An interpolation that could not be resolved is UNKNOWN.
        raw: The same tree before interpolations were resolved.
    """
    if value is UNKNOWN:
        return raw
    if isinstance(value, dict) and isinstance(raw, dict):
        return {key: _with_texts(value[key], text) for key, text in raw.items()}
    if isinstance(value, list) and isinstance(raw, list):
        return [_with_texts(inner, text) for inner, text in zip(value, raw, strict=True)]
    return value


def is_open(data: Mapping[str, object]) -> bool:
    """Return whether exp must read the inputs or the number of outputs from the data, because they are null.

    Args:
        data: Values of the config node `data`.
    """
    left = {name for name in ("inputs", "input_shape", "input_dtype", "num_outputs") if data.get(name) is None}
    return "num_outputs" in left or ("inputs" in left and bool(left & {"input_shape", "input_dtype"}))


class Values:
    """Read access to the values of a plain config by dotted key. A key that does not exist has the value UNKNOWN."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain

    def __getitem__(self, key: str) -> Any:
        value = value_at(self.plain, key)
        return UNKNOWN if value is ABSENT else value

    def entries(self, key: str) -> Plain:
        """Return the entries of a group such as `hooks`, by name. Entries without a `_target_` are left out."""
        node = self[key]
        return {name: value for name, value in node.items() if is_node(value)} if isinstance(node, dict) else {}


class _Reader:
    def __init__(self, config: DictConfig, *, is_data_read: bool) -> None:
        self.config, self.count, self.is_data_read = config, 0, is_data_read
        self.errors: list[ErrorDetails] = []
        self.raw = raw_values(config)
        self.values = Values(self.raw)
        self.costs: dict[str, int] = {}

    def mapping(self, node: DictConfig, raw: Plain, key: str, depth: int) -> Plain:
        return {name: self.child(node, name, raw[name], f"{key}.{name}" if key else str(name), depth) for name in raw}

    def sequence(self, node: ListConfig, raw: list[Any], key: str, depth: int) -> list[Any]:
        return [self.child(node, index, text, f"{key}.{index}", depth) for index, text in enumerate(raw)]

    def child(self, node: DictConfig | ListConfig, name: Any, raw: object, key: str, depth: int) -> object:
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            return self.too_large(key)
        if raw == "???":
            self.error(key, "??? (no value yet)", "a value", f"Add {key}=VALUE to the command")
            return UNKNOWN
        value: object = raw
        if isinstance(raw, dict | list):
            value = node[name]
        elif isinstance(raw, str) and "${" in raw:
            value = self.resolve(node, name, raw, key)
            # An interpolation may refer to a node.
            raw = OmegaConf.to_container(value, resolve=False) if isinstance(value, DictConfig | ListConfig) else raw
        if isinstance(value, DictConfig):
            return self.mapping(value, cast(Plain, raw), key, depth + 1)
        if isinstance(value, ListConfig):
            return self.sequence(value, cast("list[Any]", raw), key, depth + 1)
        return value

    def resolve(self, node: DictConfig | ListConfig, name: Any, text: str, key: str) -> object:
        if self.awaits_data(text) and not key.startswith("data."):
            return UNKNOWN
        if self.cost(text, (key,)) > MAX_REFERENCES:
            return self.too_large(key)
        try:
            value: object = node[name]
            return value
        except InterpolationToMissingValueError:
            return UNKNOWN  # the missing value is reported at its own key
        except (OmegaConfBaseException, RecursionError) as error:
            # Two causes are reported by other errors: a resolver that is not allowed, and a failed interpolation at the
            # key to which the text refers.
            if not is_of_a_target(error) and not self.refers_to_an_error(text):
                self.report_unresolved(key, text, error)
            return UNKNOWN

    def awaits_data(self, text: str) -> bool:
        """Return whether an interpolation in a text refers to a value that exp will read from the data later.

        If the config sets the inputs and the number of outputs, exp reads no value. A null at num_classes is then
        final.
        """
        data = self.raw.get("data")
        if self.is_data_read or not isinstance(data, dict):
            return False
        return is_open(data) and any(name in data and data[name] is None for name in OF_DATA.findall(text))

    def report_unresolved(self, key: str, text: str, error: Exception) -> None:
        variables = ENVIRONMENT.findall(text)
        if variables and NOT_SET in str(error).lower():
            fix = f"Set the variable, or write a default: ${{oc.env:{variables[0]},DEFAULT}}"
            self.error(key, f"{text}, and {variables[0]} is not set", "an environment variable that is set", fix)
            return
        fixes = [f"Did you mean ${{{near}}}?" for name in REFERENCE.findall(text) if (near := self.near(name, key))]
        reason = (str(error).splitlines() or ["it refers to itself"])[0]
        expected = "an interpolation of an existing value"
        self.error(key, text, expected if fixes else f"{expected} ({reason})", fixes[0] if fixes else None)

    def refers_to_an_error(self, text: str) -> bool:
        """Return whether an interpolation fails because the value to which it refers is another failed interpolation.

        For example, `${a}` fails if the value of the key `a` is `${b}` and the key `b` does not exist.

        Args:
            text: Text with interpolations.
        """
        values = {name: self.values[name] for name in REFERENCE.findall(text)}
        for name in (name for name, value in values.items() if isinstance(value, str) and "${" in value):
            try:
                OmegaConf.select(self.config, name)
            except OmegaConfBaseException as error:
                if NOT_FOUND.match(str(error)) or NOT_SET in str(error).lower():
                    return True
        return False

    def near(self, reference: str, key: str) -> str | None:
        """Return the existing key that is most similar to a reference to a missing key; None if no key is similar.

        Args:
            reference: Dotted key in an interpolation.
            key: Dotted key of the interpolation itself. It is never returned.
        """
        known = [path for path, _ in leaves(self.raw) if path != key and not reference.startswith(f"{path}.")]
        if reference.startswith(".") or reference.partition("[")[0] in known:
            return None
        word = reference.rpartition(".")[2]
        alike = [path for path in known if path.rpartition(".")[2] == word]
        return next(iter([*alike, *find_nearest(reference, known)]), None)

    def cost(self, text: str, trail: tuple[str, ...]) -> int:
        """Return how many references OmegaConf must follow at least to resolve a text.

        Args:
            text: Text with interpolations.
            trail: Keys of the interpolations that lead to this text. References to these keys are not followed, because
                they form a cycle.
        """
        total = 0
        for reference in REFERENCE.findall(text):
            if reference in trail or reference.startswith("."):
                continue
            if reference not in self.costs:
                text = self.values[reference]
                self.costs[reference] = self.cost(text, (*trail, reference)) if isinstance(text, str) else 0
            total += 1 + self.costs[reference]
        return total

    def too_large(self, key: str) -> Unknown:
        if not any("too large" in error.got for error in self.errors):
            fix = "Look for an anchor or an interpolation that contains itself"
            got, expected = "too large", f"a config of at most {MAX_NODES} values and {MAX_DEPTH} nested levels"
            self.error(key, got, expected, fix)
        return UNKNOWN

    def error(self, key: str, got: str, expected: str, fix: str | None = None) -> None:
        self.errors.append(ErrorDetails(key, got, expected, fix))
