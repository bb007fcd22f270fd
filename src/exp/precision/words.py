"""The words of precision.word: their dtypes, their properties, and what each cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from exp.errors import ConfigError, ErrorDetails, MissingExtraError, is_installed
from exp.spelling import did_you_mean, show

# Compute capability of Hopper, the first whose tensor cores multiply float8.
HOPPER = (9, 0)
BF16 = "Write precision=bf16"
HALF = (torch.float16, torch.bfloat16)
# The smallest number of float16 is 6e-8: half of it and less is rounded to 0.
SMALLEST_HALF = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
# The settings of a loss scale as every option of precision has them.
SCALER = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


@dataclass(frozen=True, kw_only=True)
class Word:
    """A word of precision.word.

    parameters: the dtype of the network's parameters, floating buffers, gradients and optimizer state; None leaves
        them as the network made them, which is float32.
    autocast: the dtype in which torch.autocast runs what it allows; None for no autocast.
    tf32: float32 matrix products and convolutions may be computed in TensorFloat-32.
    float8: linear layers multiply in float8; CUDA alone can.
    """

    name: str
    parameters: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tf32: bool = False
    float8: bool = False

    @property
    def compute(self) -> torch.dtype:
        """The dtype of most of the arithmetic: what matrix products take and give."""
        return self.autocast or self.parameters or torch.float32

    @property
    def half_parameters(self) -> bool:
        """Parameters, gradients and optimizer state are of 16 bits."""
        return self.parameters in HALF

    @property
    def double(self) -> bool:
        """Everything is float64: the batch with its targets, the network, the loss and the metrics."""
        return self.parameters is torch.float64

    @property
    def needs_scaler(self) -> bool:
        """Float32 parameters get float16 gradients, the small ones of which are lost without a loss scale."""
        return self.autocast is torch.float16

    @property
    def mixed_word(self) -> Word:
        """Itself, or for one with half parameters the word that computes alike with float32 parameters."""
        if not self.half_parameters:
            return self
        return next(word for word in WORDS.values() if word.autocast is self.parameters)

    def scaler_errors(self, scaler: Mapping[str, Any]) -> Iterator[ErrorDetails]:
        """Rejects a loss scale where nothing is scaled, and none where small gradients would be lost."""
        key, enabled = "precision.scaler", scaler["enabled"]
        if self.needs_scaler and enabled is False:
            yield ErrorDetails(
                key=f"{key}.enabled",
                got=f"false with {self.name}",
                expected="true: gradients below 6e-8 become 0 in float16",
                fix=f"Choose precision={self.name}, which sets both",
            )
        elif not self.needs_scaler and enabled is True:
            yield ErrorDetails(
                key=f"{key}.enabled",
                got=f"true with {self.name}",
                expected="false: a loss scale is for the float16 gradients of float32 parameters, which fp16 alone has",
                fix=f"Choose precision={self.name}, which sets both",
            )
        elif not self.needs_scaler:
            for name, default in SCALER.items():
                if scaler[name] != default:
                    yield ErrorDetails(
                        key=f"{key}.{name}",
                        got=f"{show(scaler[name])} with {self.name}, which scales no loss",
                        expected=f"{default}, as it is",
                        fix="Leave it out, or choose precision=fp16",
                    )

    def device_errors(self, accelerator: str) -> list[ErrorDetails]:
        """Rejects a device (cpu, cuda or mps) that cannot compute in this word."""
        if accelerator == "mps" and (self.needs_scaler or self.double):
            reason = "the loss scale of fp16 has no kernels there" if self.needs_scaler else "it has no float64"
            return [_error(f"{self.name} on mps", expected=f"fp32 or bf16: {reason}", fix=BF16)]
        error = float8_error(accelerator) if self.float8 else None
        return [error] if error is not None else []

    def optimizer_errors(self, optimizer: Optimizer) -> list[ErrorDetails]:
        """Rejects an optimizer that cannot step in this word's dtypes."""
        if self.needs_scaler and isinstance(optimizer, LBFGS):
            expected = "bf16 or fp32: LBFGS cannot skip a step"
            return [_error(f"{self.name} with LBFGS", expected=expected, fix=BF16)]
        if self.parameters is not torch.float16:
            return []
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if eps is not None and 0 < eps < SMALLEST_HALF:
                return [
                    ErrorDetails(
                        key="optimizer.eps",
                        got=f"{eps:g} with precision={self.name}",
                        expected=f"{SMALLEST_HALF:.0e} or more: in float16 it is 0, and the step divides by it",
                        fix="Write optimizer.eps=1e-4, or precision=fp16 or bf16_true",
                    )
                ]
        return []


def refuse_without_torchao() -> None:
    """fp8 is computed by torchao, which is an extra.

    Raises: MissingExtraError.
    """
    if not is_installed("torchao"):
        raise MissingExtraError(feature="precision=fp8", package="torchao", extra="fp8")


def read_word(name: str) -> Word:
    """The word of that name.

    Raises: ConfigError where there is none.
    """
    if name not in WORDS:
        raise ConfigError([_error(name, expected=f"one of {', '.join(WORDS)}", fix=did_you_mean(name, WORDS))])
    return WORDS[name]


def float8_error(accelerator: str, capability: tuple[int, int] | None = None) -> ErrorDetails | None:
    """Return the error of a device without float8, or of a missing torchao.

    capability: the GPU's compute capability; None asks torch.
    """
    if capability is None and accelerator == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    if accelerator != "cuda" or capability is None or capability < HOPPER:
        known = "" if capability is None else f", a GPU of compute capability {capability[0]}.{capability[1]}"
        expected = "a CUDA GPU of compute capability 9.0 or more (Hopper), whose tensor cores multiply float8"
        return _error(f"fp8 on {accelerator}{known}", expected=expected, fix=BF16)
    try:
        refuse_without_torchao()
    except MissingExtraError as error:
        return _error("fp8 without torchao", expected=str(error))
    return None


def _error(got: str, *, expected: str, fix: str | None = None) -> ErrorDetails:
    return ErrorDetails(key="precision.word", got=got, expected=expected, fix=fix)


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
