"""A run that is out of memory: its error, the table in its log, and the advice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from exp.cli.train import main
from exp.hooks.memory_snapshot import advice
from exp.hooks.memory_use import asked_for, is_out_of_memory
from exp.hooks.saved_tensors import failing_module
from exp.run_report import read_report

MIB = 2**20
# The layer does nothing without gradients, because exp infers shapes without them.
GREEDY = """
import torch
from torch import nn

class Greedy(nn.Module):
    def __init__(self, *, at_call: int = 1):
        super().__init__()
        self.at_call, self.calls = at_call, 0

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x
        self.calls += 1
        return x + x.new_empty(2**48).sum() if self.calls == self.at_call else x.relu()
"""
RUN = (
    *("model=sequential", "metrics=[]", "test=false", "security.allow=[greedy]"),
    *("trainer.limit_val_batches=0", "monitor=loss/train", "data.batch_size=32"),
    *("trainer.max_epochs=null", "trainer.max_steps=3", "launch.accelerator=cpu", "strategy=single"),
)
HERE = "hydra.run.dir=run"


@pytest.fixture
def greedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    (tmp_path / "conf" / "hooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def mib(*sizes: int) -> list[str]:
    """Return sizes in bytes as cells of the table."""
    return [f"{size / MIB:,.2f}" for size in sizes]


def table_of(run: str) -> dict[str, list[str]]:
    """Return the cells of the table in the log of a run, by module."""
    table = Path(run, "train.log").read_text().partition("MiB, by module")[2].partition("\n\n")[0]
    return {name: cells for name, *cells in map(str.split, table.splitlines()[1:]) if len(cells) == 4}


def layer(at_call: int) -> str:
    """Return the override that replaces the activation after the second hidden layer."""
    return f"+model.layers.activation2={{_target_: greedy.Greedy, at_call: {at_call}}}"


@pytest.mark.usefixtures("greedy")
def test_the_first_step_reports_what_filled_the_memory(capsys):
    assert main([*RUN, HERE, "hooks=[memory]", layer(1)]) == 1
    error = capsys.readouterr().err
    assert "out of memory on cpu in step 1, in activation2: an allocation of 1,073,741,824.0 MiB failed." in error
    assert "Try a smaller data.batch_size with a larger trainer.accumulate_grad_batches" in error
    assert "Traceback" not in error.rpartition("out of memory on cpu")[2]

    report = read_report("run")
    assert report.status == "failed"
    assert report.error["type"] == "RunError"
    for words in (
        "in activation2",
        "smaller data.batch_size",
        "DefaultCPUAlloc",
    ):
        assert words in report.error["message"]

    # The network is 64-256-128-10 with GELU, which keeps its input. It fails at its second activation.
    rows = table_of("run")
    assert rows["hidden"] == mib(4 * 256 * 65, 0, 0, 4 * 32 * 64)
    assert rows["activation"] == mib(0, 0, 0, 4 * 32 * 256)
    assert rows["hidden2"] == mib(4 * 128 * 257, 0, 0, 4 * 32 * 256)
    assert rows["head"] == mib(4 * 10 * 129, 0, 0, 0)
    assert rows["all"] == mib(4 * (256 * 65 + 128 * 257 + 10 * 129), 0, 0, 4 * 32 * (64 + 256 + 256))
    log = Path("run/train.log").read_text()
    assert "MiB, by module  parameters  gradients  optimizer  activations" in log
    assert 'greedy.py", line' in log, "the log must have the place of the request"


@pytest.mark.usefixtures("greedy")
def test_a_later_step_reports_the_last_measured_one():
    assert main([*RUN, HERE, "hooks=[memory]", "hooks.memory.every_n_steps=50", layer(3)]) == 1
    rows = table_of("run")
    # The measured step has a whole forward, with scores and classes in the objective.
    assert rows["activation2"] == mib(0, 0, 0, 4 * 32 * 128)
    assert "(objective)" in rows
    # Two moments of AdamW.
    assert rows["hidden2"] == mib(4 * 128 * 257, 0, 8 * 128 * 257, 4 * 32 * 256)


@pytest.mark.usefixtures("greedy")
def test_without_the_hook_the_error_names_it(capsys):
    assert main([*RUN, HERE, layer(1), "hooks=[]"]) == 1
    error = capsys.readouterr().err
    assert "out of memory. Add +hooks=memory to see the layer, what filled the memory, and what to change" in error
    assert "you tried to allocate 1125899906842624 bytes" in error
    assert not Path("run/memory").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("greedy")
def test_each_rank_reports_for_itself(ranks):
    with pytest.raises(AssertionError, match="out of memory on cpu in step 1, in activation2"):
        ranks.train(*RUN, "hooks=[memory]", layer(1), "strategy=ddp", "launch.devices=2", ranks=2)


def test_errors_of_memory_are_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48)
    assert is_out_of_memory(caught.value)
    assert asked_for(caught.value) == 2**50
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8 GiB"
    )
    assert is_out_of_memory(error)
    assert asked_for(error) == 2.5 * 2**30
    assert is_out_of_memory(MemoryError())
    assert asked_for(MemoryError()) is None
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_the_failing_module_is_the_innermost():
    class Failing(nn.Module):
        def forward(self, x):
            raise MemoryError

    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Failing()))
    with pytest.raises(MemoryError) as caught:
        network(torch.zeros(1, 2))
    assert failing_module(caught.value, network) == "1.1"
    assert failing_module(MemoryError(), network) is None


@pytest.mark.parametrize(("activations", "failed", "expected"), [
    (900, 0, "a smaller data.batch_size"), (100, 800, "a smaller data.batch_size"), (100, 0, "strategy=fsdp"),
])  # fmt: skip
def test_the_advice_depends_on_the_larger_part(activations, failed, expected):
    parts = {"parameters": 100, "gradients": 100, "optimizer": 200, "activations": activations}
    assert advice(parts, failed=failed).startswith(expected)
