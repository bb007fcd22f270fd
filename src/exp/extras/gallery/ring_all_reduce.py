"""Distributed data parallel that averages gradients by a ring all-reduce, and logs the number of sent bytes.

The module shows how an all-reduce works. The all-reduce of the backend is faster.

A bucket of gradients is cut into n pieces, one for each of n ranks. The algorithm has two rounds of n - 1 turns. In a
turn of the first round, a rank sends a piece to the next rank, and adds the piece that it receives. After this round,
each rank has one piece of the sum. In the second round, these pieces are passed around the ring.

A rank sends 2 (n - 1) / n of the bytes of a bucket. This is less than twice the bucket for any n (Patarasuk and Yuan
2009, doi:10.1016/j.jpdc.2008.09.002).
"""

# This module must not import annotations from __future__, because DistributedDataParallel compares the annotations of a
# hook with classes.

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs do not name it
from torch.nn.parallel import DistributedDataParallel

from exp.errors import ErrorDetails, not_supported_with
from exp.spelling import among
from exp.strategies.ddp import DDP, ExpDDPStrategy
from exp.strategies.placement import Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint

log = logging.getLogger(__name__)
KIB = 2**10


class RingDDP(DDP):
    """Strategy ddp with a ring all-reduce. The options are those of ddp, except `communication_hook`."""

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of ddp, of options that register another communication hook, and of phases.

        Phases are not supported, because they average gradients without the communication hook.
        """
        errors = [*super().errors(planned), *self.hook_errors(expected="null: the ring averages the gradients")]
        if planned.settings.phases and planned.placement.world_size > 1:
            expected = "none: phases average their gradients without the ring"
            got = among(planned.settings.phases)
            errors.append(not_supported_with("phases", got, f"strategy={self.name}", expected, "Write strategy=ddp"))
        return errors

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return the strategy of one rank."""
        return RingDDPStrategy(placement=placement, options=self)


class RingDDPStrategy(ExpDDPStrategy):
    """Lightning strategy that registers the ring as the communication hook of DistributedDataParallel."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._ring = Ring()
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(self._ring, _around)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._ring.report()


def _around(ring: "Ring", bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    ring.average(buffer, is_last=bucket.is_last())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class Ring:
    """Ring of all ranks, which averages gradients and counts the bytes that this rank sends.

    Attributes:
        steps: Number of backward passes with averaged gradients.
        sent_bytes: Number of bytes sent since the start of the run.
    """

    def __init__(self) -> None:
        self.steps, self.sent_bytes = 0, 0

    def average(self, buffer: Tensor, *, is_last: bool) -> None:
        """Average a bucket of gradients over all ranks, in place.

        Args:
            buffer: The bucket `[N]`.
            is_last: Whether the bucket is the last one of the backward pass.
        """
        self.sent_bytes += all_reduce(buffer)
        buffer.div_(dist.get_world_size())
        self.steps += is_last

    def report(self) -> None:
        """Log the number of steps and of sent bytes."""
        if self.steps:
            log.info(f"ring all-reduce: {self.steps:,} steps, {self.sent_bytes / KIB:,.1f} KiB sent by this rank")


def all_reduce(buffer: Tensor) -> int:
    """Sum a vector `[N]` over all ranks in place, and return the number of bytes that this rank sent.

    Every rank must call this function with the same N.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = buffer.tensor_split(ranks)
    sent = 0
    for turn in range(ranks - 1):
        received = torch.empty_like(pieces[(rank - turn - 1) % ranks])
        sent += _exchange(pieces[(rank - turn) % ranks], received)
        pieces[(rank - turn - 1) % ranks].add_(received)
    for turn in range(ranks - 1):
        sent += _exchange(pieces[(rank + 1 - turn) % ranks], pieces[(rank - turn) % ranks])
    return sent


def _exchange(piece: Tensor, received: Tensor) -> int:
    """Send a piece to the next rank, receive another, and return the number of bytes sent.

    Args:
        piece: The piece to send.
        received: Tensor that is filled with the piece from the previous rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # A bucket with fewer numbers than ranks has empty pieces, which are not sent.
    messages = [dist.P2POp(dist.isend, piece, (rank + 1) % ranks)] if piece.numel() else []
    messages += [dist.P2POp(dist.irecv, received, (rank - 1) % ranks)] if received.numel() else []
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return piece.nbytes
