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

# The possible values in a term's `needs`, with descriptions. objectives/passes.py provides them.
NEEDS = {
    "input_gradients": "the network's inputs require grad, and the step's graph can be differentiated twice",
    "forward_passes": "the network, or a part of it, can be run again",
    "parameter_gradients": "the step's graph, of a whole batch in one process, is differentiated by parameters",
    "retained_graph": "gradients taken from the step's graph before its backward",
}
# Needs that differentiate a gradient. Compiled networks and fused attention do not support this.
TWICE = frozenset({"input_gradients", "parameter_gradients"})


class AbstractTerm(nn.Module, ABC):
    """Base class of the terms of the objective.

    A term is a mean over samples, computed from values that it selects by name.

    Attributes:
        needs: The needs of the term, keys of NEEDS. A term with needs receives `passes` in `forward`.
        parts: The dotted names of submodules of the network that the term calls. The check before a run verifies them.
        selects: The attributes that contain names of values. The check before a run verifies that the values exist.
        weight: The factor of the term in the objective.
    """

    needs: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()
    selects: tuple[str, ...] = ()

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the values that the term reads, by config key below its section."""
        return {key: getattr(self, key) for key in self.selects}

    @property
    def is_weighed(self) -> bool:
        """Whether the term divides by its `divisor` instead of the number of samples."""
        return type(self).divisor is not AbstractTerm.divisor

    def divisor(self, values: Values) -> Tensor | float | None:
        """Return the divisor of the mean over these values, 0-d; None for the number of samples.

        Over ranks and over the batches of a stage, means are weighted by this divisor. If the divisor is 0, no target
        counts, and `forward` must return a finite number.
        """
        return None

    def weigh(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the unweighted loss and its divisor."""
        return (self(values, batch) if passes is None else self(values, batch, passes)), self.divisor(values)

    @abstractmethod
    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the unweighted loss of this rank's samples, 0-d, in float32, or in float64 if the values are float64.

        Args:
            values: The values by name: `output`, `target`, `input`, and the names that the network and the batch
                return. Autocast is off.
            batch: This rank's samples of the batch.
            passes: Additional passes and gradients, for a term with `needs`.
        """


def needs_of(module: nn.Module, *, key: str) -> frozenset[str]:
    """Return the needs that a term or a loss module declares. Raise ConfigError at `key` for an unknown need."""
    declared: str | Iterable[str] = getattr(module, "needs", frozenset())
    words = frozenset([declared] if isinstance(declared, str) else declared)
    for word in sorted(words - NEEDS.keys()):
        got, expected = f"the unknown need {word!r} in {type(module).__name__}.needs", f"one of {', '.join(NEEDS)}"
        raise config_error(key, got=got, expected=expected, fix=did_you_mean(word, NEEDS))
    return words
