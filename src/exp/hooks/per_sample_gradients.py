"""The hook `per_sample_gradients`: how large the gradient of each sample is, and how much they disagree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from exp.errors import Fault
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.apart import apart, running
from exp.hooks.hook import Hook, Values
from exp.hooks.noise_scale import NoiseScale
from exp.hooks.sample_faults import sample_faults
from exp.hooks.step import Step
from exp.hooks.values import Histogram
from exp.nested import mapped, tensors_in
from exp.types import Batch

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned

# On a sample's loss, so that float16 keeps its gradients: the largest that float16 holds.
LARGEST_FACTOR = 2.0**15


class PerSampleGradients(Hook):
    """Logs, of the samples of a step, the 2-norm of each one's own gradient, and the gradient noise scale.

    `per_sample_gradients/norm_mean`, `per_sample_gradients/norm_max` and `per_sample_gradients/norm`, a histogram: the
    gradient of the objective of a batch that holds this sample alone, with respect to all parameters that learn, by
    torch.func.vmap of grad. `per_sample_gradients/noise_scale`, `.../squared_norm` and `.../covariance_trace`: see
    hooks/noise_scale.py; the gradient of the whole batch is the step's own. Over all ranks and micro-batches.

    Dropout and the like draw numbers of their own for each sample. It costs as much as 3 to 20 steps, and memory for
    `chunk_size` gradients of the whole network.

    chunk_size: samples at once. smoothing: see hooks/noise_scale.py.
    """

    keeps_batches = True
    needs = frozenset({"whole_parameters", "one_objective", "vmap"})

    def __init__(self, *, every_n_steps: int = 100, chunk_size: int = 8, smoothing: float = 0.9) -> None:
        super().__init__(every_n_steps=every_n_steps)
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; expected a whole number of samples, 1 or more")
        self.chunk_size = chunk_size
        self._noise = NoiseScale(smoothing=smoothing)

    def faults(self, planned: Planned) -> Sequence[Fault]:
        return [*super().faults(planned), *sample_faults(self.name, planned)]

    def after_backward(self, step: Step) -> Values:
        gradients = {n: p.grad for n, p in step.network.named_parameters() if p.requires_grad and p.grad is not None}
        norms = step.norms(gradients)
        whole = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        with apart(step.network):
            own = [self._norms(step, batch) for batch, _ in step.batches if batch.size]
        each = _of_all_ranks(torch.cat(own) if own else torch.zeros(0, device=step.device), step)
        sizes = [batch.global_size for batch, _ in step.batches]
        # A window at an epoch's end may hold fewer batches than its gradient is divided by.
        whole = whole * (step.accumulated / len(sizes))
        values: dict[str, Any] = {
            "per_sample_gradients/norm_mean": each.mean(),
            "per_sample_gradients/norm_max": each.amax(),
            "per_sample_gradients/norm": Histogram.of(each),
        }
        found = self._noise.of(squares=each.square(), whole=whole.square(), sizes=sizes)
        return values | {f"per_sample_gradients/{name}": value for name, value in found.items()}

    def _norms(self, step: Step, batch: Batch) -> Tensor:
        """The norm of each sample's gradient, `[b]`, in float32 at least."""
        network, scale = step.network, self.loss_scale
        learning = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        factor = torch.as_tensor(scale, dtype=torch.float32, device=step.device).clamp(1.0, LARGEST_FACTOR)

        def loss(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
            rest = iter(sample)
            data = mapped(batch.data, lambda _: next(rest)[None])
            assert step.loss_with is not None
            with step.autocast():
                return step.loss_with(running(network, parameters), data) * factor

        def norm(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
            found = grad(loss)(parameters, *sample)
            squares = [one.to(at_least_float32(one.dtype)).div(factor).square().sum() for one in found.values()]
            return torch.stack(squares).sum().sqrt()

        place = None
        if any(isinstance(module, nn.RNNBase) for module in network.modules()):
            # Their cells add in place what depends on the sample to what depends on weights and a first state alone.
            learning, place = {name: one.expand(batch.size, *one.shape) for name, one in learning.items()}, 0
        tensors = [tensor.detach() for tensor in tensors_in(batch.data)]
        # Around the backward, too: without it that of attention under vmap mixes dtypes (torch 2.13).
        with warnings.catch_warnings(), torch.no_grad(), step.autocast():
            # Of operators without a rule of their own, which are called for one sample after the other.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            of_each = vmap(
                norm, in_dims=(place, *[0] * len(tensors)), randomness="different", chunk_size=self.chunk_size
            )
            return of_each(learning, *tensors)


def _of_all_ranks(norms: Tensor, step: Step) -> Tensor:
    """`[b]` of each rank, which may hold more or fewer samples than another, as `[B]`."""
    counts = step.gather(torch.tensor([len(norms)], device=norms.device)).flatten().tolist()
    padded = nn.functional.pad(norms, (0, max(counts) - len(norms)), value=math.nan)
    return torch.cat([row[:count] for row, count in zip(step.gather(padded), counts, strict=True)])
