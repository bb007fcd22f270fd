"""Builds JSON schemas (draft 7), with which editors complete and check config files.

One schema describes train.yaml. Each config group, such as `optimizer`, has a schema for its files. A schema accepts
every config that exp's check accepts. No key is required, because another file may set the key. Every value may be an
interpolation, such as `${name}`.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exp.check.kinds import MAPPINGS, SEQUENCES, describe_type
from exp.check.phase_rules import PHASE
from exp.check.signature import PLAIN, Parameter, signature_of
from exp.config.annotations import EMPTY
from exp.config.settings import SCHEMA, VALUES
from exp.config.slots import ANYWHERE, COLLECTIONS, NODES, PHASES, Slot, slot_of
from exp.config.targets import class_of, resolve
from exp.errors import ExpError

DRAFT = "http://json-schema.org/draft-07/schema#"
Schema = dict[str, Any]
# Text that contains an interpolation, or `???`, which marks a value that the user must set.
INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
SIMPLE: Mapping[object, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    complex: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    **{kind: {"type": "array"} for kind in SEQUENCES},
    **{kind: {"type": "object"} for kind in MAPPINGS},
}
NULL = SIMPLE[None]
NODE: Schema = {"type": "object", "required": ["_target_"]}
A_NODE: Schema = {"$ref": "#/definitions/node"}
VALUE: Schema = {"$ref": "#/definitions/value"}


class Schemas:
    """Builder of the JSON schemas for the configs of one search path.

    Args:
        targets: Dotted names of classes and functions that can be the `_target_` of a node. A node with another
            `_target_` accepts all keys.
        allow: Packages from which classes may be imported, as in security.allow.
    """

    def __init__(self, targets: Iterable[str], *, allow: Sequence[str] = ()) -> None:
        self._allow = allow
        found = {name: self._resolve(name) for name in sorted(set(targets))}
        self._targets = {name: target for name, target in found.items() if target is not None}

    def train(self) -> Schema:
        """Return the schema of train.yaml. Files with the header `# @package _global_` have the same schema."""
        body: Schema = {
            **fixed_keys(SCHEMA)["properties"],
            **{name: _or(self._node(slot_of(name)), NULL) for name in ("module", *NODES)},
            **{name: _or(self._named_schema(slot_of(f"{name}.entry"))) for name in COLLECTIONS},
            PHASES: _or(self._phases()),
            "hydra": {"type": "object"},
        }
        return self._whole({"type": "object", "properties": body, "additionalProperties": False}, "train.yaml")

    def group(self, name: str) -> Schema:
        """Return the schema of the files in a config group.

        Args:
            name: Name of the group, such as `optimizer`.
        """
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
        listed: Schema = {"type": "array", "items": {"type": ["string", "object"]}}
        properties = {"defaults": listed, **body.get("properties", {})}
        return {"$schema": DRAFT, "title": title, **body, "properties": properties, "definitions": definitions}

    def _named_schema(self, slot: Slot) -> Schema:
        """Return the schema of a mapping that has names as keys and config nodes as values.

        Args:
            slot: Place of the nodes in the config, such as `hooks`.
        """
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
        """Return the schema of a config node.

        If `_target_` of a node is a known class that fits the slot, only the parameters of that class are allowed.
        Other nodes may have the parameters of all known classes that fit the slot.

        Args:
            slot: Place of the node in the config, such as `optimizer`.
        """
        bases = tuple(map(class_of, slot.bases))
        fitting = [name for name, one in self._targets.items() if inspect.isclass(one) and issubclass(one, bases)]
        known = {name: self._target(name, slot) for name in fitting}
        cases = []
        for name, one in known.items():
            # A reference to the shared definition is enough if the slot adds no keys.
            is_plain = one == self._target(name, ANYWHERE)
            cases.append(_case(name, {"$ref": f"#/definitions/{name}"} if is_plain else one))
        properties: Schema = {"defaults": {}}  # the defaults list of a file with this node
        properties |= {name: VALUE for one in known.values() for name in one["properties"] if name != "defaults"}
        properties |= self._keys_of_slot(slot, properties)
        closed = bool(known) and all(one.get("additionalProperties") is False for one in known.values())
        open_node: Schema = {"properties": properties, **({"additionalProperties": False} if closed else {})}
        return {"type": "object", "allOf": [*cases, {"if": {"not": NODE}, "then": open_node}]}

    def _target(self, name: str, slot: Slot) -> Schema:
        """Return the schema of a config node with a given `_target_`.

        Args:
            name: Dotted name of the target.
            slot: Place of the node in the config.
        """
        target = self._targets[name]
        signature = signature_of(target)
        properties: Schema = {
            "_target_": {"const": name},
            "_partial_": _or(SIMPLE[bool]),
            "_args_": _or({"type": "array", "items": VALUE}),
            "defaults": {},  # the defaults list of a file with this node
            **{one.name: _parameter(one, slot) for one in signature.parameters.values()},
        }
        properties |= self._keys_of_slot(slot, properties)
        found: Schema = {
            "properties": {key: rule for key, rule in properties.items() if key not in slot.refused},
            "description": (inspect.getdoc(target) or "").strip().split("\n")[0][:200],
        }
        # A model with `layers` may have more keys than the signature of its class has parameters.
        is_open = signature.open or (slot.pattern == "model" and "layers" in properties)
        return found if is_open else {**found, "additionalProperties": False}

    def _keys_of_slot(self, slot: Slot, names: Iterable[str]) -> Schema:
        """Return the schemas of those keys of a node for which exp has rules.

        Args:
            slot: Place of the node in the config.
            names: Keys of the node that are parameters of classes.

        Returns:
            Schemas by key. The keys are those that exp itself reads in the slot, and keys in `names` with a rule of
            exp.
        """
        rules = {name: VALUES.get(f"{slot.pattern}.{name}") for name in {*names, *slot.reserved}}
        found = {name: _or(annotation_schema(rule)) for name, rule in rules.items() if rule is not None}
        return {**dict.fromkeys(slot.reserved, VALUE), **found}

    def _value(self) -> Schema:
        """Return the schema of an arbitrary value.

        If a node inside the value has a known `_target_`, the schema of that target applies to the node.
        """
        cases = [_case(name, {"$ref": f"#/definitions/{name}"}) for name in self._targets]
        inner: Schema = {"if": {"not": NODE}, "then": {"additionalProperties": VALUE}}
        return {"items": VALUE, "allOf": [{"if": {"type": "object"}, "then": {"allOf": [*cases, inner]}}]}


def fixed_keys(keys: Mapping[str, object]) -> Schema:
    """Return the schema of a mapping that allows only the given keys.

    Args:
        keys: Rule of each key, in the format of `exp.config.settings.SCHEMA`.
    """
    properties = {
        name: _or(fixed_keys(rule))
        if isinstance(rule, dict)
        else {"description": describe_type(rule), **_or(annotation_schema(rule))}
        for name, rule in keys.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def annotation_schema(annotation: object, default: object = EMPTY) -> Schema:
    """Return the schema of a type annotation. The schema is {} if all values are accepted.

    The schema does not limit the size of numbers or the types of entries in containers. exp's check reports such
    errors.

    Args:
        annotation: The type annotation of a parameter.
        default: Default value of the parameter. If the parameter has no annotation, the type of the default is used.
    """
    if annotation is EMPTY:
        is_plain = isinstance(default, bool | int | float | str)
        return SIMPLE[float if type(default) is int else type(default)] if is_plain else {}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [annotation_schema(one) for one in arguments]
        return {} if {} in kinds else {"anyOf": kinds}
    if origin is typing.Annotated:
        return annotation_schema(arguments[0])
    return SIMPLE.get(origin or annotation, {})


def _parameter(one: Parameter, slot: Slot) -> Schema:
    kind = annotation_schema(one.annotation, one.default)
    words = [] if one.annotation is EMPTY and one.default is EMPTY else [describe_type(one.annotation, one.default)]
    if not one.required and isinstance(one.default, PLAIN):
        words.append(f"by default {one.default!r}")
    about: Schema = {"description": ", ".join(words)} if words else {}
    nullable = [NULL] if one.name in slot.filled or one.default is None else []
    return {**about, "allOf": [_or(kind, A_NODE, *nullable), VALUE]}


def _or(*kinds: Schema) -> Schema:
    """Return a schema that accepts interpolations, and all values that at least one of the given schemas accepts."""
    return {"anyOf": [*kinds, {"$ref": "#/definitions/interpolation"}]} if {} not in kinds else {}


def _case(name: str, then: Schema) -> Schema:
    return {"if": {"required": ["_target_"], "properties": {"_target_": {"const": name}}}, "then": then}
