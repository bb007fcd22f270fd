"""Communication hooks of DistributedDataParallel: gradients that are sent in fewer bytes.

bf16 and fp16: each bucket is sent in that dtype. As torch's default_hooks, whose bf16 DistributedDataParallel refuses
unless the backend is NCCL; gloo adds bfloat16 as well (seen in torch 2.13).
powersgd: each matrix is sent as two of low rank, and what was lost is added to the next step's gradients (Vogels et al.
2019, torch's powerSGD_hook).
"""

# No postponed annotations: DistributedDataParallel compares those of a hook with the classes themselves.

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from exp.strategies.ddp import PowerSGD

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LowRank:
    """PowerSGD's state, made when the run's position is known: a resumed run does not begin with whole gradients."""

    def __init__(self, options: "PowerSGD", steps_done: Callable[[], int]) -> None:
        self._options, self._steps_done = options, steps_done
        self._state: PowerSGDState | None = None

    @property
    def state(self) -> PowerSGDState:
        if self._state is None:
            options = self._options
            # torch counts from 0 in each process, and needs two full steps before error feedback can begin.
            self._state = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=options.rank,
                start_powerSGD_iter=max(2, options.start_step - self._steps_done()),
                min_compression_rate=options.min_compression_rate,
                use_error_feedback=options.error_feedback,
                warm_start=options.warm_start,
            )
        return self._state


def compress(
    wrapped: DistributedDataParallel, word: str, *, powersgd: "PowerSGD", steps_done: Callable[[], int]
) -> None:
    """Registers the hook of a word: bf16, fp16 or powersgd.

    steps_done: how many steps of the run are done, asked when the first gradients are there.
    """
    if word == "powersgd":
        wrapped.register_comm_hook(LowRank(powersgd, steps_done), _in_low_rank)
    else:
        wrapped.register_comm_hook(DTYPES[word], _in_dtype)


def _in_dtype(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    # Divided before they are added: float16 overflows less.
    sent = buffer.to(dtype).div_(dist.get_world_size())
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: buffer.copy_(future.value()[0]))


def _in_low_rank(low_rank: LowRank, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return powerSGD_hook(low_rank.state, bucket)
