"""The rules of the config node `phases`.

They cover the keys of a phase, and conflicts between phases, objective and trainer.

This module does not import torch. exp.check.phases compares phases with the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from exp.check.kinds import describe_type
from exp.check.structure import kind_errors
from exp.config.reading import UNKNOWN, Values
from exp.config.settings import Count, Node, Positive, Repeats, Text
from exp.errors import ErrorDetails, invalid_value, missing_value, unknown_key, unsuitable
from exp.spelling import among, did_you_mean, show

_NODE = Annotated[Node | None, "a node with a _target_, or null for the top-level node"]
PHASE: dict[str, Any] = {
    "terms": Annotated[list[Text], "a list of names of the objective's terms, at least one", MinLen(1)],
    "parameters": Annotated[
        Text | Annotated[list[Text], MinLen(1)], "a pattern of parameter names such as 'generator.*', or a list of them"
    ],
    "optimizer": _NODE,
    "scheduler": _NODE,
    "gradient_clip_val": Positive | None,
    "gradient_clip_algorithm": Literal["norm", "value"],
    "every_n_steps": Count,
    "repeats": Repeats,
    "forward": Text | None,
    "simultaneous": bool,
}
# Defaults of the keys that a phase may leave out.
DEFAULTS: dict[str, Any] = {
    "optimizer": None,
    "scheduler": None,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": "norm",
    "every_n_steps": 1,
    "repeats": 1,
    "forward": None,
    "simultaneous": False,
}
# Keys that must be equal in simultaneous phases.
SHARED = ("every_n_steps", "repeats", "forward")


def phases_are_readable(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of phases that are not mappings, or that have wrong keys or values."""
    phases = values["phases"]
    if not isinstance(phases, dict):
        if phases is not UNKNOWN:
            fix = "For no phase, write phases=[]" if phases is None else None
            yield invalid_value("phases", phases, "a mapping of named phases", fix)
        return
    for name, phase in phases.items():
        key = f"phases.{name}"
        if isinstance(phase, dict):
            yield from _key_errors(key, phase)
            if any(letter in str(name) for letter in "/*?["):
                yield ErrorDetails(
                    key, "a name with one of / * ? [", "a name without these characters, because tags contain it"
                )
        elif phase is not UNKNOWN:
            fix = f"To remove the phase, write '~{key}'" if phase is None else None
            yield invalid_value(key, phase, f"a mapping of {among(PHASE, count=10)}", fix)


def _key_errors(key: str, phase: dict[str, Any]) -> Iterator[ErrorDetails]:
    yield from (unknown_key(f"{key}.{name}", PHASE, holder="a phase") for name in phase if name not in PHASE)
    for name, rule in PHASE.items():
        if name in phase:
            yield from kind_errors(f"{key}.{name}", phase[name], rule)
        elif name not in DEFAULTS:
            yield missing_value(f"{key}.{name}", describe_type(rule), got="no such key")


def phases_share_the_objective(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of terms that no phase trains, and of phases that name unknown terms."""
    terms, phases = values["objective"], readable(values)
    if not isinstance(terms, dict) or not phases:
        return
    used = {term for phase in phases.values() for term in phase["terms"]}
    for name, phase in phases.items():
        for term in (term for term in phase["terms"] if term not in terms):
            expected = f"terms of the objective: {among(map(str, terms))}"
            fix = did_you_mean(term, map(str, terms)) or f"To add the term to the objective, write +objective={term}"
            yield unsuitable(f"phases.{name}.terms", term, "which is not a term of the objective", expected, fix)
    # If a phase has an error, its terms are unknown, so no term is reported as unused.
    for term in terms if len(phases) == len(values["phases"]) else ():
        if term not in used:
            got = f"a term that no phase trains; the phases are {among(phases)}"
            fix = f"Name the term in the terms of a phase, or remove it: '~objective.{term}'"
            expected = "a term of at least one phase, because a term without a phase trains no parameter"
            yield ErrorDetails(f"objective.{term}", got, expected, fix)


def phases_go_with_the_trainer(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of trainer settings and metrics that phases do not support.

    Phases do not support gradient clipping by the trainer or steps in which no phase runs. Training metrics need a
    phase that runs at every step and calls the network's own forward.
    """
    phases, clip = readable(values), values["trainer.gradient_clip_val"]
    if not phases:
        return
    if clip not in (None, UNKNOWN):
        fix = f"Set phases.{next(iter(phases))}.gradient_clip_val instead"
        expected = "null, because each phase clips its own gradients"
        yield invalid_value("trainer.gradient_clip_val", clip, expected, fix, because="with phases")
    if len(phases) == len(values["phases"]) and all(phase["every_n_steps"] > 1 for phase in phases.values()):
        name, phase = min(phases.items(), key=lambda pair: pair[1]["every_n_steps"])
        expected = "1 for at least one phase, because a step without a phase changes no parameter"
        because = "and no phase runs at every step"
        yield unsuitable(f"phases.{name}.every_n_steps", phase["every_n_steps"], because, expected)
    stages = values["metric_stages"]
    of_training = isinstance(stages, list) and "train" in stages and bool(values["metrics"])
    if of_training and all(phase["forward"] is not None or phase["every_n_steps"] > 1 for phase in phases.values()):
        got = "train, but no phase calls the network's own forward at every step"
        yield ErrorDetails(
            "metric_stages", got, "val and test, because metrics use the output of the network's own forward"
        )


def phases_are_simultaneous_with_others(values: Values) -> Iterator[ErrorDetails]:
    """Yield the errors of simultaneous phases that cannot share the forward of the previous phase."""
    phases = readable(values)
    if not isinstance(values["phases"], dict) or len(phases) < len(values["phases"]):
        return
    for before, (name, phase) in zip([None, *phases.values()], phases.items(), strict=False):
        key = f"phases.{name}"
        if phase["simultaneous"] and before is None:
            expected = "false, because there is no phase before the first phase"
            yield ErrorDetails(f"{key}.simultaneous", "true", expected, "Set simultaneous in the second phase")
        elif phase["simultaneous"] and before is not None:
            for word in (word for word in SHARED if phase[word] != before[word]):
                expected = f"{show(before[word])}, the value of the previous phase, because both phases share a forward"
                yield invalid_value(f"{key}.{word}", phase[word], expected, f"Or write {key}.simultaneous=false")


def readable(values: Values) -> dict[str, dict[str, Any]]:
    """Return the phases without an error, by name. Missing keys of a phase are set to their defaults."""
    phases = values["phases"]
    if not isinstance(phases, dict):
        return {}
    return {
        str(name): whole_phase(phase)
        for name, phase in phases.items()
        if isinstance(phase, dict) and UNKNOWN not in phase.values() and not list(_key_errors("", phase))
    }


def whole_phase(phase: dict[str, Any]) -> dict[str, Any]:
    """Return a phase in which missing keys have their defaults, and the parameter patterns are a list."""
    whole = {**DEFAULTS, **phase}
    patterns = whole["parameters"]
    return {**whole, "parameters": [patterns] if isinstance(patterns, str) else patterns}
