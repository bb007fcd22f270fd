"""Wrong options and combinations of hooks are errors before the run, and strategies of a kind refuse the same hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import exp
from exp.check.compatibility import EXCLUDED, NEEDS
from exp.config.search_path import OWN_CONF
from exp.errors import ConfigError
from exp.hooks.declarations import NEEDS as HOOK_NEEDS
from exp.strategies.strategy import TRAITS

WRONG = yaml.safe_load(Path(__file__).with_name("wrong_hooks.yaml").read_text())


@pytest.mark.any_processor
@pytest.mark.parametrize("case", WRONG)
def test_wrong_hooks_are_errors_before_the_run(refused, monkeypatch, case: str) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    errors = refused(*WRONG[case]["overrides"])
    for message in WRONG[case]["errors"]:
        assert any(message in error for error in errors), "\n".join(errors)
    assert len(errors) == len(WRONG[case]["errors"]), errors


TRANSFORMS = ("clip_module", "gradient_reversal", "scale_gradient")
HOOKS = sorted(path.stem for path in (OWN_CONF / "hooks").glob("*.yaml"))
# Strategy: overrides of other classes of the same kind, and the hooks that all of them refuse.
STRATEGIES: dict[str, tuple[list[str], set[str]]] = {
    "single": (["exp.strategies.single.Single", "lightning.pytorch.strategies.SingleDeviceStrategy"], set()),
    "ddp": (["exp.strategies.ddp.DDP"], set()),
    "fsdp": (
        ["exp.strategies.fsdp.FSDP", "lightning.pytorch.strategies.FSDPStrategy"],
        {"nan_guard", "operators", "per_sample_gradients"},
    ),
    "tensor_parallel": (["exp.strategies.tensor_parallel.TensorParallel"], {"activations", "features", "nan_guard"}),
    "pipeline": (["exp.strategies.pipeline.Pipeline"], {"clip_module", "dtypes", "confusion"}),
    "hybrid": (["exp.strategies.hybrid.Hybrid"], {"features", "nan_guard"}),
    "layer_split": (["exp.extras.gallery.layer_split.LayerSplit"], set()),
    "data_parallel": (["exp.extras.gallery.data_parallel.DataParallel"], {"nan_guard"}),
}
SUBCLASS = """
from {module} import {name}


class Own({name}):
    pass
"""


def refused_hooks(*overrides: str) -> set[tuple[str, str]]:
    """Return (hook, reason) of each error of a command, with the name of the strategy removed from the reason."""
    chosen = [f"hooks=[{','.join(HOOKS)}]", *(f"hooks.{name}.modules=[hidden]" for name in TRANSFORMS)]
    try:
        exp.validate(exp.compose(["launch.accelerator=cpu", "model=lenet", *chosen, *overrides]))
    except ConfigError as error:
        if "no module exp.extras" in str(error):
            pytest.skip("needs a folder of src/exp/extras that was removed")
        found = ((error.key, error.expected) for error in error.errors)
        return {(key, reason) for key, reason in found if key.startswith("hooks.") and "only one of the two" in reason}
    return set()


@pytest.mark.parametrize("word", STRATEGIES)
def test_strategies_refuse_the_hooks_that_cannot_work(in_tmp: Path, word: str) -> None:
    settings = ["strategy.tensor=2"] if word == "hybrid" else []
    found = {key.removeprefix("hooks.") for key, _ in refused_hooks(f"strategy={word}", *settings)}
    needed = STRATEGIES[word][1]
    assert needed <= found if needed else not found


@pytest.mark.parametrize(
    "word", ["fsdp", *(pytest.param(word, marks=pytest.mark.slow) for word in STRATEGIES if word != "fsdp")]
)
def test_subclasses_of_a_strategy_refuse_the_same_hooks(in_tmp: Path, word: str) -> None:
    (in_tmp / "conf" / "strategy").mkdir(parents=True)
    settings = ["strategy.tensor=2"] if word == "hybrid" else []
    expected = refused_hooks(f"strategy={word}", *settings)
    assert refused_hooks(f"strategy={word}", *settings, "strategy.name=mine") == expected
    for count, target in enumerate(STRATEGIES[word][0]):
        module, _, name = target.rpartition(".")
        (in_tmp / f"like_{word}_{count}.py").write_text(SUBCLASS.format(module=module, name=name))
        option = (
            f"# A subclass: strategy=like\n_target_: like_{word}_{count}.Own\nname: {'other' if count else 'like'}\n"
        )
        (in_tmp / "conf" / "strategy" / "like.yaml").write_text(option)
        assert refused_hooks("strategy=like", *(settings if not count else [])) == expected, target


def test_the_table_has_declared_needs_and_traits() -> None:
    switches = {"compile", "phases", "accumulation", "float8", "half", "ranks"}
    assert EXCLUDED.keys() <= NEEDS.keys()
    assert {trait for excluded in EXCLUDED.values() for trait in excluded} <= {*TRAITS, *switches, "module"}
    # A need of hooks may exist that no trait excludes.
    assert NEEDS.keys() - EXCLUDED.keys() <= {"one_step_a_call"} | (NEEDS.keys() - HOOK_NEEDS.keys())
