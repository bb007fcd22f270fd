"""The hook `per_sample_gradients`: logs norms of the gradients of single samples, and the gradient noise scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from exp.data.randomness import preserve_generators
from exp.errors import ErrorDetails
from exp.extras.research.clip_module import ClipModule
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.hook import Hook, Values
from exp.hooks.panels import Histogram, Panel
from exp.hooks.step import Step
from exp.models.inference import network_call
from exp.models.matching import ANY_BATCH_NORM, INSTANCE_NORMS
from exp.nested import map_tensors, tensors_in
from exp.shared_types import Batch

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


# Largest factor by which the loss of a sample is multiplied, so that small gradients stay in the range of float16.
LARGEST_FACTOR = 2.0**15


class PerSampleGradients(Hook):
    """Hook that logs the 2-norms of the gradients of single samples, and the gradient noise scale.

    The gradient of a sample is the gradient of the sample's loss with respect to all trained parameters. All values
    cover all ranks and micro-batches:

    `per_sample_gradients/norm_mean`, `per_sample_gradients/norm_max`: mean and maximum of the norms.
    `per_sample_gradients/norm`: histogram of the norms.
    `per_sample_gradients/noise_scale`, `.../squared_norm`, `.../covariance_trace`: estimates; see NoiseScale.

    Gradients are computed with torch.func.vmap. Dropout masks differ between samples. A step with this hook takes 3 to
    20 times as long as other steps, and needs memory for `chunk_size` gradients of the network.

    Args:
        every_n_steps: Period in optimizer steps. Default: 100.
        chunk_size: Number of samples whose gradients are computed at the same time. Default: 8.
        smoothing: See NoiseScale. Default: 0.9.
    """

    keeps_batches = True
    needs = frozenset({"whole_parameters", "one_objective", "vmap"})

    def __init__(
        self,
        *,
        every_n_steps: int = 100,
        chunk_size: Annotated[int, "a whole number of samples", Ge(1)] = 8,
        smoothing: Annotated[float, Interval(ge=0, lt=1)] = 0.9,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.chunk_size = chunk_size
        self._noise = NoiseScale(smoothing=smoothing)

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        """Yield the errors of the base class, and an error for each unsupported setting.

        A setting is not supported if it makes gradients of single samples impossible.
        """
        yield from super().errors(planned)
        for key, got, expected in self._reasons(planned):
            yield self.error(key=key, got=f"{got} with hooks.{self.name}", expected=expected, fix=self.leave_out)

    def _reasons(self, planned: Blueprint) -> Iterator[tuple[str, str, str]]:
        """Yield a tuple for each error: the config key, the wrong value and the expected value."""
        if planned.needs:
            needs = f"an objective that needs {', '.join(sorted(planned.needs))}"
            yield "objective", needs, "terms of the values of one forward pass"
        for term in planned.weighed:
            got = "a term that divides by weights of its targets"
            yield f"objective.{term}", got, "a mean with equal weights of samples"
        if planned.batch_size * planned.settings.trainer.accumulate_grad_batches < 2:
            yield "data.batch_size", "a step of one sample", "2 or more"
        for other, hook in planned.hooks.items():
            if isinstance(hook, ClipModule) and hook.algorithm == "norm":
                yield (
                    f"hooks.{other}",
                    "clipping by norm",
                    "no clipping by norm: the gradient of a batch must be the mean of the gradients of its samples",
                )
        network, trace = planned.network, planned.trace
        mixing = [path for path, module in network.named_modules() if _mixes(module)]
        if mixing:
            kind = type(network.get_submodule(mixing[0])).__name__
            yield "model", f"{mixing[0]}: {kind}, which mixes samples,", f"{APART}: torch.nn.GroupNorm, LayerNorm"
        elif trace is not None:
            count = len(next(iter(trace.inputs.values())))
            shapes = [list(tensor.shape) for tensor in tensors_in(trace.output)]
            if any(not shape or shape[0] != count for shape in shapes):
                got = f"a network whose output for {count} samples has shape {shapes[0]}"
                yield "model", got, "an output with the batch as its first axis"
            elif reason := _why_not_by_vmap(network, trace.inputs):
                yield "model", f"a network that torch.func.vmap rejects ({reason})", APART

    def after_backward(self, step: Step) -> Values:
        gradients = {n: p.grad for n, p in step.network.named_parameters() if p.requires_grad and p.grad is not None}
        norms = step.norms(gradients)
        whole = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        with _vmap_context(step.network):
            own = [self._norms(step, batch) for batch, _ in step.batches if batch.size]
        each = _of_all_ranks(torch.cat(own) if own else torch.zeros(0, device=step.device), step)
        sizes = [batch.global_size for batch, _ in step.batches]
        # The last step of an epoch may have fewer batches than step.accumulated, the divisor of its gradient.
        whole = whole * (step.accumulated / len(sizes))
        values: dict[str, Tensor | Panel] = {
            "per_sample_gradients/norm_mean": each.mean(),
            "per_sample_gradients/norm_max": each.amax(),
            "per_sample_gradients/norm": Histogram.of(each),
        }
        found = self._noise.of(squares=each.square(), whole=whole.square(), sizes=sizes)
        return values | {f"per_sample_gradients/{name}": value for name, value in found.items()}

    def _norms(self, step: Step, batch: Batch) -> Tensor:
        """Return the norm of the gradient of each sample in a batch, `[b]`, in float32 or float64."""
        network, scale = step.network, self.loss_scale
        learning: dict[str, Tensor] = {name: one for name, one in network.named_parameters() if one.requires_grad}
        factor = torch.as_tensor(scale, dtype=torch.float32, device=step.device).clamp(1.0, LARGEST_FACTOR)

        def loss(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
            rest = iter(sample)
            data = map_tensors(batch.data, lambda _: next(rest)[None])
            assert step.loss_with is not None
            with step.autocast():
                return step.loss_with(partial(_call, network, parameters), data) * factor

        def norm(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
            found = grad(loss)(parameters, *sample)
            squares = [one.to(at_least_float32(one.dtype)).div(factor).square().sum() for one in found.values()]
            return torch.stack(squares).sum().sqrt()

        place = None
        if any(isinstance(module, nn.RNNBase) for module in network.modules()):
            # RNN cells add values of the samples in place to values of the weights, so the weights also need a batch
            # axis.
            learning, place = {name: one.expand(batch.size, *one.shape) for name, one in learning.items()}, 0
        tensors = [tensor.detach() for tensor in tensors_in(batch.data)]
        # Autocast must include the backward pass, because attention under vmap otherwise mixes dtypes (torch 2.13).
        with warnings.catch_warnings(), torch.no_grad(), step.autocast():
            # The warning is about operators without a vmap rule, which are called once per sample.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            of_each = vmap(
                norm, in_dims=(place, *[0] * len(tensors)), randomness="different", chunk_size=self.chunk_size
            )
            return of_each(learning, *tensors)


def _of_all_ranks(norms: Tensor, step: Step) -> Tensor:
    """Return the norms of the samples of all ranks, `[B]`.

    Args:
        norms: Norms of the samples of this rank, `[b]`. The size b may differ between ranks.
        step: The training step. Its method `gather` collects tensors of all ranks.
    """
    counts = step.gather(torch.tensor([len(norms)], device=norms.device)).flatten().tolist()
    padded = nn.functional.pad(norms, (0, max(counts) - len(norms)), value=math.nan)
    return torch.cat([row[:count] for row, count in zip(step.gather(padded), counts, strict=True)])


APART = "a network that treats samples separately"


def _mixes(module: nn.Module) -> bool:
    return isinstance(module, ANY_BATCH_NORM) or (isinstance(module, INSTANCE_NORMS) and module.track_running_stats)


def _why_not_by_vmap(network: nn.Module, inputs: Mapping[str, Tensor]) -> str | None:
    call = network_call(network, tuple(inputs))

    def output(sample: Mapping[str, Tensor]) -> object:
        return call(network, {name: one[None] for name, one in sample.items()})

    try:
        with torch.no_grad():
            vmap(output, randomness="different")(dict(inputs))
    except Exception as error:  # layers of users and operators on meta may raise any class
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return message if "vmap" in str(error) else None
    return None


class NoiseScale:
    """Estimator of the gradient noise scale, as in McCandlish et al. 2018, appendix A.1.

    G is the gradient of the expected loss, and S is the covariance matrix of the gradients of single samples. The noise
    scale is tr(S) / |G|^2. The estimates compare gradients g_1 of single samples with the gradient g_B of a step of B
    samples:

        |G|^2  estimated by (B |g_B|^2 - mean |g_1|^2) / (B - 1)
        tr(S)  estimated by (mean |g_1|^2 - |g_B|^2) / (1 - 1 / B)

    Both estimates are unbiased. The estimate of |G|^2 may be negative in a single step. The quotient of the estimates
    of a single step would be biased. Therefore the noise scale is the quotient of the running means of both estimates,
    as in the paper. The running means restart when a run is resumed.

    Args:
        smoothing: Weight of the old value in the update of a running mean, from 0 to below 1.
    """

    def __init__(self, *, smoothing: float) -> None:
        self.smoothing = smoothing
        self._means: Tensor | None = None

    def of(self, *, squares: Tensor, whole: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
        """Return the two estimates of a step and the noise scale.

        Args:
            squares: Squared norms of the gradients of single samples, `[B]`.
            whole: Squared norm of the gradient of the step, 0-d.
            sizes: Number of samples of each micro-batch. All micro-batches have the same weight in the gradient of the
                step.

        Returns:
            The values `squared_norm`, `covariance_trace` and `noise_scale`, 0-d. The mapping is empty if the step has
            one sample. The noise scale is nan if the running mean of |G|^2 is not positive.
        """
        # A mean over this number of samples has the same variance as the mean of the micro-batches' means.
        samples = len(sizes) ** 2 / sum(1 / size for size in sizes)
        if samples <= 1:
            return {}
        small, big = squares.mean(), whole
        squared_norm = (samples * big - small) / (samples - 1)
        trace = (small - big) / (1 - 1 / samples)
        now = torch.stack([squared_norm, trace])
        if self._means is None:
            self._means = now
        else:
            mean = self.smoothing * self._means + (1 - self.smoothing) * now
            # The estimates are not finite in a step that the loss scaler skips. The running means ignore this step.
            self._means = torch.where(now.isfinite().all(), mean, self._means)
        scale = torch.where(self._means[0] > 0, self._means[1] / self._means[0], torch.nan)
        return {"squared_norm": squared_norm, "covariance_trace": trace, "noise_scale": scale}


def _call(network: nn.Module, state: dict[str, Tensor], *inputs: object, **named: object) -> object:
    return functional_call(network, state, inputs, named)


@contextmanager
def _vmap_context(network: nn.Module) -> Iterator[None]:
    """Select attention kernels that torch.func.vmap supports, and restore all random generators after the block."""
    with preserve_generators(), ExitStack() as stack:
        devices = {parameter.device for parameter in network.parameters() if parameter.is_cuda}
        stack.enter_context(torch.random.fork_rng(sorted(devices, key=str)))
        # The unfused kernel is selected, because fused attention has no vmap rule.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
