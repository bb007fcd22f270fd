"""Compressed gradients of strategy=ddp: comparison with one process, and bytes that ranks send."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.numeric

SHORT = ("model=sequential", "optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=12", "test=false")
# Only training steps of a network with many gradients, so that the other messages of the ranks do not matter.
WIDE = (
    *("model=sequential", "model.layers.hidden.out_features=512", "optimizer=sgd", "test=false", "hooks=[]"),
    *("logger=[]", "checkpoint.save_last=false", "checkpoint.save_best=false", "trainer.max_epochs=null"),
    *("trainer.limit_val_batches=1", "strategy=ddp"),
)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (("strategy.communication_hook=bf16",), 1e-2),
        pytest.param(("strategy.communication_hook=fp16",), 1e-2, marks=pytest.mark.slow),
    ],
)
def test_compressed_gradients_train_nearly_the_same(ranks, alone, options, tolerance):
    one = alone(*SHORT)
    two = ranks.train(*SHORT, "strategy=ddp", *options, ranks=2)
    assert two.losses == pytest.approx(one.losses, rel=tolerance)
    assert two.losses != pytest.approx(one.losses, rel=1e-9), "the gradients were not compressed"


def wire_bytes(rank, *, directory):
    """Return the bytes that a rank writes during a run; rank 1 writes only messages, and no files."""
    from exp import run

    def written():
        fields = Path("/proc/self/io").read_text().split()
        return int(fields[fields.index("wchar:") + 1])

    before = written()
    run.run(directory, rank=rank)
    return written() - before


@pytest.mark.slow
@pytest.mark.any_processor
@pytest.mark.skipif(
    not Path("/proc/self/io").is_file(), reason="this system does not count the bytes that a process writes"
)
def test_ranks_send_the_bytes_of_the_gradients(ranks):
    def sent_each_step(*overrides):
        found = []
        for steps in (4, 12):
            directory = ranks.freeze(*WIDE, *overrides, f"trainer.max_steps={steps}")
            found.append(ranks.call(wire_bytes, ranks=2, directory=str(directory))[1])
        return (found[1] - found[0]) / 8

    numbers = 64 * 512 + 512 + 512 * 128 + 128 + 128 * 10 + 10
    whole = sent_each_step()
    assert whole == pytest.approx(4 * numbers, rel=0.02)
    assert sent_each_step("strategy.communication_hook=bf16") / whole == pytest.approx(0.5, abs=0.01)
    # A step has three batches, and sends the gradients once.
    assert sent_each_step("trainer.accumulate_grad_batches=3") / whole == pytest.approx(1.0, abs=0.02)
