"""Tensor-like type for a multiple of the identity matrix, which implements `__torch_function__`.

The matrix is stored as one number.
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
    """Matrix `value * I`, `[N, N]`, that is stored as one number.

    torch's functions add, mul, matmul, mean, trace and inverse accept a ScalarTensor. Other functions of torch raise
    TypeError.

    Args:
        value: Number on the diagonal, as a 0-d tensor or a float.
        size: Number of rows and columns N.
    """

    def __init__(self, value: Tensor | float, size: int) -> None:
        self.value, self.size = value, size

    def dense(self) -> Tensor:
        """Return the full matrix, `[N, N]`."""
        value = torch.as_tensor(self.value)
        return value * torch.eye(self.size, dtype=value.dtype, device=value.device)

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func not in FUNCTIONS:
            return NotImplemented
        return FUNCTIONS[func](*args, **(kwargs or {}))


def _add(one: ScalarTensor, other: ScalarTensor) -> ScalarTensor:
    return ScalarTensor(one.value + other.value, one.size)


def _mul(one: ScalarTensor | float, other: ScalarTensor | float) -> ScalarTensor:
    """Return the elementwise product of two matrices, or the product of a matrix and a number."""
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


FUNCTIONS: dict[object, Callable[..., object]] = {
    torch.add: _add,
    torch.mul: _mul,
    torch.matmul: _matmul,
    torch.mean: lambda matrix: matrix.value / matrix.size,
    torch.trace: lambda matrix: matrix.value * matrix.size,
    torch.inverse: lambda matrix: ScalarTensor(1 / matrix.value, matrix.size),
}


class ScalarMatrix(nn.Module):
    """Linear layer that multiplies all features by one trained number. Its matrix is a ScalarTensor.

    Args:
        size: Number of features N, the size of the last axis.
        initialisation: Scheme of exp.models.initialisation that initializes the number. Default: ones.
    """

    def __init__(self, *, size: Annotated[int, Ge(1)], initialisation: Scheme = "ones") -> None:
        super().__init__()
        self.size = size
        self.value = nn.Parameter(torch.empty(()))
        fill(self.value, initialisation)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.size:
            raise ValueError(f"the last axis has size {x.shape[-1]}; expected {self.size}, the size of the layer")
        # torch's stubs declare only tensors.
        product: Any = torch.matmul
        found: Tensor = product(x, ScalarTensor(self.value, self.size))
        return found
