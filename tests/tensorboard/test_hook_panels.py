"""A hook of one's own that gives panels: they come to the event file at their steps, once, and change no loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp
from exp.run import run

HOOK = """
from exp.hooks.hook import Hook
from exp.hooks.panels import Histogram, Image, PrecisionRecallCurve, Text


class Glance(Hook):
    def setup(self, network):
        self.weights = next(network.parameters())

    def after_backward(self, step):
        return {"gradients/histogram/first": Histogram.of(self.weights.grad), "number": self.weights.grad.norm()}

    def after_step(self, step):
        inputs, targets = step.data
        return {
            "samples": Image.of(inputs[:4], stretched=True),
            "note": Text(f"step {step.index}"),
            "curve": PrecisionRecallCurve.of(inputs.mean((1, 2, 3)) / 16, targets > 4),
        }
"""
YAML = "# What a hook can show: +hooks=glance\nglance: {_target_: glance.Glance, every_n_steps: 10}\n"
SMALL = ["model.layers.hidden.out_features=8", "model.layers.hidden2.out_features=8", "test=false"]
EVERYTHING = {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "conf" / "hooks").mkdir(parents=True)
    (tmp_path / "conf" / "hooks" / "glance.yaml").write_text(YAML)
    (tmp_path / "glance.py").write_text(HOOK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def events(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory / "tensorboard"), size_guidance=EVERYTHING).Reload()


def test_panels_come_at_their_steps_once_and_change_no_loss(folder):
    first = Path(exp.fit(exp.compose(["+hooks=glance", "trainer.max_epochs=1", *SMALL])).directory)
    config = OmegaConf.load(first / "config.yaml")
    config.trainer.max_epochs = 2
    OmegaConf.save(config, first / "config.yaml")
    run(first, resume=first / "checkpoints" / "last.ckpt")
    read = events(first)
    steps = [1, 10, 20, 30, 40]
    for found in (
        read.Scalars("number"),
        read.Histograms("gradients/histogram/first"),
        read.Images("samples"),
        read.Tensors("note"),
        read.Tensors("curve"),
    ):
        assert [event.step for event in found] == steps
    assert [event.tensor_proto.string_val[0] for event in read.Tensors("note")] == [
        f"step {step}".encode() for step in steps
    ]
    assert {event.histogram_value.num for event in read.Histograms("gradients/histogram/first")} == {64 * 8}
    plain = events(Path(exp.fit(exp.compose(["hooks=[]", "trainer.max_epochs=2", *SMALL])).directory))
    for tag in ("loss/train", "loss/val"):
        assert [event.value for event in read.Scalars(tag)] == [event.value for event in plain.Scalars(tag)]
