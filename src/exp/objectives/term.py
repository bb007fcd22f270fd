"""Base class of the objective's terms, and the needs that a term may declare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from exp.errors import ErrorDetails, raise_errors
from exp.objectives.loss_inputs import Values
from exp.shared_types import Batch
from exp.spelling import find_nearest

if TYPE_CHECKING:
    from exp.objectives.passes import Passes

# What a term may declare as `needs`, and what it is given for it (objectives/passes.py).
NEEDS = {
    "input_gradients": "the network's inputs require grad, and the step's graph can be differentiated twice",
    "forward_passes": "the network, or a part of it, can be run again",
    "parameter_gradients": "the step's graph, of a whole batch in one process, is differentiated by parameters",
    "retained_graph": "gradients taken from the step's graph before its backward",
}
# Of these, what differentiates a gradient once more: no compiled network, no fused attention.
TWICE = frozenset({"input_gradients", "parameter_gradients"})


class AbstractTerm(nn.Module, ABC):
    """One part of the objective: a mean over samples, of values that it finds by name.

    needs: a class's attribute (or an instance's own), words of NEEDS. With any of them `forward` is given `passes`.
    parts: the parts of the network that it calls by their dotted names; the check looks for them.
    weight: its factor in the sum.
    """

    needs: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    @property
    def names(self) -> Mapping[str, str]:
        """Which values it reads: a key of its node to the name there. The check asks whether somebody gives them."""
        return {}

    @property
    def is_weighed(self) -> bool:
        """Whether it divides by something else than the number of samples, and `divisor` says by what."""
        return type(self).divisor is not AbstractTerm.divisor

    def divisor(self, values: Values) -> Tensor | float | None:
        """By what the mean over these values divided its sum, 0-d; None is the number of samples.

        Over ranks and over the batches of a stage the means are weighted by it. Where it is 0, nothing counts, and
        `forward` must give a finite number.
        """
        return None

    def weighed(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, Tensor | float | None]:
        """The loss and its divisor."""
        return (self(values, batch) if passes is None else self(values, batch, passes)), self.divisor(values)

    @abstractmethod
    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """The unweighted loss of this rank's share, 0-d, in float32 (float64 where the values are float64).

        values: `output`, `target`, `input` and whatever else the network and the batch name. Autocast is off.
        """


def needs_of(module: nn.Module, *, key: str) -> frozenset[str]:
    """What a term or a loss module declares that it needs; nothing where it declares nothing.

    key: of the term in the config.
    Raises: ConfigError where a word is none of NEEDS.
    """
    declared: str | Iterable[str] = getattr(module, "needs", frozenset())
    words = frozenset([declared] if isinstance(declared, str) else declared)
    errors = []
    for word in sorted(words - NEEDS.keys()):
        found = find_nearest(word, NEEDS)
        errors.append(
            ErrorDetails(
                key=key,
                got=f"{type(module).__name__}.needs has {word!r}",
                expected=f"words of {', '.join(NEEDS)}",
                fix=f"Nearest: {found[0]}" if found else None,
            )
        )
    raise_errors(errors)
    return words
