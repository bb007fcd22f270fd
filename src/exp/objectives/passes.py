"""Additional forward passes and gradients, for terms that need more than one forward and one backward pass.

An example is a term with a penalty on the gradients of the inputs:

    class Smooth(AbstractTerm):
        needs = frozenset({"input_gradients"})

        def forward(self, values, batch, passes):
            slope = passes.gradients(values["output"], values["input"])
            return slope.flatten(1).square().sum(1).mean()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.nested import rebuild
from exp.objectives.loss_inputs import Values, full
from exp.shared_types import dtype_name

# The largest factor for a sum over samples. The product must remain in the range of float16.
LARGEST_FACTOR = 2.0**15


class Passes:
    """Additional forward passes and gradients for one batch of one step, under the autocast of the step.

    Args:
        network: The network itself, not a wrapper of the strategy, such as DDP.
        run: Function that receives the runner and the data of a batch, runs the network, and returns values by name.
        data: The data of the batch. If `inputs_require_grad` is true, the passes use leaf tensors that require
            gradients instead of the floating-point inputs in the data. The original tensors do not change.
        inputs: The names of the network's inputs, if the data is a mapping. If the data is a pair, the first value is
            the input. Default: `input`.
        runner: The callable that runs the network in this step, such as DDP. None (default): the network.
        loss_scale: The factor by which the gradient scaler multiplies the loss of this step, as a 0-d tensor or a
            float. None (default) if there is no gradient scaler.
        inputs_require_grad: Whether the inputs require gradients. Default: true.
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
        # Autocast does not support the meta device, on which shapes and FLOPs are computed.
        self._device = "cpu" if parameter is None or parameter.is_meta else parameter.device.type
        self._autocast = torch.is_autocast_enabled(self._device)
        self._autocast_dtype = torch.get_autocast_dtype(self._device)

    def run(self, data: object = None) -> Values:
        """Run an additional forward pass with a graph, and return the values by name.

        Args:
            data: The data of a batch. None (default): the data of the step.
        """
        with self._context():
            return self._run(self._runner, self.data if data is None else data)

    def call(self, part: str, *inputs: object) -> Any:
        """Return the output of a submodule of the network, such as the discriminator.

        Args:
            part: The dotted name of the submodule. The empty name stands for the whole network.
            inputs: The inputs of the submodule.

        Raises:
            RunError: The network has no submodule with this name.
        """
        try:
            module = self.network.get_submodule(part)
        except AttributeError as error:
            names = [name for name, _ in self.network.named_children()]
            raise RunError(f"the network has no submodule {part!r}; expected one of {', '.join(names)}") from error
        with self._context():
            return module(*inputs)

    @overload
    def gradients(self, output: Tensor, inputs: Tensor, *, create_graph: bool = ...) -> Tensor: ...
    @overload
    def gradients(
        self, output: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = ...
    ) -> tuple[Tensor, ...]: ...
    def gradients(
        self, output: Tensor, inputs: Tensor | Sequence[Tensor], *, create_graph: bool = True
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the gradients of the sum of an output with respect to tensors.

        If the network treats samples separately, row b of a gradient belongs to sample b. If the step has a gradient
        scaler, the sum is multiplied by a factor that avoids underflow in float16. The gradients are divided by the
        same factor. PyTorch's AMP notes describe this method:
        https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty

        Args:
            output: A tensor of any shape.
            inputs: A tensor, or a sequence of tensors, on which the output depends.
            create_graph: Whether the gradients can be differentiated again. Default: true.

        Returns:
            A gradient for each input, in float32, or in float64 if the input is float64.

        Raises:
            RunError: An input contains integers, or the output does not depend on an input.
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
                    "a term computes the gradient of an output with respect to an input that does not affect it"
                )
            result = tuple(full(one) if factor is None else full(one) / factor for one in found)
        return result[0] if isinstance(inputs, Tensor) else result

    def _context(self) -> torch.autocast:
        # Disable the cache of cast weights, because a forward pass without gradients may have filled the cache.
        return torch.autocast(self._device, dtype=self._autocast_dtype, enabled=self._autocast, cache_enabled=False)

    def _factor(self, samples: int) -> Tensor | float | None:
        """Return the factor for the output of an inner gradient: the loss scale divided by the number of samples.

        Return None if there is no loss scale.
        """
        if self._scale is None:
            return None
        if isinstance(self._scale, Tensor):
            return (self._scale / samples).clamp(1.0, LARGEST_FACTOR)
        return min(max(self._scale / samples, 1.0), LARGEST_FACTOR)


def _leaves(data: object, inputs: Sequence[str]) -> object:
    """Return the data with leaf tensors that require gradients instead of the floating-point inputs.

    The new tensors share storage with the original tensors.

    Args:
        data: The data of a batch: a tensor, a mapping, or a pair of input and target.
        inputs: The names of the inputs in a mapping.
    """
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
            f"a term computes the gradient with respect to a tensor of dtype {dtype}; expected a floating-point dtype. "
            "Return the embedding from the network by name, and compute the gradient with respect to the embedding"
        )
    if not tensor.requires_grad:
        raise RunError(
            "a term computes the gradient with respect to a tensor without a graph; expected an input of the network, "
            "or a tensor that depends on the network's parameters"
        )
    if not output.requires_grad:
        raise RunError("a term computes the gradient of a tensor that depends on no input and on no parameter")
