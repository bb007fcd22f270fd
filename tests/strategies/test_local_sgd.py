"""Local SGD over two ranks, against a loop by hand over two copies of the network."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from exp.config.freeze import read_frozen
from exp.construct import build_data, build_network, plain_config

pytestmark = pytest.mark.numeric

LOCAL = (
    *("model=sequential", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "test=false", "hooks=[]"),
    *("strategy=ddp", "trainer.max_epochs=null", "strategy.local_sgd.every_n_steps=4"),
)


def by_hand(directory, *, steps, every, start, checkpoints):
    """The weights after so many steps of two copies, each on its share, brought together every so many steps."""
    config = plain_config(read_frozen(directory))
    data = build_data(config)
    network = build_network(config, data.spec)
    copies = [network, copy.deepcopy(network)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in copies]
    for done, shares in enumerate(itertools.islice(batches(data), steps), start=1):
        for one, share in zip(copies, shares, strict=True):
            one.zero_grad()
            loss = torch.nn.functional.cross_entropy(one(share.data[0]), share.data[1]) * share.weight
            loss.backward()
        if done <= start:
            for first, second in zip(*(one.parameters() for one in copies), strict=True):
                first.grad = (first.grad + second.grad) / 2
                second.grad = first.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        if done > start and ((done - start) % every == 0 or done in checkpoints):
            bring_together(copies, optimizers)
    return copies[0].state_dict()


def batches(data):
    """The shares of both ranks, epoch after epoch."""
    loaders = [data.loader("train", rank=rank, world_size=2) for rank in range(2)]
    for epoch in itertools.count():
        for loader in loaders:
            loader.set_position(epoch, 0)
        yield from zip(*loaders, strict=True)


@torch.no_grad()
def bring_together(copies, optimizers):
    for pair in zip(*(one.parameters() for one in copies), strict=True):
        momenta = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, pair, strict=True)]
        for first, second in (pair, momenta):
            mean = (first + second) / 2
            first.copy_(mean)
            second.copy_(mean)


def weights(trained):
    state = trained.checkpoint()["state_dict"]
    return {name.removeprefix("network."): value for name, value in state.items() if name.startswith("network.")}


def test_equal_to_two_copies_by_hand(ranks):
    # 20 batches an epoch, the last of them short: 30 steps pass an epoch's end, with its checkpoint.
    trained = ranks.train(*LOCAL, "strategy.local_sgd.start_step=5", "trainer.max_steps=30", ranks=2)
    expected = by_hand(trained.directory, steps=30, every=4, start=5, checkpoints={20, 30})
    for name, value in weights(trained).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_averaging_at_every_step_is_ddp(ranks):
    plain = ("model=sequential", "optimizer=sgd", "test=false", "trainer.max_epochs=1", "strategy=ddp", "hooks=[]")
    ddp = ranks.train(*plain, ranks=2)
    local = ranks.train(*plain, "strategy.local_sgd.every_n_steps=1", ranks=2)
    for name, value in weights(ddp).items():
        torch.testing.assert_close(weights(local)[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.any_processor
def test_a_resumed_run_is_the_unbroken_one(ranks):
    saving = (*LOCAL, "checkpoint.every_n_steps=6")
    unbroken = ranks.train(*saving, "trainer.max_steps=13", ranks=2)
    first = ranks.train(*saving, "trainer.max_steps=6", ranks=2)
    second = ranks.train(*saving, "trainer.max_steps=13", f"resume={first.directory}/checkpoints/last.ckpt", ranks=2)
    assert second.losses == unbroken.losses[6:]
    for name, value in weights(unbroken).items():
        assert torch.equal(weights(second)[name], value), name


@pytest.mark.parametrize("within", ["true", "false"])
def test_one_node_averages_gradients_where_it_is_asked_to(ranks, within):
    steps = ("model=sequential", "optimizer=sgd", "test=false", "trainer.max_epochs=null", "trainer.max_steps=7")
    ddp = ranks.train(*steps, "strategy=ddp", ranks=2)
    options = ("strategy.local_sgd.every_n_steps=100", f"strategy.local_sgd.within_node={within}")
    local = ranks.train(*steps, "strategy=ddp", *options, ranks=2)
    assert (local.losses == pytest.approx(ddp.losses, abs=1e-6)) == (within == "true")
