"""Lightning's precision plugin for each word of precision.word, with or without a loss scale.

Private names of Lightning (seen in 2.6.6): Precision._after_closure, which calls on_before_optimizer_step and clips.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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
from exp.precision.keep import kept_layers, refuse_shared
from exp.precision.scaler import FIX, UNSCALED_FIX, CountingScaler, FiniteSteps, ScaleWatch
from exp.precision.words import Word, read_word

log = logging.getLogger(__name__)

# Compute capability of Ampere, the first with TensorFloat-32.
FIRST_CAPABILITY = (8, 0)


class RunPrecision(Precision):
    """A word of the config as Lightning's precision plugin. This class has no loss scale: its steps are plain ones.

    Whoever steps several optimizers in one batch by hand (phases) writes, as PyTorch's AMP notes do:

        with precision.without_autocast():             # a training step runs under autocast, backward must not
            precision.scale(loss).backward()
        precision.unscale(optimizer)                   # once an optimizer; true gradients from here: hooks, clipping
        precision.step(optimizer)                      # skipped where a gradient is not finite
        precision.update()                             # once a batch window, after all optimizers

    word: what the config's precision.word means (read_word).
    device_type: torch's, such as cpu or cuda.
    keep: layers with a dtype of their own, as precision.keep has them. The names are those in the LightningModule's
        `network`, or in the module itself where it has none.
    matmul: how exact float32 matrix products are, as runtime.matmul; None leaves it to the word.
    is_scaled, skips: attributes, whether the loss is scaled, and whether a step with gradients that are not finite is
        skipped and counted.
    is_whole: an attribute, whether a module is all network, whatever its attributes are called, and calls parts of
        itself: one of the user's own.
    """

    is_scaled: bool = False
    skips: bool = False
    is_whole: bool = False

    def __init__(
        self, *, word: Word, device_type: str, keep: Mapping[str, str] | None = None, matmul: str | None = None
    ) -> None:
        super().__init__()
        self.word, self.device_type, self.keep = word, device_type, dict(keep or {})
        self._tf32 = TensorFloat32(allowed=word.tf32, matmul=matmul)
        self._handles: list[RemovableHandle] = []
        self.kept: dict[str, torch.dtype] = {}
        self._has_spoken = self._has_converted = False

    # --- the loss scale ---

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

    def step(self, optimizer: Optimizer, **kwargs: Any) -> object:
        """Steps, unless a gradient is not finite under a loss scale. Unscales first where nobody did."""
        return optimizer.step(**kwargs)

    def update(self) -> None:
        """Sets the scale of the next window: once a batch window, after every optimizer's step."""

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's last step changed nothing: its schedule should not move. Waits for the device."""
        return False

    def agree_over(self, group: ProcessGroup) -> None:
        """Ranks of this process group hold parts of one model: from now on they skip a step together."""

    def written(self, values: Mapping[str, float], *, step: int) -> None:
        """Called with the values written for a step, which hold the loss scale; a plugin may warn of it."""

    # --- the network ---

    def represent(self, module: nn.Module) -> nn.Module:
        """Casts the module's tensors to the word's dtypes in place. A second call changes nothing.

        Before a checkpoint is loaded into it: float64 would be rounded on its way through float32.

        Raises: ConfigError for an error in `keep`.
        """
        network = self._network(module)
        kept = kept_layers(network, self._keep(network))
        refuse_shared(network, kept, otherwise=self.word.parameters)
        if self.word.double:
            # What is beside the network, too: the weights of a loss, the states of metrics.
            for part in module.modules():
                if isinstance(part, Metric):
                    # Once: what it holds by the second time may be class numbers, which must stay whole.
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
        self.kept = kept_layers(network, self._keep(network))
        self.attach(module)
        self._speak(network)
        return module

    def attach(self, module: nn.Module) -> None:
        """Puts the hooks on the network, and sets the process's switches. Behind convert_module; again is no change.

        A strategy that shards or cuts the network calls it once more afterwards, in every stage: the hooks of fsdp see
        a layer's output then before it is cast, and layers that are elsewhere now have none.
        """
        self.teardown()
        self._tf32.set()
        network = self._network(module)
        there = {name for name, _ in network.named_modules(remove_duplicate=False)}
        kept = {name: dtype for name, dtype in self.kept.items() if name in there}
        self._handles = attach_edges(network, self.word, kept, device_type=self.device_type)

    def teardown(self) -> None:
        """Takes the hooks off the network, and puts the process's switches back. The dtypes stay."""
        while self._handles:
            self._handles.pop().remove()
        self._tf32.put_back()

    def convert_input(self, data: Nested) -> Nested:
        """The whole batch in float64 under fp64, targets too; else the network casts what comes in."""
        if self.is_whole and self.word.parameters is not None:
            return cast(data, self.word.parameters)
        return cast(data, torch.float64) if self.word.double else data

    def cast_inputs(self, inputs: Nested) -> Nested:
        """For a strategy that runs the network's layers without calling the network: what goes in as they take it."""
        return inputs if self.word.parameters is None else cast(inputs, self.word.parameters)

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast, where the word has it. Without its cache of cast weights, as in Lightning."""
        if self.word.double or (self.is_whole and self.word.half_parameters):
            return _by_default(self.word.compute)
        if self.word.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.word.autocast, cache_enabled=False)

    def without_autocast(self) -> AbstractContextManager[None]:
        """For a backward inside a training step, which runs under autocast."""
        return nullcontext() if self.word.autocast is None else torch.autocast(self.device_type, enabled=False)

    def _network(self, module: nn.Module) -> nn.Module:
        """The network of a training module; any other module is one itself."""
        own = getattr(module, "network", None) if isinstance(module, LightningModule) and not self.is_whole else None
        return own if isinstance(own, nn.Module) else module

    def _keep(self, network: nn.Module) -> dict[str, str]:
        """The config's map, and layers that have no kernel in the word's dtype."""
        if self.word.autocast is None or self.device_type != "cpu":
            return self.keep
        without = {name: "fp32" for name, part in network.named_modules() if isinstance(part, nn.LSTM)}
        return self.keep if not without or _runs_lstm(self.word.autocast) else {**without, **self.keep}

    def _speak(self, network: nn.Module) -> None:
        """Logs, once a run, where the word does something else than one might think."""
        if self._has_spoken:
            return
        self._has_spoken = True
        for name in self._keep(network).keys() - self.keep.keys():
            lacking = str(self.word.autocast).removeprefix("torch.")
            log.warning("%s: an LSTM has no %s on this CPU; it runs in float32", name, lacking)
        if self.word.tf32:
            if reason := why_without_effect(self.device_type):
                log.warning("precision=tf32 changes nothing here and trains in float32: %s", reason)
            elif "fp32" in self.keep.values():
                log.warning("precision.keep keeps nothing in fp32 under tf32, which holds for the whole process")


class ScaledPrecision(RunPrecision):
    """float16 by autocast with a loss scale, as PyTorch's AMP notes write it by hand, on CUDA and on CPU.

    With FiniteSteps for a scaler, another word without a scale, whose steps are skipped alike.

    Forward and loss run under autocast, backward does not. After backward the gradients are unscaled once, whatever
    the optimizer (Lightning leaves a fused one's scaled and refuses to clip them), so that on_before_optimizer_step
    and clipping see true gradients; then comes the step, skipped where a gradient is not finite, and the scale's
    update.
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
        self.skips = scaler.is_enabled()
        self.is_scaled = self.skips and scaler.scales
        self._watch = ScaleWatch(FIX if self.is_scaled else UNSCALED_FIX)

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

    def step(self, optimizer: Optimizer, **kwargs: Any) -> object:
        return self.scaler.step(optimizer, **kwargs)

    def update(self) -> None:
        self.scaler.update()

    def skipped(self, optimizer: Optimizer) -> bool:
        return self.scaler.skipped(optimizer)

    def agree_over(self, group: ProcessGroup) -> None:
        self.scaler.agree_over(group)

    def written(self, values: Mapping[str, float], *, step: int) -> None:
        if "precision/skipped_steps" in values:
            scale = values["precision/loss_scale"] if self.is_scaled else None
            self._watch.see(step=step, loss_scale=scale, skipped_steps=values["precision/skipped_steps"])

    def pre_backward(  # type: ignore[override]  # Lightning's own Precision narrows Fabric's alike
        self, tensor: Tensor, module: LightningModule
    ) -> Tensor:
        return super().pre_backward(self.scale(tensor), module)

    def optimizer_step(  # type: ignore[override]  # Lightning's own Precision narrows Fabric's alike
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], object], **kwargs: Any
    ) -> object:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(self.word.optimizer_errors(optimizer))
        result = closure()
        if result is None and model.automatic_optimization:
            # The training step gave no loss: there are no gradients to unscale.
            self._after_closure(model, optimizer)
            return result
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        output = self.step(optimizer, **kwargs)
        if model.automatic_optimization or self.is_whole:
            # One optimizer; exp's phases say when the last of several has. A user's own training step says nothing:
            # as in Lightning, each of its optimizers' steps updates the scale.
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
    """The plugin for a word of `precision.word`.

    device_type: torch's, such as cpu or cuda.
    keep: pattern of module names or name of a type to fp32 or fp64, as precision.keep.
    matmul: how exact float32 matrix products are, as runtime.matmul; None leaves it to the word.
    enabled: whether there is a loss scale, which only fp16 has; None: as the word says.
    skips: whether steps are skipped without a loss scale, too, as runtime.non_finite=skip.
    scale: init_scale, growth_factor, backoff_factor and growth_interval of torch.amp.GradScaler, as precision.scaler.
    Raises: ConfigError for an unknown word, or a scaler that is enabled for a word without one.
    """
    meaning = read_word(word)
    if enabled and not meaning.needs_scaler:
        raise ConfigError(list(meaning.scaler_errors({"enabled": True})))
    scaler: CountingScaler | None = None
    if meaning.needs_scaler and not (skips and enabled is False):
        scaler = CountingScaler(device=device_type, enabled=enabled is not False, **scale)
    elif skips:
        scaler = FiniteSteps(device=device_type)
    if scaler is not None:
        return ScaledPrecision(word=meaning, device_type=device_type, scaler=scaler, keep=keep, matmul=matmul)
    return RunPrecision(word=meaning, device_type=device_type, keep=keep, matmul=matmul)


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    """Makes float64 the default dtype, for a loss's zeros and a metric's sums; or that of a module's half parameters,
    as Lightning does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TensorFloat32:
    """Sets whether CUDA may use TensorFloat-32, for matrix products and cuDNN (convolutions, recurrent layers) alike.

    By their older names, which set the newer `fp32_precision` ones with them: where only the newer are set, reading
    the older raises, and Lightning and torch.backends.cudnn.flags read them (seen in torch 2.13, Lightning 2.6.6).

    matmul: torch's word for matrix products alone: highest, high or medium; None follows `allowed`.
    """

    def __init__(self, *, allowed: bool, matmul: str | None = None) -> None:
        self.allowed = allowed
        self.matmul = matmul or ("high" if allowed else "highest")
        self._before: tuple[str, bool] | None = None

    def set(self) -> None:
        """torch itself lets convolutions use it and matrix products not; here a word says it for both."""
        if self._before is None:
            self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            torch.set_float32_matmul_precision(self.matmul)
            torch.backends.cudnn.allow_tf32 = self.allowed

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """As they were before `set`. Safe to call twice."""
        if self._before is not None:
            matmul, torch.backends.cudnn.allow_tf32 = self._before
            torch.set_float32_matmul_precision(matmul)
            self._before = None


def why_without_effect(device_type: str) -> str | None:
    """The reason why tf32 changes nothing here; None where it does."""
    if device_type != "cuda":
        return f"{device_type} has no TensorFloat-32"
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, TensorFloat-32 begins with 8.0"
    return None


@functools.cache
def _runs_lstm(dtype: torch.dtype) -> bool:
    """Whether this CPU has an LSTM under autocast in a dtype: oneDNN has one of float16 nowhere, and of bfloat16 with
    AVX-512 alone ("could not create a primitive", torch 2.13)."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype):
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True
