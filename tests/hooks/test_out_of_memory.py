"""A run that is out of memory: error, written file, and advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from exp.cli.train import main
from exp.hooks.memory_snapshot import advice
from exp.hooks.out_of_memory import asked_for, is_out_of_memory
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


def layer(at_call: int) -> str:
    """Return the override that replaces the activation after the second hidden layer."""
    return f"+model.layers.activation2={{_target_: greedy.Greedy, at_call: {at_call}}}"


@pytest.mark.usefixtures("greedy")
def test_the_first_step_reports_what_filled_the_memory(capsys):
    assert main([*RUN, HERE, "hooks=[memory]", layer(1)]) == 1
    error = capsys.readouterr().err
    assert "out of memory on cpu in step 1, in activation2: 1,073,741,824.0 MiB more were asked for." in error
    assert "Try a smaller data.batch_size and trainer.accumulate_grad_batches as many times larger" in error
    assert "Traceback" not in error.rpartition("out of memory on cpu")[2]

    report = read_report("run")
    assert report.status == "failed"
    assert report.error["type"] == "RunError"
    for words in (
        "in activation2",
        "smaller data.batch_size",
        "run/memory/out_of_memory.rank0.json",
        "DefaultCPUAlloc",
    ):
        assert words in report.error["message"]

    found = json.loads(Path("run/memory/out_of_memory.rank0.json").read_text())
    assert (found["step"], found["rank"], found["device"], found["measured_at_step"]) == (1, 0, "cpu", 1)
    assert (found["module"], found["requested_bytes"]) == ("activation2", 2**50)
    # The network is 64-256-128-10 with GELU, which keeps its input. It fails at its second activation.
    weights = {"hidden": 4 * 256 * 65, "hidden2": 4 * 128 * 257, "head": 4 * 10 * 129}
    parameters = {name: row["parameters"] for name, row in found["modules"].items() if row["parameters"]}
    assert parameters == weights
    assert found["parts"] == {
        "parameters": sum(weights.values()),
        "gradients": 0,
        "optimizer": 0,
        "activations": 4 * 32 * (64 + 256 + 256),
    }
    kept = {name: row["activations"] for name, row in found["modules"].items() if row["activations"]}
    assert kept == {"hidden": 4 * 32 * 64, "activation": 4 * 32 * 256, "hidden2": 4 * 32 * 256}

    log = Path("run/train.log").read_text()
    assert "MiB, by module  parameters  gradients  optimizer  activations" in log
    assert 'greedy.py", line' in log, "the place of the request"


@pytest.mark.usefixtures("greedy")
def test_a_later_step_reports_the_last_measured_one():
    assert main([*RUN, HERE, "hooks=[memory]", "hooks.memory.every_n_steps=50", layer(3)]) == 1
    found = json.loads(Path("run/memory/out_of_memory.rank0.json").read_text())
    assert (found["step"], found["measured_at_step"]) == (3, 1)
    # The measured step has a whole forward, with scores and classes in the objective.
    assert found["modules"]["activation2"]["activations"] == 4 * 32 * 128
    assert found["modules"]["(objective)"]["activations"] >= 4 * 32 * 10
    parameters = found["parts"]["parameters"]
    assert found["parts"]["optimizer"] == 2 * parameters + 4 * 6
    # Two moments. The step counters of all parameters may be one storage.
    assert found["modules"]["hidden2"]["optimizer"] >= 2 * found["modules"]["hidden2"]["parameters"]


@pytest.mark.usefixtures("greedy")
def test_without_the_hook_the_error_names_it(capsys):
    assert main([*RUN, HERE, layer(1), "hooks=[]"]) == 1
    error = capsys.readouterr().err
    assert "out of memory. The hook memory says in which layer, what filled it, and what to try: +hooks=memory" in error
    assert "you tried to allocate 1125899906842624 bytes" in error
    assert not Path("run/memory").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("greedy")
def test_each_rank_reports_for_itself(ranks):
    with pytest.raises(AssertionError, match="out of memory on cpu in step 1, in activation2"):
        ranks.train(*RUN, "hooks=[memory]", layer(1), "strategy=ddp", "launch.devices=2", ranks=2)
    assert len(list(Path().glob("*/memory/out_of_memory.rank*.json"))) >= 1


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
