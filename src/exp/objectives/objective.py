"""The objective: a weighted sum of named terms. Its value is the loss that the network is trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.objectives.counting import counts_by_weight, reduction_fault, shared_mean
from exp.objectives.shapes import checked_target
from exp.objectives.term import AbstractTerm, needs_of
from exp.objectives.values import full, pick
from exp.spelling import nearest
from exp.types import Batch

if TYPE_CHECKING:
    from exp.objectives.passes import Passes


class Term(AbstractTerm):
    """A loss of one output of the network against one target.

    loss: a module called with (output, target) that gives a 0-d tensor, such as torch.nn.MSELoss. One that declares
        `needs` (objectives/term.py) is called with (output, target, passes).
    weight: its factor in the sum.
    output, target: which of the values it compares: `output` and `target`, or a name that the network's or the
        data set's mapping has.
    """

    def __init__(self, *, loss: nn.Module, weight: float = 1.0, output: str = "output", target: str = "target") -> None:
        super().__init__(weight=weight)
        self.loss = loss
        self.output = output
        self.target = target
        self.is_by_weight = counts_by_weight(loss)

    def forward(self, values: Mapping[str, Any], batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """The unweighted loss, 0-d, in float32 (float64 where the output is float64).

        batch: whose share the values are, as Objective takes it. passes: for a loss that declares needs.

        Raises: RunError where a value is not there, a shape does not fit, or the loss is not one number.
        """
        module = self.loss  # once: nn.Module's attribute lookup takes a microsecond
        output = full(pick(values, self.output, "output"))
        target = checked_target(module, output, full(pick(values, self.target, "target")))
        if self.is_by_weight and batch is not None and batch.world_size > 1:
            return shared_mean(module, output, target, batch)
        loss = module(output, target) if passes is None else module(output, target, passes)
        if loss.dim() != 0:
            raise RunError(
                f"{type(module).__name__} gives a tensor of shape {list(loss.shape)}; a term must give one number, "
                "the mean over samples"
            )
        return loss


class Objective(nn.Module):
    """The weighted sum of terms, computed in full precision whatever the network runs in.

    terms: by name; a bare loss module becomes a term of weight 1. The names are those of the tags
        `loss/<stage>/<term>`.
    needs: what its terms need beside the values of one forward pass, words of NEEDS in objectives/term.py.
    Raises: RunError where there is none, or where a loss is no mean over samples; ConfigError for needs that are none.
    """

    needs: frozenset[str]

    def __init__(self, terms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not terms:
            raise RunError("the objective has no terms; it must have at least one: objective=[cross_entropy]")
        # A plain mapping, for an nn.ModuleDict refuses names such as `update` and is slow to read; the list registers.
        self.terms = {name: term if isinstance(term, AbstractTerm) else Term(loss=term) for name, term in terms.items()}
        self._needs = {name: _needs(term, key=f"objective.{name}") for name, term in self.terms.items()}
        self.needs = frozenset().union(*self._needs.values())
        for name, term in self.terms.items():
            if isinstance(term, Term) and (fault := reduction_fault(term.loss)):
                key = f"objective.{name}.loss.reduction" if terms[name] is term else f"objective.{name}.reduction"
                raise RunError(
                    f"{key}: {fault}; it must be 'mean', for each sample counts once. Take the line out, or scale the "
                    f"term with objective.{name}.weight"
                )
        self._terms = nn.ModuleList(self.terms.values())
        self._output = next((term.output for term in self.terms.values() if isinstance(term, Term)), None)

    @property
    def weighed(self) -> tuple[str, ...]:
        """Names of the terms that divide by weights of their targets, and not by the number of samples."""
        return tuple(name for name, term in self.terms.items() if isinstance(term, Term) and term.is_by_weight)

    def only(self, names: Collection[str]) -> Objective:
        """The sum of some of the terms, in this one's order: the same modules, not copies.

        Raises: RunError where a name is no term.
        """
        for name in names:
            if name not in self.terms:
                found = nearest(name, self.terms)
                hint = f". Nearest: {found[0]}" if found else ""
                raise RunError(f"the objective has no term {name!r}; there are {', '.join(self.terms)}{hint}")
        return Objective({name: term for name, term in self.terms.items() if name in names})

    def forward(
        self, values: Mapping[str, Any], batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its parts.

        values: `output`, `target` and whatever else the network and the batch name.
        batch: whose share the values are. Where other ranks hold the rest of it, the mean over ranks, weighted by
            their samples, is the loss of the whole batch; every rank must call it then.
        passes: of the step that gave the values; only where there are `needs`.
        Returns: the sum of weight times term, 0-d and with a gradient; and each term's own loss, 0-d, detached and
            not weighted.
        Raises: RunError where a term's needs are not met.
        """
        device = self._device(values)
        # Autocast knows no meta device, on which FLOPs are counted.
        if device != "meta" and torch.is_autocast_enabled(device):
            # Some losses refuse to run under autocast, and a sum of half precision numbers is not one to train on.
            with torch.autocast(device, enabled=False):
                return self._sum(values, batch, passes)
        return self._sum(values, batch, passes)

    def _device(self, values: Mapping[str, Any]) -> str:
        if self._output is not None:
            return pick(values, self._output, "output").device.type
        return next((value.device.type for value in values.values() if isinstance(value, Tensor)), "cpu")

    def _sum(
        self, values: Mapping[str, Any], batch: Batch | None, passes: Passes | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        total: Tensor | None = None
        parts: dict[str, Tensor] = {}
        if passes is None and self.needs:
            raise RunError(f"the terms need {', '.join(sorted(self.needs))}; the objective was called without passes")
        for name, term in self.terms.items():
            loss = term(values, batch, passes) if self._needs[name] else term(values, batch)
            parts[name] = loss.detach()
            weighted = loss if term.weight == 1.0 else term.weight * loss
            total = weighted if total is None else total + weighted
        assert total is not None
        return total, parts


def _needs(term: AbstractTerm, *, key: str) -> frozenset[str]:
    needs = needs_of(term, key=key)
    return needs | needs_of(term.loss, key=f"{key}.loss") if isinstance(term, Term) else needs
