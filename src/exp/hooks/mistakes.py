"""What is wrong with a hook's class, told before the run: methods that nothing calls, or that cannot be called."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from exp.errors import Fault
from exp.spelling import nearest

if TYPE_CHECKING:
    from exp.hooks.hook import Hook

# Overridden alone, they do nothing in a run.
NOT_IN_A_RUN = {"faults", "due", "overrides", "attach", "engaged", "disengage", "detach"}


def mistakes_of(hook: Hook, base: type[Hook]) -> list[Fault]:
    """A fault for each method that looks like a mistyped one, and each with other parameters than the base's."""
    known = {name: method for name, method in vars(base).items() if inspect.isfunction(method) and name[0] != "_"}
    own = {
        name: method
        for kind in reversed(type(hook).__mro__)
        if issubclass(kind, base) and kind is not base
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and name[0] != "_"
    }
    faults = []
    for name, method in own.items():
        if name in known:
            faults += _signature_faults(hook, name, method, list(inspect.signature(known[name]).parameters)[1:])
        elif near := nearest(name, known, likeness=0.85):
            faults.append(_fault(hook, f"a method {name}, which nothing calls", f"{near[0]}, or another name"))
    if not faults and not own.keys() & (known.keys() - NOT_IN_A_RUN):
        methods = ", ".join(sorted(known.keys() - NOT_IN_A_RUN))
        faults.append(_fault(hook, "a class that overrides no method of Hook", f"one or more of {methods}"))
    return faults


def _signature_faults(hook: Hook, name: str, method: object, parameters: list[str]) -> list[Fault]:
    signature = inspect.signature(method)  # type: ignore[arg-type]
    try:
        signature.bind(hook, *parameters)
    except TypeError as error:
        expected = f"def {name}(self{''.join(f', {parameter}' for parameter in parameters)})"
        return [_fault(hook, f"{name}{signature}: {error}", expected)]
    return []


def _fault(hook: Hook, got: str, expected: str) -> Fault:
    return Fault(key=f"hooks.{hook.name}", got=f"{type(hook).__name__} with {got}", expected=expected)
