"""A multiple of the identity matrix that is kept as one number, known to torch's functions by `__torch_function__`.

https://docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-with-a-tensor-like-type
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from exp.models.initialisation import Scheme, fill


class ScalarTensor:
    """The matrix `value * I`, `[N, N]`.

    torch's add, mul, matmul, mean, trace and inverse know it; of other functions TypeError says that they do not.

    value: 0-d, or a number. size: N.
    """

    def __init__(self, value: Tensor | float, size: int) -> None:
        self.value, self.size = value, size

    def dense(self) -> Tensor:
        """The whole matrix, `[N, N]`."""
        value = torch.as_tensor(self.value)
        return value * torch.eye(self.size, dtype=value.dtype, device=value.device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in FUNCTIONS:
            return NotImplemented
        return FUNCTIONS[func](*args, **(kwargs or {}))


def _add(one: ScalarTensor, other: ScalarTensor) -> ScalarTensor:
    return ScalarTensor(one.value + other.value, one.size)


def _mul(one: ScalarTensor | float, other: ScalarTensor | float) -> ScalarTensor:
    """Element by element, or by a number."""
    matrix = one if isinstance(one, ScalarTensor) else other
    assert isinstance(matrix, ScalarTensor)
    first, second = (each.value if isinstance(each, ScalarTensor) else each for each in (one, other))
    return ScalarTensor(first * second, matrix.size)


def _matmul(one: ScalarTensor | Tensor, other: ScalarTensor | Tensor) -> ScalarTensor | Tensor:
    if isinstance(one, ScalarTensor) and isinstance(other, ScalarTensor):
        return ScalarTensor(one.value * other.value, one.size)
    first, second = (each.value if isinstance(each, ScalarTensor) else each for each in (one, other))
    found: Tensor = torch.as_tensor(first) * second
    return found


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.add: _add,
    torch.mul: _mul,
    torch.matmul: _matmul,
    torch.mean: lambda matrix: matrix.value / matrix.size,
    torch.trace: lambda matrix: matrix.value * matrix.size,
    torch.inverse: lambda matrix: ScalarTensor(1 / matrix.value, matrix.size),
}


class ScalarMatrix(nn.Module):
    """A linear layer whose matrix is a ScalarTensor: one number that learns, the same for all features.

    size: of the last axis, N. initialisation: of the number, a scheme of models/initialisation.py.
    """

    def __init__(self, *, size: Annotated[int, Ge(1)], initialisation: Scheme = "ones") -> None:
        super().__init__()
        self.size = size
        self.value = nn.Parameter(torch.empty(()))
        fill(self.value, initialisation)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., N]` of `[..., N]`."""
        if x.shape[-1] != self.size:
            raise ValueError(f"the last axis is {x.shape[-1]} long; expected {self.size}, the layer's size")
        # torch's stubs know tensors alone.
        product: Any = torch.matmul
        found: Tensor = product(x, ScalarTensor(self.value, self.size))
        return found
