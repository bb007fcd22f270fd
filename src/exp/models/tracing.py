"""From a checked program and the layers to a graph: statements run once, loops unroll, constants fold."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, fx, nn

from exp.models.expressions import Evaluator
from exp.models.program import Program
from exp.models.references import Reference


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class _Return(Exception):
    def __init__(self, value: Any, node: ast.Return) -> None:
        self.value, self.node = value, node


def trace(
    program: Program,
    *,
    held: Mapping[str, nn.Module | Tensor],
    layers_as: Literal["list", "dict"],
    constants: Mapping[str, Any],
) -> fx.Graph:
    """Run the program once on placeholders and return what it does to tensors as a torch.fx graph.

    held: the network's layers and parameters, by the names that the program and the state dict know.
    layers_as: what the name `layers` stands for: all of them in a list, or in a dict by name.
    constants: values that the config gives the program.

    Raises ProgramError, with the line and column of the program.
    """
    references = {name: Reference(name, module) for name, module in held.items()}
    all_layers = list(references.values()) if layers_as == "list" else dict(references)
    evaluator = Evaluator(program, references, all_layers, constants)
    recorder = evaluator.recorder
    for name in program.inputs:
        evaluator.names[name] = recorder.graph.placeholder(name)
    try:
        _run(evaluator, program.tree.body)
    except _Return as result:
        value = recorder.argument(result.value, result.node)
        if not recorder.graph.nodes or not _has_node(value):
            expected = "a tensor, or several in a tuple or dict"
            raise program.error(result.node, "a return without a tensor", expected) from None
        recorder.emit("output", "output", (value,), {}, result.node)
        return recorder.graph
    except (_Break, _Continue):
        raise program.error(program.tree.body[0], "break or continue outside a loop", "a loop around it") from None
    last = program.tree.body[-1]
    raise program.error(last, "the program ends without a return", "a last line such as `return x`")


def _run(evaluator: Evaluator, statements: list[ast.stmt]) -> None:
    for statement in statements:
        evaluator.recorder.count(statement)
        _STATEMENTS[type(statement)](evaluator, statement)


def _assign(evaluator: Evaluator, statement: ast.Assign) -> None:
    value = evaluator.evaluate(statement.value)
    for target in statement.targets:
        evaluator.assign(target, value)


def _augment(evaluator: Evaluator, statement: ast.AugAssign) -> None:
    # `x += y` is `x = x + y`: an input, or a tensor that another name still holds, keeps its values.
    both = ast.BinOp(ast.Name(statement.target.id, ast.Load()), statement.op, statement.value)
    ast.copy_location(both.left, statement.target)
    ast.copy_location(both, statement)
    evaluator.assign(statement.target, evaluator.evaluate(both))


def _for(evaluator: Evaluator, statement: ast.For) -> None:
    for element in evaluator.iterate(evaluator.evaluate(statement.iter), statement.iter):
        evaluator.assign(statement.target, element)
        try:
            _run(evaluator, statement.body)
        except _Continue:
            continue
        except _Break:
            break


def _if(evaluator: Evaluator, statement: ast.If) -> None:
    holds = evaluator.truth(evaluator.evaluate(statement.test), statement.test)
    _run(evaluator, statement.body if holds else statement.orelse)


def _expression(evaluator: Evaluator, statement: ast.Expr) -> None:
    evaluator.evaluate(statement.value)


def _return(evaluator: Evaluator, statement: ast.Return) -> None:
    raise _Return(None if statement.value is None else evaluator.evaluate(statement.value), statement)


def _break(evaluator: Evaluator, statement: ast.Break) -> None:
    raise _Break


def _continue(evaluator: Evaluator, statement: ast.Continue) -> None:
    raise _Continue


def _pass(evaluator: Evaluator, statement: ast.Pass) -> None:
    return


_STATEMENTS = {
    ast.Assign: _assign,
    ast.AugAssign: _augment,
    ast.For: _for,
    ast.If: _if,
    ast.Expr: _expression,
    ast.Return: _return,
    ast.Break: _break,
    ast.Continue: _continue,
    ast.Pass: _pass,
}


def _has_node(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_node, value.values() if isinstance(value, dict) else value))
    return isinstance(value, fx.Node)
