"""The values of precision.word, with their dtypes and the devices and optimizers that support them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim import LBFGS, Optimizer

from exp.errors import (
    ConfigError,
    ErrorDetails,
    MissingExtraError,
    is_installed,
    not_supported_with,
    unknown_word,
)

# The compute capability of Hopper, the first GPU generation with float8 tensor cores.
HOPPER = (9, 0)
KEY, BF16 = "precision.word", "Write precision=bf16"
HALF = (torch.float16, torch.bfloat16)
# The smallest positive float16 number, 6e-8. Numbers of at most half of it are rounded to 0.
SMALLEST_HALF = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
# The default settings of precision.scaler.
SCALER = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


@dataclass(frozen=True, kw_only=True)
class Word:
    """Settings of one value of precision.word.

    Args:
        name: Value of precision.word, such as "bf16".
        parameters: Dtype of the network's parameters, floating-point buffers, gradients and optimizer state. Default:
            None, they are not converted and stay float32.
        autocast: Dtype of torch.autocast. Default: None, no autocast.
        tf32: Whether float32 matrix products and convolutions may be computed in TensorFloat-32. Default: false.
        float8: Whether linear layers multiply in float8. Only CUDA supports float8. Default: false.
    """

    name: str
    parameters: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tf32: bool = False
    float8: bool = False

    @property
    def compute(self) -> torch.dtype:
        """Dtype of matrix products."""
        return self.autocast or self.parameters or torch.float32

    @property
    def half_parameters(self) -> bool:
        """True if parameters, gradients and optimizer state have 16 bits."""
        return self.parameters in HALF

    @property
    def double(self) -> bool:
        """True for fp64: the network, the batch with its targets, the loss and the metrics are float64."""
        return self.parameters is torch.float64

    @property
    def needs_scaler(self) -> bool:
        """True for float16 autocast: the loss must be scaled, because small gradients would otherwise become 0."""
        return self.autocast is torch.float16

    def scaler_errors(self, scaler: Mapping[str, object]) -> Iterator[ErrorDetails]:
        """Yield an error for each setting of precision.scaler that this precision does not support.

        Args:
            scaler: Values of the config node precision.scaler, by name.
        """
        enabled, key = scaler["enabled"], "precision.scaler"
        if enabled is not None and enabled is not self.needs_scaler:
            expected = "false, because only fp16 needs a loss scale"
            if self.needs_scaler:
                expected = "true, because gradients below 6e-8 become 0 in float16"
            fix = f"Leave {key}.enabled out: precision={self.name} sets it"
            yield not_supported_with(f"{key}.enabled", enabled, self.name, expected, fix)
        elif not self.needs_scaler:
            for name, default in SCALER.items():
                if scaler[name] != default:
                    fix = "Leave it out, or choose precision=fp16"
                    other = f"{self.name}, which has no loss scale"
                    yield not_supported_with(f"{key}.{name}", scaler[name], other, f"{default}, the default", fix)

    def device_errors(self, accelerator: str) -> list[ErrorDetails]:
        """Return the error of a device that does not support this precision. The list is empty without an error.

        Args:
            accelerator: "cpu", "cuda" or "mps".
        """
        if accelerator == "mps" and (self.needs_scaler or self.double):
            reason = "mps does not support the loss scale of fp16" if self.needs_scaler else "mps has no float64"
            return [not_supported_with(KEY, self.name, "mps", f"fp32 or bf16, because {reason}", BF16)]
        error = float8_error(accelerator) if self.float8 else None
        return [error] if error is not None else []

    def optimizer_errors(self, optimizer: Optimizer) -> list[ErrorDetails]:
        """Return the error of an optimizer that does not support this precision. The list is empty without an error."""
        if self.needs_scaler and isinstance(optimizer, LBFGS):
            return [not_supported_with(KEY, self.name, "LBFGS", "bf16 or fp32, because LBFGS cannot skip a step", BF16)]
        if self.parameters is not torch.float16:
            return []
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if eps is not None and 0 < eps < SMALLEST_HALF:
                expected = f"{SMALLEST_HALF:.0e} or more, because the optimizer divides by eps, which is 0 in float16"
                fix = "Write optimizer.eps=1e-4, or precision=fp16 or bf16_true"
                return [not_supported_with("optimizer.eps", f"{eps:g}", f"precision={self.name}", expected, fix)]
        return []


def refuse_without_torchao() -> None:
    """Raise MissingExtraError if torchao is not installed. fp8 requires torchao."""
    if not is_installed("torchao"):
        raise MissingExtraError(feature="precision=fp8", package="torchao", extra="fp8")


def read_word(name: str) -> Word:
    """Return the settings of a value of precision.word.

    Raises:
        ConfigError: The value is unknown.
    """
    if name not in WORDS:
        raise ConfigError([unknown_word(KEY, name, WORDS)])
    return WORDS[name]


def float8_error(accelerator: str, capability: tuple[int, int] | None = None) -> ErrorDetails | None:
    """Return an error if the device does not support float8, or if torchao is not installed; otherwise None.

    Args:
        accelerator: "cpu", "cuda" or "mps".
        capability: Compute capability of the GPU, such as (9, 0). Default: None, read from torch.
    """
    if capability is None and accelerator == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    if accelerator != "cuda" or capability is None or capability < HOPPER:
        known = "" if capability is None else f" of compute capability {capability[0]}.{capability[1]}"
        expected = "a CUDA GPU of compute capability 9.0 or more (Hopper), whose tensor cores multiply float8"
        return not_supported_with(KEY, "fp8", f"{accelerator}{known}", expected, BF16)
    try:
        refuse_without_torchao()
    except MissingExtraError as error:
        return ErrorDetails(KEY, "fp8 without torchao", str(error))
    return None


WORDS = {
    word.name: word
    for word in (
        Word(name="fp32"),
        Word(name="tf32", tf32=True),
        Word(name="bf16", autocast=torch.bfloat16),
        Word(name="fp16", autocast=torch.float16),
        Word(name="bf16_true", parameters=torch.bfloat16),
        Word(name="fp16_true", parameters=torch.float16),
        Word(name="fp64", parameters=torch.float64),
        Word(name="fp8", autocast=torch.bfloat16, float8=True),
    )
}
