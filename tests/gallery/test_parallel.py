"""Strategies of the gallery equal one process. The site shows the docstrings of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import mse_loss

pytestmark = [pytest.mark.numeric, pytest.mark.any_processor]

SINGLE = ("strategy=single", "launch.devices=1")
QUIET = ("launch.accelerator=cpu", "hooks=[]")


def plain(hand: Any) -> list[str]:
    return [*hand.DESCENT, *hand.SHORT, *QUIET]


def as_one_process(
    ranks: Any, hand: Any, name: str, *more: str, processes: int = 2, alone: tuple[str, ...] = SINGLE
) -> Any:
    """Compare the weights after three steps in float64 with those of one process."""
    several = ranks.train(f"experiment={name}", *plain(hand), *more, ranks=processes)
    given = {key.partition("=")[0] for key in alone}
    one = ranks.train(
        *(_of(name)), *plain(hand), *(word for word in more if word.partition("=")[0] not in given), *alone
    )
    hand.assert_equal(several.checkpoint()["state_dict"], one.checkpoint()["state_dict"], rtol=1e-9, atol=1e-11)
    assert several.report["world_size"] == processes
    return several


def _of(name: str) -> tuple[str, ...]:
    """Return the overrides of the experiment's network and data, without the experiment, because it sets `strategy`."""
    return {"resnet_in_two_parts": ("model=resnet",), "sync_batchnorm": ("model=resnet",)}.get(
        name,
        ("model=transformer",) if name in ("pipeline", "fsdp", "tensor_parallel", "activation_checkpointing") else (),
    )


class Toy(nn.Module):
    """ToyModel of PyTorch's tutorial on model parallelism, with a head, on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.head = nn.Linear(10, 10), nn.Linear(10, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net2(self.net1(x).relu()))


def test_toy_model_parallel(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of the ToyModel on one device to 1e-9."""
    gallery.descend("toy_model_parallel", Toy(), loss=lambda network, batch: mse_loss(network(batch[0]), batch[1]))


@pytest.mark.slow
def test_resnet_in_two_parts(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the weights equal those of the network on one device to 1e-9."""
    as_one_process(ranks, hand, "resnet_in_two_parts", processes=1)


@pytest.mark.slow
def test_pipeline(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the weights of two ranks with four micro-batches equal those of one process to
    1e-9.
    """
    as_one_process(ranks, hand, "pipeline")


@pytest.mark.slow
def test_data_parallel(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the weights equal those of one device to 1e-9."""
    as_one_process(ranks, hand, "data_parallel", processes=1)


@pytest.mark.slow
def test_ddp(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the weights of two ranks equal those of one process to 1e-9."""
    as_one_process(ranks, hand, "ddp")


@pytest.mark.slow
def test_ddp_with_layer_split(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the weights of two ranks of two devices equal those of one process to 1e-9."""
    as_one_process(ranks, hand, "ddp_with_layer_split")


@pytest.mark.slow
def test_fsdp(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the gathered weights of two ranks equal those of one process to 1e-9."""
    as_one_process(ranks, hand, "fsdp")


@pytest.mark.slow
def test_tensor_parallel(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the gathered weights of two ranks equal those of one process to 1e-9."""
    as_one_process(ranks, hand, "tensor_parallel")


@pytest.mark.slow
def test_sync_batchnorm(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, weights and running statistics of two ranks equal those of one process to 1e-9.
    Without shared statistics they differ by more than 1e-4.
    """
    as_one_process(ranks, hand, "sync_batchnorm")
    apart = ranks.train("experiment=sync_batchnorm", "strategy.sync_batchnorm=false", *plain(hand), ranks=2)
    one = ranks.train("model=resnet", *plain(hand), *SINGLE)
    name = "network.stem.weight"
    assert (apart.checkpoint()["state_dict"][name] - one.checkpoint()["state_dict"][name]).abs().max() > 1e-4


def test_ring_all_reduce(ranks: Any, hand: Any) -> None:
    """After three SGD steps in float64, the weights of two ranks equal those of one process to 1e-9. Each of n ranks
    sends 2 (n - 1) / n times the bytes of the 50,826 gradients, which is all of them for two ranks.
    """
    ran = as_one_process(ranks, hand, "ring_all_reduce")
    log = (ran.directory / "train.log").read_text()
    assert f"ring all-reduce: 3 steps, {3 * 8 * 50826 / 1024:,.1f} KiB sent by this rank" in log


@pytest.mark.slow
def test_activation_checkpointing(commands: Any, hand: Any, tmp_path: Path) -> None:
    """After three SGD steps in float64, the weights equal those of a run without checkpointing to 1e-9. The activations
    take less than half of the bytes.
    """
    short = [*hand.DESCENT, *hand.SHORT, "launch.accelerator=cpu", "hooks.memory.every_n_steps=1", "logger=[csv]"]
    ran = []
    for name, patterns in (("again", "[blocks.?]"), ("kept", "[]")):
        own = [
            "experiment=activation_checkpointing",
            f"hydra.run.dir={name}",
            f"strategy.activation_checkpointing={patterns}",
        ]
        done = commands.run(*short, *own, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        ran.append(hand.Ran(directory=tmp_path / name))
    hand.assert_equal(ran[0].weights, ran[1].weights)
    few, all_of_them = (one.column("memory/activations_mib")[0] for one in ran)
    assert few < all_of_them / 2
