"""Builds conf/model/*.yaml without Hydra, so that these tests need nothing but the models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from exp.models.inference import example_inputs, lazy_class, materialise
from exp.types import DataSpec

CONF = Path(__file__).parents[2] / "conf" / "model"
DIGITS = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)


def construct(node: Any) -> Any:
    if isinstance(node, Mapping) and "_target_" in node:
        module, _, name = node["_target_"].rpartition(".")
        target = getattr(importlib.import_module(module), name)
        arguments = {key: construct(value) for key, value in node.items() if key != "_target_"}
        return (lazy_class(target, set(arguments)) or target)(**arguments)
    if isinstance(node, Mapping) and node.keys() == {"repeat", "layer"}:
        return nn.ModuleList(construct(node["layer"]) for _ in range(node["repeat"]))
    if isinstance(node, Mapping):
        return {key: construct(value) for key, value in node.items()}
    return [construct(value) for value in node] if isinstance(node, list) else node


def build(name: str, *overrides: str, spec: DataSpec = DIGITS, device: str = "cpu") -> nn.Module:
    data = {
        "input_shape": list(spec.input_shape),
        "input_dtype": spec.input_dtype,
        "num_classes": spec.num_classes,
        "num_outputs": spec.num_outputs,
    }
    config = OmegaConf.create({"model": OmegaConf.load(CONF / f"{name}.yaml"), "data": data})
    config.merge_with_dotlist(list(overrides))
    with torch.device(device):
        network = construct(OmegaConf.to_container(config, resolve=True)["model"])
        materialise(network, example_inputs(spec, device=device))
    return network


@pytest.fixture
def build_model():
    return build
