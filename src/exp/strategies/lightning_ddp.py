"""Lightning's DDPStrategy, as exp uses it. Imported in a rank only, for it imports Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from exp.errors import RunError
from exp.strategies import batch_norm, compression
from exp.strategies.averaging import broadcast_state
from exp.strategies.local_sgd import LocalSteps, register

if TYPE_CHECKING:
    from exp.strategies.ddp import LocalSGD, PowerSGD


class ExpDDPStrategy(DDPStrategy):
    """Wraps the module in DistributedDataParallel, but for one that averages its own gradients.

    Of that one, parameters and buffers start as rank 0's, and nothing else is done: DistributedDataParallel's reducer
    counts one backward a forward, which phases with several do not keep.

    broadcasts_buffers: whether rank 0's buffers go to all ranks before each forward; of phases, before each step.
    The other parameters are those of exp.strategies.ddp.DDP. Lightning registers a communication hook on CUDA alone,
    so it is done here.

    Relied on, and tested: `configure_ddp` is where Lightning wraps, and a module that it leaves unwrapped is called as
    it is; a batch is the first argument of `training_step` (seen in lightning 2.6.6).
    """

    def __init__(
        self,
        *,
        backend: str | None,
        ranks_per_node: int,
        sync_batchnorm: bool,
        communication_hook: str | None,
        powersgd: PowerSGD,
        local_sgd: LocalSGD,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=backend, **options)
        self._ranks_per_node = ranks_per_node
        self._communication_hook, self._powersgd = communication_hook, powersgd
        self._share = batch_norm.Share() if sync_batchnorm else None
        self._classes_before: dict[nn.Module, type[nn.Module]] = {}
        self._local_options = local_sgd
        self._local: LocalSteps | None = None
        self._waits_for_a_graph = options["static_graph"]
        self.broadcasts_buffers: bool = options["broadcast_buffers"]

    def configure_ddp(self) -> None:
        """Raises: RunError where the module averages its own gradients, and an option is about how ddp does it."""
        module = self.lightning_module
        if self._share is not None:
            self._classes_before = batch_norm.join_statistics(module, self._share, device_type=self.root_device.type)
        is_local = self._local_options.every_n_steps is not None
        # A LightningModule that is not exp's own says nothing of it.
        if getattr(module, "averages_gradients", False):
            if is_local or self._communication_hook is not None:
                raise RunError(
                    f"{type(module).__name__} averages its gradients itself; expected neither "
                    "strategy.communication_hook nor strategy.local_sgd: leave them null"
                )
            broadcast_state(module)
            return
        super().configure_ddp()
        if self._communication_hook is not None:
            compression.compress(
                self.model,
                self._communication_hook,
                powersgd=self._powersgd,
                steps_done=lambda: module.trainer.global_step,
            )
        if is_local:
            self._local = LocalSteps(self._local_options, node_group=self._node_group())
            register(self.model, self._local)

    @property
    def is_plain(self) -> bool:
        """Whether a step has nothing of it but DistributedDataParallel: neither local steps nor shared statistics.

        Relied on, and tested: Lightning's `_model_averager` is None but for its own post-local SGD (lightning 2.6.6).
        """
        return self._local is None and self._share is None and self._model_averager is None

    def training_step(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        if self._share is not None:
            self._share.counts = batch.size > 0
        if self._local is not None:
            self._local.begin_step(self.lightning_module.trainer.global_step)
        return super().training_step(batch, *arguments, **named)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients of accumulated batches stay here until the last of them.

        A static graph has to see one backward with its collectives before one without (an internal assertion of torch
        2.13 otherwise): the run's first batch is sent, which gives the same sum.
        """
        if self._waits_for_a_graph:
            self._waits_for_a_graph = False
            yield
        else:
            with super().block_backward_sync():
                yield

    def optimizer_step(self, *arguments: Any, **named: Any) -> Any:
        output = super().optimizer_step(*arguments, **named)
        if self._local is not None:
            # Lightning counts this step once it is done.
            step = self.lightning_module.trainer.global_step + 1
            self._local.end_step(step, self.lightning_module, self.optimizers)
        return output

    def on_validation_start(self) -> None:
        self._meet()

    def on_train_end(self) -> None:
        self._meet()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All ranks' weights, the same in each: what a checkpoint holds. Every rank must call it."""
        self._meet()
        return super().lightning_module_state_dict()

    def teardown(self) -> None:
        super().teardown()
        batch_norm.part_statistics(self._classes_before)
        self._classes_before = {}

    def _meet(self) -> None:
        if self._local is not None:
            self._local.meet(self.lightning_module, self.optimizers)

    def _node_group(self) -> dist.ProcessGroup | None:
        """The ranks of this node, where they average their gradients at every step."""
        if not self._local_options.within_node or self._ranks_per_node == 1:
            return None
        group, _ = dist.new_subgroups(self._ranks_per_node)
        return group
