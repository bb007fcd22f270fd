"""How numbers are represented: the word of the config as a Lightning precision plugin."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from exp.precision.conversion import attach_edges, cast_own_tensors, cast_tensors
from exp.precision.edges import cast
from exp.precision.fp8 import convert_linear
from exp.precision.holding import hold
from exp.precision.keep import kept_layers, refuse_shared
from exp.precision.tf32 import TensorFloat32, why_without_effect
from exp.precision.words import Word

log = logging.getLogger(__name__)


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
    """

    is_scaled: bool = False

    def __init__(
        self, *, word: Word, device_type: str, keep: Mapping[str, str] | None = None, matmul: str | None = None
    ) -> None:
        super().__init__()
        self.word, self.device_type, self.keep = word, device_type, dict(keep or {})
        self._tf32 = TensorFloat32(allowed=word.tf32, matmul=matmul)
        self._handles: list[Any] = []
        self._kept: dict[str, torch.dtype] = {}
        self._has_spoken = False

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

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Steps, unless a gradient is not finite under a loss scale. Unscales first where nobody did."""
        return optimizer.step(**kwargs)

    def update(self) -> None:
        """Sets the scale of the next window: once a batch window, after every optimizer's step."""

    def hold(self, optimizer: Optimizer, flag: Tensor) -> None:
        """The optimizer's coming step changes nothing where `flag`, 0-d in float32, is not 0 when the device comes to
        it. Behind unscale. Only where `can_hold` of exp.precision.holding."""
        hold(optimizer, flag)

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's last step changed nothing: its schedule should not move. Waits for the device."""
        return False

    def agree_over(self, group: Any) -> None:
        """Ranks of this process group hold parts of one model: from now on they skip a step together."""

    def written(self, values: Mapping[str, float], *, step: int) -> None:
        """Told of what is written for a step, scale and skipped steps among it: it may say something of them."""

    # --- the network ---

    def represent(self, module: nn.Module) -> nn.Module:
        """The module's tensors in the word's dtypes, in place. Before a checkpoint is loaded into it: float64 would be
        rounded on its way through float32. Again is no change.

        Raises: ConfigError for a fault in `keep`.
        """
        network = _network(module)
        kept = kept_layers(network, self._keep(network))
        refuse_shared(network, kept, otherwise=self.word.parameters)
        if self.word.double:
            # What is beside the network, too: the weights of a loss, the states of metrics.
            for part in module.modules():
                if isinstance(part, Metric):
                    part.set_dtype(torch.float64)
                else:
                    cast_own_tensors(part, torch.float64)
        cast_tensors(network, self.word, kept)
        if self.word.float8:
            names = convert_linear(network, kept=kept)
            log.info("float8: %s", ", ".join(names) or "no linear layer")
        return module

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.represent(module)
        network = _network(module)
        self._kept = kept_layers(network, self._keep(network))
        self.attach(module)
        self._speak(network)
        return module

    @property
    def kept(self) -> Mapping[str, torch.dtype]:
        """The dtype of every layer that has one of its own, by name; empty before convert_module."""
        return self._kept

    def attach(self, module: nn.Module) -> None:
        """Puts the hooks on the network, and sets the process's switches. Behind convert_module; again is no change.

        A strategy that shards or cuts the network calls it once more afterwards, in every stage: the hooks of fsdp see
        a layer's output then before it is cast, and layers that are elsewhere now have none.
        """
        self.teardown()
        self._tf32.set()
        network = _network(module)
        there = {name for name, _ in network.named_modules(remove_duplicate=False)}
        kept = {name: dtype for name, dtype in self._kept.items() if name in there}
        self._handles = attach_edges(network, self.word, kept, device_type=self.device_type)

    def teardown(self) -> None:
        """Takes the hooks off the network, and puts the process's switches back. The dtypes stay."""
        while self._handles:
            self._handles.pop().remove()
        self._tf32.put_back()

    def convert_input(self, data: Any) -> Any:
        """The whole batch in float64 under fp64, targets too; else the network casts what comes in."""
        return cast(data, torch.float64) if self.word.double else data

    def cast_inputs(self, inputs: Any) -> Any:
        """For a strategy that runs the network's layers without calling the network: what goes in as they take it."""
        return inputs if self.word.parameters is None else cast(inputs, self.word.parameters)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast, where the word has it. Without its cache of cast weights, as in Lightning."""
        if self.word.double:
            return _Float64ByDefault()
        if self.word.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.word.autocast, cache_enabled=False)

    def without_autocast(self) -> AbstractContextManager[Any]:
        """For a backward inside a training step, which runs under autocast."""
        return nullcontext() if self.word.autocast is None else torch.autocast(self.device_type, enabled=False)

    def _keep(self, network: nn.Module) -> dict[str, str]:
        """The config's map, and layers that have no kernel in the word's dtype."""
        if not self.word.needs_scaler or self.device_type != "cpu":
            return self.keep
        # mkldnn has none ("could not create a primitive", torch 2.13).
        without = {name: "fp32" for name, part in network.named_modules() if type(part) is nn.LSTM}
        return {**without, **self.keep}

    def _speak(self, network: nn.Module) -> None:
        """What the word does otherwise than one might think: a line each, once a run."""
        if self._has_spoken:
            return
        self._has_spoken = True
        for name in self._keep(network).keys() - self.keep.keys():
            log.warning("%s: an LSTM has no float16 on CPU; it runs in float32", name)
        if self.word.tf32:
            if reason := why_without_effect(self.device_type):
                log.warning("precision=tf32 changes nothing here and trains in float32: %s", reason)
            elif "fp32" in self.keep.values():
                log.warning("precision.keep keeps nothing in fp32 under tf32, which holds for the whole process")


class _Float64ByDefault:
    """What is created without a dtype is float64 meanwhile: a loss's zeros, a metric's sums."""

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


def _network(module: nn.Module) -> nn.Module:
    """What a training module calls its network; any other module is one itself."""
    own = getattr(module, "network", None) if isinstance(module, LightningModule) else None
    return own if isinstance(own, nn.Module) else module
