"""The objective: a weighted sum of named terms. Its value is the loss that the network is trained on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.objectives.counting import counts_by_weight, reduction_fault, shared_mean
from exp.objectives.shapes import checked_target
from exp.spelling import nearest
from exp.types import Batch

HALF = (torch.float16, torch.bfloat16)


class Term(nn.Module):
    """One part of the objective: a loss of one output of the network against one target.

    loss: a module called with (output, target) that gives a 0-d tensor, such as torch.nn.MSELoss.
    weight: its factor in the sum.
    output, target: which of the values it compares: `output` and `target`, or a name that the network's or the
        data set's mapping has.
    """

    def __init__(self, *, loss: nn.Module, weight: float = 1.0, output: str = "output", target: str = "target") -> None:
        super().__init__()
        self.loss = loss
        self.weight = weight
        self.output = output
        self.target = target
        self._by_weight = counts_by_weight(loss)

    def forward(self, values: Mapping[str, Tensor], batch: Batch | None = None) -> Tensor:
        """The unweighted loss, 0-d, in float32 (float64 where the output is float64).

        batch: whose share the values are, as Objective takes it.

        Raises: RunError where a value is not there, a shape does not fit, or the loss is not one number.
        """
        module = self.loss  # once: nn.Module's attribute lookup takes a microsecond
        output = _full(_pick(values, self.output, "output"))
        target = checked_target(module, output, _full(_pick(values, self.target, "target")))
        if self._by_weight and batch is not None and batch.world_size > 1:
            return shared_mean(module, output, target, batch)
        loss = module(output, target)
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
    Raises: RunError where there is none, or where a loss is no mean over samples.
    """

    def __init__(self, terms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not terms:
            raise RunError("the objective has no terms; it must have at least one: objective=[cross_entropy]")
        # A plain mapping, for an nn.ModuleDict refuses names such as `update` and is slow to read; the list registers.
        self.terms = {name: term if isinstance(term, Term) else Term(loss=term) for name, term in terms.items()}
        for name, term in self.terms.items():
            if fault := reduction_fault(term.loss):
                key = f"objective.{name}.loss.reduction" if terms[name] is term else f"objective.{name}.reduction"
                raise RunError(
                    f"{key}: {fault}; it must be 'mean', for each sample counts once. Take the line out, or scale the "
                    f"term with objective.{name}.weight"
                )
        self._terms = nn.ModuleList(self.terms.values())
        self._output = next(iter(self.terms.values())).output

    def forward(self, values: Mapping[str, Tensor], batch: Batch | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its parts.

        values: `output`, `target` and whatever else the network and the batch name.
        batch: whose share the values are. Where other ranks hold the rest of it, the mean over ranks, weighted by
            their samples, is the loss of the whole batch; every rank must call it then.
        Returns: the sum of weight times term, 0-d and with a gradient; and each term's own loss, 0-d, detached and
            not weighted.
        """
        device = _pick(values, self._output, "output").device.type
        if torch.is_autocast_enabled(device):
            # Some losses refuse to run under autocast, and a sum of half precision numbers is not one to train on.
            with torch.autocast(device, enabled=False):
                return self._sum(values, batch)
        return self._sum(values, batch)

    def _sum(self, values: Mapping[str, Tensor], batch: Batch | None) -> tuple[Tensor, dict[str, Tensor]]:
        total: Tensor | None = None
        parts: dict[str, Tensor] = {}
        for name, term in self.terms.items():
            loss = term(values, batch)
            parts[name] = loss.detach()
            weighted = loss if term.weight == 1.0 else term.weight * loss
            total = weighted if total is None else total + weighted
        assert total is not None
        return total, parts


def _pick(values: Mapping[str, Tensor], name: str, role: str) -> Tensor:
    if name in values:
        value = values[name]
        if type(value) is Tensor or isinstance(value, Tensor):  # the first is thrice as fast
            return value
        if not isinstance(value, Mapping):
            raise RunError(f"a term's {role} {name!r} is a {type(value).__name__}; it must be a tensor")
        values = value
    found = nearest(name, values)
    hint = f". Nearest: {found[0]}" if found else ""
    there = ", ".join(sorted(values))
    raise RunError(f"a term's {role} is {name!r}, which neither network nor batch gives; there are {there}{hint}")


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor
