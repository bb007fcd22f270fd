"""Lightning precision plugins for the values of precision.word, with or without a loss scale.

This module uses a private method of Lightning 2.6.6: `_after_closure` of Precision, which calls
on_before_optimizer_step and clips gradients.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from exp.errors import ConfigError
from exp.nested import Nested
from exp.precision.conversion import attach_edges, cast, cast_own_tensors, cast_tensors, convert_linear
from exp.precision.keep import kept_layers
from exp.precision.scaler import CountingScaler, FiniteSteps
from exp.precision.words import Word, read_word

log = logging.getLogger(__name__)

# The compute capability of Ampere, the first GPU generation with TensorFloat-32.
FIRST_CAPABILITY = (8, 0)


class RunPrecision(Precision):
    """Lightning precision plugin for a value of precision.word, without a loss scale.

    Code that steps several optimizers in one batch (phases) must call the methods in this order:

        precision.scale(loss).backward()               # outside of autocast
        precision.unscale(optimizer)                   # once per optimizer, before hooks and clipping
        precision.step(optimizer)                      # skipped if a gradient is not finite
        precision.update()                             # once per step, after all optimizers

    Attributes:
        is_scaled: Whether the loss is multiplied by a loss scale.
        skips: Whether steps with non-finite gradients are skipped and counted.
        is_whole: Whether the LightningModule itself is the network. This is true for a user's own LightningModule. If
            false, the network is the attribute `network` of the LightningModule.

    Args:
        word: Settings of the value of precision.word.
        device_type: torch's name of the device, such as "cpu" or "cuda".
        keep: Value of precision.keep: module name patterns or types, mapped to "fp32" or "fp64". Module names are
            relative to the network. Default: None, no exceptions.
        matmul: Value of runtime.matmul: the precision of float32 matrix products. Default: None, the default of `word`.
        scaler: Gradient scaler. Default: None, no loss scale and no skipped steps.
    """

    is_whole: bool = False

    def __init__(
        self,
        *,
        word: Word,
        device_type: str,
        keep: Mapping[str, str] | None = None,
        matmul: str | None = None,
        scaler: CountingScaler | None = None,
    ) -> None:
        super().__init__()
        self.word, self.device_type, self.keep = word, device_type, dict(keep or {})
        self.scaler = scaler or CountingScaler(device=device_type, enabled=False)
        self.skips: bool = self.scaler.is_enabled()
        self.is_scaled = self.skips and self.scaler.scales
        self._tf32 = TensorFloat32(allowed=word.tf32, matmul=matmul)
        self._handles: list[RemovableHandle] = []
        self.kept: dict[str, torch.dtype] = {}
        self._has_logged = self._has_converted = self._has_warned = False

    # --- the loss scale ---

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor by which the loss is multiplied: a 0-d tensor on the device, or a float."""
        return self.scaler.loss_scale

    @property
    def skipped_steps(self) -> Tensor | float:
        """The number of optimizer steps skipped so far: a 0-d tensor on the device, or a float."""
        return self.scaler.skipped_steps

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale, for the backward pass."""
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale. Call this method at most once per step."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, **kwargs: object) -> object:
        """Step the optimizer, or skip the step if a gradient is not finite and `skips` is true.

        Gradients that are still scaled are unscaled first.

        Returns:
            Result of torch.amp.GradScaler.step.
        """
        return self.scaler.step(optimizer, **kwargs)

    def update(self) -> None:
        """Compute the loss scale of the next step. Call this method after the steps of all optimizers."""
        self.scaler.update()

    def has_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of an optimizer was skipped. The call waits until the device has finished."""
        return self.scaler.has_skipped(optimizer)

    def check_scale(self, values: Mapping[str, float], *, step: int) -> None:
        """Warn once if the loss scale is below 1.

        Args:
            values: Scalars that were recorded for a step, by tag.
            step: Number of the optimizer step, for the warning.
        """
        scale = values.get("precision/loss_scale", 1.0)
        if scale < 1.0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "step %d: the loss scale has fallen to %g, because a gradient is not finite with any scale. Find the "
                "layer with python -m exp.precision and keep it in fp32 (precision.keep), or train in bf16",
                step,
                scale,
            )

    # --- the network ---

    def represent(self, module: nn.Module) -> nn.Module:
        """Convert the module's tensors to the dtypes of the precision, in place, and return the module.

        A second call changes nothing. The method must be called before a checkpoint is loaded, because float64 weights
        of the checkpoint would otherwise be rounded to float32.

        Raises:
            ConfigError: precision.keep is invalid.
        """
        network = self._network(module)
        kept = kept_layers(network, self._keep(network), otherwise=self.word.parameters)
        if self.word.double:
            # The weights of losses and the states of metrics are also converted.
            for part in module.modules():
                if isinstance(part, Metric):
                    # A metric is converted only once. After an update, its states may contain class indices, which must
                    # stay integers.
                    if part.dtype is not torch.float64:
                        part.set_dtype(torch.float64)
                else:
                    cast_own_tensors(part, torch.float64)
        cast_tensors(network, self.word, kept)
        if self.word.float8:
            names = convert_linear(network, kept=kept)
            if names or not self._has_converted:
                log.info("layers that compute in float8: %s", ", ".join(names) or "none")
            self._has_converted = True
        return module

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.represent(module)
        network = self._network(module)
        self.kept = kept_layers(network, self._keep(network), otherwise=self.word.parameters)
        self.attach(module)
        self._log_exceptions(network)
        return module

    def attach(self, module: nn.Module) -> None:
        """Attach the conversion hooks to the network, and set the TensorFloat-32 switches of the process.

        convert_module calls this method. A strategy that shards or splits the network calls the method again after the
        split. The new hooks then run after FSDP's hooks, and layers of other ranks get no hooks.
        """
        self.teardown()
        self._tf32.set()
        network = self._network(module)
        present = {name for name, _ in network.named_modules(remove_duplicate=False)}
        kept = {name: dtype for name, dtype in self.kept.items() if name in present}
        self._handles = attach_edges(network, self.word, kept, device_type=self.device_type)

    def teardown(self) -> None:
        """Remove the conversion hooks from the network, and restore the TensorFloat-32 switches of the process.

        The dtypes of parameters and buffers stay converted.
        """
        while self._handles:
            self._handles.pop().remove()
        self._tf32.restore()

    def convert_input(self, data: Nested) -> Nested:
        """Return a batch with floating-point tensors converted as Lightning requires before a step.

        The batch, with its targets, is converted in two cases:

        - If the precision is fp64, the batch becomes float64.
        - If the LightningModule itself is the network, the batch gets the dtype of the parameters.

        In all other cases, the batch is returned unchanged, because hooks of the network convert the inputs.
        """
        if self.is_whole and self.word.parameters is not None:
            return cast(data, self.word.parameters)
        return cast(data, torch.float64) if self.word.double else data

    def cast_inputs(self, inputs: Nested) -> Nested:
        """Return the network's inputs converted to the dtype of the parameters.

        Strategies that run layers without calling the network use this method, because the network's hooks do not run.
        """
        return inputs if self.word.parameters is None else cast(inputs, self.word.parameters)

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass: autocast, a default dtype, or no change.

        As in Lightning, autocast does not cache converted weights.
        """
        if self.word.double or (self.is_whole and self.word.half_parameters):
            return _default_dtype(self.word.compute)
        if self.word.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.word.autocast, cache_enabled=False)

    def _network(self, module: nn.Module) -> nn.Module:
        """Return the network of a LightningModule. For any other module, return the module itself."""
        own = getattr(module, "network", None) if isinstance(module, LightningModule) and not self.is_whole else None
        return own if isinstance(own, nn.Module) else module

    def _keep(self, network: nn.Module) -> dict[str, str]:
        """Return precision.keep, extended by "fp32" for LSTM layers that this CPU cannot run in the autocast dtype."""
        if self.word.autocast is None or self.device_type != "cpu":
            return self.keep
        without = {name: "fp32" for name, part in network.named_modules() if isinstance(part, nn.LSTM)}
        return self.keep if not without or _runs_lstm(self.word.autocast) else {**without, **self.keep}

    def _log_exceptions(self, network: nn.Module) -> None:
        """Log the settings of the precision that have no effect on this device or network. Log them only once."""
        if self._has_logged:
            return
        self._has_logged = True
        for name in self._keep(network).keys() - self.keep.keys():
            lacking = str(self.word.autocast).removeprefix("torch.")
            log.warning("the LSTM %s runs in float32, because this CPU does not support %s for LSTMs", name, lacking)
        if self.word.tf32:
            if reason := why_without_effect(self.device_type):
                log.warning("precision=tf32 has no effect, and the run trains in float32: %s", reason)
            elif "fp32" in self.keep.values():
                log.warning("fp32 in precision.keep has no effect with precision=tf32")


class ScaledPrecision(RunPrecision):
    """Lightning precision plugin that skips steps with non-finite gradients. For fp16, it also scales the loss.

    A step has this order:

    1. The forward pass and the loss run under autocast.
    2. The backward pass runs without autocast.
    3. The gradients are unscaled, for any class of optimizer.
    4. on_before_optimizer_step and clipping receive the unscaled gradients.
    5. The optimizer steps, and the loss scale is updated.

    Lightning's own plugin does not unscale the gradients of a fused optimizer, and cannot clip them.
    """

    def pre_backward(  # type: ignore[override]  # Lightning's Precision narrows Fabric's signature, too
        self, tensor: Tensor, module: LightningModule
    ) -> Tensor:
        return super().pre_backward(self.scale(tensor), module)

    def optimizer_step(  # type: ignore[override]  # Lightning's Precision narrows Fabric's signature, too
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], object], **kwargs: object
    ) -> object:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(self.word.optimizer_errors(optimizer))
        result = closure()
        if result is None and model.automatic_optimization:
            # The training step returned no loss, so no gradients must be unscaled.
            self._after_closure(model, optimizer)
            return result
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        output = self.step(optimizer, **kwargs)
        if model.automatic_optimization or self.is_whole:
            # With phases, exp calls update after the last optimizer. In a user's LightningModule, each optimizer step
            # updates the scale, as in Lightning.
            self.update()
        return output

    def state_dict(self) -> dict[str, object]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.scaler.load_state_dict(state_dict)


def build_precision(
    word: str,
    *,
    device_type: str,
    keep: Mapping[str, str] | None = None,
    matmul: str | None = None,
    enabled: bool | None = None,
    skips: bool = False,
    **scale: float,
) -> RunPrecision:
    """Return the precision plugin for a value of precision.word.

    Args:
        word: Value of precision.word, such as "bf16".
        device_type: torch's name of the device, such as "cpu" or "cuda".
        keep: Value of precision.keep: module name patterns or types, mapped to "fp32" or "fp64". Default: None, no
            exceptions.
        matmul: Value of runtime.matmul: the precision of float32 matrix products. Default: None, the default of the
            word.
        enabled: Whether to scale the loss. Only fp16 supports true. Default: None, true for fp16 and false otherwise.
        skips: Whether to skip steps with non-finite gradients even without a loss scale. Default: false.
        **scale: Arguments of torch.amp.GradScaler: init_scale, growth_factor, backoff_factor and growth_interval.

    Raises:
        ConfigError: The word is unknown, or `enabled` is true for a word that does not support a loss scale.
    """
    meaning = read_word(word)
    if enabled and not meaning.needs_scaler:
        raise ConfigError(list(meaning.scaler_errors({"enabled": True})))
    scaler: CountingScaler | None = None
    if meaning.needs_scaler and not (skips and enabled is False):
        scaler = CountingScaler(device=device_type, enabled=enabled is not False, **scale)
    elif skips:
        scaler = FiniteSteps(device=device_type)
    kind = RunPrecision if scaler is None else ScaledPrecision
    return kind(word=meaning, device_type=device_type, keep=keep, matmul=matmul, scaler=scaler)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within a context, because losses and metrics create tensors without a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TensorFloat32:
    """Switches of TensorFloat-32 on CUDA, for matrix products and cuDNN (convolutions, recurrent layers).

    torch has older and newer names for these switches. This class sets the older names, and torch then sets the newer
    name `fp32_precision`. If only the newer name is set, reading an older name raises an error. Lightning 2.6.6 and
    torch.backends.cudnn.flags (torch 2.13) read the older names.

    Args:
        allowed: Whether CUDA may use TensorFloat-32. It is always set, because torch's defaults differ between
            convolutions and matrix products.
        matmul: Precision of matrix products: "highest", "high" or "medium". Default: None, "high" if `allowed` is true,
            otherwise "highest".
    """

    def __init__(self, *, allowed: bool, matmul: str | None = None) -> None:
        self.allowed = allowed
        self.matmul = matmul or ("high" if allowed else "highest")
        self._before: tuple[str, bool] | None = None

    def set(self) -> None:
        """Set the switches, and store their previous values for `restore`. Repeated calls change nothing."""
        if self._before is None:
            self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            torch.set_float32_matmul_precision(self.matmul)
            torch.backends.cudnn.allow_tf32 = self.allowed

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the values that the switches had before `set`. Repeated calls change nothing."""
        if self._before is not None:
            matmul, torch.backends.cudnn.allow_tf32 = self._before
            torch.set_float32_matmul_precision(matmul)
            self._before = None


def why_without_effect(device_type: str) -> str | None:
    """Return the reason why TensorFloat-32 is not available on this device; None if it is available.

    Args:
        device_type: torch's name of the device, such as "cpu" or "cuda".
    """
    if device_type == "cuda" and torch.cuda.get_device_capability() >= FIRST_CAPABILITY:
        return None
    return f"TensorFloat-32 needs a GPU of compute capability 8.0 or more, and the run uses {device_type}"


@functools.cache
def _runs_lstm(dtype: torch.dtype) -> bool:
    """Return whether this CPU can run an LSTM under autocast in a dtype.

    oneDNN needs processor instructions for the dtype, such as AVX-512 for bfloat16. If the processor lacks these
    instructions, torch 2.13 raises "could not create a primitive".
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype):
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True
