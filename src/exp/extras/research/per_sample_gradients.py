"""The hook `per_sample_gradients`: the norm of each sample's gradient, and the gradient noise scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

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
from exp.hooks.panels import Histogram
from exp.hooks.step import Step
from exp.models.inference import network_call
from exp.models.matching import ANY_BATCH_NORM, INSTANCE_NORMS
from exp.nested import map_tensors, tensors_in
from exp.shared_types import Batch

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


# On a sample's loss, so that float16 keeps its gradients: the largest that float16 holds.
LARGEST_FACTOR = 2.0**15


class PerSampleGradients(Hook):
    """Logs the 2-norm of the gradient of each sample of a step, and the gradient noise scale.

    `per_sample_gradients/norm_mean`, `per_sample_gradients/norm_max` and `per_sample_gradients/norm`, a histogram, are
    of the gradients of an objective of this sample alone, with respect to all trained parameters, by torch.func.vmap of
    grad. For `per_sample_gradients/noise_scale`, `.../squared_norm` and `.../covariance_trace` see NoiseScale; the
    gradient of the whole batch is the step's. All are over all ranks and micro-batches.

    Dropout draws other numbers for each sample. A due step takes as long as 3 to 20 steps, and memory for `chunk_size`
    gradients of the whole network.

    Args:
        every_n_steps: Period in optimizer steps.
        chunk_size: Number of samples at once.
        smoothing: See NoiseScale.
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
        """Yield the reasons why one sample has no gradient by itself, each at its own key."""
        yield from super().errors(planned)
        for key, got, expected in self._reasons(planned):
            yield self.error(key=key, got=f"{got}, with hooks.{self.name}", expected=expected, fix=self.leave_out)

    def _reasons(self, planned: Blueprint) -> Iterator[tuple[str, str, str]]:
        """Yield the key, the value and the expected value of each error."""
        if planned.needs:
            needs = f"an objective that needs {', '.join(sorted(planned.needs))}"
            yield "objective", needs, "terms of the values of one forward pass"
        for term in planned.weighed:
            got = "a term that divides by weights of its targets"
            yield f"objective.{term}", got, "a mean over samples, of which each has an equal share"
        if planned.batch_size * planned.settings.trainer.accumulate_grad_batches < 2:
            yield "data.batch_size", "a step of one sample", "2 or more, to compare one with all"
        for other, hook in planned.hooks.items():
            if isinstance(hook, ClipModule) and hook.algorithm == "norm":
                yield (
                    f"hooks.{other}",
                    "a clipped gradient of a batch",
                    "the mean of gradients of samples",
                )
        network, trace = planned.network, planned.trace
        mixing = [path for path, module in network.named_modules() if _mixes(module)]
        if mixing:
            kind = type(network.get_submodule(mixing[0])).__name__
            yield "model", f"{mixing[0]}: {kind}, which mixes samples", f"{APART}: torch.nn.GroupNorm, LayerNorm"
        elif trace is not None:
            count = len(next(iter(trace.inputs.values())))
            shapes = [list(tensor.shape) for tensor in tensors_in(trace.output)]
            if any(not shape or shape[0] != count for shape in shapes):
                got = f"a network that makes of {count} samples a tensor of shape {shapes[0]}"
                yield "model", got, "an output with the batch as its first axis"
            elif reason := _why_not_by_vmap(network, trace.inputs):
                yield "model", f"a network that torch.func.vmap refuses ({reason})", APART

    def after_backward(self, step: Step) -> Values:
        gradients = {n: p.grad for n, p in step.network.named_parameters() if p.requires_grad and p.grad is not None}
        norms = step.norms(gradients)
        whole = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        with _apart(step.network):
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
    """Return `[B]` of all ranks from `[b]` of each, which may differ in size."""
    counts = step.gather(torch.tensor([len(norms)], device=norms.device)).flatten().tolist()
    padded = nn.functional.pad(norms, (0, max(counts) - len(norms)), value=math.nan)
    return torch.cat([row[:count] for row, count in zip(step.gather(padded), counts, strict=True)])


APART = "a network that treats the samples of a batch apart"


def _mixes(module: nn.Module) -> bool:
    return isinstance(module, ANY_BATCH_NORM) or (isinstance(module, INSTANCE_NORMS) and module.track_running_stats)


def _why_not_by_vmap(network: nn.Module, inputs: Mapping[str, Tensor]) -> str | None:
    call = network_call(network, tuple(inputs))

    def output(sample: Mapping[str, Tensor]) -> object:
        return call(network, {name: one[None] for name, one in sample.items()})

    try:
        with torch.no_grad():
            vmap(output, randomness="different")(dict(inputs))
    except Exception as error:  # a user's own layer may raise anything, and so do operators without numbers
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return message if "vmap" in str(error) else None
    return None


class NoiseScale:
    """The estimators of appendix A.1, with batches of one sample for the small one and the step's for the big one.

        |G|^2  estimated by (B |g_B|^2 - mean |g_1|^2) / (B - 1)
        tr(S)  estimated by (mean |g_1|^2 - |g_B|^2) / (1 - 1 / B)

    Both are unbiased; of one step, the first may be below 0. Their quotient is biased, so that it is taken of running
    means of the two, as the paper does; these begin anew with the run and with each resume.

    smoothing: the share of the running mean that stays at each step, 0 to below 1; 0 takes each step by itself.
    """

    def __init__(self, *, smoothing: float) -> None:
        self.smoothing = smoothing
        self._means: Tensor | None = None

    def of(self, *, squares: Tensor, whole: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The two estimates of a step, and the noise scale so far, 0-d; nan where |G|^2 is estimated below 0.

        squares: of the norms of single samples' gradients, `[B]`. whole: of the norm of the step's, 0-d.
        sizes: of its micro-batches, each of which has the same weight in the step's gradient.
        Returns: nothing where the step has one sample.
        """
        # A mean of means: as good as one over so many samples.
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
            # Where the loss scale skips a step there is no gradient.
            self._means = torch.where(now.isfinite().all(), mean, self._means)
        scale = torch.where(self._means[0] > 0, self._means[1] / self._means[0], torch.nan)
        return {"squared_norm": squared_norm, "covariance_trace": trace, "noise_scale": scale}


def _call(network: nn.Module, state: dict[str, Tensor], *inputs: Any, **named: Any) -> Any:
    return functional_call(network, state, inputs, named)


@contextmanager
def _apart(network: nn.Module) -> Iterator[None]:
    """Keep every random generator, and choose kernels that torch.func.vmap supports."""
    with preserve_generators(), ExitStack() as stack:
        devices = {parameter.device for parameter in network.parameters() if parameter.is_cuda}
        stack.enter_context(torch.random.fork_rng(sorted(devices, key=str)))
        # Fused attention has no rule for torch.func.vmap; the plain one computes the same.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
