"""What a precision, a strategy or a machine cannot do: one message before training, exit 2, nothing written.

Each runs in an empty directory, on CPU whatever the machine has.
"""

from __future__ import annotations

import importlib.util
import textwrap

import pytest
import torch

from exp.errors import ConfigError
from exp.strategies.placement import Machine, placement
from exp.train import main as train


def request(command: str, key: str, *says: str) -> tuple[list[str], str, tuple[str, ...]]:
    return command.split(), key, says


MACHINE = [
    request("strategy=ddp launch.backend=nccl", "launch.backend", "nccl on cpu", "gloo"),
    request("strategy=ddp launch.accelerator=mps launch.devices=2", "launch.accelerator", "mps"),
    request("strategy=ddp launch.devices=[0,1]", "launch.devices", "a number: a list names GPUs"),
    request("strategy=single launch.devices=2", "strategy.name", "one device"),
    request("strategy=single launch.nodes=2", "strategy.name", "2 ranks", "one device"),
    request("strategy=data_parallel launch.nodes=2", "launch.nodes", "1: it is one process", "strategy=ddp"),
]
DDP = [
    request("strategy=ddp strategy.sync_batchnorm=true", "strategy.sync_batchnorm", "no batch normalisation", "false"),
    request("model=resnet strategy=ddp strategy.sync_batchnorm=true strategy.local_sgd.every_n_steps=4",
            "strategy.sync_batchnorm", "local_sgd"),
    request("strategy=ddp strategy.communication_hook=bf16 strategy.local_sgd.every_n_steps=4",
            "strategy.communication_hook", "bf16 with local_sgd", "null"),
    request("strategy=ddp strategy.static_graph=true strategy.find_unused_parameters=true",
            "strategy.static_graph", "one of the two"),
    request("precision=fp16 strategy=ddp strategy.local_sgd.every_n_steps=4",
            "strategy.local_sgd", "a loss scale of its own", "precision=bf16"),
    request("callbacks=[ema] strategy=ddp strategy.local_sgd.every_n_steps=4",
            "callbacks.ema", "with local_sgd", "weights of its own", "every_n_steps=null"),
    request("phases=[body_and_head] strategy=ddp strategy.communication_hook=bf16",
            "strategy.communication_hook", "with phases", "expected null"),
    request("experiment=gan strategy=ddp launch.devices=2 strategy.broadcast_buffers=false strategy.static_graph=true",
            "strategy.static_graph", "true, with phases", "expected false"),
    request("phases=[body_and_head] strategy=ddp strategy.bucket_cap_mb=5", "strategy.bucket_cap_mb", "expected null"),
    request("+objective=gradient_norm strategy=ddp launch.devices=2", "objective", "one process"),
    request("+objective=gradient_norm trainer.accumulate_grad_batches=2", "objective", "one batch a step"),
    request("strategy=ddp strategy.communication_hook=int8", "strategy.communication_hook", "fp16, bf16, powersgd"),
    request("strategy=ddp strategy.local_sgd.every_n_steps=0", "strategy.local_sgd.every_n_steps", "1 or more"),
    request("strategy=ddp trainer.sync_batchnorm=true", "trainer.sync_batchnorm", "strategy.sync_batchnorm"),
    request("model=own strategy=ddp strategy.sync_batchnorm=true security.allow=[own]",
            "strategy.sync_batchnorm", "norm is a Scaled", "BatchNorm1d, 2d or 3d"),
    request("model=sync strategy=ddp", "strategy.sync_batchnorm", "SyncBatchNorm, which refuses tensors on CPU"),
]  # fmt: skip

