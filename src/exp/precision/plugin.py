"""How numbers are represented: the word of the config as a Lightning precision plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from exp.errors import ConfigError, Fault
from exp.precision.scaler import CountingScaler
from exp.spelling import did_you_mean

log = logging.getLogger(__name__)

Word = Literal["fp32", "bf16", "fp16"]
WORDS: tuple[Word, ...] = ("fp32", "bf16", "fp16")


class RunPrecision(Precision):
    """A word of the config as Lightning's precision plugin. This class has no loss scale: its steps are plain ones.

    Whoever steps several optimizers in one batch by hand (phases) writes, as PyTorch's AMP notes do:

        with precision.without_autocast():             # a training step runs under autocast, backward must not
            precision.scale(loss).backward()
        precision.unscale(optimizer)                   # once an optimizer; true gradients from here: hooks, clipping
        precision.step(optimizer)                      # skipped where a gradient is not finite
        precision.update()                             # once a batch window, after all optimizers

    device_type: torch's, such as cpu or cuda.
    autocast: the dtype of forward and loss under torch.autocast; None for none.
    """

    is_scaled: bool = False

    def __init__(self, *, device_type: str, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.device_type, self.autocast = device_type, autocast

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor on the loss: 0-d on the device, or a float."""
        return 1.0

    @property
    def skipped_steps(self) -> Tensor | float:
        """Optimizer steps skipped so far: 0-d on the device, or a float."""
        return 0.0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Makes this optimizer's gradients true ones, once a window."""

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Steps, unless a gradient is not finite under a loss scale. Unscales first where nobody did."""
        return optimizer.step(**kwargs)

    def update(self) -> None:
        """Sets the scale of the next window: once a batch window, after every optimizer's step."""

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's last step changed nothing: its schedule should not move. Waits for the device."""
        return False

    def agree_over(self, group: Any) -> None:
        """Ranks of this process group hold parts of one model: from now on they skip a step together."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast, where the word has it. Without its cache of cast weights, as in Lightning."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast, cache_enabled=False)

    def without_autocast(self) -> AbstractContextManager[Any]:
        """For a backward inside a training step, which runs under autocast."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device_type, enabled=False)


class ScaledPrecision(RunPrecision):
    """float16 by autocast with a loss scale, as PyTorch's AMP notes write it by hand, on CUDA and on CPU.

    Forward and loss run under autocast, backward does not. After backward the gradients are unscaled once, whatever
    the optimizer (Lightning leaves a fused one's scaled and refuses to clip them), so that on_before_optimizer_step
    and clipping see true gradients; then comes the step, skipped where a gradient is not finite, and the scale's
    update.

    Relies on Precision._after_closure, which calls on_before_optimizer_step and then clips, seen in Lightning 2.6.6.
    """

    def __init__(self, *, device_type: str, scaler: CountingScaler) -> None:
        super().__init__(device_type=device_type, autocast=torch.float16)
        self.scaler = scaler
        self.is_scaled = scaler.is_enabled()

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

    def skipped(self, optimizer: Optimizer) -> bool:
        return self.scaler.skipped(optimizer)

    def agree_over(self, group: Any) -> None:
        self.scaler.agree_over(group)

    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.device_type == "cpu":
            for name, part in module.named_modules():
                # Its class and not its forward is replaced, so that a copy of the module runs its own weights.
                if type(part) is nn.LSTM:
                    part.__class__ = _FullPrecisionLSTM
                    log.warning("%s: an LSTM has no float16 on CPU; it runs in float32", name)
        return super().convert_module(module)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        return super().pre_backward(self.scale(tensor), module)

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


def build_precision(
    word: str,
    *,
    device_type: str,
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = False,
) -> RunPrecision:
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
    return RunPrecision(device_type=device_type, autocast=torch.bfloat16 if word == "bf16" else None)


class _FullPrecisionLSTM(nn.LSTM):
    """An LSTM that leaves autocast: mkldnn has none in float16 ("could not create a primitive", torch 2.13)."""

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        states = None if hx is None else (hx[0].float(), hx[1].float())
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float(), states)
