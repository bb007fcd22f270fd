"""The hook `features`: what convolutions see, as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from exp.errors import Fault, RunError
from exp.hooks.hook import Hook, Values
from exp.hooks.panels import Image
from exp.hooks.step import Step
from exp.models.matching import matches
from exp.nested import tensors_in

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint

# A map is enlarged by whole pixels until its longer side has so many.
SIDE = 48


class Features(Hook):
    """Draws `features/<module>`, a grid of the feature maps that chosen layers gave for the first sample of a due step.

    A map is one channel of an output `[B, C, H, W]`; its own smallest value is black and its largest white. Of several
    calls of a module in a step, and of several micro-batches, the first one is drawn; of several ranks the first's.

    modules: whose outputs are drawn. Each pattern must mean a module with such an output, and `*` takes all that have.
    maps: so many channels are drawn at most, the first ones. columns: of the grid; None makes it square.
    """

    needs = frozenset({"whole_outputs", "all_layers", "one_thread"})
    least = {"maps": 1, "columns": 1}

    def __init__(
        self,
        *,
        every_n_steps: int = 500,
        modules: Sequence[str] = ("Conv2d",),
        maps: int = 16,
        columns: int | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.maps, self.columns = maps, columns
        self._images: dict[str, Image] = {}
        self._others: dict[str, str] = {}

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        faults = list(super().faults(planned))
        yield from faults
        if any(fault.key == f"hooks.{self.name}.modules" for fault in faults):
            return
        # Of each module that is called, the shape that is drawn, or that it gives.
        shapes = {name: _shape_of(calls[0].output) for name, calls in planned.calls.items()}
        fitting = [name for name, shape in shapes.items() if len(shape) == 4 and name]
        for pattern in self.modules:
            meant = [name for name, module in planned.network.named_modules() if matches(name, module, pattern)]
            seen = {name: shapes[name] for name in meant if name in shapes}
            if seen and not any(len(shape) == 4 for shape in seen.values()):
                given = ", ".join(
                    f"{name or 'the network'} gives {_named(shape)}" for name, shape in [*seen.items()][:4]
                )
                there = f"there are {', '.join(fitting[:20])}" if fitting else "this network has none"
                expected = f"a module whose output is [B, C, H, W]; {there}"
                cure = None if fitting else self.leave_out
                yield self.fault("modules", got=f"{pattern!r}: {given}", expected=expected, cure=cure)

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if name in self._images:
            return
        found = _maps_of(output)
        if found is None:
            shape = _shape_of(output)
            self._others[name] = f"gives {shape}" if shape else "gives no tensor"
        else:
            self._images[name] = picture(found[0, : self.maps], columns=self.columns)

    def after_step(self, step: Step) -> Values | None:
        images, self._images = self._images, {}
        others, self._others = self._others, {}
        if not images:
            there = ", ".join(f"{name or 'network'} {shape}" for name, shape in others.items()) or "none was called"
            raise RunError(
                f"hooks.{self.name}.modules: no module gives feature maps in this step; expected an output "
                f"[B, C, H, W]; {there}. Choose others, or leave the hook out with ~hooks.{self.name}"
            )
        return {f"features/{name or 'network'}": image for name, image in images.items()}


def picture(maps: Tensor, *, columns: int | None = None) -> Image:
    """Feature maps `[C, H, W]` of one sample as a grid, each stretched from black to white, enlarged to be seen."""
    factor = max(1, SIDE // max(maps.shape[1:]))
    stretched = Image.of(maps[:, None], stretched=True, columns=columns)
    return Image(stretched.pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3), columns)


def _maps_of(output: object) -> Tensor | None:
    """The first tensor `[B, C, H, W]` of what a module returns."""
    fitting = (tensor for tensor in tensors_in(output) if tensor.dim() == 4 and not tensor.is_complex())
    return next(fitting, None)


def _shape_of(output: object) -> list[int]:
    """Of the feature maps, or else of the first tensor; empty where there is none."""
    maps = _maps_of(output)
    first = next(tensors_in(output), None) if maps is None else maps
    return [] if first is None else list(first.shape)


def _named(shape: Sequence[int]) -> str:
    return f"[{', '.join(['B', *(str(size) for size in shape[1:])])}]" if shape else "no tensor"
