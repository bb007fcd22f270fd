"""Lightning's DDPStrategy, as exp uses it. Imported in a rank only, for it imports Lightning."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from exp.strategies.averaging import broadcast_state


class ExpDDPStrategy(DDPStrategy):
    """Wraps the module in DistributedDataParallel, but for one that averages its own gradients.

    Of that one, parameters and buffers start as rank 0's, and nothing else is done: DistributedDataParallel's reducer
    counts one backward a forward, which phases with several do not keep.

    Relied on, and tested: `configure_ddp` is where Lightning wraps, and a module that it leaves unwrapped is called as
    it is (seen in lightning 2.6.6).
    """

    def configure_ddp(self) -> None:
        if self.lightning_module.averages_gradients:
            broadcast_state(self.lightning_module)
        else:
            super().configure_ddp()
