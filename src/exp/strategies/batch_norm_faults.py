"""Batch normalisation over the ranks' shares: which networks have nothing to join, and which cannot do without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from exp.errors import Fault

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned


def batch_norm_faults(planned: Planned, *, sync_batchnorm: bool) -> Iterator[Fault]:
    """What of a network cannot be, or has to be, normalised over the global batch."""
    from torch import nn

    from exp.models.normalisation import BATCH_NORMS
    from exp.strategies.batch_norm import batch_norms

    layers = list(batch_norms(planned.network))
    if not sync_batchnorm:
        for name, layer in layers:
            if isinstance(layer, nn.SyncBatchNorm) and planned.placement.accelerator == "cpu":
                yield Fault(
                    key="strategy.sync_batchnorm",
                    got=f"false, and {name} is a torch.nn.SyncBatchNorm, which refuses tensors on CPU",
                    expected="true: its statistics then go through gloo",
                )
        return
    if not layers:
        yield Fault(
            key="strategy.sync_batchnorm",
            got="true, and the network has no batch normalisation",
            expected="false",
        )
    for name, layer in layers:
        if type(layer) not in BATCH_NORMS:
            yield Fault(
                key="strategy.sync_batchnorm",
                got=f"true, and {name} is a {type(layer).__name__}, whose forward is its own",
                expected="torch.nn.BatchNorm1d, 2d or 3d",
            )
