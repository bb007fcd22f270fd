"""Adapter to torch's private databases of operators, modules and optimizers in torch.testing._internal.

It is written for torch 2.13, and uses `op_db` (name, aliases, sample_inputs, supports_dtype, supports_autograd),
`module_db` (module_cls, module_inputs_func) and `optim_db` (optim_cls, optim_inputs_func).

The import of the databases freezes the flags of torch.backends in the process, so tests import them in a separate
process.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Entries of op_db with another order of arguments than the function: conversion to the order of the function.
ORDERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "einsum": lambda tensors, equation: (equation, *tensors),
    "nn.functional.embedding": lambda weight, indices: (indices, weight),
    "pca_lowrank": lambda left, right: (left @ right.mT,),
    "polygamma": lambda x, order: (order, x),
    "special.polygamma": lambda x, order: (order, x),
    "svd_lowrank": lambda left, right: (left @ right.mT,),
    "where": lambda x, condition, other: (condition, x, other),
}
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Entry of op_db with its name and aliases, and a variant if several entries have the same name."""

    names: tuple[str, ...]
    variant: str
    entry: Any

    def as_function(self, call: Call) -> Call:
        """Return the call with its arguments in the order of the function."""
        order = ORDERS.get(self.entry.name)
        return call if order is None else Call(args=order(*call.args), kwargs=call.kwargs)

    def samples(self, most: int) -> list[Call]:
        """Return calls of torch's tests, on tensors of the first supported dtype of DTYPES."""
        dtype = next((one for one in DTYPES if self.entry.supports_dtype(one, "cpu")), None)
        if dtype is None:
            return []
        differentiable = self.entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        torch.manual_seed(0)
        found = []
        for sample in self.entry.sample_inputs("cpu", dtype, requires_grad=differentiable):
            found.append(Call(args=(sample.input, *sample.args), kwargs=dict(sample.kwargs)))
            if len(found) == most:
                break
        return found


@dataclass(frozen=True, kw_only=True)
class Module:
    """Entry of module_db: a class of torch.nn, with its construction and calls in torch's tests."""

    kind: type[torch.nn.Module]
    entry: Any

    def cases(self, *, training: bool) -> list[tuple[Call, Call]]:
        """Return pairs of the arguments of the constructor and of the forward, in float64."""
        torch.manual_seed(0)
        made = self.entry.module_inputs_func(
            self.entry, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        )
        return [
            tuple(
                Call(args=tuple(one.args), kwargs=dict(one.kwargs))
                for one in (case.constructor_input, case.forward_input)
            )
            for case in made
            if case.forward_input is not None
        ]


def operators() -> list[Operator]:
    """Return all entries of op_db in order."""
    _import()
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        Operator(
            names=(entry.name, *(alias.name for alias in entry.aliases)),
            variant=entry.variant_test_name,
            entry=entry,
        )
        for entry in op_db
    ]


def modules() -> Iterator[Module]:
    """Yield all entries of module_db in order."""
    _import()
    from torch.testing._internal.common_modules import module_db

    return (Module(kind=entry.module_cls, entry=entry) for entry in module_db)


def optimizers() -> list[tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]]:
    """Return all optimizers of optim_db, with the arguments of their cases."""
    _import()
    from torch.testing._internal.common_optimizers import optim_db

    return [(entry.optim_cls, [case.kwargs for case in entry.optim_inputs_func("cpu")]) for entry in optim_db]


def _import() -> None:
    # The databases import expecttest, which is not installed, and do not use it.
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        vars(stand_in)["TestCase"] = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_methods_invocations
        import torch.testing._internal.common_modules
    # Unfreeze the flags of torch.backends, because a run sets them.
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
