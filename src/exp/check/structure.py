"""The first stage of the check: keys, types and bounds of config values. No target is imported."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from exp.check.kinds import describe_type, fits, words_of
from exp.config.annotations import EMPTY
from exp.config.frozen import COMPOSITION, OWN_GROUPS
from exp.config.module_key import MODULE_KEY, REPLACED, brings_data, has_module
from exp.config.plain_tree import is_node, leaves
from exp.config.reading import UNKNOWN, Values
from exp.config.search_path import OWN_CONF
from exp.config.settings import SCHEMA, VALUES, Node, Repeats
from exp.config.slots import COLLECTIONS, NODES, PHASES
from exp.config.yaml_files import read_yaml
from exp.errors import ErrorDetails, invalid_value, missing_value, unknown_key, unsuitable
from exp.spelling import among, did_you_mean, find_nearest, fix_of_key, fix_of_value, show

# Matches values that need no quotes in a list.
PLAIN_WORD = re.compile(r"[\w./-]+")
KNOWN = (*SCHEMA, *NODES, *COLLECTIONS, PHASES)
# Largest number of layers in a model. The type Repeats limits each repeat, but nested repeats multiply.
MAX_LAYERS = 100_000
# Largest number of missing top-level keys with an error each. If more keys are missing, there is one error for all.
FORGOTTEN = 8
# Keys in nodes of train.yaml that a config may leave out, because the class of the node has a default.
OPTIONAL = ("num_workers", "drop_last")
# Integers must be less than this number, because libraries store them in 64 bits.
MAX_INTEGER = 2**63


def structure_errors(plain: dict[str, object]) -> list[ErrorDetails]:
    """Return the errors of unknown and missing keys, and of wrong types, words and bounds."""
    absent = [name for name in KNOWN if name not in plain]
    if len(absent) > FORGOTTEN:
        fix = "Your conf/train.yaml replaces exp's file. Copy its keys, or rename yours to conf/experiment/NAME.yaml"
        got = f"none of {among(absent)}"
        return [ErrorDetails("config", got, "all keys of exp's own train.yaml", fix)]
    return [
        *_mapping_errors("", plain, SCHEMA),
        *_group_errors(plain),
        *_missing_errors(plain),
        *_bound_errors(plain),
        *_layers_errors(plain),
    ]


def node_errors(name: str, plain: dict[str, object]) -> list[ErrorDetails]:
    """Return the errors of keys, types and bounds in a top-level node.

    Args:
        name: Key of the node. The node must be in SCHEMA.
        plain: Values of the config.
    """
    return list(_mapping_errors("", {name: plain[name]} if name in plain else {}, {name: SCHEMA[name]}))


def kind_errors(key: str, value: object, annotation: object, default: object = EMPTY) -> Iterator[ErrorDetails]:
    """Yield the error of a value that does not match an annotation.

    Args:
        key: Key of the value.
        value: The value.
        annotation: Annotation of the parameter. If it is EMPTY, the type of the default decides.
        default: Default of the parameter. EMPTY (default) if the parameter has no default.
    """
    if not fits(value, annotation, default):
        fix = _list_fix(key, value, annotation, default)
        yield value_error(key, value, expected=describe_type(annotation, default), words=words_of(annotation), fix=fix)


def _list_fix(key: str, value: object, annotation: object, default: object) -> str | None:
    """Return the fix to write the value as a list, if such a list would be valid. Otherwise return None."""
    if isinstance(value, list | dict) or value is None or value is UNKNOWN:
        return None
    text = value if isinstance(value, str) else show(value)
    if not PLAIN_WORD.fullmatch(text):
        return None
    if fits([value], annotation, default):
        return f"Write {key}=[{text}]"
    if fits([text], annotation, default):
        return f"Write '{key}=[\"{text}\"]'"
    near = find_nearest(text, words_of(annotation))
    return f"Write {key}=[{near[0]}]" if near and fits([near[0]], annotation, default) else None


def _key_errors(key: str, value: object, annotation: object) -> Iterator[ErrorDetails]:
    """Yield the error of a value that does not match the annotation of its key.

    A node with a `_target_` is valid only if the annotation contains Node.
    """
    if is_node(value) and Node not in typing.get_args(annotation):
        yield value_error(key, value, expected=describe_type(annotation))
    elif key == MODULE_KEY and isinstance(value, str):
        error = value_error(key, value, expected=describe_type(annotation))
        yield replace(error, fix=_module_fix(value))
    else:
        yield from kind_errors(key, value, annotation)


def _module_fix(name: str) -> str:
    if "." in name:
        return f"Write 'module={{_target_: {name}}}'"
    return f"Create conf/module/{name}.yaml with a _target_, or write 'module={{_target_: mine.LitNet}}'"


def value_error(
    key: str, value: object, *, expected: str, words: Sequence[str] = (), fix: str | None = None
) -> ErrorDetails:
    """Return the error of a wrong value.

    The error contains the first fix that exists, in this order: the fix of a common mistake, the argument `fix`, the
    closest valid word, a fix derived from the type.

    Args:
        key: Key of the value.
        value: The value.
        expected: Description of valid values.
        words: Valid words. Default: no words.
        fix: Fix of the error. None (default) if the caller has no fix.
    """
    fix = fix_of_value(key, value) or fix or (did_you_mean(value, words) if isinstance(value, str) else None)
    return invalid_value(key, value, expected, fix or _fix_of_kind(key, value, expected))


def _fix_of_kind(key: str, value: object, expected: str) -> str | None:
    """Return the fix of a value with an unintended YAML type, such as the text '8' instead of the number 8.

    Return None if no fix is known.
    """
    is_number = "number" in expected or "integer" in expected
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_INTEGER and "integer" in expected:
        return f"Write {int(value)}"
    if isinstance(value, str) and value.lower() in ("none", "nil"):
        return "Write null"
    if isinstance(value, str) and is_number and _is_number(value):
        return f"Write {value} without quotes"
    entries = value if isinstance(value, list) else [value]
    is_quotable = not any(isinstance(entry, list | dict) or entry in ("", None) for entry in entries)
    if "text" not in expected or not is_quotable or all(isinstance(entry, str) for entry in entries):
        return None
    texts = ",".join(f'"{entry if isinstance(entry, str) else show(entry)}"' for entry in entries)
    quoted = f"[{texts}]" if isinstance(value, list) else texts
    return f"Put double quotes around the text, and single quotes around the override: '{key}={quoted}'"


def _unknown_key(key: str, known: list[str], *, holder: str) -> ErrorDetails:
    """Return the error of an unknown key.

    The fix comes from habits.yaml, which lists keys of other frameworks. Otherwise, the fix is the most similar known
    key.

    Args:
        key: The unknown dotted key.
        known: Known names.
        holder: Description of the mapping that contains the key.
    """
    parent, _, name = key.rpartition(".")
    near = find_nearest(name, known)
    fix = f"Did you mean {_join(parent, near[0])}?" if near else None
    if not parent and fix is None:
        fix = f"Move the key below vars, and refer to it as ${{vars.{name}}}"
    return unknown_key(key, known, holder=holder, fix=fix_of_key(key, "VALUE") or fix)


def own_groups(plain: dict[str, object]) -> list[str]:
    """Return the top-level keys that come from config groups of the user.

    Such a group is a folder of ./conf with a selected option.
    """
    found = Values(plain)[f"{COMPOSITION}.{OWN_GROUPS}"]
    return [name for name in found if name not in KNOWN] if isinstance(found, list) else []


def _mapping_errors(key: str, node: dict[str, object], schema: dict[str, object]) -> Iterator[ErrorDetails]:
    known = list(schema) + ([*NODES, *COLLECTIONS, PHASES, *own_groups(node)] if not key else [])
    for name in node:
        if name not in known and not (name == COMPOSITION and not key):
            yield _unknown_key(_join(key, name), known, holder=key or "the config")
    for name, rule in schema.items():
        path = _join(key, name)
        if name not in node:
            yield missing_value(path, "a mapping" if isinstance(rule, dict) else describe_type(rule), got="no such key")
        elif not isinstance(rule, dict):
            yield from _key_errors(path, node[name], rule)
        elif isinstance(inner := node[name], dict):
            yield from _mapping_errors(path, inner, rule)
        elif inner is not UNKNOWN:
            yield invalid_value(path, inner, f"a mapping of {among(rule)}")


def _group_errors(plain: dict[str, object]) -> Iterator[ErrorDetails]:
    is_own = has_module(plain)
    if not is_own and "monitor" in plain and plain["monitor"] is None:
        yield missing_value("monitor", "a tag of this run, such as loss/val")
    for name in NODES:
        if name not in plain:
            yield missing_value(name, "a node with a _target_", f"Choose one: {name}=NAME", got="no such key")
        elif not (is_own and name in REPLACED and plain[name] is None):
            yield from _node_errors(name, plain[name])
    for name in (*COLLECTIONS, PHASES):
        if name not in plain:
            yield missing_value(name, "named entries", f"For none, write {name}: {{}}", got="no such key")
    for name in COLLECTIONS:
        entries = plain.get(name, UNKNOWN)
        if is_node(entries):
            below = f"Give the node a name: {name}: {{my_name: {{_target_: ...}}}}"
            yield ErrorDetails(name, "a node with a _target_", "a mapping of named entries", below)
        elif isinstance(entries, dict):
            for entry, node in entries.items():
                yield from _node_errors(f"{name}.{entry}", node)
        elif entries is not UNKNOWN:
            fix = f"For no entry, write {name}=[]" if entries is None else None
            yield invalid_value(name, entries, "a mapping of named entries", fix)


def _node_errors(key: str, node: object) -> Iterator[ErrorDetails]:
    if node is UNKNOWN or is_node(node):
        return
    if node is None and "." in key:
        yield missing_value(key, "a node with a _target_", f"To remove the entry, write '~{key}'")
    elif isinstance(node, dict):
        near = find_nearest("_target_", [str(name) for name in node])
        fix = f"{key}.{near[0]} should be {key}._target_" if near else fix_of_key(key, "VALUE")
        yield ErrorDetails(key, "a mapping without a _target_", "a _target_: the name of a class", fix)
    else:
        fix = f"To select an option of a config group, write {key}={node} on the command line or in a defaults list"
        yield invalid_value(key, node, "a node with a _target_", fix if isinstance(node, str) else None)


def _missing_errors(plain: dict[str, Any]) -> Iterator[ErrorDetails]:
    """Yield the errors of missing keys in nodes with a `_target_`, if exp itself reads these keys.

    exp's train.yaml declares these keys.
    """
    declared = {**read_yaml(OWN_CONF / "train.yaml"), "strategy": {"name": "ddp"}}
    owned = ("data",) if brings_data(plain) else ()
    for node in (name for name in NODES if name in declared and name not in owned and is_node(plain.get(name))):
        for name, default in declared[node].items():
            if name not in (*plain[node], *OPTIONAL):
                fix = f"Write {node}.{name}={default if isinstance(default, str) else show(default)}"
                yield missing_value(f"{node}.{name}", "a value, which exp needs", fix, got="no such key")


# Patterns of VALUES by their first word. This grouping saves time, because most of the hundreds of keys in a config
# match no pattern.
PATTERNS = {
    word: [(pattern, rule) for pattern, rule in VALUES.items() if "*" in pattern and pattern.startswith(f"{word}.")]
    for word in {pattern.partition(".")[0] for pattern in VALUES if "*" in pattern}
}


def _bound_errors(plain: dict[str, object]) -> Iterator[ErrorDetails]:
    for key, value in leaves(plain):
        if isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER:
            yield invalid_value(key, value, "an integer of 64 bits")
        if key in VALUES:
            yield from _key_errors(key, value, VALUES[key])
        for pattern, rule in PATTERNS.get(key.partition(".")[0], ()):
            if _matches(key, pattern):
                yield from _key_errors(key, value, rule)


def _layers_errors(plain: dict[str, object]) -> Iterator[ErrorDetails]:
    """Yield the errors of entries of `layers`: nodes, `{repeat: n, layer: node}`, and lists or mappings of these."""
    model = plain.get("model")
    yield from _count_errors(model)
    for key, value in leaves(model, "model"):
        if key.rpartition(".")[2] == "layers" and isinstance(value, dict) and not is_node(value):
            for name, layer in value.items():
                yield from _layer_errors(f"{key}.{name}", layer)


def _layer_errors(key: str, value: object) -> Iterator[ErrorDetails]:
    if value is UNKNOWN or is_node(value):
        return
    if isinstance(value, list):
        for index, layer in enumerate(value):
            yield from _layer_errors(f"{key}.{index}", layer)
    elif not isinstance(value, dict):
        fix = f"To remove the layer, write '~{key}'" if value is None else None
        yield invalid_value(key, value, "a layer: a node with a _target_", fix)
    elif value.keys() & {"repeat", "layer"}:
        yield from _repeat_errors(key, value)
        yield from _layer_errors(f"{key}.layer", value.get("layer", UNKNOWN))
    elif not value or not all(isinstance(layer, dict | list) for layer in value.values()):
        yield from _node_errors(key, value)
    else:
        for name, layer in value.items():
            yield from _layer_errors(f"{key}.{name}", layer)


def _repeat_errors(key: str, value: dict[str, object]) -> Iterator[ErrorDetails]:
    for name in value:
        if name not in ("repeat", "layer"):
            yield _unknown_key(f"{key}.{name}", ["repeat", "layer"], holder="a repeated layer")
    for name, expected in (("repeat", "the number of layers, 1 or more"), ("layer", "a node with a _target_")):
        if name not in value:
            yield missing_value(f"{key}.{name}", expected, got="no such key")
    yield from kind_errors(f"{key}.repeat", value.get("repeat", 1), Repeats)


def _count_errors(model: object) -> Iterator[ErrorDetails]:
    """Yield the error of nested repeats that multiply to too many layers."""
    if _count(model) <= MAX_LAYERS:
        return
    repeats = [(key, value) for key, value in leaves(model, "model") if isinstance(value, dict) and "repeat" in value]
    # Report the innermost repeat that alone makes too many layers, or else the innermost repeat.
    key, value = max(repeats, key=lambda found: (_count(found[1]) > MAX_LAYERS, len(found[0])))
    because = f"which leads to {_count(model):,} layers in the model"
    yield unsuitable(f"{key}.repeat", value["repeat"], because, f"a model with at most {MAX_LAYERS:,} layers")


def _count(value: object) -> int:
    """Return the number of nodes with a `_target_` in a part of a model. A repeated node counts several times."""
    if isinstance(value, list):
        return sum(map(_count, value))
    if not isinstance(value, dict):
        return 0
    times = value.get("repeat") if "layer" in value else 1
    return is_node(value) + (times if isinstance(times, int) else 1) * sum(map(_count, value.values()))


def _matches(key: str, pattern: str) -> bool:
    parts, wanted = key.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
