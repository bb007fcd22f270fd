"""A network over several devices, which moves values to each layer. On a CPU, cpu:0 and cpu:1 are the same device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exp
from exp.build import build
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.config.freeze import freeze
from exp.extras.gallery.layer_split import SplitNetwork
from exp.models.containers import ModuleDictModel
from exp.models.partition import split
from exp.strategies.rank import ALONE

TWO = ("strategy=layer_split", "launch.accelerator=cpu", "launch.devices=2")


@pytest.mark.slow
def test_resnet_in_two_named_halves(ranks, settings, alone, require_same_run):
    """The example is that of PyTorch's tutorial on model parallelism."""
    halves = "strategy.layers=[[stem,'stage.*'],[down,'stage2.*',norm,head]]"
    one = alone("model=resnet", *settings)
    require_same_run(one, ranks.train("model=resnet", *settings, *TWO, halves))


class Residual(nn.Linear):
    def forward(self, x, residual):
        return super().forward(x) + residual


def test_values_move_to_the_next_layers_device():
    """The test uses the meta device as a second device."""
    devices = [torch.device("cpu"), torch.device("meta")]
    layers = {"a": nn.Linear(6, 6), "b": Residual(6, 6)}
    network = ModuleDictModel(layers=layers, forward="return b(a(x), x)")
    parts = split(network, count=2, layers=None, inputs=())
    layers["b"].to("meta")
    seen = {}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: [one.device for one in given]}))
    assert SplitNetwork(network, parts, devices)(torch.ones(3, 6)).device == devices[1]
    assert seen == {"a": [devices[0]], "b": [devices[1], devices[1]]}


def test_the_network_is_whole_after_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("hooks=[]", "logger=[]", "trainer.max_epochs=null", "trainer.max_steps=1", "trainer.limit_val_batches=1")
    decided = plan(resolve(exp.compose(["hydra.run.dir=run", *small, *TWO])))
    parts = build(decided, freeze(decided.resolved.config), rank=ALONE)
    parts.trainer.fit(parts.module, datamodule=parts.data)
    assert parts.module.run_network is parts.module.network
