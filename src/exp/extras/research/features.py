"""The hook `features`: draws the outputs of convolutions as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge
from torch import Tensor, nn

from exp.errors import ErrorDetails, RunError
from exp.hooks.hook import Hook, Values
from exp.hooks.panels import Image
from exp.hooks.step import Step
from exp.models.matching import matches
from exp.nested import tensors_in

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint

# Length of a picture's longer side in pixels. Small maps are enlarged by a whole factor to about this length.
SIDE = 48


class Features(Hook):
    """Hook that draws the feature maps of one sample as a grid of pictures, with the tag `features/<module>`.

    A feature map is one channel of a module's output `[B, C, H, W]`. The smallest value of a map is black, and the
    largest value is white. The sample is the first one in the first micro-batch of rank 0. If a module is called
    several times in a step, its first output is drawn.

    Args:
        every_n_steps: Period in optimizer steps. Default: 500.
        modules: Name patterns of modules. Each pattern must match a module with an output `[B, C, H, W]`. `*` selects
            all modules with such an output. Default: Conv2d.
        maps: Largest number of maps per module. The first channels are drawn. Default: 16.
    """

    needs = frozenset({"whole_outputs", "all_layers", "one_thread"})

    def __init__(
        self, *, every_n_steps: int = 500, modules: Sequence[str] = ("Conv2d",), maps: Annotated[int, Ge(1)] = 16
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        self.maps = maps
        self._images: dict[str, Image] = {}

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        yield from super().errors(planned)
        fitting = {name for name, calls in planned.calls.items() if _maps_of(calls[0].output) is not None}
        for pattern in self.modules:
            meant = {name for name, module in planned.network.named_modules() if matches(name, module, pattern)}
            if meant & planned.calls.keys() and not meant & fitting:
                there = f"there are {', '.join(sorted(fitting)[:20])}" if fitting else "this network has none"
                expected = f"a module whose output is [B, C, H, W]; {there}"
                yield self.error("modules", got=repr(pattern), expected=expected, fix=self.leave_out)

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        maps = _maps_of(output)
        if maps is not None and name not in self._images:
            self._images[name] = picture(maps[0, : self.maps])

    def after_step(self, step: Step) -> Values | None:
        images, self._images = self._images, {}
        if not images:
            raise RunError(
                f"hooks.{self.name}.modules: no module has feature maps [B, C, H, W] in this step. Choose others, or "
                f"leave the hook out with ~hooks.{self.name}"
            )
        return {f"features/{name or 'network'}": image for name, image in images.items()}


def picture(maps: Tensor) -> Image:
    """Return a grid with one picture for each feature map of a sample.

    The values of each map are stretched to the range from black to white. Small maps are enlarged.

    Args:
        maps: Feature maps `[C, H, W]`.
    """
    factor = max(1, SIDE // max(maps.shape[1:]))
    stretched = Image.of(maps[:, None], stretched=True)
    return Image(stretched.pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3))


def _maps_of(output: object) -> Tensor | None:
    """Return the first real tensor with four axes in a module's output; None if the output has no such tensor."""
    fitting = (tensor for tensor in tensors_in(output) if tensor.dim() == 4 and not tensor.is_complex())
    return next(fitting, None)
