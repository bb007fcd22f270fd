"""Lightning's precision plugin for each word of precision.word, with or without a loss scale.

Private names of Lightning (seen in 2.6.6): Precision._after_closure, which calls on_before_optimizer_step and clips.
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
from torch.distributed import ProcessGroup
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from exp.errors import ConfigError
from exp.nested import Nested
from exp.precision.conversion import attach_edges, cast, cast_own_tensors, cast_tensors, convert_linear
from exp.precision.keep import kept_layers
from exp.precision.scaler import FIX, UNSCALED_FIX, CountingScaler, FiniteSteps, ScaleWatch
from exp.precision.words import Word, read_word

log = logging.getLogger(__name__)

# Compute capability of Ampere, the first with TensorFloat-32.
FIRST_CAPABILITY = (8, 0)


class RunPrecision(Precision):
    """A word of the config as Lightning's precision plugin, for steps that Lightning makes without a loss scale.

    Code that steps several optimizers in one batch (phases) follows PyTorch's AMP notes:

        with precision.without_autocast():             # a training step runs under autocast, backward must not
            precision.scale(loss).backward()
        precision.unscale(optimizer)                   # once per optimizer, before hooks and clipping
        precision.step(optimizer)                      # skipped if a gradient is not finite
        precision.update()                             # once per step, after all optimizers

    Attributes:
        is_scaled: True if the loss is scaled.
        skips: True if steps with non-finite gradients are skipped and counted.
        is_whole: True if the module itself is the network and calls its parts: the user's own LightningModule.

    Args:
        word: The meaning of precision.word.
        device_type: torch's name of the device, such as cpu or cuda.
        keep: precision.keep. The names are those in the LightningModule's `network`, or in another module.
        matmul: runtime.matmul, the precision of float32 matrix products. None follows the word.
        scaler: The loss scale. None: no scale and no skipped steps.
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
        self._watch = ScaleWatch(FIX if self.is_scaled else UNSCALED_FIX)
        self._tf32 = TensorFloat32(allowed=word.tf32, matmul=matmul)
        self._handles: list[RemovableHandle] = []
        self.kept: dict[str, torch.dtype] = {}
        self._has_logged = self._has_converted = False

    # --- the loss scale ---

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor on the loss: 0-d on the device, or a float."""
        return self.scaler.loss_scale

    @property
    def skipped_steps(self) -> Tensor | float:
        """Optimizer steps skipped so far: 0-d on the device, or a float."""
        return self.scaler.skipped_steps

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, once per step."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, **kwargs: object) -> object:
        """Step, unless a gradient is not finite under a loss scale. Unscales first if that was not done."""
        return self.scaler.step(optimizer, **kwargs)

    def update(self) -> None:
        """Set the scale of the next step, after every optimizer's step."""
        self.scaler.update()

    def has_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's last step was skipped. Waits for the device."""
        return self.scaler.has_skipped(optimizer)

    def agree_over(self, group: ProcessGroup) -> None:
        """Skip a step on all ranks of a process group, which hold parts of one model, if one of them must skip it."""
        self.scaler.agree_over(group)

    def check_values(self, values: Mapping[str, float], *, step: int) -> None:
        """Warn of a falling loss scale or of many skipped steps, given the values written for a step."""
        if self.skips and "precision/skipped_steps" in values:
            scale = values["precision/loss_scale"] if self.is_scaled else None
            self._watch.see(step=step, loss_scale=scale, skipped_steps=values["precision/skipped_steps"])

    # --- the network ---

    def represent(self, module: nn.Module) -> nn.Module:
        """Cast the module's tensors to the word's dtypes in place. A second call changes nothing.

        Call it before a checkpoint is loaded: float64 weights would otherwise be rounded to float32.

        Raises:
            ConfigError: For an error in `keep`.
        """
        network = self._network(module)
        kept = kept_layers(network, self._keep(network), otherwise=self.word.parameters)
        if self.word.double:
            # The weights of a loss and the states of metrics, too.
            for part in module.modules():
                if isinstance(part, Metric):
                    # Once: later its states may hold class numbers, which must stay integers.
                    if part.dtype is not torch.float64:
                        part.set_dtype(torch.float64)
                else:
                    cast_own_tensors(part, torch.float64)
        cast_tensors(network, self.word, kept)
        if self.word.float8:
            names = convert_linear(network, kept=kept)
            if names or not self._has_converted:
                log.info("float8: %s", ", ".join(names) or "no linear layer")
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
        """Attach the hooks to the network and set the process's switches, after convert_module. May be repeated.

        A strategy that shards or cuts the network calls it again afterwards, in every stage. The hooks of FSDP then see
        a layer's output before it is cast, and layers of other ranks have no hooks.
        """
        self.teardown()
        self._tf32.set()
        network = self._network(module)
        present = {name for name, _ in network.named_modules(remove_duplicate=False)}
        kept = {name: dtype for name, dtype in self.kept.items() if name in present}
        self._handles = attach_edges(network, self.word, kept, device_type=self.device_type)

    def teardown(self) -> None:
        """Remove the hooks from the network, and restore the process's switches. The dtypes stay."""
        while self._handles:
            self._handles.pop().remove()
        self._tf32.restore()

    def convert_input(self, data: Nested) -> Nested:
        """Return the whole batch in float64 under fp64. Other words cast the network's inputs in its hooks."""
        if self.is_whole and self.word.parameters is not None:
            return cast(data, self.word.parameters)
        return cast(data, torch.float64) if self.word.double else data

    def cast_inputs(self, inputs: Nested) -> Nested:
        """Return the network's inputs in the word's dtype, for a strategy that does not call the network itself."""
        return inputs if self.word.parameters is None else cast(inputs, self.word.parameters)

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context of a forward: autocast, without its cache of cast weights, as in Lightning."""
        if self.word.double or (self.is_whole and self.word.half_parameters):
            return _default_dtype(self.word.compute)
        if self.word.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.word.autocast, cache_enabled=False)

    def without_autocast(self) -> AbstractContextManager[None]:
        """Return the context of a backward inside a training step, which runs under autocast."""
        return nullcontext() if self.word.autocast is None else torch.autocast(self.device_type, enabled=False)

    def _network(self, module: nn.Module) -> nn.Module:
        """Return the network of a training module. Any other module is its own network."""
        own = getattr(module, "network", None) if isinstance(module, LightningModule) and not self.is_whole else None
        return own if isinstance(own, nn.Module) else module

    def _keep(self, network: nn.Module) -> dict[str, str]:
        """Return precision.keep with the layers that have no kernel in the word's dtype."""
        if self.word.autocast is None or self.device_type != "cpu":
            return self.keep
        without = {name: "fp32" for name, part in network.named_modules() if isinstance(part, nn.LSTM)}
        return self.keep if not without or _runs_lstm(self.word.autocast) else {**without, **self.keep}

    def _log_exceptions(self, network: nn.Module) -> None:
        """Log, once per run, what differs from the word."""
        if self._has_logged:
            return
        self._has_logged = True
        for name in self._keep(network).keys() - self.keep.keys():
            lacking = str(self.word.autocast).removeprefix("torch.")
            log.warning("%s: an LSTM has no %s on this CPU; it runs in float32", name, lacking)
        if self.word.tf32:
            if reason := why_without_effect(self.device_type):
                log.warning("precision=tf32 changes nothing here and trains in float32: %s", reason)
            elif "fp32" in self.keep.values():
                log.warning("precision.keep cannot keep fp32 under tf32, which applies to the whole process")


