"""Page compatibility.md of the site, made from traits and needs. `python docs/make_compatibility.py` prints it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import strategies as lightning_strategies

import exp
from exp.check.compatibility import EXCLUDED, NEEDS, REASONS, REFUSED
from exp.config.settings import settings_of
from exp.construct import build_entries, build_strategy, plain_config
from exp.hooks.hook import Hook
from exp.strategies.strategy import TRAITS, Strategy, traits_of

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Compatibility

*Reference*: the traits of each strategy, the needs of hooks, losses, callbacks and optimizers, and the strategies that
each hook supports. Made from their declarations by `python docs/make_compatibility.py`.

A strategy has **traits**. A hook, a term of the objective, a callback or an optimizer has **needs**. A table in
`src/exp/check/compatibility.py` defines which trait excludes which need, and the reason. Traits and needs belong to
classes: a subclass of a strategy has the traits of its base class under any `strategy.name`, and Lightning's strategies
have traits, too. [The check](configuration.md#the-check) reports each conflict as an error before training.

The table covers conflicts of one need and one trait. Conflicts that depend on the values of options are found by the
methods `Hook.errors` and `Strategy.errors`, and the check reports them in the same list. To check a combination, run
`python -m exp.check OVERRIDES`.
"""
# Overrides that change the traits of a strategy of conf/strategy.
OPTIONS = (
    "strategy=hybrid strategy.data=shard",
    "strategy=hybrid strategy.tensor=1 strategy.pipeline=2",
    "strategy=pipeline strategy.stages=2",
)
OF_LIGHTNING = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
# Text in the page for the keys of EXCLUDED that are not traits of a strategy.
SWITCHES = {
    "ranks": "several ranks",
    "compile": "`runtime.compile=true`",
    "phases": "`phases`",
    "module": "`module`",
    "accumulation": "`trainer.accumulate_grad_batches` above 1",
    "float8": "`precision=fp8`",
    "half": "a precision that computes in half precision",
}


def page() -> str:
    return "\n".join([HEAD, *_strategies(), *_needs(), *_callbacks(), *_hooks()]).rstrip() + "\n"


def _strategies() -> Iterator[str]:
    yield "## Traits of strategies\n\n| trait | meaning |\n|---|---|"
    yield from (f"| `{trait}` | {meaning} |" for trait, meaning in _meanings().items())
    yield "\n| strategy | traits |\n|---|---|"
    yield from (f"| `{words}` | {_listed(traits)} |" for words, traits in _chosen().items())
    for name in OF_LIGHTNING:
        kind = getattr(lightning_strategies, name)
        yield f"| Lightning's `{name}` | {_listed(traits_of(kind.__new__(kind)))} |"
    yield "\nA custom strategy sets its traits as class attributes: see `Strategy` in [the API](api.md).\n"


def _meanings() -> dict[str, str]:
    """Return the meaning of each trait, read from the docstring of Strategy."""
    said = re.findall(r"^ *(\w+): (.+(?:\n {4,}(?!\w+: ).+)*)", inspect.cleandoc(Strategy.__doc__), re.MULTILINE)
    lines = {trait: " ".join(meaning.split()).removesuffix(".") for trait, meaning in said}
    return {trait: lines[trait] for trait in TRAITS}


def _needs() -> Iterator[str]:
    yield "## Needs and the traits that exclude them\n"
    yield "The needs of hooks come first. Those of terms, phases, compilation, callbacks and optimizers follow.\n"
    yield "| need | meaning | excluded by | reason in the error message |\n|---|---|---|---|"
    for need, meaning in NEEDS.items():
        reasons: dict[str, list[str]] = {}
        for trait in EXCLUDED.get(need, ()):
            reasons.setdefault(REASONS[trait], []).append(SWITCHES.get(trait) or f"`{trait}`")
        rows = [(", ".join(traits), reason) for reason, traits in reasons.items()] or [("nothing", "-")]
        for index, (traits, reason) in enumerate(rows):
            said = f"`{need}` | {meaning}" if index == 0 else "|"
            yield f"| {said} | {traits} | {reason} |"
    yield ""


def _callbacks() -> Iterator[str]:
    yield "## Callbacks that no run supports\n\n| callback | effect | alternative |\n|---|---|---|"
    yield from (f"| `{kind.__name__}` | {why.removeprefix('which ')} | {fix} |" for kind, (why, fix) in REFUSED.items())
    yield "\nIf a callback changes weights between a validation and the next training batch, `best.ckpt` has the"
    yield "changed weights.\n"


def _hooks() -> Iterator[str]:
    hooks, strategies, meanings = _built_hooks(), _chosen(), _meanings()
    yield "## Hooks\n\n| hook | needs |\n|---|---|"
    yield from (f"| `{name}` | {_listed(hook.all_needs)} |" for name, hook in hooks.items())
    numbers = {trait: number for number, trait in enumerate(_excluding(hooks, [*TRAITS, *SWITCHES]), start=1)}
    yield "\n## Hooks and strategies\n"
    yield "A number refers to the excluding trait in the list at the end. A hook with * also checks its options.\n"
    yield from _table(hooks, {words.removeprefix("strategy="): traits for words, traits in strategies.items()}, numbers)
    yield "\n## Hooks and the rest of a run\n"
    yield from _table(hooks, {SWITCHES[word]: frozenset({word}) for word in SWITCHES if word in numbers}, numbers)
    yield ""
    for trait, number in numbers.items():
        yield f"{number}. {SWITCHES.get(trait) or f'`{trait}`: {meanings[trait]}'}"


def _table(
    hooks: Mapping[str, Hook], columns: Mapping[str, frozenset[str]], numbers: Mapping[str, int]
) -> Iterator[str]:
    yield f"| hook | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, hook in hooks.items():
        cells = [_excluding({name: hook}, [one for one in numbers if one in traits]) for traits in columns.values()]
        said = ["no " + " ".join(f"[{numbers[trait]}]" for trait in cell) if cell else "yes" for cell in cells]
        yield f"| `{name}`{'*' * hook.overrides('errors')} | {' | '.join(said)} |"


def _excluding(hooks: Mapping[str, Hook], traits: list[str]) -> list[str]:
    """Return the traits that exclude a need of one of the hooks, in the order of `traits`."""
    needs = frozenset().union(*(hook.all_needs for hook in hooks.values()))
    return [trait for trait in traits if any(trait in EXCLUDED.get(need, ()) for need in needs)]


def _chosen() -> dict[str, frozenset[str]]:
    """Return the traits for each option of conf/strategy and for each entry of OPTIONS."""
    words = sorted([f"strategy={path.stem}" for path in (ROOT / "conf" / "strategy").glob("*.yaml")] + list(OPTIONS))
    return {one: traits_of(build_strategy(settings_of(_plain(one.split())))) for one in words}


def _built_hooks() -> dict[str, Hook]:
    names = ",".join(sorted(path.stem for path in (ROOT / "conf" / "hooks").glob("*.yaml")))
    return build_entries(settings_of(_plain([f"hooks=[{names}]"])), "hooks")


def _plain(overrides: list[str]) -> dict[str, Any]:
    return plain_config(exp.compose(overrides))


def _listed(words: frozenset[str]) -> str:
    order = [*TRAITS, *NEEDS]
    return ", ".join(f"`{word}`" for word in sorted(words, key=order.index)) or "nothing"


if __name__ == "__main__":
    print(page(), end="")
