"""The four parts of memory in runs of exp's own models: three against counts by hand, activations against what lives.

The reference asks nobody what is saved: a dispatch mode notes every storage that an operator makes, and what the graph
alone keeps alive once the forward has returned is what it keeps for the backward.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import exp
from exp.config.freeze import read_frozen
from exp.construct import build_data, build_network, build_objective, plain_config
from exp.nested import tensors_in

MIB = 2**20
SHORT = (
    *("hooks=[memory]", "metrics=[]", "test=false", "trainer.limit_val_batches=0", "monitor=loss/train"),
    *("trainer.max_epochs=null", "trainer.max_steps=1", "checkpoint.save_last=false", "checkpoint.save_best=false"),
    *("strategy=single", "launch.accelerator=cpu"),
)


class Made(TorchDispatchMode):
    """The storages that operators make, by their address, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self.storages[reference.cdata] = (reference, storage.nbytes())
        return result


def bytes_kept(network: nn.Module, objective: nn.Module, batch) -> int:
    """What the graph of one forward and its objective keeps alive, without the loss itself."""
    own = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    with Made() as made:
        # Copies, so that the batch counts where the graph keeps it.
        values = {"input": batch.data[0].clone(), "target": batch.data[1].clone()}
        values["output"] = network(values["input"])
        loss, _ = objective(values, batch)
        values.clear()
    gc.collect()
    own.add(loss.untyped_storage()._cdata)
    return sum(size for at, (reference, size) in made.storages.items() if at not in own and not reference.expired())


@pytest.mark.parametrize("model", ["mlp", "lenet", "resnet", "rnn", "transformer", "gpt"])
def test_the_four_parts_of_a_real_run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [*SHORT, f"model={model}"]
    if model == "gpt":
        Path("text.txt").write_text("to be, or not to be, that is the question. " * 200)
        overrides = [*SHORT, "data=text", "data.dataset.files=text.txt"]
    found = exp.fit(exp.compose([*overrides, "hydra.run.dir=run"])).metrics
    plain = plain_config(read_frozen(Path("run")))
    data = build_data(plain)
    network = build_network(plain, data.spec)
    sizes = [parameter.numel() * 4 for parameter in network.parameters()]
    assert found["memory/parameters_mib"] * MIB == sum(sizes)
    assert found["memory/gradients_mib"] * MIB == sum(sizes)
    # Two moments, and the count of steps of each parameter.
    assert found["memory/optimizer_mib"] * MIB == 2 * sum(sizes) + 4 * len(sizes)
    kept = bytes_kept(network, build_objective(plain), next(iter(data.loader("train"))))
    assert found["memory/activations_mib"] * MIB == pytest.approx(kept, rel=0.02)
