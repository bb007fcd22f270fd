"""The options of strategy=ddp, in runs of two real ranks, against one process and against what goes over the wire."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.numeric

SHORT = ("model=sequential", "optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=30", "test=false")
# Nothing but training steps, on a network whose gradients are far larger than what is said beside them.
WIDE = (
    *("model=sequential", "model.layers.hidden.out_features=512", "optimizer=sgd", "test=false", "hooks=[]"),
    *("logger=[]", "checkpoint.save_last=false", "checkpoint.save_best=false", "trainer.max_epochs=null"),
    *("trainer.limit_val_batches=1", "strategy=ddp"),
)

FULL_RANK = ("strategy.powersgd.rank=128", "strategy.powersgd.min_compression_rate=0.01")


def wire_bytes(rank, *, directory):
    """What a rank writes while it lives a run: on rank 1 that is what it sends, for rank 0 writes the files."""
    from exp import run

    def written():
        fields = Path("/proc/self/io").read_text().split()
        return int(fields[fields.index("wchar:") + 1])

    before = written()
    run.run(directory, rank=rank)
    return written() - before


@pytest.fixture
def sent_a_step(ranks):
    """A function: how many bytes an optimizer step of a command line sends, from the difference of two lengths."""
    if not Path("/proc/self/io").is_file():
        pytest.skip("this system does not count what a process writes")

    def sent(*overrides):
        found = []
        for steps in (4, 12):
            directory = ranks.freeze(*WIDE, *overrides, f"trainer.max_steps={steps}")
            found.append(ranks.call(wire_bytes, ranks=2, directory=str(directory))[1])
        return (found[1] - found[0]) / 8

    return sent


@pytest.mark.any_processor
def test_bytes_on_the_wire(sent_a_step):
    numbers = 64 * 512 + 512 + 512 * 128 + 128 + 128 * 10 + 10
    whole = sent_a_step()
    assert whole == pytest.approx(4 * numbers, rel=0.02)
    assert sent_a_step("strategy.communication_hook=bf16") / whole == pytest.approx(0.5, abs=0.01)
    # Three batches a step, and their gradients sent once.
    assert sent_a_step("trainer.accumulate_grad_batches=3") / whole == pytest.approx(1.0, abs=0.02)
    # Every fourth step, and then the weights.
    local = ("strategy.local_sgd.every_n_steps=4", "strategy.local_sgd.average_optimizer_state=false")
    assert sent_a_step(*local) / whole == pytest.approx(0.25, abs=0.02)
    low = sent_a_step("strategy.communication_hook=powersgd", "strategy.powersgd.start_step=2")
    assert low < 0.05 * whole


@pytest.fixture(scope="module")
def plain():
    return {}


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (("strategy.communication_hook=bf16",), 1e-2),
        (("strategy.communication_hook=fp16",), 1e-2),
        # Of full rank, a matrix is what its two stand for.
        (("strategy.communication_hook=powersgd", "strategy.powersgd.start_step=10", *FULL_RANK), 1e-3),
        (("strategy.static_graph=true", "trainer.accumulate_grad_batches=2"), 1e-5),
        (("strategy.find_unused_parameters=true", "strategy.broadcast_buffers=false"), 1e-5),
        (("strategy.gradient_as_bucket_view=false", "strategy.bucket_cap_mb=0.01"), 1e-5),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_losses_are_those_of_one_process(ranks, options, tolerance, plain):
    accumulates = tuple(option for option in options if option.startswith("trainer."))
    if accumulates not in plain:
        plain[accumulates] = ranks.train(*SHORT, "strategy=single", *accumulates).losses
    two = ranks.train(*SHORT, "strategy=ddp", *options, ranks=2)
    assert len(two.losses) == 30
    assert two.losses == pytest.approx(plain[accumulates], rel=tolerance)
    if "hook" in options[0]:
        assert two.losses != pytest.approx(plain[accumulates], rel=1e-9), "nothing was compressed"
