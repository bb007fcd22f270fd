"""How numbers are represented: the word of the config as a Lightning precision plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from exp.errors import ConfigError, Fault
from exp.precision.scaler import CountingScaler
from exp.spelling import did_you_mean

log = logging.getLogger(__name__)

Word = Literal["fp32", "bf16", "fp16"]
WORDS: tuple[Word, ...] = ("fp32", "bf16", "fp16")


class ScaledPrecision(MixedPrecision):
    """float16 by autocast with a loss scale, as PyTorch's AMP notes write it by hand, on CUDA and on CPU.

    Forward and loss run under autocast, backward does not. After backward the gradients are unscaled once, whatever
    the optimizer (Lightning leaves a fused one's scaled and refuses to clip them), so that on_before_optimizer_step
    and clipping see true gradients; then comes the step, skipped where a gradient is not finite, and the scale's
    update.

    Relies on Precision._after_closure, which calls on_before_optimizer_step and then clips, seen in Lightning 2.6.6.
    """

    scaler: CountingScaler

    def __init__(self, *, device_type: str, scaler: CountingScaler) -> None:
        super().__init__("16-mixed", device_type, scaler=scaler)

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor on the loss: 0-d on the device, or a float before the first step."""
        return self.scaler.loss_scale

    @property
    def skipped_steps(self) -> Tensor | float:
        """Optimizer steps skipped so far: 0-d on the device, or a float before the first."""
        return self.scaler.skipped_steps

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step changed nothing: a schedule should not move. Waits for the device."""
        return self.scaler.last_step_skipped

    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.device == "cpu":
            for name, part in module.named_modules():
                # Its class and not its forward is replaced, so that a copy of the module runs its own weights.
                if type(part) is nn.LSTM:
                    part.__class__ = _FullPrecisionLSTM
                    log.warning("%s: an LSTM has no float16 on CPU; it runs in float32", name)
        return super().convert_module(module)

    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                [Fault(key="precision.word", got="fp16 with LBFGS", expected="bf16 or fp32: LBFGS cannot skip a step")]
            )
        result = closure()
        if result is None and model.automatic_optimization:
            # The training step gave no loss: there are no gradients to unscale.
            self._after_closure(model, optimizer)
            return result
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Past MixedPrecision, which refuses fused optimizers: their gradients are already true here.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


def build_precision(
    word: str,
    *,
    device_type: str,
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = False,
) -> Precision:
    """The plugin for a word of `precision.word`.

    device_type: torch's, such as cpu or cuda.
    init_scale, growth_factor, backoff_factor, growth_interval, enabled: of the loss scale (precision.scaler), which
        only fp16 has.
    Raises: ConfigError for an unknown word, or a scaler that is enabled for a word without one.
    """
    if word not in WORDS:
        expected, cure = f"one of {', '.join(WORDS)}", did_you_mean(word, WORDS)
        raise ConfigError([Fault(key="precision.word", got=word, expected=expected, cure=cure)])
    if word == "fp16":
        scaler = CountingScaler(
            device=device_type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        return ScaledPrecision(device_type=device_type, scaler=scaler)
    if enabled:
        fault = Fault(
            key="precision.scaler.enabled",
            got=f"true with {word}",
            expected="false: only the narrow range of fp16 needs a loss scale",
            cure="Choose precision=fp16, or set precision.scaler.enabled=false",
        )
        raise ConfigError([fault])
    return MixedPrecision("bf16-mixed", device_type) if word == "bf16" else Precision()


class _FullPrecisionLSTM(nn.LSTM):
    """An LSTM that leaves autocast: mkldnn has none in float16 ("could not create a primitive", torch 2.13)."""

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        states = None if hx is None else (hx[0].float(), hx[1].float())
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float(), states)
