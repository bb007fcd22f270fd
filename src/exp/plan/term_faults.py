"""Can the terms have what they need of this network, this data and this precision? Known before training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from exp.errors import Fault
from exp.objectives.objective import Objective
from exp.objectives.penalties import R1, JacobianNorm
from exp.precision.words import WORDS
from exp.spelling import among, did_you_mean
from exp.types import DataSpec


def term_faults(objective: Objective, network: nn.Module, spec: DataSpec, *, word: str) -> Iterator[Fault]:
    """Parts of the network that are not there, gradients of whole numbers, full precision of half parameters.

    word: the config's precision.word.
    """
    known = [name for name, _ in network.named_modules() if name]
    for name, term in objective.terms.items():
        for part in term.parts:
            if part and part not in known:
                yield Fault(
                    key=f"objective.{name}",
                    got=f"the part {part!r} of the network, which is not there",
                    expected=f"one of {among(known, word=part)}, or '' for the whole",
                    cure=did_you_mean(part, known),
                )
        if isinstance(term, R1 | JacobianNorm) and term.input == "input" and "int" in spec.input_dtype:
            yield Fault(
                key=f"objective.{name}.input",
                got=f"input, which is {spec.input_dtype}: whole numbers have no gradient",
                expected="a value of floating numbers",
                cure="Let the network return its embedding by a name, and write that name",
            )
        if getattr(term, "precision", "step") == "full" and WORDS[word].half_parameters:
            yield Fault(
                key=f"objective.{name}.precision",
                got=f"full with precision={word}, whose parameters are of half precision themselves",
                expected="step, or a precision with float32 parameters",
                cure=f"Write precision={WORDS[word].mixed_word.name}",
            )
