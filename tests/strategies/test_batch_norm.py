"""Batch normalization over two ranks equals that of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

KINDS = {
    "1d": (nn.BatchNorm1d, (5, 3), {}),
    "1d over time": (nn.BatchNorm1d, (5, 3, 4), {"affine": False}),
    "2d": (nn.BatchNorm2d, (5, 3, 4, 4), {"momentum": None}),
    "3d": (nn.BatchNorm3d, (5, 3, 2, 2, 2), {"track_running_stats": False}),
}


def layer_and_batches(kind):
    """Return a layer, global batches of 5 samples and of 1 sample, and weights of the outputs in the loss."""
    cls, shape, options = KINDS[kind]
    torch.manual_seed(3)
    layer = cls(shape[1], **options).double()
    batches = [
        torch.randn(size, *shape[1:], dtype=torch.float64) * 3 + 100 for size in ((5, 1) if kind != "1d" else (5,))
    ]
    return layer, batches, [torch.randn_like(batch) for batch in batches]


def steps_of_a_rank(rank):
    """Return outputs, gradients of the inputs, and gradients and state of the layer, for each kind of layer."""
    return {kind: steps_of_a_kind(rank, kind) for kind in KINDS}


def steps_of_a_kind(rank, kind):
    from exp.strategies.batch_norm import GlobalBatchNorm, Share, join_statistics, restore_classes

    layer, batches, factors = layer_and_batches(kind)
    network, share = nn.Sequential(layer), Share()
    before = join_statistics(network, share, device_type="cpu")
    assert isinstance(layer, GlobalBatchNorm)
    outputs, gradients = [], []
    for batch, factor in zip(batches, factors, strict=True):
        # Ranks get 3 and 2 of five samples. If there is one sample, the second rank gets a copy that does not count.
        share.counts = len(batch) > 1 or rank.global_rank == 0
        mine = slice(0, 3) if rank.global_rank == 0 else slice(3, 5)
        part = (batch[mine] if len(batch) > 1 else batch).clone().requires_grad_()
        output = network(part)
        weights = factor[mine] if len(batch) > 1 else factor
        (output.square() * weights * float(share.counts)).sum().backward()
        outputs.append(output.detach().numpy())
        gradients.append(part.grad.numpy())
    restore_classes(before)
    assert type(layer) is KINDS[kind][0]
    own = [parameter.grad.numpy() for parameter in layer.parameters()]
    return outputs, gradients, own, {name: value.numpy() for name, value in layer.state_dict().items()}


def test_two_ranks_normalize_the_whole_batch(ranks):
    shares = ranks.call(steps_of_a_rank, ranks=2)
    for kind in KINDS:
        first, second = (share[kind] for share in shares)
        layer, batches, factors = layer_and_batches(kind)
        for index, (batch, factor) in enumerate(zip(batches, factors, strict=True)):
            whole = batch.clone().requires_grad_()
            output = layer(whole)
            (output.square() * factor).sum().backward()
            for place, expected in ((0, output.detach()), (1, whole.grad)):
                found = torch.from_numpy(first[place][index])
                if len(batch) > 1:
                    found = torch.cat([found, torch.from_numpy(second[place][index])])
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        for index, parameter in enumerate(layer.parameters()):
            torch.testing.assert_close(torch.from_numpy(first[2][index] + second[2][index]), parameter.grad)
        for name, value in layer.state_dict().items():
            for found in (first[3], second[3]):
                torch.testing.assert_close(torch.as_tensor(found[name]), value, rtol=1e-12, atol=0)


NORMED = """# Batch normalization between a convolution and the head: model=normed
_target_: exp.models.containers.SequentialModel
layers:
  conv: {_target_: torch.nn.Conv2d, out_channels: 4, kernel_size: 3}
  norm: {_target_: torch.nn.BatchNorm2d}
  flatten: {_target_: torch.nn.Flatten}
  head: {_target_: torch.nn.Linear, out_features: "${data.num_outputs}"}
"""
CLASSES = '''
from lightning.pytorch import Callback


class Classes(Callback):
    """Writes the classes of the layers that normalize at the start of each stage."""

    def note(self, module, moment):
        kinds = sorted({type(part).__name__ for part in module.network.modules() if "BatchNorm" in type(part).__name__})
        with open("classes.txt", "a") as file:
            file.write(f"{moment} {' '.join(kinds)}\\n")

    def setup(self, trainer, module, stage):
        if trainer.is_global_zero:
            self.note(module, f"before {stage.value}")

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            self.note(module, "in fit")
'''


@pytest.fixture
def normed(ranks, tmp_path, settings):
    """Overrides of a run with a batch norm.

    The 1,258 samples are three batches of 419 and one of a single sample. The second rank gets a copy of this sample,
    which does not count.
    """
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "normed.yaml").write_text(NORMED)
    (tmp_path / "normed_classes.py").write_text(CLASSES)
    return (
        *("model=normed", *settings, "data.batch_size=419", "test=true", "trainer.limit_test_batches=1"),
        *("security.allow=[normed_classes]", "+callbacks.classes={_target_: normed_classes.Classes}"),
    )


@pytest.mark.parametrize(
    ("strategy", "wrapped"),
    [
        (("strategy=ddp",), ""),
        (("strategy=fsdp",), ""),
        # fully_shard replaces the class of this layer, which cannot be undone.
        pytest.param(("strategy=fsdp", "strategy.shard=['norm']"), "FSDPGlobalBatchNorm", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_two_ranks_keeps_the_statistics_of_one(ranks, normed, alone, require_same_run, strategy, wrapped):
    one = alone(*normed)
    Path("classes.txt").unlink(missing_ok=True)
    two = ranks.train(*normed, *strategy, "strategy.sync_batchnorm=true", ranks=2)
    require_same_run(one, two)
    assert two.report["metrics"]["loss/test"] == pytest.approx(one.report["metrics"]["loss/test"], rel=0, abs=1e-10)
    during, after = wrapped or "GlobalBatchNorm", wrapped or "BatchNorm2d"
    expected = ["before fit BatchNorm2d", f"in fit {during}", f"before test {after}"]
    assert Path("classes.txt").read_text().splitlines() == expected


@pytest.mark.slow
def test_ranks_without_synchronization_have_statistics_of_their_shares(ranks, normed, alone):
    whole, apart = alone(*normed).checkpoint(), ranks.train(*normed, "strategy=ddp", ranks=2).checkpoint()
    for statistic in ("running_mean", "running_var"):
        name = f"network.norm.{statistic}"
        assert (apart["state_dict"][name] - whole["state_dict"][name]).abs().max() > 1e-4