PRECISION = [
    request("precision=fp16_true precision.scaler.enabled=true", "precision.scaler.enabled", "true with fp16_true"),
    request("precision=bf16 precision.scaler.enabled=true", "precision.scaler.enabled", "true with bf16", "fp16 alone"),
    request("precision=fp16 precision.scaler.enabled=false", "precision.scaler.enabled", "false with fp16"),
    request("precision=fp8", "precision.word", "fp8 on cpu", "compute capability 9.0", "precision=bf16"),
    request("precision=fp32 +precision.keep={nowhere:fp32}", "precision.keep.nowhere", "matches no layer"),
]
SHARDS = [
    request("model=transformer strategy=tensor_parallel launch.devices=3", "launch.devices", "3 ranks", "1, 2, 4"),
    request("strategy=tensor_parallel strategy.plan={head9:column}", "strategy.plan.head9", "Did you mean head?"),
    request("strategy=fsdp strategy.shard=[nothing.*]", "strategy.shard", "matches no layer", "hidden"),
    request("strategy=fsdp strategy.cpu_offload=true", "strategy.cpu_offload", "on a run on CPU"),
    request("strategy=hybrid strategy.tensor=2 launch.devices=3", "launch.devices", "3 ranks", "a multiple of 2"),
    request("strategy=hybrid strategy.tensor=2 strategy.pipeline=2 launch.devices=4", "strategy.pipeline", "one of"),
    request("strategy=hybrid strategy.schedule=nonsense", "strategy.schedule", "with pipeline=1", "expected 1f1b"),
    request("strategy=hybrid strategy.layers=[[hidden],[head]]", "strategy.layers", "expected null"),
    request(
        "strategy=hybrid strategy.tensor=1 strategy.pipeline=2 strategy.plan={nothing:zzz}", "strategy.plan", "auto"
    ),
    request("strategy=tensor_parallel strategy.verify=false", "strategy.verify", "It is gone: leave it out"),
]
LAYERS = [
    request("strategy=layer_split strategy.layers=[[conv9,hidden,hidden2],[head]]", "strategy.layers.0", "'conv9'"),
    request("strategy=layer_split strategy.layers=[[hidden],[head]]", "strategy.layers", "no part for hidden2"),
    request("strategy=layer_split launch.devices=9", "strategy.layers", "at most 3"),
    request("strategy=layer_split runtime.compile=true", "runtime.compile", "false"),
    request("strategy=pipeline data.batch_size=1", "data.batch_size", "2 micro-batches"),
    request("strategy=pipeline strategy.schedule=interleaved_1f1b strategy.stages_per_rank=1",
            "strategy.stages_per_rank", "2 or more"),
    request("strategy=pipeline runtime.compile=true", "runtime.compile", "false"),
    request("strategy=ddp strategy.inner=layer_split strategy.communication_hook=bf16", "strategy.communication_hook"),
]  # fmt: skip

TABLE = [*MACHINE, *DDP, *PRECISION, *SHARDS, *LAYERS]

MODEL = """
    # A convolution, batch normalisation and a head: model={name}
    _target_: exp.models.containers.SequentialModel
    layers:
      conv: {{_target_: torch.nn.Conv2d, out_channels: 4, kernel_size: 3}}
      norm: {{_target_: {norm}, num_features: 4}}
      flatten: {{_target_: torch.nn.Flatten}}
      head: {{_target_: torch.nn.Linear, out_features: "${{data.num_outputs}}"}}
"""
OWN = """
from torch import nn


class Scaled(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(2 * input)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory but for two models of one's own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "conf" / "model"
    folder.mkdir(parents=True)
    for name, norm in {"own": "own.Scaled", "sync": "torch.nn.SyncBatchNorm"}.items():
        (folder / f"{name}.yaml").write_text(textwrap.dedent(MODEL.format(name=name, norm=norm)).lstrip())
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize(("command", "key", "says"), TABLE, ids=[" ".join(command) for command, _, _ in TABLE])
def test_an_impossible_request_is_refused_before_training(command, key, says, here, capfd):
    on_cpu = [] if any(part.startswith("launch.accelerator") for part in command) else ["launch.accelerator=cpu"]
    status = train([*command, *on_cpu])
    captured = capfd.readouterr()
    text = captured.err + captured.out
    assert status == 2, text
    assert text.startswith("1 fault in the config; nothing was started."), text
    assert f"\n  {key}: " in text
    assert "; expected " in text
    for part in says:
        assert part in text, f"{part!r} is not in:\n{text}"
    assert not (here / "outputs").exists(), "a directory was made"


def test_the_table_is_long():
    assert len(TABLE) >= 25


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="the extra deepspeed is installed")
def test_deepspeed_without_the_extra(here, capfd):
    assert train(["strategy=deepspeed", "launch.accelerator=cpu"]) == 2
    said = capfd.readouterr().err
    assert "strategy.name: strategy=deepspeed needs the package deepspeed" in said
    assert "exp-framework[deepspeed]" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there(here, capfd):
    assert train(["strategy=ddp", "launch.devices=8", "launch.accelerator=cuda"]) == 2
    assert "launch.accelerator: cuda; expected a machine with a CUDA device" in capfd.readouterr().err


def test_eight_devices_of_two():
    with pytest.raises(ConfigError, match=r"launch\.devices: 8; expected at most the 2 GPUs of this machine") as caught:
        placement("ddp", devices=8, machine=Machine(gpus=2))
    assert len(caught.value.faults) == 1
    assert caught.value.exit_status == 2
