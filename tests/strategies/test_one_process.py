"""Every strategy has the losses, norms, metrics, weights and optimizer state of one process, in float64."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from exp.errors import ConfigError

LIGHTNINGS = """# Lightning's DDPStrategy: strategy=mine
_target_: lightning.pytorch.strategies.DDPStrategy
name: mine
find_unused_parameters: true
"""
TABLES = yaml.safe_load(Path(__file__).with_name("variants.yaml").read_text())
MODELS, OPTIONS = TABLES["models"], TABLES["options"]
VARIANTS = {**TABLES["strategies"], **TABLES["variants"]}
CPU = "launch.accelerator=cpu"


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path) -> None:
    path = tmp_path / "conf" / "strategy" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(LIGHTNINGS)
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 600)


@pytest.mark.parametrize("name", TABLES["strategies"])
def test_a_strategy_trains_what_one_process_trains(name, ranks, run, reference, require_same_run):
    words, count, parameters, activations = TABLES["strategies"][name]
    found = ranks.train(*run, *words.split(), CPU, ranks=count)
    require_same_run(reference, found)
    strategy = words.split()[0].partition("=")[2]
    assert (found.report["strategy"], found.report["world_size"]) == (strategy, count)
    shares = {"parameters": parameters, "gradients": parameters, "optimizer": parameters, "activations": activations}
    for part, share in shares.items():
        held, whole = (one.values[f"memory/{part}_mib"][1] for one in (found, reference))
        assert held <= share * whole, part


@pytest.mark.slow
def test_every_strategy_with_every_model_and_option(ranks, share, settings, alone, require_same_run):
    """The test covers each pair of a strategy and a model with one of the options, except refused pairs."""
    compared = 0
    pairs = itertools.product(VARIANTS, MODELS)
    cases = [(*pair, option) for pair, option in zip(pairs, itertools.cycle(OPTIONS), strict=False)]
    for variant, model, option in share.of(cases):
        print(f"{variant}; {model}; {option}")
        words, count, *_ = VARIANTS[variant]
        whole = (*MODELS[model].split(), *settings, *OPTIONS[option].split())
        try:
            found = ranks.train(*whole, *words.split(), CPU, ranks=count)
        except ConfigError:
            continue
        require_same_run(alone(*whole), found)
        compared += 1
    assert compared


@pytest.mark.slow
def test_one_rank_of_lightnings_strategy_has_a_group(run, commands, tmp_path):
    done = commands.run(*run, "strategy=mine", "launch.devices=1", CPU, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
