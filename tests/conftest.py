"""Builds conf/model/*.yaml without composing a whole config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from exp.build import construct
from exp.models.inference import example_inputs, materialise
from exp.types import DataSpec

CONF = Path(__file__).parents[1] / "conf" / "model"
DIGITS = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)


def build(name: str, *overrides: str, spec: DataSpec = DIGITS, device: str = "cpu") -> nn.Module:
    """The network of conf/model/<name>.yaml for data of this spec; overrides are dotted, as on the command line."""
    data = {
        "input_shape": list(spec.input_shape),
        "input_dtype": spec.input_dtype,
        "num_classes": spec.num_classes,
        "num_outputs": spec.num_outputs,
    }
    config = OmegaConf.create({"model": OmegaConf.load(CONF / f"{name}.yaml"), "data": data})
    config.merge_with_dotlist(list(overrides))
    with torch.device(device):
        network = construct(OmegaConf.to_container(config, resolve=True)["model"], key="model", allow=())
        materialise(network, example_inputs(spec, device=device))
    return network


@pytest.fixture
def build_model():
    return build
