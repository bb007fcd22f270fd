"""Rules of the node `phases`: what a phase may say, and how phases, objective and trainer go together.

Imports nothing of torch: what the network has is judged by plan/phases.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from exp.check.keys import Count, Node, Positive, Repeats, Text
from exp.check.kinds import worded
from exp.check.structure import kind_faults
from exp.config.reading import UNKNOWN, Values
from exp.errors import Fault
from exp.spelling import among, did_you_mean, nearest, show

_NODE = Annotated[Node | None, "a node with a _target_, or null for the one at the top"]
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
# What a phase that leaves them out has.
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
# What phases that are simultaneous have in common.
SHARED = ("every_n_steps", "repeats", "forward")


def phases_are_readable(values: Values) -> Iterator[Fault]:
    """Each phase is a mapping of the keys of PHASE."""
    phases = values["phases"]
    if not isinstance(phases, dict):
        if phases is not UNKNOWN:
            cure = "An empty one is phases=[]" if phases is None else None
            yield Fault(key="phases", got=show(phases), expected="a mapping of named phases", cure=cure)
        return
    for name, phase in phases.items():
        key = f"phases.{name}"
        if phase is UNKNOWN:
            continue
        if not isinstance(phase, dict):
            cure = f"To leave it out, write '~{key}'" if phase is None else None
            yield Fault(key=key, got=show(phase), expected=f"a mapping of {among(PHASE, count=10)}", cure=cure)
            continue
        yield from _keys(key, phase)
        if any(letter in str(name) for letter in "/*?["):
            yield Fault(key=key, got="a name with one of / * ? [", expected="a name that can be a part of a tag")


def _keys(key: str, phase: dict[str, Any]) -> Iterator[Fault]:
    for name in phase:
        if name not in PHASE:
            near = nearest(str(name), PHASE)
            cure = f"Did you mean {key}.{near[0]}?" if near else None
            yield Fault(
                key=f"{key}.{name}", got="no key of a phase", expected=f"one of {among(PHASE, count=10)}", cure=cure
            )
    for name, rule in PHASE.items():
        if name not in phase:
            if name not in DEFAULTS:
                yield Fault(key=f"{key}.{name}", got="no such key", expected=worded(rule))
        else:
            yield from kind_faults(f"{key}.{name}", phase[name], rule)


def phases_share_the_objective(values: Values) -> Iterator[Fault]:
    """Every term is trained in a phase, and every phase's terms are there."""
    terms, phases = values["objective"], readable(values)
    if not isinstance(terms, dict) or not phases:
        return
    for name, phase in phases.items():
        for term in phase["terms"]:
            if term not in terms:
                yield Fault(
                    key=f"phases.{name}.terms",
                    got=f"{term!r}, which is no term of the objective",
                    expected=f"terms of the objective: {among(map(str, terms))}",
                    cure=did_you_mean(term, map(str, terms)) or f"Or add it: +objective={term}",
                )
    if len(phases) < len(values["phases"]):
        return  # the terms may be in a phase that cannot be read
    used = {term for phase in phases.values() for term in phase["terms"]}
    for term in terms:
        if term not in used:
            yield Fault(
                key=f"objective.{term}",
                got=f"in the terms of no phase; there are the phases {among(phases)}",
                expected="each term in a phase, for else it trains nothing",
                cure=f"Add it to the terms of one, or take it out: '~objective.{term}'",
            )


def phases_go_with_the_trainer(values: Values) -> Iterator[Fault]:
    """Clipping is a phase's own, and each step has something to do."""
    phases = readable(values)
    if not phases:
        return
    if values["trainer.gradient_clip_val"] not in (None, UNKNOWN):
        first = next(iter(phases))
        yield Fault(
            key="trainer.gradient_clip_val",
            got=f"{show(values['trainer.gradient_clip_val'])}, with phases",
            expected="null: each phase clips its own gradients",
            cure=f"Write phases.{first}.gradient_clip_val",
        )
    if len(phases) == len(values["phases"]) and all(phase["every_n_steps"] > 1 for phase in phases.values()):
        name, phase = min(phases.items(), key=lambda pair: pair[1]["every_n_steps"])
        yield Fault(
            key=f"phases.{name}.every_n_steps",
            got=f"{phase['every_n_steps']}, and no phase runs at every step",
            expected="1 for at least one phase: a step in which nothing runs changes nothing",
        )
    stages = values["metric_stages"]
    of_training = isinstance(stages, list) and "train" in stages and bool(values["metrics"])
    if of_training and all(phase["forward"] is not None or phase["every_n_steps"] > 1 for phase in phases.values()):
        yield Fault(
            key="metric_stages",
            got="train, and no phase that runs at every step gives the network's own output",
            expected="val and test: metrics compare what the network's own forward gives",
        )


def phases_are_simultaneous_with_others(values: Values) -> Iterator[Fault]:
    """A simultaneous phase shares the forward of the one before it."""
    phases = readable(values)
    if not isinstance(values["phases"], dict) or len(phases) < len(values["phases"]):
        return
    for before, (name, phase) in zip([None, *phases.values()], phases.items(), strict=False):
        key = f"phases.{name}"
        if not phase["simultaneous"]:
            continue
        if before is None:
            expected = "false: the first phase has none before it"
            yield Fault(key=f"{key}.simultaneous", got="true", expected=expected, cure="Write it at the second one")
            continue
        for word in SHARED:
            if phase[word] != before[word]:
                expected = f"{show(before[word])}, as the phase before it, whose forward it shares"
                cure = f"Or write {key}.simultaneous=false"
                yield Fault(key=f"{key}.{word}", got=show(phase[word]), expected=expected, cure=cure)


def readable(values: Values) -> dict[str, dict[str, Any]]:
    """The phases that have no fault of their own, whole."""
    phases = values["phases"]
    if not isinstance(phases, dict):
        return {}
    return {
        str(name): whole_phase(phase)
        for name, phase in phases.items()
        if isinstance(phase, dict) and UNKNOWN not in phase.values() and not list(_keys("", phase))
    }


def whole_phase(phase: dict[str, Any]) -> dict[str, Any]:
    """A phase with all its keys, its patterns a list."""
    whole = {**DEFAULTS, **phase}
    patterns = whole["parameters"]
    return {**whole, "parameters": [patterns] if isinstance(patterns, str) else patterns}
