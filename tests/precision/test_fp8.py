"""precision=fp8: an error without the GPU or the package, otherwise layers of torchao."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import exp
from exp.build import Parts
from exp.errors import ConfigError, MissingExtraError
from exp.precision.conversion import convert_linear
from exp.precision.words import float8_error, refuse_without_torchao

HAS_TORCHAO = find_spec("torchao") is not None
# torchao 0.18 uses a deprecated registration of torch 2.13, and has an invalid escape sequence for Python 3.12.
WARNINGS_OF_TORCHAO = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        exp.validate(exp.compose(["precision=fp8", "launch.accelerator=cpu"]))
    (error,) = error.value.errors
    expected = "expected a CUDA GPU of compute capability 9.0 or more (Hopper), whose tensor cores multiply float8"
    assert str(error).startswith(f"precision.word: fp8 with cpu; {expected}. Write precision=bf16")


def test_an_old_gpu_is_refused() -> None:
    error = float8_error("cuda", (8, 0))
    assert error is not None
    assert error.got == "fp8 with cuda of compute capability 8.0"
    assert float8_error("mps").got == "fp8 with mps"


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_a_run_without_torchao_is_refused() -> None:
    with pytest.raises(MissingExtraError) as error:
        refuse_without_torchao()
    message = "precision=fp8 needs the package torchao, which is not installed: pip install 'exp-framework[fp8]'"
    assert str(error.value) == message
    assert error.value.exit_status == 2


@pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao, the extra fp8")
@WARNINGS_OF_TORCHAO
def test_linear_layers_become_float8() -> None:
    """The layers are emulated: numbers are rounded to float8, and products are computed in float32."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 10))
    plain, before, keys = copy.deepcopy(network), list(network.parameters()), list(network.state_dict())
    assert convert_linear(network, kept={"2"}, emulated=True) == ["0"]  # 10 is not a multiple of 16
    assert [type(layer).__name__ for layer in network] == ["Float8Linear", "GELU", "Linear", "Linear"]
    assert all(a is b for a, b in zip(before, network.parameters(), strict=True))
    assert list(network.state_dict()) == keys
    assert convert_linear(network, kept={"2"}, emulated=True) == []
    x = torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = network(x)
    output.float().pow(2).mean().backward()
    assert {p.grad.dtype for p in network.parameters()} == {torch.float32}
    # Three bits of mantissa give a relative error of a few percent.
    assert 1e-3 < (output - plain(x)).norm() / plain(x).norm() < 1e-1


@pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao, the extra fp8")
@WARNINGS_OF_TORCHAO
def test_a_number_of_rows_is_padded_to_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float8 products on a GPU need multiples of 16, also of the input's rows for the gradient of a weight."""
    shapes, product = [], torch._scaled_mm

    def counted(a: Tensor, b: Tensor, **settings: Any) -> Tensor:
        shapes.append((a.shape[1], b.shape[0]))
        return product(a, b, **settings)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    network = nn.Sequential(nn.Linear(32, 64))
    convert_linear(network)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = network(torch.randn(42, 32))
    output.float().sum().backward()
    assert shapes[0] == (32, 32)
    assert shapes[-1] == (48, 48)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao, the extra fp8")
@WARNINGS_OF_TORCHAO
def test_a_run_in_float8_on_a_gpu(parts: Callable[..., Parts]) -> None:
    if error := float8_error("cuda"):
        pytest.skip(str(error))
    run = ("launch.accelerator=cuda", "model=mlp", "trainer.max_steps=20", "data.batch_size=64")
    losses = []
    for word in ("bf16", "fp8"):
        built = parts(f"precision={word}", *run)
        built.trainer.fit(built.module, datamodule=built.data)
        losses.append(float(built.module.last.loss))
    assert type(built.module.network.stem).__name__ == "Float8Linear"
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    # torchao's layers fail in inference mode.
    built.trainer.test(built.module, datamodule=built.data)
