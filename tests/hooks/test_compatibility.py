"""Hooks are refused by what a strategy is: under another name, as a subclass, or Lightning's own, it is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import exp
from exp.check.compatibility import EXCLUDED, NEEDS
from exp.config.search_path import OWN_CONF
from exp.errors import ConfigError
from exp.hooks.declarations import NEEDS as HOOK_NEEDS
from exp.strategies.strategy import TRAITS

SWITCHES = {"compile", "cuda_graph", "phases", "accumulation", "float8", "half", "ranks", "frozen_statistics", "module"}
MODULES = ("clip_module", "gradient_reversal", "scale_gradient")
STRATEGIES = {
    "ddp": ["exp.strategies.ddp.DDP"],
    "fsdp": ["exp.strategies.fsdp.FSDP", "lightning.pytorch.strategies.FSDPStrategy"],
    "tensor_parallel": ["exp.strategies.tensor_parallel.TensorParallel"],
    "pipeline": ["exp.strategies.pipeline.Pipeline"],
    "hybrid": ["exp.strategies.hybrid.Hybrid"],
    "layer_split": ["exp.strategies.layer_split.LayerSplit"],
    "data_parallel": ["exp.strategies.data_parallel.DataParallel"],
    "single": ["exp.strategies.single.Single", "lightning.pytorch.strategies.SingleDeviceStrategy"],
}
SUBCLASS = """
from {module} import {name}


class Own({name}):
    pass
"""


def refused(*overrides: str) -> set[tuple[str, str]]:
    """The hooks that a command's faults name, and why, without the strategy's name."""
    hooks = sorted(path.stem for path in (OWN_CONF / "hooks").glob("*.yaml"))
    chosen = [f"hooks=[{','.join(hooks)}]", *(f"hooks.{name}.modules=[hidden]" for name in MODULES)]
    try:
        exp.validate(exp.compose(["launch.accelerator=cpu", "model=lenet", *chosen, *overrides]))
    except ConfigError as error:
        return {
            (fault.key, fault.expected)
            for fault in error.faults
            if fault.key.startswith("hooks.") and "a run without it" in fault.expected
        }
    return set()


@pytest.mark.parametrize("word", STRATEGIES)
def test_every_hook_goes_with_a_strategy_as_with_its_like(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    settings = ["strategy.tensor=2"] if word == "hybrid" else []
    expected = refused(f"strategy={word}", *settings)
    assert refused(f"strategy={word}", *settings, "strategy.name=mine") == expected
    for count, target in enumerate(STRATEGIES[word]):
        module, _, name = target.rpartition(".")
        (tmp_path / f"like_{word}_{count}.py").write_text(SUBCLASS.format(module=module, name=name))
        yaml = f"# Like it: strategy=like\n_target_: like_{word}_{count}.Own\nname: {'other' if count else 'like'}\n"
        (tmp_path / "conf" / "strategy" / "like.yaml").write_text(yaml)
        assert refused("strategy=like", *(settings if not count else [])) == expected, target


def test_the_table_speaks_of_what_is_declared() -> None:
    assert EXCLUDED.keys() <= NEEDS.keys()
    assert {trait for excluded in EXCLUDED.values() for trait in excluded} <= {*TRAITS, *SWITCHES}
    # What nothing excludes today: a hook may say it all the same.
    assert NEEDS.keys() - EXCLUDED.keys() <= {"one_step_a_call"} | (NEEDS.keys() - HOOK_NEEDS.keys())
