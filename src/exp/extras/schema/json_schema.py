"""Builds JSON schemas (draft 7) of train.yaml and of the options of each group, for editors.

A schema accepts every config that exp's check accepts. For example, no key is required, because another file may set
it. Every value may be an interpolation.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exp.check.kinds import MAPPINGS, SEQUENCES, bounds_of, describe_type
from exp.check.phase_rules import PHASE
from exp.check.signature import PLAIN, Parameter, signature_of
from exp.config.annotations import EMPTY
from exp.config.settings import SCHEMA, VALUES
from exp.config.slots import ANYWHERE, COLLECTIONS, NODES, PHASES, Slot, slot_of
from exp.config.targets import resolve
from exp.errors import ExpError

DRAFT = "http://json-schema.org/draft-07/schema#"
Schema = dict[str, Any]
# An interpolation, or ??? for a value that must be set.
INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
SCALARS: Mapping[object, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    complex: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
REFERENCE = re.compile(r'"#/definitions/([^"]+)"')
LENGTHS = {"min_length": "minItems", "max_length": "maxItems"}
NULL = SCALARS[type(None)]
NODE: Schema = {"type": "object", "required": ["_target_"]}
A_NODE: Schema = {"$ref": "#/definitions/node"}
VALUE: Schema = {"$ref": "#/definitions/value"}


class Schemas:
    """Builds the schemas for the configs of one search path.

    Args:
        targets: Dotted names of classes and functions that nodes may have as `_target_`. A node with another `_target_`
            accepts all keys.
        allow: Packages whose classes may be imported, as in security.allow.
    """

    def __init__(self, targets: Iterable[str], *, allow: Sequence[str] = ()) -> None:
        self._allow = allow
        found = {name: self._resolve(name) for name in sorted(set(targets))}
        self._targets = {name: target for name, target in found.items() if target is not None}

    def train(self) -> Schema:
        """Return the schema of train.yaml and of files with the header `# @package _global_`."""
        body: Schema = {
            **fixed_keys(SCHEMA)["properties"],
            **{name: _or(self._node(slot_of(name)), NULL) for name in ("module", *NODES)},
            **{name: _or(self._named_schema(slot_of(f"{name}.entry"))) for name in COLLECTIONS},
            PHASES: _or(self._phases()),
            "hydra": {"type": "object"},
        }
        return self._whole({"type": "object", "properties": body, "additionalProperties": False}, "train.yaml")

    def group(self, name: str) -> Schema:
        """Return the schema of the files in a config group, such as optimizer."""
        if name in COLLECTIONS:
            body = self._named_schema(slot_of(f"{name}.entry"))
        elif name == PHASES:
            body = self._phases()
        elif name in SCHEMA and isinstance(SCHEMA[name], dict):
            body = fixed_keys(SCHEMA[name])
        else:
            body = self._node(slot_of(name))
        return self._whole(body, f"An option of the group {name}")

    def _resolve(self, name: str) -> Any:
        try:
            return resolve(name, returns=("builtins.object",), allow=self._allow)
        except ExpError:
            return None  # an extra that is not installed, or an error that the check reports

    def _whole(self, body: Schema, title: str) -> Schema:
        definitions = {
            "interpolation": INTERPOLATION,
            "node": NODE,
            "value": self._value(),
            **{name: self._target(name, ANYWHERE) for name in self._targets},
        }
        body = _with_defaults(body)
        return {"$schema": DRAFT, "title": title, **body, "definitions": _reachable(body, definitions)}

    def _named_schema(self, slot: Slot) -> Schema:
        """Return the schema of a mapping from names to nodes of a slot."""
        return {"type": "object", "additionalProperties": _or(self._node(slot))}

    def _phases(self) -> Schema:
        nodes = {name: _or(self._node(slot_of(f"{PHASES}.one.{name}")), NULL) for name in ("optimizer", "scheduler")}
        phase = {
            "type": "object",
            "properties": {**fixed_keys(PHASE)["properties"], **nodes},
            "additionalProperties": False,
        }
        return {"type": "object", "additionalProperties": phase}

    # --- nodes with a _target_ ---

    def _node(self, slot: Slot) -> Schema:
        """Return the schema of a node in a slot, which is a place in the config such as `optimizer`.

        A node with a known `_target_` has the schema of the target. Other nodes may have the keys of all targets that
        fit the slot.
        """
        fitting = [name for name, target in self._targets.items() if self._fits(target, slot)]
        known = {name: self._target(name, slot) for name in fitting}
        cases = []
        for name, one in known.items():
            # A reference is enough if the slot adds no keys.
            is_plain = one == self._target(name, ANYWHERE)
            cases.append(_case(name, {"$ref": f"#/definitions/{name}"} if is_plain else one))
        properties: Schema = {"defaults": {}}  # the defaults list of a file with this node
        properties |= {name: VALUE for one in known.values() for name in one["properties"] if name != "defaults"}
        properties |= {name: self._reserved_schema(slot, name) for name in slot.reserved}
        properties |= self._schema_of_bounds(slot, within=properties)
        closed = bool(known) and all(one.get("additionalProperties") is False for one in known.values())
        open_node: Schema = {"properties": properties, **({"additionalProperties": False} if closed else {})}
        return {"type": "object", "allOf": [*cases, {"if": {"not": NODE}, "then": open_node}]}

    def _fits(self, target: object, slot: Slot) -> bool:
        if not slot.bases or not inspect.isclass(target):
            return False
        names = {name for one in target.__mro__ for name in (f"{one.__module__}.{one.__qualname__}", *_aliases(one))}
        return not names.isdisjoint(slot.bases)

    def _target(self, name: str, slot: Slot) -> Schema:
        """Return the schema of a node in a slot with a given `_target_`."""
        target = self._targets[name]
        signature = signature_of(target)
        properties: Schema = {
            "_target_": {"const": name},
            "_partial_": _or(SCALARS[bool]),
            "_args_": _or({"type": "array", "items": VALUE}),
            "defaults": {},  # the defaults list of a file with this node
            **{one.name: self._parameter(one, slot) for one in signature.parameters.values()},
            **{one: self._reserved_schema(slot, one) for one in slot.reserved},
        }
        properties |= self._schema_of_bounds(slot, within=properties)
        found: Schema = {
            "properties": {key: rule for key, rule in properties.items() if key not in slot.refused},
            "description": (inspect.getdoc(target) or "").strip().split("\n")[0][:200],
        }
        # Keys next to the layers of a model may belong to the slot instead of the signature.
        is_open = signature.open or (slot.pattern == "model" and "layers" in properties)
        return found if is_open else {**found, "additionalProperties": False}

    def _parameter(self, one: Parameter, slot: Slot) -> Schema:
        kind = annotation_schema(one.annotation, one.default)
        words = [] if one.annotation is EMPTY and one.default is EMPTY else [describe_type(one.annotation, one.default)]
        if not one.required and isinstance(one.default, PLAIN):
            words.append(f"by default {one.default!r}")
        about: Schema = {"description": ", ".join(words)} if words else {}
        if not kind:
            return {**about, "allOf": [VALUE]}
        nullable = [NULL] if one.name in slot.filled or one.default is None else []
        if _is_scalar(kind):
            return {**about, **_or(kind, *nullable)}
        return {**about, "allOf": [_or(kind, A_NODE, *nullable), VALUE]}

    def _reserved_schema(self, slot: Slot, name: str) -> Schema:
        rule = VALUES.get(slot.pattern + f".{name}")
        return VALUE if rule is None else _or(annotation_schema(rule))

    def _schema_of_bounds(self, slot: Slot, within: Iterable[str]) -> Schema:
        """Return the schemas of those keys in `within` for which exp has rules in this slot."""
        rules = {name: VALUES[f"{slot.pattern}.{name}"] for name in within if f"{slot.pattern}.{name}" in VALUES}
        return {name: _or(annotation_schema(rule)) for name, rule in rules.items()}

    def _value(self) -> Schema:
        """Return the schema of an arbitrary value.

        Nodes inside the value with a known `_target_` have the schema of the target.
        """
        cases = [_case(name, {"$ref": f"#/definitions/{name}"}) for name in self._targets]
        inner: Schema = {"if": {"not": NODE}, "then": {"additionalProperties": VALUE}}
        return {"items": VALUE, "allOf": [{"if": {"type": "object"}, "then": {"allOf": [*cases, inner]}}]}


def _reachable(body: Schema, definitions: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the definitions that a schema uses, directly or through other definitions."""
    found: dict[str, Schema] = {}
    todo = [body]
    while todo:
        names = set(REFERENCE.findall(json.dumps(todo.pop()))) - found.keys()
        found |= {name: definitions[name] for name in names}
        todo += [definitions[name] for name in names]
    return {name: found[name] for name in definitions if name in found}


