"""Unsupported combinations with a strategy are errors before the run: cases of refused.yaml, and code of a user."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import exp
from exp.check.examination import examine
from exp.check.resolution import resolve
from exp.cli.check import main as check
from exp.errors import ConfigError

CASES = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def errors_of(*words):
    try:
        return examine(resolve(exp.compose(list(words)))).errors
    except ConfigError as error:
        return error.errors


@pytest.mark.parametrize(
    ("strategy", "command", "key", "message"),
    [(strategy, *case) for strategy, cases in CASES.items() for case in cases],
)
def test_an_error_names_its_key_and_reason(strategy, command, key, message):
    words = command.split()
    devices = [] if any(word.startswith("launch.devices") for word in words) else ["launch.devices=2"]
    errors = errors_of(f"strategy={strategy}", "launch.accelerator=cpu", *devices, *words)
    found = [error for error in errors if error.key == key or error.key.startswith(f"{key}.")]
    assert any(message in str(error) for error in found), [str(error) for error in errors]


NETS = """
import torch
from torch.nn import functional


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.head(self.dropout(self.hidden(x.flatten(1))))


class Functional(Layer):
    def forward(self, x):
        return self.head(functional.dropout(self.hidden(x.flatten(1)), training=self.training))


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(64, 10), torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.scale
"""


@pytest.mark.parametrize(("strategy", "refused"), [("single", False), ("ddp", True), ("fsdp", True)])
def test_a_layer_with_max_norm_is_refused_over_ranks(strategy, refused):
    place = [f"strategy={strategy}", f"launch.devices={1 if strategy == 'single' else 2}", "launch.accelerator=cpu"]
    found = [str(error) for error in errors_of("model=gpt", "data=text", "+model.layers.tokens.max_norm=1.0", *place)]
    assert ["strategy: tokens, which changes its weight" in one for one in found] == [True] * refused


def test_a_parameter_without_an_axis_is_refused_where_parameters_are_sharded(tmp_path, monkeypatch):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "scaled.yaml").write_text("# A scale: model=scaled\n_target_: scaled_nets.Scaled\n")
    (tmp_path / "scaled_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    for strategy in ("fsdp", "hybrid strategy.data=shard strategy.tensor=2 launch.devices=4"):
        errors = errors_of(
            "model=scaled", "launch.accelerator=cpu", "launch.devices=2", *f"strategy={strategy}".split()
        )
        assert any("the parameter scale of shape []" in str(error) and error.key == "model" for error in errors)
    for strategy in ("strategy=ddp", "strategy=fsdp"):
        devices = "launch.devices=2" if strategy == "strategy=ddp" else "launch.devices=1"
        assert not errors_of("model=scaled", "launch.accelerator=cpu", strategy, devices)


def test_functional_dropout_of_a_user_is_refused(tmp_path, monkeypatch, capsys):
    """The divided network would also drop values in evaluation."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    for kind in ("Layer", "Functional"):
        text = f"# A network with dropout: model={kind.lower()}\n_target_: nets_that_drop.{kind}\n"
        (tmp_path / "conf" / "model" / f"{kind.lower()}.yaml").write_text(text)
    (tmp_path / "nets_that_drop.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    for strategy in ("layer_split", "pipeline"):
        assert check(["model=layer", f"strategy={strategy}", "launch.devices=2"]) == 0
        capsys.readouterr()
        assert check(["model=functional", f"strategy={strategy}", "launch.devices=2"]) == 2
        text = capsys.readouterr().err
        assert "  strategy.name: " in text
        assert "the layer torch.nn.Dropout" in text
