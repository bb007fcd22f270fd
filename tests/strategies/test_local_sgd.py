"""Local SGD over two ranks, compared with a loop by hand over two copies of the network, in float64."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from exp.config.frozen import read_frozen
from exp.construct import build_data, build_network, plain_config

RUN = (
    *("model=sequential", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "precision=fp64"),
    *("test=false", "hooks=[]", "logger=[]", "data.batch_size=200", "trainer.max_epochs=null", "strategy=ddp"),
)
LOCAL = (*RUN, "strategy.local_sgd.every_n_steps=4")


def train_by_hand(directory, *, steps, every, start, checkpoints):
    """Return the weights of two copies, each trained on its share, that are averaged every `every` steps."""
    config = plain_config(read_frozen(directory))
    data = build_data(config)
    network = build_network(config, data.spec).double()
    copies = [network, copy.deepcopy(network)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in copies]
    for done, shares in enumerate(itertools.islice(batches(data), steps), start=1):
        for one, share in zip(copies, shares, strict=True):
            one.zero_grad()
            loss = torch.nn.functional.cross_entropy(one(share.data[0].double()), share.data[1]) * share.weight
            loss.backward()
        if done <= start:
            for first, second in zip(*(one.parameters() for one in copies), strict=True):
                first.grad = (first.grad + second.grad) / 2
                second.grad = first.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        if done > start and ((done - start) % every == 0 or done in checkpoints):
            average(copies, optimizers)
    return copies[0].state_dict()


def batches(data):
    """Yield the shares of both ranks, epoch after epoch."""
    loaders = [data.loader("train", rank=rank, world_size=2) for rank in range(2)]
    for epoch in itertools.count():
        for loader in loaders:
            loader.set_position(epoch, 0)
        yield from zip(*loaders, strict=True)


@torch.no_grad()
def average(copies, optimizers):
    for pair in zip(*(one.parameters() for one in copies), strict=True):
        momenta = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, pair, strict=True)]
        for first, second in (pair, momenta):
            mean = (first + second) / 2
            first.copy_(mean)
            second.copy_(mean)


def weights(trained):
    state = trained.checkpoint()["state_dict"]
    return {name.removeprefix("network."): value for name, value in state.items() if name.startswith("network.")}


def test_local_sgd_equals_two_copies_by_hand(ranks):
    # 7 batches an epoch, the last one short: 9 steps pass the end of an epoch, which has a checkpoint.
    trained = ranks.train(*LOCAL, "strategy.local_sgd.start_step=1", "trainer.max_steps=9", ranks=2)
    expected = train_by_hand(trained.directory, steps=9, every=4, start=1, checkpoints={7, 9})
    for name, value in weights(trained).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_resumed_run_of_local_sgd_is_exact(ranks):
    saving = (*LOCAL, "checkpoint.every_n_steps=6")
    unbroken = ranks.train(*saving, "trainer.max_steps=13", ranks=2)
    first = ranks.train(*saving, "trainer.max_steps=6", ranks=2)
    second = ranks.train(*saving, "trainer.max_steps=13", f"resume={first.directory}/checkpoints/last.ckpt", ranks=2)
    assert second.losses == unbroken.losses[6:]
    for name, value in weights(unbroken).items():
        assert torch.equal(weights(second)[name], value), name
