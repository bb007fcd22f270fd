"""The YAML of precision and debug: one option replaces another wholly, and a debug switch touches only its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import exp
from exp.precision.plugin import build_precision
from exp.precision.words import WORDS

CONF = Path(__file__).parents[2] / "conf"


def leaves(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict) or not node:
        return {prefix}
    return {leaf for key, value in node.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else key)}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / name).read_text())


def test_there_is_an_option_for_each_word() -> None:
    assert {path.stem for path in (CONF / "precision").glob("*.yaml")} == set(WORDS)


@pytest.mark.parametrize("word", WORDS)
def test_an_option_sets_every_scalar_so_that_it_replaces_another(word: str) -> None:
    option = read(f"precision/{word}.yaml")
    assert leaves(option) | {"keep"} == leaves(read("train.yaml")["precision"])
    assert option["word"] == word
    build_precision(word, device_type="cpu", **option["scaler"])


@pytest.mark.parametrize("word", WORDS)
def test_the_two_spellings_are_one_command(word: str) -> None:
    composed = [exp.compose([f"{sign}precision={word}", "experiment=example"]) for sign in ("", "+")]
    first, second = (OmegaConf.to_container(config, resolve=False) for config in composed)
    first.pop("_composition_"), second.pop("_composition_")
    assert first == second
    assert first["precision"]["word"] == word


def test_nothing_chosen_is_fp32() -> None:
    assert read("train.yaml")["precision"] == {**read("precision/fp32.yaml"), "keep": {}}


@pytest.mark.parametrize("name", ["fast", "overfit", "limit", "profiler", "short"])
def test_a_debug_switch_leaves_all_but_the_trainer_alone(name: str) -> None:
    path = CONF / "debug" / f"{name}.yaml"
    # Hydra looks for the header in the first line only, and ignores one below another comment in silence.
    assert path.read_text().startswith("# @package _global_\n")
    option = yaml.safe_load(path.read_text())
    known = leaves(read("trainer/default.yaml"))
    assert {leaf.removeprefix("trainer.") for leaf in leaves(option) if leaf.startswith("trainer.")} <= known
    assert {leaf for leaf in leaves(option) if not leaf.startswith("trainer.")} <= {"data.shuffle"}
