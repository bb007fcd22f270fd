"""Drives what torch's own databases hold through exp, and writes docs/against-torch.md.

    python tests/models/against_torch.py            the table, and exit status 1 where something is wrong
    python tests/models/against_torch.py --write    and the page

operators.py drives op_db through forward programs, layers.py drives module_db through configs, losses.py its losses
through objectives, steps.py optim_db and torch's schedules through whole runs, measures.py torchmetrics' classes of
classification and regression through the stages of a run, lightning_callbacks.py Lightning's callbacks through runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torchmetrics

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "against-torch.md"
HEAD = """# Against torch: every operator, layer, loss, optimizer, schedule, metric and callback

*Reference*: what `python tests/models/against_torch.py --write` saw with torch {version}, on CPU. Nothing here is
written by hand.

torch's tests know each operator (`op_db`) and each layer (`module_db`) with arguments that they are tried with. Here
each of these calls goes through exp, and by hand: outputs, and gradients of all inputs and parameters, must be the same
bits. A call is *refused* where the check says before the run why not, *torch refuses* where torch raises the same by
hand, and *not written* where an argument is one that no YAML and no program can hold.

Losses are compared to 1e-13, for a mean that counts its targets is summed in another order than torch's. Each case of
torch's optimizers (`optim_db`), and each schedule by step and by epoch, is a run of 4 epochs in float64 that must end
with the weights of the loop of PyTorch's tutorials, bit for bit.

Metrics are those of torchmetrics {torchmetrics}, each with the parameters that it needs and with each other word of
one that changes what it gives, of outputs that are scores, probabilities or numbers. A stage of uneven batches, and one
that goes on from a checkpoint in its middle, must give to 1e-6 what one call on all outputs gives by hand. The same
holds over two ranks, also where one of them has no sample at all (tests/models/test_measures.py drives a share of it).

With each callback of Lightning a run must end with the checkpoint that Lightning's own loop ends with beside it.
"""


def load(name: str) -> Any:
    """A module that stands beside this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(parts: Sequence[tuple[str, list[Any]]]) -> str:
    """parts: a title, and what was seen, as rows of operators.Row."""
    text = [HEAD.format(version=torch.__version__, torchmetrics=torchmetrics.__version__)]
    for title, rows in parts:
        text += [f"## {title}\n", *_counts(rows), "", *_refused(rows), ""]
    return "\n".join(text).rstrip() + "\n"


def _counts(rows: list[Any]) -> Iterator[str]:
    yield "| written as | names | calls equal | with gradients | refused | torch refuses | not written | wrong |"
    yield "|---|---|---|---|---|---|---|---|"
    forms = list(dict.fromkeys(_form(row) for row in rows))
    for form in [*forms, "all"]:
        these = [row for row in rows if form in (_form(row), "all")]
        counts = [
            sum(row.equal for row in these),
            sum(row.backward for row in these),
            *(sum(getattr(row, kind).total() for row in these) for kind in ("refused", "by_torch", "unwritten")),
            sum(len(row.wrong) for row in these),
        ]
        yield f"| {form} | {len(these)} | {' | '.join(f'{count:,}' for count in counts)} |"


def _form(row: Any) -> str:
    if row.form != "function":
        return row.form
    return row.name.rpartition(".")[0]


def _refused(rows: list[Any]) -> Iterator[str]:
    for kind, title in (("refused", "refused"), ("unwritten", "not written")):
        reasons: dict[str, list[str]] = {}
        calls: Counter[str] = Counter()
        for row in rows:
            for reason, count in getattr(row, kind).items():
                short = reason.partition("; expected ")[0]
                short = short.partition(" is not on the list: ")[2] or short
                short = re.sub(r"^.*(refused its values)", r"the class \1", short)
                reasons.setdefault(short, []).append(row.name)
                calls[short] += count
        if reasons:
            yield f"| {title}, because | calls | names |\n|---|---|---|"
            for reason, names in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
                shown = " ".join(f"`{name}`" for name in sorted(set(names)))
                yield f"| {reason} | {calls[reason]} | {shown} |"
            yield ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=20, help="samples of an operator")
    parser.add_argument("--only", default="", help="names of operators")
    parser.add_argument("--write", action="store_true", help="docs/against-torch.md")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name]
    parts = [
        ("Operators, in forward programs", load("operators").seen(most=options.most, only=names)),
        ("Layers, in configs", load("layers").seen(most=options.most, only=names)),
        ("Losses, in objectives", load("losses").seen(most=options.most, only=names)),
        ("Optimizers and schedules, in runs", load("steps").seen(most=options.most, only=names)),
        ("Metrics, in configs", load("measures").seen(only=names)),
        ("Callbacks, in runs", load("lightning_callbacks").seen(only=names)),
    ]
    text = page(parts)
    print(text)
    wrong = [f"{row.name}: {one[:300]}" for _, rows in parts for row in rows for one in row.wrong]
    print("\n".join(wrong))
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
