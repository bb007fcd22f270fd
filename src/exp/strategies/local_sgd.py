"""Local SGD in a rank: steps without communication between ranks, and their weights averaged every so many steps.

With all ranks' gradients averaged at every step there is one trajectory; here each rank has its own between two
averagings (Lin et al. 2018, arXiv:1808.07217, post-local SGD; torch's post_localSGD_hook and PeriodicModelAverager).
"""

# No postponed annotations: DistributedDataParallel compares those of a hook with the classes themselves.

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from exp.strategies.averaging import average_tensors

if TYPE_CHECKING:
    from exp.strategies.ddp import LocalSGD


class LocalSteps:
    """Knows at which step ranks are on their own, and brings them together again.

    node_group: ranks whose gradients are averaged at every step all the same; None where each is on its own.
    """

    def __init__(self, options: "LocalSGD", *, node_group: dist.ProcessGroup | None) -> None:
        self.options, self.node_group = options, node_group
        self.is_local = False
        self._is_apart = False

    def begin_step(self, step: int) -> None:
        """step: how many optimizer steps of the run are done."""
        self.is_local = step >= self.options.start_step

    def end_step(self, step: int, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """step: how many are done now, this one counted."""
        self._is_apart = self._is_apart or self.is_local
        if self.is_local and (step - self.options.start_step) % self.options.every_n_steps == 0:
            self.meet(module, optimizers)

    def meet(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Makes all ranks one again, where they are apart. Every rank must call it."""
        if not self._is_apart:
            return
        self._is_apart = False
        tensors = [parameter for parameter in module.parameters() if parameter.requires_grad]
        tensors += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        if self.options.average_optimizer_state:
            tensors += [tensor for optimizer in optimizers for tensor in _state(optimizer)]
        average_tensors([tensor.detach() for tensor in tensors])


def register(wrapped: DistributedDataParallel, steps: LocalSteps) -> None:
    """Has gradients averaged over all ranks, and in local steps over the node's or not at all."""
    wrapped.register_comm_hook(steps, _unless_local)


def _unless_local(steps: LocalSteps, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    group = steps.node_group if steps.is_local else dist.group.WORLD
    if group is None:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    buffer.div_(dist.get_world_size(group))
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """Momenta and the like, in an order that all ranks share; not the counts of steps, which are equal already."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in sorted(state):
                value = state[name]
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    yield value
