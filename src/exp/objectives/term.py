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

# The possible words in the `needs` of a term, with descriptions. objectives/passes.py implements the needs.
NEEDS = {
    "input_gradients": "the network's inputs require grad, and the step's graph can be differentiated twice",
    "forward_passes": "the network, or a part of it, can be run again",
    "parameter_gradients": "the step's graph, of a whole batch in one process, is differentiated by parameters",
    "retained_graph": "gradients taken from the step's graph before its backward",
}
# Needs for which a gradient is differentiated. Compiled networks and fused attention do not support this.
TWICE = frozenset({"input_gradients", "parameter_gradients"})


class AbstractTerm(nn.Module, ABC):
    """Base class of the terms of the objective.

    A term is a mean over samples. It is computed from values of the step, which the term selects by name.

    Attributes:
        needs: Words of NEEDS. If the term has any, `forward` receives `passes`. Default: no needs.
        parts: The dotted names of the submodules of the network that the term calls. The check before a run verifies
            that these submodules exist. Default: no submodules.
        selects: The attributes of the term that contain names of values. The check before a run verifies that these
            values exist. Default: no attributes.
        weight: The factor of the term in the objective. Default: 1.
    """

    needs: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()
    selects: tuple[str, ...] = ()

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the values that the term reads, by config key relative to the term, such as `output`."""
        return {key: getattr(self, key) for key in self.selects}

    @property
    def is_weighed(self) -> bool:
        """True if the term divides by its `divisor` instead of the number of samples."""
        return type(self).divisor is not AbstractTerm.divisor

    def divisor(self, values: Values) -> Tensor | float | None:
        """Return the divisor of the term's mean, as a number or 0-d tensor. Return None for the number of samples.

        exp averages the term over ranks and batches with these divisors as weights. If the divisor is 0, `forward` must
        return a finite number.

        Args:
            values: The values of the step by name.
        """
        return None

    def weigh(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the unweighted loss of the term, and the divisor of this loss."""
        return (self(values, batch) if passes is None else self(values, batch, passes)), self.divisor(values)

    @abstractmethod
    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the unweighted loss over the samples of this rank.

        Autocast is off during the call.

        Args:
            values: The values by name: `output`, `target`, `input`, and the names in mappings that the network and the
                data set return.
            batch: The samples of this rank. Default: None.
            passes: Additional passes and gradients. Default: None, for a term without `needs`.

        Returns:
            A 0-d tensor in float32, or in float64 if the values are float64.
        """


def needs_of(module: nn.Module, *, key: str) -> frozenset[str]:
    """Return the needs that a term or a loss declares.

    Args:
        module: The term or the loss.
        key: The config key of the module, for the error.

    Raises:
        ConfigError: A need is not in NEEDS.
    """
    declared: str | Iterable[str] = getattr(module, "needs", frozenset())
    words = frozenset([declared] if isinstance(declared, str) else declared)
    for word in sorted(words - NEEDS.keys()):
        got, expected = f"the unknown need {word!r} in {type(module).__name__}.needs", f"one of {', '.join(NEEDS)}"
        raise config_error(key, got=got, expected=expected, fix=did_you_mean(word, NEEDS))
    return words
