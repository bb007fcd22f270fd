"""The YAML of precision and debug: one option replaces another wholly, and a debug switch touches only its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

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


def test_there_is_an_option_for_each_word() -> None:
    assert {path.stem for path in (CONF / "precision").glob("*.yaml")} == set(WORDS)


def test_the_settings_of_a_scale_that_are_no_fault_without_one_are_the_defaults() -> None:
    assert read("train.yaml")["precision"]["scaler"] == {**SCALER, "enabled": None}


@pytest.mark.parametrize("word", WORDS)
def test_an_option_sets_the_word_alone_so_that_it_replaces_another(word: str) -> None:
    assert read(f"precision/{word}.yaml") == {"word": word}
    plugin = build_precision(word, device_type="cpu", **read("train.yaml")["precision"]["scaler"])
    assert plugin.is_scaled == (word == "fp16")


@pytest.mark.parametrize("word", WORDS)
def test_the_command_line_replaces_what_an_experiment_picked(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first is left over. Each word is picked once and replaces once: all of them set one key alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/experiment").mkdir(parents=True)
    words = [*WORDS]
    other = words[words.index(word) - 1]
    text = f"# @package _global_\n# Picks a precision: experiment=e\ndefaults:\n  - /precision/{other}\nseed: 3\n"
    (tmp_path / "conf/experiment/e.yaml").write_text(text)
    replaced = exp.compose(["experiment=e", f"precision={word}"])
    assert replaced.precision == exp.compose([f"precision={word}"]).precision
    assert replaced.seed == 3


@pytest.mark.parametrize("word", WORDS)
def test_the_two_spellings_are_one_command(word: str) -> None:
    composed = [exp.compose([f"{sign}precision={word}", "experiment=example"]) for sign in ("", "+")]
    first, second = (OmegaConf.to_container(config, resolve=False) for config in composed)
    first.pop("_composition_"), second.pop("_composition_")
    assert first == second
    assert first["precision"]["word"] == word


def test_nothing_chosen_is_fp32() -> None:
    assert exp.compose([]).precision == exp.compose(["precision=fp32"]).precision


@pytest.mark.parametrize("name", ["one_batch", "overfit", "few_batches", "profiler", "few_epochs"])
def test_a_debug_switch_leaves_all_but_the_trainer_alone(name: str) -> None:
    path = CONF / "debug" / f"{name}.yaml"
    # Hydra looks for the header in the first line only, and ignores one below another comment in silence.
    assert path.read_text().startswith("# @package _global_\n")
    option = yaml.safe_load(path.read_text())
    # Two are Lightning's alone: an experiment may set them, and a switch sets them back.
    known = leaves(read("train.yaml")["trainer"], "trainer") | {"trainer.min_epochs", "trainer.min_steps"}
    assert {leaf for leaf in leaves(option) if leaf.startswith("trainer.")} <= known
    assert {leaf for leaf in leaves(option) if not leaf.startswith("trainer.")} <= {"data.shuffle"}
