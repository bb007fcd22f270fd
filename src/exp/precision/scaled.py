"""The plugin of fp16: autocast with a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from exp.errors import ConfigError
from exp.precision.plugin import RunPrecision
from exp.precision.scaler import CountingScaler
from exp.precision.watch import ScaleWatch
from exp.precision.words import Word


class ScaledPrecision(RunPrecision):
    """float16 by autocast with a loss scale, as PyTorch's AMP notes write it by hand, on CUDA and on CPU.

    Forward and loss run under autocast, backward does not. After backward the gradients are unscaled once, whatever
    the optimizer (Lightning leaves a fused one's scaled and refuses to clip them), so that on_before_optimizer_step
    and clipping see true gradients; then comes the step, skipped where a gradient is not finite, and the scale's
    update.

    Relies on Precision._after_closure, which calls on_before_optimizer_step and then clips, seen in Lightning 2.6.6.
    """

    def __init__(
        self,
        *,
        word: Word,
        device_type: str,
        scaler: CountingScaler,
        keep: Mapping[str, str] | None = None,
        matmul: str | None = None,
    ) -> None:
        super().__init__(word=word, device_type=device_type, keep=keep, matmul=matmul)
        self.scaler = scaler
        self.is_scaled = scaler.is_enabled()
        self._watch = ScaleWatch()

    @property
    def loss_scale(self) -> Tensor | float:
        return self.scaler.loss_scale

    @property
    def skipped_steps(self) -> Tensor | float:
        return self.scaler.skipped_steps

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        return self.scaler.step(optimizer, **kwargs)

    def update(self) -> None:
        self.scaler.update()

    def hold(self, optimizer: Optimizer, flag: Tensor) -> None:
        self.scaler.hold(optimizer, flag)

    def skipped(self, optimizer: Optimizer) -> bool:
        return self.scaler.skipped(optimizer)

    def agree_over(self, group: Any) -> None:
        self.scaler.agree_over(group)

    def written(self, values: Mapping[str, float], *, step: int) -> None:
        if "precision/loss_scale" in values:
            scale, skipped = values["precision/loss_scale"], values["precision/skipped_steps"]
            self._watch.see(step=step, loss_scale=scale, skipped_steps=skipped)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        return super().pre_backward(self.scale(tensor), module)

    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(self.word.optimizer_faults(optimizer))
        result = closure()
        if result is None and model.automatic_optimization:
            # The training step gave no loss: there are no gradients to unscale.
            self._after_closure(model, optimizer)
            return result
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        output = self.step(optimizer, **kwargs)
        if model.automatic_optimization:
            # One optimizer; who steps several by hand says when the last of them has.
            self.update()
        return output

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)
