"""More forward passes and gradients, for terms that need more than one forward pass and one backward.

class Smooth(AbstractTerm):
    needs = frozenset({"input_gradients"})

    def forward(self, values, batch, passes):
        slope = passes.gradients(values["output"], values["input"])
        return slope.flatten(1).square().sum(1).mean()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.nested import map_tensors, rebuild
from exp.objectives.loss_inputs import HALF, Values, full
from exp.shared_types import dtype_name

Precision = Literal["step", "full"]
# A sum over samples is differentiated, so that a factor on it reaches float16 whole: the largest that it holds.
LARGEST_FACTOR = 2.0**15


class Passes:
    """More forward passes and gradients, of one step and one batch.

    network: itself, not the wrapper of a strategy.
    run: called with what runs the network and with a batch's data, gives the values by name, as the step names them.
    data: of the batch. Its floating inputs become leaves that require grad where `inputs_require_grad`; the batch's
        own tensors stay as they are.
    inputs: the names of the network's inputs where the data is a mapping; of a pair the first is the input.
    runner: what runs the network in this step; by default the network.
    loss_scale: the factor on the loss of this step, 0-d or a float; None without a gradient scaler.

    Autocast is that of the moment at which it is made: the step's.
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        run: Callable[[Callable[..., object], object], Values],
        data: object,
        inputs: Sequence[str] = ("input",),
        runner: Callable[..., object] | None = None,
        loss_scale: Tensor | float | None = None,
        inputs_require_grad: bool = True,
    ) -> None:
        self.network = network
        self.data = _leaves(data, inputs) if inputs_require_grad else data
        self._run, self._runner, self._scale = run, runner or network, loss_scale
        parameter = next(network.parameters(), None)
        # Autocast knows no meta device, on which shapes and FLOPs are looked at.
        self._device = "cpu" if parameter is None or parameter.is_meta else parameter.device.type
        self._autocast = torch.is_autocast_enabled(self._device)
        self._autocast_dtype = torch.get_autocast_dtype(self._device)

    def run(self, data: object = None, *, precision: Precision = "step") -> Values:
        """The values by name of one more forward pass, with a graph.

        data: by default the step's own. precision: `full` runs in float32 (float64 where the parameters are).
        """
        data = self.data if data is None else data
        if precision == "step":
            with self._as_the_step():
                return self._run(self._runner, data)
        with torch.autocast(self._device, enabled=False):
            return self._run(self._in_full(self.network), map_tensors(data, full))

    def call(self, part: str, *inputs: object, precision: Precision = "step") -> Any:
        """What one part of the network gives for some inputs, such as its discriminator.

        part: its dotted name; the empty one is the network. precision: as in `run`.
        Raises: RunError where there is no such part.
        """
        try:
            module = self.network.get_submodule(part)
        except AttributeError as error:
            names = [name for name, _ in self.network.named_children()]
            raise RunError(f"the network has no part {part!r}; there are {', '.join(names)}") from error
        if precision == "step":
            with self._as_the_step():
                return module(*inputs)
        with torch.autocast(self._device, enabled=False):
            return self._in_full(module)(*map_tensors(inputs, full))

    @overload
    def gradients(self, output: Tensor, inputs: Tensor, *, create_graph: bool = ...) -> Tensor: ...
    @overload
    def gradients(
        self, output: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = ...
    ) -> tuple[Tensor, ...]: ...
    def gradients(
        self, output: Tensor, inputs: Tensor | Sequence[Tensor], *, create_graph: bool = True
    ) -> Tensor | tuple[Tensor, ...]:
        """The gradients of an output's sum with respect to values that it was computed from, in float32 (or float64).

        Row b of a gradient is that of sample b, where the network treats samples apart. Under a loss scale it is
        computed with a factor that keeps float16 from underflowing, and divided by it, as PyTorch's AMP notes do:
        https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty

        output: of any shape. inputs: one tensor, or several. create_graph: whether it can be differentiated again.
        Raises: RunError where an input is of integers, or the output does not depend on it.
        """
        several = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        for tensor in several:
            _require_differentiable(tensor, output)
        factor = self._factor(len(output) if output.dim() else 1)
        with torch.autocast(self._device, enabled=False):
            total = full(output).sum()
            found = torch.autograd.grad(
                total if factor is None else total * factor,
                several,
                create_graph=create_graph,
                retain_graph=True,
                allow_unused=True,
            )
            if any(one is None for one in found):
                raise RunError(
                    "a term takes the gradient of a value with respect to another that it does not depend on"
                )
            result = tuple(full(one) if factor is None else full(one) / factor for one in found)
        return result[0] if isinstance(inputs, Tensor) else result

    def _as_the_step(self) -> torch.autocast:
        # Without a cache of cast weights, which may have been filled where no gradient was kept.
        return torch.autocast(self._device, dtype=self._autocast_dtype, enabled=self._autocast, cache_enabled=False)

    def _factor(self, samples: int) -> Tensor | float | None:
        """On an inner gradient: the loss scale, shared over the samples that are summed; None without one."""
        if self._scale is None:
            return None
        if isinstance(self._scale, Tensor):
            return (self._scale / samples).clamp(1.0, LARGEST_FACTOR)
        return min(max(self._scale / samples, 1.0), LARGEST_FACTOR)

    def _in_full(self, module: nn.Module) -> nn.Module:
        """The module, which is in full precision where autocast is off."""
        for name, parameter in module.named_parameters():
            if parameter.dtype in HALF:
                dtype = dtype_name(parameter.dtype)
                raise RunError(
                    f"a term asks for precision: full, and {name} is {dtype} itself; it must be float32. Write "
                    "precision: step, or choose a precision with float32 parameters such as precision=bf16"
                )
        return module


def _leaves(data: object, inputs: Sequence[str]) -> object:
    """The same batch with floating inputs that require grad; what they share is storage, not the tensors."""
    if isinstance(data, Tensor):
        return _leaf(data)
    if isinstance(data, Mapping):
        return {name: _leaf(value) if name in inputs else value for name, value in data.items()}
    assert isinstance(data, list | tuple), "a pair of input and target"
    return rebuild(data, [_leaf(data[0]), *data[1:]])


def _leaf(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _require_differentiable(tensor: Tensor, output: Tensor) -> None:
    if not tensor.is_floating_point():
        dtype = dtype_name(tensor.dtype)
        raise RunError(
            f"a term takes the gradient with respect to a value of {dtype}, and a whole number has none; it must be "
            "floating. Let the network return its embedding by a name, and take the gradient with respect to that"
        )
    if not tensor.requires_grad:
        raise RunError(
            "a term takes the gradient with respect to a value that was computed without one; it must be an input of "
            "the network or follow from its parameters"
        )
    if not output.requires_grad:
        raise RunError("a term takes the gradient of a value that depends on no input and no parameter")