class ScaledPrecision(RunPrecision):
    """Steps under a loss scale (fp16), or steps of another word that are skipped if a gradient is not finite.

    Forward and loss run under autocast, backward does not. After backward the gradients are unscaled once, for any
    optimizer, so that on_before_optimizer_step and clipping see true gradients. (Lightning does not unscale for a fused
    optimizer and cannot clip then.) The step follows, then the update of the scale.
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
            # The training step returned no loss: there are no gradients to unscale.
            self._after_closure(model, optimizer)
            return result
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        output = self.step(optimizer, **kwargs)
        if model.automatic_optimization or self.is_whole:
            # exp's phases call update after the last of several optimizers. In the user's own module each optimizer
            # step updates the scale, as in Lightning.
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
    """Return the plugin for a word of `precision.word`.

    Args:
        word: The word.
        device_type: torch's name of the device, such as cpu or cuda.
        keep: precision.keep: a pattern of module names or a type, to fp32 or fp64.
        matmul: runtime.matmul, the precision of float32 matrix products. None follows the word.
        enabled: Whether there is a loss scale, which only fp16 has. None follows the word.
        skips: Whether non-finite steps are skipped without a loss scale, too (runtime.non_finite=skip).
        scale: init_scale, growth_factor, backoff_factor and growth_interval of torch.amp.GradScaler.

    Raises:
        ConfigError: For an unknown word, or a scaler that is enabled for a word without one.
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
    """Change the default dtype: float64 for a loss's zeros and a metric's sums, or that of half parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TensorFloat32:
    """Switches of TensorFloat-32 on CUDA, for matrix products and cuDNN (convolutions, recurrent layers).

    They are set by their older names, which also set `fp32_precision`. If only the newer names are set, reading the
    older ones raises, and Lightning and torch.backends.cudnn.flags read them (seen in torch 2.13, Lightning 2.6.6).

    Args:
        allowed: Whether CUDA may use TensorFloat-32. torch's default differs between convolutions and matrix products.
        matmul: The precision of matrix products alone: highest, high or medium. None follows `allowed`.
    """

    def __init__(self, *, allowed: bool, matmul: str | None = None) -> None:
        self.allowed = allowed
        self.matmul = matmul or ("high" if allowed else "highest")
        self._before: tuple[str, bool] | None = None

    def set(self) -> None:
        """Set the switches, and remember their values at the first call."""
        if self._before is None:
            self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            torch.set_float32_matmul_precision(self.matmul)
            torch.backends.cudnn.allow_tf32 = self.allowed

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the values before `set`. Safe to call twice."""
        if self._before is not None:
            matmul, torch.backends.cudnn.allow_tf32 = self._before
            torch.set_float32_matmul_precision(matmul)
            self._before = None


def why_without_effect(device_type: str) -> str | None:
    """Return the reason why tf32 changes nothing on this device. None if it has an effect."""
    if device_type != "cuda":
        return f"{device_type} has no TensorFloat-32"
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, TensorFloat-32 begins with 8.0"
    return None


@functools.cache
def _runs_lstm(dtype: torch.dtype) -> bool:
    """Return whether this CPU runs an LSTM under autocast in a dtype.

    oneDNN needs processor instructions for the dtype, such as AVX-512 for bfloat16. Without them torch 2.13 raises
    "could not create a primitive".
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype):
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True
