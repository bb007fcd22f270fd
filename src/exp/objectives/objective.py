"""The objective: a weighted sum of named terms. Its value is the loss that the network is trained on.

A cross entropy with class weights or ignored targets divides by the weights of the targets at hand. Each rank dividing
by its own would give another loss than one process, so that such a loss is summed, and divided by what all ranks hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed
from torch import Tensor, nn

from exp.errors import RunError
from exp.objectives.loss_inputs import Values, full, match_target, pick
from exp.objectives.term import AbstractTerm, needs_of
from exp.objectives.terms import NLL, NOTHING, CrossEntropy
from exp.spelling import nearest
from exp.types import Batch

if TYPE_CHECKING:
    from exp.objectives.passes import Passes

# What may divide by something else than the number of its targets.
ByWeight = CrossEntropy | NLL | nn.CrossEntropyLoss | nn.NLLLoss


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

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """The unweighted loss, 0-d, in float32 (float64 where the output is float64).

        batch: whose share the values are, as Objective takes it. passes: for a loss that declares needs.

        Raises: RunError where a value is not there, a shape does not fit, or the loss is not one number.
        """
        module = self.loss  # once: nn.Module's attribute lookup takes a microsecond
        output = full(pick(values, self.output, "output"))
        target = match_target(module, output, full(pick(values, self.target, "target")))
        if self.is_by_weight and batch is not None and batch.world_size > 1:
            return shared_mean(cast(ByWeight, module), output, target, batch)
        loss: Tensor = module(output, target) if passes is None else module(output, target, passes)
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
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
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

    def _device(self, values: Values) -> str:
        if self._output is not None:
            return pick(values, self._output, "output").device.type
        return next((value.device.type for value in values.values() if isinstance(value, Tensor)), "cpu")

    def _sum(self, values: Values, batch: Batch | None, passes: Passes | None) -> tuple[Tensor, dict[str, Tensor]]:
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


def reduction_fault(loss: nn.Module) -> str | None:
    """Says what is wrong with the reduction of a loss; None where its value is a mean over samples."""
    reduction = getattr(loss, "reduction", "mean")
    # KLDivLoss calls the mean over samples batchmean.
    if reduction == "mean" or (reduction == "batchmean" and isinstance(loss, nn.KLDivLoss)):
        return None
    return f"{type(loss).__name__} has reduction {reduction!r}, so that its value depends on the batch size"


def counts_by_weight(loss: nn.Module) -> bool:
    """Whether the loss may divide by something else than the number of its targets."""
    if isinstance(loss, CrossEntropy | NLL):
        return loss.class_weights is not None or loss.ignore_index != NOTHING
    # torch's own ignore -100 unless told otherwise, and a batch does not say whether it has any.
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def shared_mean(loss: ByWeight, output: Tensor, target: Tensor, batch: Batch) -> Tensor:
    """The loss of this rank's share such that the mean over ranks, weighted by samples, is the loss of the batch.

    One sum over the ranks, of one number. 0-d.
    """
    loss.reduction = "sum"
    try:
        total: Tensor = loss(output, target)
    finally:
        loss.reduction = "mean"
    # A stand-in takes part in the sum, and adds nothing to it.
    held: Tensor = _weight(loss, target) if batch.size else torch.zeros((), device=target.device)
    torch.distributed.all_reduce(held)
    # Several ranks hold each share where a model is split over ranks.
    held = held * (batch.world_size / torch.distributed.get_world_size())
    return total / held * (batch.global_size / batch.size) if batch.size else total * 0.0


def _weight(loss: ByWeight, target: Tensor) -> Tensor:
    """The weight by which the loss divides its sum, 0-d, float32."""
    if target.is_floating_point():  # torch divides the loss of probabilities by their number, whatever the weights
        return torch.tensor(float(target.numel() // target.shape[1] if target.dim() > 1 else 1), device=target.device)
    weights: Tensor | None = loss.class_weights if isinstance(loss, CrossEntropy | NLL) else loss.weight
    counted = target != loss.ignore_index
    if weights is None:
        return counted.sum().float()
    return torch.where(counted, weights.float()[torch.where(counted, target, 0)], 0.0).sum()
