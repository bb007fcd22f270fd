"""The second stage of the check: the targets of the config and their parameters.

Each `_target_` is imported, and the values of its node are compared with the signature of the target.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from exp.check.foreign import missing_package
from exp.check.kinds import describe_type
from exp.check.signature import Parameter, Signature, signature_of
from exp.check.structure import kind_errors, value_error
from exp.config.annotations import EMPTY
from exp.config.reading import UNKNOWN
from exp.config.settings import VALUES
from exp.config.slots import (
    DATA_MODULE,
    RESERVED_IN_NODE,
    Slot,
    nodes_in,
    own_loaders_error,
    own_training_error,
    returned_classes,
    slot_of,
    trains_itself,
)
from exp.config.targets import TargetError, class_of, resolve, resolve_function
from exp.config.versions import REMOVED_PARAMETERS, current_target
from exp.errors import ConfigError, ErrorDetails, MissingExtraError, missing_value, unsuitable
from exp.spelling import among, find_nearest, fix_of_key, show


def target_errors(plain: dict[str, Any], *, allow: Sequence[str], has_module: bool = False) -> list[ErrorDetails]:
    """Return the errors of all nodes with a `_target_`.

    If the name of a target is wrong, the values of its node are not checked.

    Args:
        plain: Values of the config.
        allow: Packages of users that targets may come from.
        has_module: Whether the run trains a user's LightningModule.
    """
    places: dict[str, str] = {}
    errors: list[ErrorDetails] = []
    for key, node in nodes_in(plain):
        # nodes_in yields outer nodes first. For a node in `_args_`, the parameter name replaces the index.
        holder = max((inner for inner in places if f"{key}.".startswith(f"{inner}.")), key=len, default="")
        place = places[holder] + key.removeprefix(holder) if holder else key
        errors += node_errors(key, node, place=place, allow=allow, has_module=has_module)
        for index, name in enumerate(_positional_names(node, place, allow=allow)):
            places[f"{key}._args_.{index}"] = f"{place}.{name}"
    return errors


def _positional_names(node: dict[str, Any], place: str, *, allow: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(node.get("_args_"), list) or not isinstance(node["_target_"], str):
        return ()
    try:
        target = resolve(node["_target_"], returns=returned_classes(place), allow=allow)
        return signature_of(target).positional[: len(node["_args_"])]
    except (ConfigError, MissingExtraError):
        return ()  # node_errors reports this error


def node_errors(
    key: str, node: dict[str, Any], *, place: str | None = None, allow: Sequence[str], has_module: bool = False
) -> Iterator[ErrorDetails]:
    """Yield the errors of one node, except those of inner nodes.

    Args:
        key: Key of the node.
        node: The node.
        place: Key that determines which classes are allowed. None (default): `key`. For nodes in `_args_`, `place` has
            the name of the parameter instead of the index.
        allow: Packages of users that targets may come from.
        has_module: Whether the run trains a user's LightningModule.
    """
    place = place or key
    slot, name = slot_of(place), node["_target_"]
    if name is UNKNOWN:
        return
    try:
        target = resolve(name, base=slot.bases or None, returns=returned_classes(place), allow=allow)
    except TargetError as error:
        yield replace(error.errors[0], key=f"{key}._target_")
        return
    except MissingExtraError as error:
        yield ErrorDetails(f"{key}._target_", str(error), "an installed package")
        return
    except ConfigError as error:
        yield from error.errors
        return
    if inspect.isclass(target) and (missing := missing_package(target, key=f"{key}._target_")) is not None:
        yield missing
    elif place == "model" and inspect.isclass(target) and trains_itself(target):
        yield own_training_error(name, kind=name)
    elif place == "data" and not has_module and issubclass(target, class_of(DATA_MODULE)):
        yield own_loaders_error(name)
    elif _is_made_of_functions(target):
        expected = "a schedule whose parameters are plain values"
        fix = "Derive a class that creates the function in its constructor, as docs/training.md shows"
        yield unsuitable(f"{key}._target_", name, "which needs a Python function", expected, fix)
    else:
        yield from _parameter_errors(key, node, target, slot, allow=allow)


def _parameter_errors(
    key: str, node: dict[str, Any], target: object, slot: Slot, *, allow: Sequence[str]
) -> Iterator[ErrorDetails]:
    """Yield the errors of the values in a node, compared with the signature of the target."""
    yield from _hydra_errors(key, node)
    given = [name for name in node if name not in RESERVED_IN_NODE]
    signature = _without_inferred_size(target, signature_of(target), given, node)
    yield from _unknown_errors(key, node, given, signature, slot)
    yield from _missing_errors(key, node, given, signature, slot, target)
    yield from _positional_errors(key, node, given, signature, slot)
    if _takes_functions(target) and isinstance(node.get("functions"), dict):
        yield from _function_errors(f"{key}.functions", node["functions"], allow=allow)
        given.remove("functions")
    for name in given:
        # Skip keys with a rule of exp, which accepts more than the class, such as trainer.max_time in seconds.
        is_judged = f"{key}.{name}" in VALUES
        if name in signature.parameters and not is_judged and name not in slot.reserved and name not in slot.refused:
            yield from _type_errors(f"{key}.{name}", node[name], signature.parameters[name], filled=name in slot.filled)


def _is_made_of_functions(target: object) -> bool:
    """Return whether a target is a schedule of torch that needs a Python function, which YAML cannot express."""
    if not inspect.isclass(target) or not target.__module__.startswith("torch.optim"):
        return False
    from torch.optim import lr_scheduler

    return target in (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)


def _takes_functions(target: object) -> bool:
    """Return whether a target is a container with a forward program, which reads dotted names in `functions`."""
    from exp.models.containers import ProgramModel

    return inspect.isclass(target) and issubclass(target, ProgramModel)


def _function_errors(key: str, named: dict[Any, Any], *, allow: Sequence[str]) -> Iterator[ErrorDetails]:
    for name, dotted in named.items():
        if dotted is UNKNOWN:
            continue
        try:
            resolve_function(dotted, allow=allow)
        except TargetError as error:
            yield replace(error.errors[0], key=f"{key}.{name}")
        except ConfigError as error:
            yield from error.errors


def _without_inferred_size(target: object, signature: Signature, given: list[str], node: dict[str, Any]) -> Signature:
    """Return the signature of a layer, without the parameter of an input size that exp infers from the data.

    For a lazy class such as LazyLinear, the signature of Linear is used, because lazy classes have fewer annotations.
    """
    from exp.models.inference import LAZY_CLASSES, lazy_class

    values = node.get("_args_")
    positional = len(values) if isinstance(values, list) else 0
    if not inspect.isclass(target):
        return signature
    sized = getattr(target, "cls_to_become", None)  # only lazy classes of torch have this attribute
    if sized not in LAZY_CLASSES and lazy_class(target, set(given), positional=positional) is None:
        return signature
    whole: Any = sized or target
    size = LAZY_CLASSES[whole][1]
    of_sized = signature_of(sized) if sized else signature
    parameters = {name: one for name, one in of_sized.parameters.items() if name != size}
    return replace(signature, parameters=parameters, positional=tuple(parameters))


def _hydra_errors(key: str, node: dict[str, Any]) -> Iterator[ErrorDetails]:
    for name, kind, expected in (("_args_", list, "a list"), ("_partial_", bool, "true or false")):
        if name in node and not isinstance(node[name], kind) and node[name] is not UNKNOWN:
            yield value_error(f"{key}.{name}", node[name], expected=expected)


def _unknown_errors(
    key: str, node: dict[str, Any], given: list[str], signature: Signature, slot: Slot
) -> Iterator[ErrorDetails]:
    known = [name for name in signature.parameters if name not in slot.filled and name not in slot.refused]
    known += [name for name in slot.reserved if name not in known]
    for name in given:
        if name in slot.refused:
            yield ErrorDetails(f"{key}.{name}", "set by another key", slot.refused[name], f"Leave {key}.{name} out")
        elif name not in known and name not in signature.parameters and not signature.open:
            near, refused = find_nearest(str(name), known), find_nearest(str(name), slot.refused)
            fix = f"Did you mean {key}.{near[0]}?" if near else f"Use {slot.refused[refused[0]]}" if refused else None
            if fix is None and slot.pattern == "objective.*" and name in ("weight", "output", "target"):
                fix = f"Use an exp.objectives.objective.Term at {key}, which has the parameters {name} and loss"
            value = node[name]
            said = value if isinstance(value, str) else "VALUE" if isinstance(value, dict) else show(value)
            if name in REMOVED_PARAMETERS.get(current_target(node["_target_"]), {}):
                fix = f"Leave {key}.{name} out: this version of exp has no such parameter"
            fix = fix_of_key(f"{key}.{name}", said) or fix
            expected = f"one of {among(known, word=str(name))}" if known else "no parameters"
            yield ErrorDetails(f"{key}.{name}", f"no parameter of {node['_target_']}", expected, fix)


def _missing_errors(
    key: str, node: dict[str, Any], given: list[str], signature: Signature, slot: Slot, target: object
) -> Iterator[ErrorDetails]:
    if node.get("_partial_") is True or (slot.pattern == "**" and node.get("_partial_") is UNKNOWN):
        return
    positional = len(node["_args_"]) if isinstance(node.get("_args_"), list) else 0
    for name, parameter in signature.parameters.items():
        is_bound = name in signature.positional[:positional]
        if not parameter.required or name in given or name in slot.filled or is_bound:
            continue
        fix = None
        if not any(find_nearest(str(other), [name]) for other in given if other not in signature.parameters):
            fix = f"Add +{key}.{name}=VALUE to the command" if "." not in key else f"Write {name} below {key}"
        if _inexpressible_parameter(target) == name:
            # Only user code, such as configure_optimizers, can pass this parameter.
            fix = f"Add _partial_: true below {key}. Your code then calls the partial object with the {name}"
        is_open = parameter.annotation is EMPTY and parameter.default is EMPTY
        words = "a value" if is_open else describe_type(parameter.annotation, parameter.default)
        yield missing_value(f"{key}.{name}", f"{words}, which {node['_target_']} needs", fix, got="nothing")


def _inexpressible_parameter(target: object) -> str | None:
    """Return the name of the required parameter that a config cannot express. Return None for other targets.

    The parameter is `params` for an optimizer, and `optimizer` for a schedule.
    """
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    if not inspect.isclass(target):
        return None
    return "params" if issubclass(target, Optimizer) else "optimizer" if issubclass(target, LRScheduler) else None


def _positional_errors(
    key: str, node: dict[str, Any], given: list[str], signature: Signature, slot: Slot
) -> Iterator[ErrorDetails]:
    """Yield the errors of `_args_`. Each value is checked against the parameter that it fills."""
    for index, value in enumerate(node["_args_"] if isinstance(node.get("_args_"), list) else ()):
        where = f"{key}._args_.{index}"
        if index >= len(signature.positional):
            if not signature.rest:
                names = among(signature.positional) if signature.positional else "none, only keyword arguments"
                expected = f"the positional arguments of {node['_target_']}: {names}"
                yield ErrorDetails(where, "one argument too many", expected)
            continue
        name = signature.positional[index]
        if name in (*slot.filled, *slot.refused, *slot.reserved):
            yield unsuitable(
                where, name, "which exp provides", "no positional arguments", "Pass the other parameters by name"
            )
        elif name in given:
            yield unsuitable(where, name, "which is also passed by name", "one value", f"Leave {key}._args_ out")
        elif name in signature.parameters:
            yield from _type_errors(where, value, signature.parameters[name], filled=False)


def _type_errors(key: str, value: object, parameter: Parameter, *, filled: bool) -> Iterator[ErrorDetails]:
    if not (filled and value is None):
        yield from kind_errors(key, value, parameter.annotation, parameter.default)
