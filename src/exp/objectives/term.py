"""Base class of the objective's terms, and the needs that a term may declare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from exp.errors import config_error
from exp.objectives.loss_inputs import Values
from exp.shared_types import Batch
from exp.spelling import did_you_mean

if TYPE_CHECKING:
    from exp.objectives.passes import Passes

# The words of a term's `needs`, and what each provides (objectives/passes.py).
NEEDS = {
    "input_gradients": "the network's inputs require grad, and the step's graph can be differentiated twice",
    "forward_passes": "the network, or a part of it, can be run again",
    "parameter_gradients": "the step's graph, of a whole batch in one process, is differentiated by parameters",
    "retained_graph": "gradients taken from the step's graph before its backward",
}
# Needs that differentiate a gradient again: no compiled network, no fused attention.
TWICE = frozenset({"input_gradients", "parameter_gradients"})


class AbstractTerm(nn.Module, ABC):
    """A part of the objective: a mean over samples, of values that it selects by name.

    Attributes:
        needs: Words of NEEDS, of the class or the instance. With any of them `forward` is given `passes`.
        parts: Dotted names of the network's parts that the term calls. The check looks for them.
        selects: Attributes that hold names of values. The check looks for the values.
        weight: The term's factor in the sum.
    """

    needs: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()
    selects: tuple[str, ...] = ()

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the values that the term reads, by their keys below its node, for the check."""
        return {key: getattr(self, key) for key in self.selects}

    @property
    def is_weighed(self) -> bool:
        """True if the term divides by its `divisor` instead of the number of samples."""
        return type(self).divisor is not AbstractTerm.divisor

    def divisor(self, values: Values) -> Tensor | float | None:
        """Return the number by which the mean over these values divided its sum, 0-d. None: the number of samples.

        Over ranks and over the batches of a stage the means are weighted by it. If it is 0, nothing counts, and
        `forward` must return a finite number.
        """
        return None

    def weigh(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss and its divisor."""
        return (self(values, batch) if passes is None else self(values, batch, passes)), self.divisor(values)

    @abstractmethod
    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the unweighted loss of this rank's share, 0-d, in float32 (float64 if the values are float64).

        Args:
            values: `output`, `target`, `input`, and the names of the network and the batch. Autocast is off.
            batch: The share that the values belong to.
            passes: More passes and gradients, for a term with `needs`.
        """


def needs_of(module: nn.Module, *, key: str) -> frozenset[str]:
    """Return the needs that a term or a loss module declares, or raise ConfigError at its key for an unknown word."""
    declared: str | Iterable[str] = getattr(module, "needs", frozenset())
    words = frozenset([declared] if isinstance(declared, str) else declared)
    for word in sorted(words - NEEDS.keys()):
        got, expected = f"{type(module).__name__}.needs has {word!r}", f"words of {', '.join(NEEDS)}"
        raise config_error(key, got=got, expected=expected, fix=did_you_mean(word, NEEDS))
    return words
