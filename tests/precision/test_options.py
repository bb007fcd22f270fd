"""A precision option replaces another one completely, and debug options set only trainer keys and data.shuffle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import exp
from exp.precision.plugin import build_precision
from exp.precision.words import SCALER, WORDS

CONF = Path(__file__).parents[2] / "conf"


def leaves(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict) or not node:
        return {prefix}
    return {leaf for key, value in node.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else key)}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / name).read_text())


def test_an_option_sets_only_its_word() -> None:
    assert {path.stem for path in (CONF / "precision").glob("*.yaml")} == set(WORDS)
    scaler = read("train.yaml")["precision"]["scaler"]
    assert scaler == {**SCALER, "enabled": None}
    for word in WORDS:
        assert read(f"precision/{word}.yaml") == {"word": word}
        assert build_precision(word, device_type="cpu", **scaler).is_scaled == (word == "fp16")


def test_a_command_replaces_the_word_of_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/experiment").mkdir(parents=True)
    text = "# @package _global_\n# A precision: experiment=e\ndefaults:\n  - /precision/fp16\nseed: 3\n"
    (tmp_path / "conf/experiment/e.yaml").write_text(text)
    replaced = exp.compose(["experiment=e", "precision=bf16"])
    assert replaced.precision == exp.compose(["+precision=bf16"]).precision
    assert (replaced.precision.word, replaced.seed) == ("bf16", 3)
    assert exp.compose([]).precision == exp.compose(["precision=fp32"]).precision


@pytest.mark.parametrize("name", ["one_batch", "overfit", "few_batches", "profiler", "few_epochs"])
def test_a_debug_switch_sets_only_the_trainer(name: str) -> None:
    path = CONF / "debug" / f"{name}.yaml"
    # Hydra reads the header only in the first line, and ignores it after another comment.
    assert path.read_text().startswith("# @package _global_\n")
    option = yaml.safe_load(path.read_text())
    # Debug options also reset two keys of Lightning that an experiment may set.
    known = leaves(read("train.yaml")["trainer"], "trainer") | {"trainer.min_epochs", "trainer.min_steps"}
    assert {leaf for leaf in leaves(option) if leaf.startswith("trainer.")} <= known
    assert {leaf for leaf in leaves(option) if not leaf.startswith("trainer.")} <= {"data.shuffle"}
