"""Batch normalisation over two ranks' shares, against one process that has the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.numeric

KINDS = {
    "1d": (nn.BatchNorm1d, (5, 3), {}),
    "1d over time": (nn.BatchNorm1d, (5, 3, 4), {"affine": False}),
    "2d": (nn.BatchNorm2d, (5, 3, 4, 4), {"momentum": None}),
    "3d": (nn.BatchNorm3d, (5, 3, 2, 2, 2), {"track_running_stats": False}),
}


def given(kind):
    """The layer, two global batches of 5 and then 1 samples, and what the output is weighted with in the loss."""
    cls, shape, options = KINDS[kind]
    torch.manual_seed(3)
    layer = cls(shape[1], **options).double()
    batches = [
        torch.randn(size, *shape[1:], dtype=torch.float64) * 3 + 100 for size in ((5, 1) if kind != "1d" else (5,))
    ]
    return layer, batches, [torch.randn_like(batch) for batch in batches]


def shared(rank, *, kind):
    """Two steps of a rank: its outputs, its inputs' gradients, and the layer's gradients and state."""
    from exp.strategies.batch_norm import GlobalBatchNorm, Share, join_statistics, part_statistics

    layer, batches, factors = given(kind)
    network, share = nn.Sequential(layer), Share()
    before = join_statistics(network, share, device_type="cpu")
    assert isinstance(layer, GlobalBatchNorm)
    outputs, gradients = [], []
    for batch, factor in zip(batches, factors, strict=True):
        # 3 and 2 of five; of one sample the second rank holds a copy that does not count.
        share.counts = len(batch) > 1 or rank.global_rank == 0
        mine = slice(0, 3) if rank.global_rank == 0 else slice(3, 5)
        part = (batch[mine] if len(batch) > 1 else batch).clone().requires_grad_()
        output = network(part)
        weights = factor[mine] if len(batch) > 1 else factor
        (output.square() * weights * float(share.counts)).sum().backward()
        outputs.append(output.detach().numpy())
        gradients.append(part.grad.numpy())
    part_statistics(before)
    assert type(layer) is KINDS[kind][0]
    own = [parameter.grad.numpy() for parameter in layer.parameters()]
    return outputs, gradients, own, {name: value.numpy() for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_whole_batch(ranks, kind):
    layer, batches, factors = given(kind)
    first, second = ranks.call(shared, ranks=2, kind=kind)
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


NORMED = """
# Batch normalisation between a convolution and the head: model=normed
_target_: exp.models.containers.SequentialModel
layers:
  conv: {_target_: torch.nn.Conv2d, out_channels: 4, kernel_size: 3}
  norm: {_target_: torch.nn.BatchNorm2d}
  relu: {_target_: torch.nn.ReLU}
  flatten: {_target_: torch.nn.Flatten}
  head: {_target_: torch.nn.Linear, out_features: "${data.num_outputs}"}
"""


def test_a_run_of_two_ranks_keeps_the_statistics_of_one(ranks, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "normed.yaml").write_text(NORMED)
    # 1,258 samples are three batches and one of a single sample, so that the second rank holds one that does not count.
    short = ("model=normed", "optimizer=sgd", "trainer.max_epochs=1", "hooks=[]", "data.batch_size=419")
    one = ranks.train(*short, "strategy=single")
    two = ranks.train(*short, "strategy=ddp", "strategy.sync_batchnorm=true", ranks=2)
    apart = ranks.train(*short, "strategy=ddp", ranks=2)
    assert len(one.losses) == 4
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    expected = one.checkpoint()["state_dict"]
    assert list(two.checkpoint()["state_dict"]) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(two.checkpoint()["state_dict"][name], value, rtol=1e-4, atol=1e-5)
    for statistic in ("running_mean", "running_var"):
        own = apart.checkpoint()["state_dict"][f"network.norm.{statistic}"]
        assert (own - expected[f"network.norm.{statistic}"]).abs().max() > 1e-4
    # Weights of two ranks are those of one process: they are tested as such.
    tested = ranks.train("model=normed", "hooks=[]", "train=false", f"resume={two.directory}/checkpoints/last.ckpt")
    assert tested.report["metrics"]["loss/test"] == pytest.approx(two.report["metrics"]["loss/test"], abs=1e-5)


def classes_of_norms(rank, *, directory):
    """The classes of the network's batch normalisations before and behind the end of each stage of a run."""
    from exp import run
    from exp.strategies.fsdp import FullyShardedStrategy

    found = []
    teardown = FullyShardedStrategy.teardown

    def watched(self):
        network = self.lightning_module.network
        found.append(sorted({type(part).__name__ for part in network.modules() if "BatchNorm" in type(part).__name__}))
        teardown(self)
        found.append(sorted({type(part).__name__ for part in network.modules() if "BatchNorm" in type(part).__name__}))

    FullyShardedStrategy.teardown = watched
    run.run(directory, rank=rank)
    return found


@pytest.mark.parametrize("shard", [(), ("strategy.shard=['norm']",)])
@pytest.mark.any_processor
def test_fsdp_gives_the_layers_back(ranks, shard):
    short = ("model=resnet", "trainer.max_epochs=null", "trainer.max_steps=1", "trainer.limit_val_batches=1")
    command = (*short, "strategy=fsdp", "strategy.sync_batchnorm=true", "hooks=[]", "trainer.limit_test_batches=1")
    directory = ranks.freeze(*command, *shard)
    found = ranks.call(classes_of_norms, ranks=2, directory=str(directory))[0]
    # One that fully_shard has wrapped keeps its class: fully_shard cannot be undone.
    wrapped = ["FSDPGlobalBatchNorm"] if shard else []
    assert found == [[*wrapped, "GlobalBatchNorm"], ["BatchNorm2d", *wrapped]] * 2