def fixed_keys(keys: Mapping[str, object]) -> Schema:
    """Return the schema of a mapping that allows only the given keys.

    Args:
        keys: Rules by key, in the format of `exp.config.settings.SCHEMA`.
    """
    properties = {
        name: _or(fixed_keys(rule))
        if isinstance(rule, dict)
        else {"description": describe_type(rule), **_or(annotation_schema(rule))}
        for name, rule in keys.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def annotation_schema(annotation: object, default: object = EMPTY) -> Schema:
    """Return the schema of a type annotation; {} if it accepts all values.

    The schema follows the rules of `exp.check.kinds.fits`.

    Args:
        annotation: The type annotation of a parameter.
        default: Default of the parameter, whose type is used without an annotation.
    """
    if annotation in (EMPTY, Any, object) or isinstance(annotation, typing.TypeVar | str | typing.ForwardRef):
        is_plain = annotation is EMPTY and isinstance(default, bool | int | float | str)
        return SCALARS[float if type(default) is int else type(default)] if is_plain else {}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in SCALARS or annotation is None:
        return NULL if annotation is None else SCALARS[annotation]
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [annotation_schema(one) for one in arguments]
        return {} if {} in kinds else {"anyOf": kinds}
    if origin is typing.Annotated:
        return _bounded_schema(annotation_schema(arguments[0]), bounds_of(arguments[1:]))
    return _container(origin or annotation, arguments)


def _container(base: object, arguments: tuple[object, ...]) -> Schema:
    if base in SEQUENCES:
        if base is tuple and arguments and arguments[-1] is not ...:
            count = len(arguments)
            return {"type": "array", "items": list(map(_entry, arguments)), "minItems": count, "maxItems": count}
        return {"type": "array", "items": _entry(arguments[0]) if arguments else {}}
    if base in MAPPINGS and len(arguments) == 2 and typing.get_origin(arguments[1]) is collections.abc.Callable:
        # Functions of a forward program, by their dotted names.
        return {"type": "object", "additionalProperties": SCALARS[str]}
    if base in MAPPINGS:
        return {"type": "object", "additionalProperties": _entry(arguments[1]) if len(arguments) == 2 else {}}
    if base is collections.abc.Callable:
        return A_NODE
    if not inspect.isclass(base):
        return {}
    if issubclass(base, enum.Enum):
        return {"enum": [*(member.name for member in base), *(member.value for member in base)]}
    if issubclass(base, os.PathLike) or f"{base.__module__}.{base.__qualname__}" == "torch.dtype":
        return SCALARS[str]
    return {}


def _is_scalar(kind: Schema) -> bool:
    """Return whether a schema accepts only scalars, so that a node with a `_target_` cannot replace the value."""
    others = kind.get("anyOf")
    if others is not None:
        return all(map(_is_scalar, others))
    return kind.get("type") in ("boolean", "integer", "number", "string", "null") or "enum" in kind


def _entry(annotation: object) -> Schema:
    kind = annotation_schema(annotation)
    return (_or(kind) if _is_scalar(kind) else _or(kind, A_NODE)) if kind else {}


def _bounded_schema(kind: Schema, bounds: Mapping[str, Any]) -> Schema:
    if not kind or kind == A_NODE:
        return kind
    limits = {BOUNDS[name]: bound for name, bound in bounds.items() if name in BOUNDS and math.isfinite(bound)}
    lengths = {LENGTHS[name]: bound for name, bound in bounds.items() if name in LENGTHS}
    if kind.get("type") == "array":
        entries = [kind["items"]] if isinstance(kind["items"], dict) else []
        return {**kind, **lengths, **({"items": {**entries[0], **limits}} if entries and limits else {})}
    return {**kind, **limits}


def _or(*kinds: Schema) -> Schema:
    """Return the schema that accepts an interpolation and every value that one of the given schemas accepts."""
    return {"anyOf": [*kinds, {"$ref": "#/definitions/interpolation"}]} if {} not in kinds else {}


def _case(name: str, then: Schema) -> Schema:
    return {"if": {"required": ["_target_"], "properties": {"_target_": {"const": name}}}, "then": then}


def _with_defaults(body: Schema) -> Schema:
    """Return a schema that also allows a defaults list at the top of the file."""
    listed: Schema = {"type": "array", "items": {"type": ["string", "object"]}}
    return {**body, "properties": {"defaults": listed, **body.get("properties", {})}}


def _aliases(kind: type) -> set[str]:
    """Return names of a class with shorter module paths, such as torch.nn.Module for torch.nn.modules.module.Module."""
    parts = kind.__module__.split(".")
    return {".".join([*parts[:count], kind.__qualname__]) for count in range(1, len(parts))}
