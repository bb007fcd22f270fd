"""What terms of a derivative share: of which output, with respect to which input, in which precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from exp.objectives.passes import Passes, Precision
from exp.objectives.term import AbstractTerm
from exp.objectives.values import pick


class DerivativeTerm(AbstractTerm):
    """Of the derivative of an output of the network with respect to an input.

    output: the value that is differentiated, `[B, ...]`. input: with respect to which, `[B, ...]`.
    precision: `full` runs the network once more in float32 for this term alone; only for an input of the network.
    """

    needs = frozenset({"input_gradients"})

    def __init__(self, *, weight: float, output: str, input: str, precision: Precision) -> None:
        super().__init__(weight=weight)
        self.output, self.input = output, input
        self.precision = checked_precision(precision)
        if precision == "full":
            self.needs = self.needs | {"forward_passes"}

    def ends(self, values: Mapping[str, Any], passes: Passes) -> tuple[Tensor, Tensor]:
        """The output and the input, of this pass or of one of the term's own.

        Raises: RunError where a value is not there.
        """
        if self.precision == "full":
            values = passes.run(precision="full")
        return pick(values, self.output, "output"), pick(values, self.input, "input")


def checked_precision(precision: Precision) -> Precision:
    """Raises: ValueError where it is none."""
    if precision not in ("step", "full"):
        raise ValueError(f"precision is {precision!r}; it must be step (the run's own) or full (float32)")
    return precision
