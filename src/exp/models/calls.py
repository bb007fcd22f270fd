"""Calls in a forward program: of layers, listed functions and listed methods."""

from __future__ import annotations

import ast
from typing import Any

from exp.models import vocabulary
from exp.models.builtin_functions import BUILTINS, mathematics
from exp.models.evaluation import Evaluation
from exp.models.recorder import Function, is_dynamic
from exp.models.references import Reference
from exp.models.syntax import prefix_of


def call(evaluator: Evaluation, node: ast.Call) -> Any:
    """The value of a call: a graph node, or what a builtin computes from constants."""
    function = node.func
    args = tuple(evaluator.sequence(node.args))
    kwargs = {keyword.arg: evaluator.evaluate(keyword.value) for keyword in node.keywords}
    if isinstance(function, ast.Attribute) and prefix_of(function, evaluator.variables) is None:
        owner = evaluator.evaluate(function.value)
        if is_dynamic(owner) or not isinstance(owner, Reference) or _is_container_method(owner, function.attr):
            return _method(evaluator, owner, node, args, kwargs)
        called = owner.attribute(function.attr)
    else:
        called = evaluator.evaluate(function)
    if isinstance(called, Function):
        return _function(evaluator, called, node, args, kwargs)
    if isinstance(called, Reference) and called.is_callable:
        return _record(evaluator, "call_module", called.target, args, kwargs, node)
    name = f"`{called.target}` ({called.kind})" if isinstance(called, Reference) else f"a {type(called).__name__}"
    raise evaluator.program.error(node, f"{name} is called", "a layer or a listed function before the parenthesis")


def _is_container_method(owner: Reference, name: str) -> bool:
    return not owner.is_callable and name in vocabulary.CONTAINER_METHODS


def _record(evaluator: Evaluation, op: str, target: Any, args: tuple, kwargs: dict, node: ast.Call) -> Any:
    recorder = evaluator.recorder
    return recorder.emit(op, target, recorder.argument(args, node), recorder.argument(kwargs, node), node)


def _function(evaluator: Evaluation, called: Function, node: ast.Call, args: tuple, kwargs: dict) -> Any:
    name, home = called.name, called.home
    if home == "builtins":
        if not (args and is_dynamic(args[0]) and name in vocabulary.TORCH_FUNCTIONS):
            return BUILTINS[name](evaluator, node, args, kwargs)
        called = Function(name, "torch")
    if home == "math" and not any(map(is_dynamic, args)):
        return mathematics(called.resolve(), args, kwargs)
    if name in vocabulary.NEEDS_TRAINING and "training" not in kwargs and len(args) < 3:
        message = f"`{name}` is not told whether the network trains, and would drop values in evaluation, too"
        raise evaluator.program.error(node, message, f"`{name}(x, p, training=training)`, or a layer for it")
    return _record(evaluator, "call_function", called.resolve(), args, kwargs, node)


def _method(evaluator: Evaluation, owner: Any, node: ast.Call, args: tuple, kwargs: dict) -> Any:
    name = node.func.attr
    if is_dynamic(owner) and name in vocabulary.METHODS:
        return _record(evaluator, "call_method", name, (owner, *args), kwargs, node)
    if not is_dynamic(owner) and not kwargs:
        if isinstance(owner, list) and name == "append" and len(args) == 1:
            owner.append(args[0])
            return None
        entries = owner.entries() if isinstance(owner, Reference) else owner
        if isinstance(entries, dict) and not args:
            if name == "items":
                return list(entries.items())
            if name in ("keys", "values"):
                return list(entries if name == "keys" else entries.values())
    raise evaluator.program.error(node, f"this value has no method `.{name}` of these arguments", "a tensor before it")
