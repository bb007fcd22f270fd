"""The hook `landscape`: the loss on the way along the gradient, and along a random direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge, Gt, Predicate
from torch import Tensor

from exp.data.randomness import reseed, seed_for
from exp.errors import Fault
from exp.files import write_whole
from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.figures import curves
from exp.hooks.hook import Hook, Values
from exp.hooks.isolated_forward import apart, objective_faults, running
from exp.hooks.norms import joined, norm
from exp.hooks.panels import Image
from exp.hooks.step import Step
from exp.output import tell_not_written

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


def _is_odd(number: int) -> bool:
    return number % 2 == 1


class Landscape(Hook):
    """Draws `landscape`: the loss of the step's batch where all weights are moved a distance, along two directions.

    One is against the gradient, the other random, filter by filter as long as the weights (Li et al. 2018,
    arXiv:1712.09913; see `random_direction`). Both are as long as the random one, which is as long as the weights but
    for biases and norms, so that 0.1 moves weights by a tenth of their size. The loss is that of the training step,
    over all ranks and micro-batches, with its dropout and its batch statistics: at distance 0 it is the step's own.
    Weights, buffers and generators of random numbers are as they were. The numbers are in a file of the run directory,
    too, `landscape/step_000200.csv`: distance, against_gradient, random.

    distance: how far to both sides; above 0.
    points: on each curve; odd, so that the middle one is where the weights are.
    """

    keeps_batches = True
    needs = frozenset({"whole_parameters", "one_objective"})

    def __init__(
        self,
        *,
        every_n_steps: int = 200,
        distance: Annotated[float, Gt(0)] = 0.5,
        points: Annotated[int, "an odd number, so that the middle one is at 0", Predicate(_is_odd), Ge(3)] = 21,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self.distance, self.points = distance, points

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        yield from super().faults(planned)
        yield from objective_faults(self, planned, takes_samples=False)

    @torch.no_grad()
    def after_backward(self, step: Step) -> Values:
        learning = {name: parameter for name, parameter in step.network.named_parameters() if parameter.requires_grad}
        # The same on every rank.
        generator = torch.Generator().manual_seed(seed_for(step.seed, "landscape", step.index))
        across = random_direction(learning, generator=generator)
        down = downhill({name: parameter.grad for name, parameter in learning.items()}, across)
        half = self.points // 2
        distances = [self.distance * place / half for place in range(-half, half + 1)]
        with apart(step.network):
            losses = [
                torch.stack([self._loss(step, moved(learning, direction, at)) for at in distances])
                for direction in (down, across)
            ]
        shares = step.gather(torch.stack(losses)).cpu().double().mean(0)
        down_losses, across_losses = shares.tolist()
        self._write(step, distances, down_losses, across_losses)
        picture = curves(
            distances,
            {"against the gradient": down_losses, "random direction": across_losses},
            title=f"loss, step {step.index}",
            along="distance, in lengths of the weights",
        )
        return {"landscape": Image.of(torch.from_numpy(picture).permute(2, 0, 1))}

    def _loss(self, step: Step, parameters: dict[str, Tensor]) -> Tensor:
        """The mean over this rank's samples, so weighted that the mean over ranks is that over all; 0-d."""
        total = sum(batch.global_size for batch, _ in step.batches)
        losses = []
        for batch, batch_idx in step.batches:
            reseed(seed=step.seed, rank=step.rank, epoch=step.epoch, batch=batch_idx)
            # New copies each time, for a forward in training moves running statistics.
            buffers = {name: buffer.clone() for name, buffer in step.network.named_buffers()}
            runner = running(step.network, {**parameters, **buffers})
            assert step.loss_with is not None
            with step.autocast():
                loss = step.loss_with(runner, batch.data)
            share = batch.weight * batch.global_size / total
            losses.append(loss if share == 1.0 else loss * share)
        return torch.stack(losses).sum()

    def _write(self, step: Step, distances: Sequence[float], down: Sequence[float], across: Sequence[float]) -> None:
        if self.directory is None or step.rank:
            return
        path = self.directory / self.name / f"step_{step.index:06d}.csv"
        rows = [f"{at!r},{one!r},{other!r}" for at, one, other in zip(distances, down, across, strict=True)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "\n".join(["distance,against_gradient,random", *rows, ""]))
        except OSError as error:
            tell_not_written(str(path), error)


def random_direction(parameters: Mapping[str, Tensor], *, generator: torch.Generator) -> dict[str, Tensor]:
    """Normal numbers, filter by filter of the same norm as the weights; zero for biases and the scales of norms.

    Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets", arXiv:1712.09913, section 4: so that two networks
    with the same function have the same landscape, one with large weights and one with small. A filter is what one
    index of a weight's first axis gives: of a linear layer the weights into one output. What has one axis is left as it
    is, as in the authors' own code.

    parameters: by name, of any shape. generator: on the CPU, so that a seed gives one direction on every device.
    """
    direction = {}
    for name, parameter in parameters.items():
        if parameter.dim() < 2:
            direction[name] = torch.zeros_like(parameter)
            continue
        wide = at_least_float32(parameter.dtype)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=wide).to(parameter.device)
        axes = tuple(range(1, parameter.dim()))
        size = torch.linalg.vector_norm(parameter.to(wide), dim=axes, keepdim=True)
        direction[name] = drawn / torch.linalg.vector_norm(drawn, dim=axes, keepdim=True) * size
    return direction


def downhill(gradients: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Against the gradient, as long as `like`; zero where there is no gradient."""
    found = {name: torch.zeros_like(like[name]) if one is None else -one for name, one in gradients.items()}
    factor = torch.nan_to_num(length(like) / length(found), nan=0.0, posinf=0.0)
    return {name: one.to(at_least_float32(one.dtype)) * factor.to(one.device) for name, one in found.items()}


def length(direction: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all of it, 0-d, in float32 at least."""
    return joined([norm(one) for one in direction.values()])


def moved(parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor], distance: float) -> dict[str, Tensor]:
    """Copies of the parameters so far along; at 0.0 with the same bits."""
    return {
        name: (one + distance * direction[name]).to(one.dtype) if distance else one.detach().clone()
        for name, one in parameters.items()
    }
