"""Means over an epoch: the objective, its terms and the metrics of one stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import Metric

from exp.errors import RunError
from exp.types import Stage


class Source(Protocol):
    """Where the outputs are, of a network whose parts lie in several ranks: on one of them."""

    has_output: bool

    def shared(self, value: Any) -> Any:
        """What the rank that has the outputs gives, on every rank of the model; each must call it."""


class EpochValues(nn.Module):
    """Sums losses weighted by samples, and updates metrics, on the device; one host copy gives their values.

    terms: the objective's, in their order. They have tags of their own where there are several.
    source: an attribute, where the outputs are; None is here.
    """

    def __init__(self, *, stage: Stage, terms: Sequence[str], metrics: Mapping[str, Metric]) -> None:
        super().__init__()
        self.stage = stage
        self.terms = tuple(terms)
        self.names = tuple(metrics)
        # A list: a ModuleDict refuses names such as `update`.
        self.metrics = nn.ModuleList(metrics.values())
        self.source: Source | None = None
        self._sums: Tensor | None = None
        self._samples = 0

    def add(self, loss: Tensor, parts: Mapping[str, Tensor], *, size: int, output: Any, target: Any) -> None:
        """Adds a batch of `size` samples that count; 0 for a stand-in, which leaves no trace."""
        if not size:
            return
        means = loss.detach().reshape(1)
        if len(self.terms) > 1:
            means = torch.stack([loss.detach(), *(parts[term].to(loss.dtype) for term in self.terms)])
        # Sums over an epoch of many batches lose digits in float32; some devices have nothing else.
        sums = means.to(torch.float32 if means.device.type == "mps" else torch.float64) * size
        self._sums = sums if self._sums is None else self._sums + sums
        self._samples += size
        self.update_metrics(output, target)

    def update_metrics(self, output: Any, target: Any) -> None:
        for metric in self.metrics:
            metric.update(output, target)

    def finish(self, strategy: Strategy) -> dict[str, float]:
        """The values by tag, over all ranks, and a fresh start. Every rank must call it.

        Raises: RunError where a metric gives more than one number.
        """
        device = strategy.root_device
        width = 1 + (len(self.terms) if len(self.terms) > 1 else 0)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.zeros(width, dtype=dtype, device=device) if self._sums is None else self._sums
        totals = torch.cat([sums, torch.tensor([self._samples], dtype=dtype, device=device)])
        totals = strategy.reduce(totals, reduce_op="sum")
        metrics = self._computed(device)
        values = torch.cat([totals, torch.stack(metrics).to(dtype)]) if metrics else totals
        self._sums, self._samples = None, 0
        *means, samples = values[: width + 1].tolist()
        result: dict[str, float] = {}
        if samples:
            tags = [f"loss/{self.stage}", *(f"loss/{self.stage}/{term}" for term in self.terms)]
            result = {tag: mean / samples for tag, mean in zip(tags, means, strict=False)}
        tags = [f"{name}/{self.stage}" for name in self.names]
        return result | dict(zip(tags, values[width + 1 :].tolist(), strict=True))

    def metric_states(self) -> dict[str, dict[str, Any]]:
        """What the metrics hold in the middle of an epoch, of all ranks together. Every rank must call it."""
        states = {}
        if self.source is None or self.source.has_output:
            for name, metric in zip(self.names, self.metrics, strict=True):
                with metric.sync_context():
                    # What is synced is undone, and what is not goes on changing: a copy of either.
                    states[name] = {key: _copied(value) for key, value in metric.metric_state.items()}
        return states if self.source is None else self.source.shared(states)

    def restore_metrics(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Goes on from `metric_states`; on one rank only, for they are those of all ranks."""
        for name, metric in zip(self.names, self.metrics, strict=True):
            for key, value in states[name].items() if name in states else ():
                is_list = isinstance(metric.metric_state[key], list)
                setattr(metric, key, [value] if is_list and isinstance(value, Tensor) else value)
                # Else compute warns that nothing was added. torchmetrics has no public way (seen in 1.9).
                metric._update_count = 1

    def _computed(self, device: torch.device) -> list[Tensor]:
        if self.source is None:
            return self._computed_here(device)
        values = self._computed_here(device) if self.source.has_output else []
        for metric in self.metrics:
            metric.reset()
        return [value.to(device) for value in self.source.shared(values)]

    def _computed_here(self, device: torch.device) -> list[Tensor]:
        values = []
        for name, metric in zip(self.names, self.metrics, strict=True):
            value = metric.compute()
            metric.reset()
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise RunError(
                    f"metrics.{name}: {type(metric).__name__} gives a value {got}; expected one number. Most of "
                    "torchmetrics take average: macro"
                )
            values.append(value.detach().reshape(()).to(device))
        return values


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else [item.detach().clone() for item in value]
