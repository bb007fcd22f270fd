"""The hook `landscape`: the loss on the way along the gradient, and along a random direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exp.data.randomness import reseed, seed_for
from exp.errors import Fault
from exp.files import write_whole
from exp.hooks.apart import apart, objective_faults, running
from exp.hooks.directions import downhill, moved, random_direction
from exp.hooks.figures.curves import curves
from exp.hooks.hook import Hook, Values
from exp.hooks.step import Step
from exp.hooks.values import Image

if TYPE_CHECKING:
    from exp.strategies.strategy import Planned


class Landscape(Hook):
    """Draws `landscape`: the loss of the step's batch where all weights are moved a distance, along two directions.

    One is against the gradient, the other random, filter by filter as long as the weights (Li et al. 2018,
    arXiv:1712.09913; see hooks/directions.py). Both are as long as the random one, which is as long as the weights but
    for biases and norms, so that 0.1 moves weights by a tenth of their size. The loss is that of the training step,
    over all ranks and micro-batches, with its dropout and its batch statistics: at distance 0 it is the step's own.
    Weights, buffers and generators of random numbers are as they were. The numbers are in a file of the run directory,
    too, `landscape/step_000200.csv`: distance, against_gradient, random.

    distance: how far to both sides; above 0.
    points: on each curve; odd, so that the middle one is where the weights are.
    """

    keeps_batches = True
    needs = frozenset({"whole_parameters", "one_objective"})

    def __init__(self, *, every_n_steps: int = 200, distance: float = 0.5, points: int = 21) -> None:
        super().__init__(every_n_steps=every_n_steps)
        if not (0 < distance < math.inf):
            raise ValueError(f"distance is {distance}; it must be a number above 0")
        if points < 3 or points % 2 == 0:
            raise ValueError(f"points is {points}; it must be odd, and 3 or more, so that the middle one is at 0")
        self.distance, self.points = distance, points

    def faults(self, planned: Planned) -> Sequence[Fault]:
        return [*super().faults(planned), *objective_faults(self.name, planned, takes_samples=False)]

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
        place = self.directory / self.name
        place.mkdir(parents=True, exist_ok=True)
        rows = [f"{at!r},{one!r},{other!r}" for at, one, other in zip(distances, down, across, strict=True)]
        write_whole(place / f"step_{step.index:06d}.csv", "\n".join(["distance,against_gradient,random", *rows, ""]))
