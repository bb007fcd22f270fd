"""The file and line that sets a key."""

from pathlib import Path

import pytest
from omegaconf import open_dict

import exp
from exp.config.frozen import COMPOSITION
from exp.config.sources import position_of, source_of

MODEL = """\
# A model. Select it with model=programmed
_target_: exp.models.containers.ModuleDictModel
layers:
  hidden: {_target_: torch.nn.Linear, out_features: 32}
  sizes: [1, 2]
forward: |

  x = hidden(x)
  return x
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, text in {
        "conf/model/programmed.yaml": MODEL,
        "conf/experiment/e.yaml": (
            "# @package _global_\n# E. Select it with experiment=e\n"
            "defaults:\n  - override /model: programmed\nseed: 4\nmodel:\n  layers:\n    hidden: {out_features: 64}\n"
        ),
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def test_the_last_source_of_a_key_is_named():
    config = exp.compose(["experiment=e", "optimizer.lr=0.5", "+optimizer.extra={a: {b: 1}}"])
    assert source_of(config, "model.layers.hidden._target_") == "conf/model/programmed.yaml, line 4"
    assert source_of(config, "model.layers.hidden.out_features") == "conf/experiment/e.yaml, line 8"
    assert source_of(config, "model.layers.sizes[1]") == "conf/model/programmed.yaml, line 5"
    assert source_of(config, "seed") == "conf/experiment/e.yaml, line 5"
    assert source_of(config, "optimizer.lr") == "command line"
    assert source_of(config, "optimizer.extra.a.b") == "command line"
    assert source_of(config, "optimizer._target_").endswith("conf/optimizer/adamw.yaml, line 2")
    assert "conf/train.yaml, line " in source_of(config, "name")


def test_an_unset_key_has_the_nearest_source():
    config = exp.compose(["model=programmed"])
    assert source_of(config, "model.layers.hidden.in_features") == "conf/model/programmed.yaml, line 4"
    assert source_of(config, "nothing.like.this") is None


def test_a_program_has_a_line_and_a_column():
    config = exp.compose(["model=programmed"])
    position = position_of(config, "model.forward")
    lines = Path(position.file).read_text().splitlines()
    program = config.model.forward.splitlines()
    second = program.index("x = hidden(x)")
    assert lines[position.line - 1 + second][position.column - 1 :] == "x = hidden(x)"
    flow = position_of(config, "model.layers.hidden.out_features")
    assert lines[flow.line - 1][flow.column - 1 :].startswith("32")
    assert position_of(exp.compose(["seed=9"]), "seed") is None


def test_a_broken_config_has_no_sources():
    config = exp.compose(["experiment=e"])
    Path("conf/experiment/e.yaml").unlink()
    config[COMPOSITION].overrides = ["experiment=e", "seed=77"]
    assert source_of(config, "seed") is None
    with open_dict(config):
        del config[COMPOSITION]
    assert source_of(config, "seed") is None
