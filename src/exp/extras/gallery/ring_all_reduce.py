"""Distributed data parallel whose gradients go around a ring of ranks, which logs what it sends.

For what an all-reduce does, and what it costs; the backend's own is faster. A bucket is cut into as many pieces as
there are ranks. In n - 1 turns each rank sends a piece to the next rank and adds the piece that it receives, so that
each rank has one piece of the whole sum. In n - 1 further turns these pieces go round. So each rank sends 2 (n - 1) / n
of a bucket's bytes, however many ranks there are (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
"""

# No postponed annotations: DistributedDataParallel compares those of a hook with the classes themselves.

import logging
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs do not name it
from torch.nn.parallel import DistributedDataParallel

from exp.errors import ErrorDetails
from exp.spelling import among
from exp.strategies.ddp import DDP, ExpDDPStrategy
from exp.strategies.placement import Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint

log = logging.getLogger(__name__)
KIB = 2**10


class RingDDP(DDP):
    """Data parallel with the options of ddp, except `communication_hook`."""

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of ddp, of options that register a second hook, and of phases, which run no hook."""
        errors = [*super().errors(planned), *self.hook_errors(expected="null: the ring averages the gradients")]
        if planned.settings.phases and planned.placement.world_size > 1:
            expected = "none: phases average their gradients without the ring"
            errors.append(
                ErrorDetails(
                    key="phases", got=among(planned.settings.phases), expected=expected, fix="Write strategy=ddp"
                )
            )
        return errors

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return the strategy of one rank."""
        return RingDDPStrategy(placement=placement, options=self)


class RingDDPStrategy(ExpDDPStrategy):
    """Registers the ring as the hook of DistributedDataParallel."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._ring = Ring()
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(self._ring, _around)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._ring.tell()


def _around(ring: "Ring", bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    ring.average(buffer, index=bucket.index(), is_last=bucket.is_last())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class Ring:
    """Counts what a rank sends.

    sent_bytes, seconds: since the start of the run, of all buckets. steps: backwards whose gradients were averaged.
    """

    def __init__(self) -> None:
        self.steps, self.sent_bytes, self.seconds = 0, 0, 0.0

    def average(self, buffer: Tensor, *, index: int, is_last: bool) -> None:
        """Makes a bucket of gradients `[N]` its mean over all ranks, in place, and logs it in the first step.

        index: of the bucket, of which a step has several. is_last: whether it is the step's last one.
        """
        began, ranks = time.perf_counter(), dist.get_world_size()
        sent = all_reduce(buffer)
        buffer.div_(ranks)
        seconds = time.perf_counter() - began
        if self.steps == 0:
            log.info(
                f"ring all-reduce of bucket {index}: {buffer.numel():,} numbers in {ranks} pieces, "
                f"{2 * (ranks - 1)} messages, {sent / KIB:,.1f} KiB sent of {buffer.nbytes / KIB:,.1f}, "
                f"{1000 * seconds:.2f} ms"
            )
        self.sent_bytes += sent
        self.seconds += seconds
        self.steps += is_last

    def tell(self) -> None:
        """Logs the sums."""
        if self.steps:
            log.info(
                f"ring all-reduce: {self.steps:,} steps, {self.sent_bytes / KIB:,.1f} KiB sent by this rank, "
                f"{1000 * self.seconds / self.steps:.2f} ms a step"
            )


def all_reduce(buffer: Tensor) -> int:
    """Adds a vector `[N]` up over all ranks, in place. Every rank must call it with one N.

    Returns: the bytes that this rank sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = buffer.tensor_split(ranks)
    sent = 0
    for turn in range(ranks - 1):
        received = torch.empty_like(pieces[(rank - turn - 1) % ranks])
        sent += _pass_on(pieces[(rank - turn) % ranks], received)
        pieces[(rank - turn - 1) % ranks].add_(received)
    for turn in range(ranks - 1):
        sent += _pass_on(pieces[(rank + 1 - turn) % ranks], pieces[(rank - turn) % ranks])
    return sent


def _pass_on(piece: Tensor, received: Tensor) -> int:
    """Sends one piece to the next rank and fills the other from the one before; the bytes sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # A bucket of fewer numbers than ranks has empty pieces, which are no messages.
    messages = [dist.P2POp(dist.isend, piece, (rank + 1) % ranks)] if piece.numel() else []
    messages += [dist.P2POp(dist.irecv, received, (rank - 1) % ranks)] if received.numel() else []
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return piece.nbytes
