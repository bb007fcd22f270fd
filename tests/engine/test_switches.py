"""The switches of `runtime` have their effect, and the results stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import exp
from exp.engine.runtime import put_channels_last

SHORT = ("trainer.max_steps=6", "hooks=[]", "metrics=[]", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1")
PICTURES = ("model=lenet", "data=digits", "precision=fp64", *SHORT)


def fit(directory: Path, *overrides: str) -> Any:
    return exp.fit(exp.compose([f"hydra.run.dir={directory}", "trainer.enable_progress_bar=false", *overrides]))


def checkpoint(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_channels_last_keeps_results_over_a_resume(tmp_path: Path) -> None:
    last = ("runtime.channels_last=true", *PICTURES)
    plain = fit(tmp_path / "plain", *PICTURES)
    other = fit(tmp_path / "last", *last)
    assert other.metrics["loss/val"] == pytest.approx(plain.metrics["loss/val"], rel=1e-9)
    kept = checkpoint(tmp_path / "last")
    weights = [tensor for tensor in kept["state_dict"].values() if tensor.dim() == 4]
    assert weights
    assert any(not weight.is_contiguous() for weight in weights)
    longer = ("trainer.max_steps=12", "test=false")
    whole = fit(tmp_path / "whole", *last, *longer)
    again = fit(tmp_path / "again", *last, *longer, f"resume={tmp_path}/last/checkpoints/last.ckpt")
    assert again.metrics["loss/val"] == whole.metrics["loss/val"]
    with pytest.raises(exp.ConfigError, match=r"runtime\.channels_last was True and is now False"):
        fit(tmp_path / "other", *PICTURES, *longer, f"resume={tmp_path}/last/checkpoints/last.ckpt")


def test_pictures_are_laid_out_channels_last() -> None:
    seen: list[torch.Tensor] = []

    class Network(nn.Module):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> None:
            seen.extend((x, other))

    network = Network()
    put_channels_last(network)
    network(torch.zeros(2, 3, 4, 4), other=torch.zeros(2, 5))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()
    assert seen[1].shape == (2, 5)


def test_deterministic_and_cudnn_benchmark_reach_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        fit(tmp_path / "a", *SHORT, "runtime.cudnn_benchmark=true", "test=false")
        assert torch.backends.cudnn.benchmark
        fit(tmp_path / "b", *SHORT, "runtime.deterministic=true", "test=false")
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        fit(tmp_path / "c", *SHORT, "test=false")
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
