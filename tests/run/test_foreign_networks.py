"""One network of the table of docs/foreign-networks.md, where its package is installed; the program makes the whole."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("foreign_networks.py")


@pytest.mark.parametrize(("package", "name"), [("torchvision", "resnet18"), ("timm", "resnet10t")])
def test_a_foreign_network_trains_starts_a_new_head_and_is_adapted(package, name, tmp_path, monkeypatch):
    pytest.importorskip(package, reason=f"the package {package} is not installed")
    spec = importlib.util.spec_from_file_location("foreign_networks", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.delitem(sys.modules, "foreign_data", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    program.write_conf(tmp_path)
    steps = program.Steps(name)
    assert "layers in the report" in steps.epoch()
    assert "tensors are the body's" in steps.new_head()
    assert int(steps.lora().split()[0]) > 10
